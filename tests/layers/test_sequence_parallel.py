"""Attention in FP8 between the exchanges of DeepSpeed's sequence parallelism: two ranks against one."""

import functools
import warnings
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention import documents, sequence_parallel
from ds_fp8.layers.attention.fp8_attention import fp8_attention
from ds_fp8.train import packed_attention
from tests.layers.hugging_face import causal_lm, tokens

emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are kernels, for heads of 128 alone")
pytestmark = emulated

RANKS, ROWS, LENGTH, FEATURES = 2, 2, 48, 64
# Tokens of the documents of two rows: those of the first, and the last of the second, lie on both ranks
DOCUMENTS = [(30, 18), (8, 5, 35)]
SHORT_AND_LONG = 18  # With it as the length of long documents, both rows have some, and the second row two short ones


def positions(packed=True):
    rows = DOCUMENTS if packed else [(LENGTH,)] * ROWS
    return torch.stack([torch.cat([torch.arange(count) for count in row]) for row in rows])


def operands(heads, kv_heads):
    """q, k, v [B, heads, S, D] and the output's gradient [B, S, heads, D] in BF16."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(ROWS, n, LENGTH, FEATURES, generator=generator) for n in (heads, kv_heads, kv_heads))
    gradient = torch.randn(ROWS, LENGTH, heads, FEATURES, generator=generator) * 1e-3
    return [x.bfloat16() for x in (q, k, v)], gradient.bfloat16()


def step(attention, inputs, gradient):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attention(*leaves)
    output = output.view(*output.shape[:2], -1, FEATURES)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def mine(x, dim):
    """This rank's tokens of a tensor, in memory as the whole tensor's."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class shared:
    """Two ranks, or others, a sequence, for models with attention of one name; afterwards everything is as it was."""

    def __init__(self, model, rows=ROWS, disable_in_eval=False, ranks=RANKS):
        self.ranks = ranks
        self.name = model.config._attn_implementation
        self.before = ALL_ATTENTION_FUNCTIONS[self.name]
        self.model, self.rows, self.disable_in_eval = model, rows, disable_in_eval

    def __enter__(self):
        UlyssesSPAttentionHF.register_with_transformers(
            self.model,
            core_attn_implementation=self.name,
            sequence_parallel_size=self.ranks,
            micro_batch_size=self.rows,
            disable_in_eval=self.disable_in_eval,
        )

    def __exit__(self, *_):
        ALL_ATTENTION_FUNCTIONS[self.name] = self.before
        parallel_state_sp._release_sequence_parallel_groups()


def model_of(heads, kv_heads, implementation="packed", **sizes):
    packed_attention.register()
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return causal_lm("qwen2", **sizes, attn_implementation=implementation)


def in_fp8(model, format="e4m3"):
    return convert(model, parse_fp8({"fp8": {"monitor": {"every": 0}, "attention": {"format": format}}})).attention


def attention_of_slices(heads, kv_heads, implementation, packed, long, format="e4m3"):
    """Output and gradients of this rank's tokens."""
    model = model_of(heads, kv_heads, implementation)
    inputs, gradient = operands(heads, kv_heads)
    with mock.patch.object(documents, "LONG", long), shared(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = in_fp8(model, format)
        assert len(found.layers) == 2
        module = model.model.layers[0].self_attn
        assert module.num_key_value_groups == heads // kv_heads
        attention = functools.partial(ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation], module)
        whole = step(
            lambda q, k, v: attention(q, k, v, None, position_ids=mine(positions(packed), 1))[0],
            [mine(x, 2) for x in inputs],
            mine(gradient, 1),
        )
        assert module.num_key_value_groups == heads // kv_heads
        return whole


def by_rank(attention, heads, kv_heads):
    """The same of whole rows in one process: each rank's heads by themselves, the gradients of shared ones added."""
    inputs, gradient = operands(heads, kv_heads)
    copies = max(1, RANKS // kv_heads)
    q, k, v = (x.chunk(RANKS, 1) for x in (inputs[0], *(x.repeat_interleave(copies, 1) for x in inputs[1:])))
    parts = [step(attention, part, g) for part, g in zip(zip(q, k, v, strict=True), gradient.chunk(2, 2), strict=True)]
    outputs, *gradients = zip(*parts, strict=True)
    dq, dk, dv = (torch.cat(x, 1) for x in gradients)
    return [torch.cat(outputs, 2), dq, *(x.unflatten(1, (-1, copies)).sum(2) for x in (dk, dv))]


def document_by_document(attend):
    """Attention that is called with each document of the rows by itself."""

    def attention(q, k, v):
        rows = []
        for row, counts in enumerate(DOCUMENTS):
            parts = zip(*(x[row : row + 1].split(counts, 2) for x in (q, k, v)), strict=True)
            rows.append(torch.cat([attend(*part) for part in parts], 1))
        return torch.cat(rows)

    return attention


def sdpa(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def by_length(q, k, v):
    return fp8_attention(q, k, v) if q.shape[2] >= SHORT_AND_LONG else sdpa(q, k, v)


CASES = {
    "whole rows": (4, 2, "sdpa", False, LENGTH, fp8_attention),
    "whole rows, packed attention": (4, 4, "packed", False, LENGTH, fp8_attention),
    "fewer heads of k and v than ranks": (4, 1, "sdpa", False, LENGTH, fp8_attention),
    "long documents": (4, 2, "packed", True, 1, document_by_document(fp8_attention)),
    "long and short documents": (4, 2, "packed", True, SHORT_AND_LONG, document_by_document(by_length)),
    "long and short documents, sdpa": (4, 4, "sdpa", True, SHORT_AND_LONG, document_by_document(by_length)),
    "short documents, sdpa": (4, 4, "sdpa", True, LENGTH, document_by_document(sdpa)),
    "long rows alone": (4, 2, "sdpa", False, LENGTH, "auto", fp8_attention),
    "long rows alone, these are short": (4, 4, "sdpa", False, LENGTH + 1, "auto", sdpa),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_bits_of_one(ranks, case):
    """The exchange moves numbers: what a rank computes is attention of its heads over whole documents, bit for bit."""
    *arguments, attend = CASES[case]
    outputs, dq, dk, dv = zip(*ranks(RANKS, attention_of_slices, *arguments), strict=True)
    found = [torch.cat(outputs, 1), *(torch.cat(x, 2) for x in (dq, dk, dv))]
    wanted = by_rank(attend, *arguments[:2])
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        assert torch.equal(ours, theirs), name


@mock.patch.object(documents, "LONG", SHORT_AND_LONG)
def loss_and_gradient(split, packed, fuse, attention, implementation="packed"):
    """Summed loss of this rank's tokens and its gradient, added over ranks, and the warnings."""
    model = model_of(4, 2, implementation if split or attention == "bf16" else "packed")
    ids, places = tokens(ROWS, LENGTH), positions(packed)
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    targets[:, 1:][places[:, 1:] == 0] = -100
    batch = {"input_ids": ids, "position_ids": places, "labels": targets, "shift_labels": targets}

    def run(batch):
        section = {"monitor": {"every": 0}, "linear": {"backend": "reference"}, "fuse": fuse}
        convert(model, parse_fp8({"fp8": {**section, "attention": {"format": attention}}}))
        # As `ds_fp8.initialize` does.
        sequence_parallel.separate_documents(implementation, takes_ends=implementation == "packed")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(1.0)).loss
        loss.backward()
        found = torch.cat([loss.detach()[None], *(p.grad.flatten().float() for p in model.parameters())])
        return found

    if not split:
        return run(batch)
    with shared(model):
        found = run({name: mine(x, 1).contiguous() for name, x in batch.items()})
    dist.all_reduce(found)
    return found


@pytest.mark.parametrize(
    ("fuse", "packed", "attention", "implementation"),
    [
        ("auto", True, "e4m3", "packed"),
        ("auto", True, "bf16", "sdpa"),
        ("off", False, "e4m3", "sdpa"),
        ("off", False, "bf16", "packed"),
        ("off", True, "bf16", "packed"),
    ],
)
def test_a_model_on_two_ranks_is_that_on_one(ranks, fuse, attention, packed, implementation):
    split = ranks(RANKS, loss_and_gradient, True, packed, fuse, attention, implementation)[0]
    whole = loss_and_gradient(False, packed, fuse, attention, implementation)
    other = loss_and_gradient(False, not packed, fuse, attention, implementation)
    assert split[0].item() == pytest.approx(whole[0].item(), rel=1e-3)
    distance, apart = ((x[1:] - whole[1:]).norm() / whole[1:].norm() for x in (split, other))
    bound = 0.02
    if packed and attention == "bf16" and implementation == "sdpa":
        # A kernel with a mask, for whole rows, rounds otherwise than one without, for each document: on one rank too.
        by_document = loss_and_gradient(False, packed, fuse, attention, "packed")
        bound = 1.5 * (by_document[1:] - whole[1:]).norm() / whole[1:].norm()
    assert distance < bound
    assert apart > 5 * distance  # documents matter


@mock.patch.object(documents, "LONG", SHORT_AND_LONG)
def evaluated(packed, split):
    """Logits of whole rows in evaluation, without an exchange there; before it, where `split`, a step with one."""
    model = model_of(4, 1, "packed")
    ids, places = tokens(ROWS, LENGTH), positions(packed)

    def logits():
        in_fp8(model)
        return model.eval()(input_ids=ids, position_ids=places, use_cache=False).logits.detach()

    if not split:
        return logits()
    with shared(model, disable_in_eval=True):
        in_fp8(model)
        half = {"input_ids": mine(ids, 1).contiguous(), "position_ids": mine(places, 1).contiguous()}
        model(**half, use_cache=False).logits.sum().backward()
        return logits()


@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_without_the_exchange(ranks, packed):
    """As Accelerate evaluates: each rank has whole rows of its own."""
    whole = evaluated(packed, False)
    assert not torch.equal(whole, evaluated(not packed, False))
    for found in ranks(RANKS, evaluated, packed, True):
        assert torch.equal(found, whole)
