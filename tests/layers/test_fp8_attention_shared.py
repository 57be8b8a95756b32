"""FP8 codes between ranks that share sequences, beside BF16 cast after the exchange: every bit, and half the bytes."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention import documents, sequence_parallel
from ds_fp8.layers.attention import sharded as exchanges
from tests.layers.hugging_face import tokens
from tests.layers.test_sequence_parallel import emulated, in_fp8, mine, model_of, shared

pytestmark = emulated

FEATURES, LENGTH = 32, 96
NAMES = ("output", "dq", "dk", "dv")
SENDS = ("all_to_all_single", "all_reduce", "all_gather", "all_gather_into_tensor")


def in_bf16():
    """Let q, k and v travel in BF16, and be cast after DeepSpeed's exchange."""

    def without(exchanged):
        return lambda *arguments, of_slices=None, of_documents=None, **options: exchanged(*arguments, **options)

    return mock.patch.object(sequence_parallel, "ulysses_attention", without(sequence_parallel.ulysses_attention))


@contextlib.contextmanager
def bytes_sent():
    """Bytes handed to DeepSpeed's collectives inside, by name of the collective and dtype of the tensor."""
    found = Counter()

    def counted(name, collective):
        def call(*arguments, **options):
            sent = arguments[0] if name == "all_reduce" else arguments[1]
            found[name, sent.dtype] += sent.nbytes
            return collective(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in SENDS:
            stack.enter_context(mock.patch.object(dist, name, counted(name, getattr(dist, name))))
        yield found


def operands(rows, heads, kv_heads, kind):
    """q, k, v [B, heads, S, D], views of one matrix, and the output's gradient; sizes differ by token and head."""
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(rows, LENGTH, heads + 2 * kv_heads, FEATURES, generator=generator)
    gradient = torch.randn(rows, LENGTH, heads, FEATURES, generator=generator) * 1e-3
    for x in (qkv, gradient):
        x *= 2.0 ** torch.randint(-6, 6, (rows, LENGTH, x.shape[2], 1), generator=generator)
    if kind == "tiny":
        qkv *= 2.0**-60
        gradient *= 2.0**-60
    if kind == "zeros":
        qkv[:, : LENGTH // 2] = 0
        qkv[:, :, 0] = 0
    if kind == "infinite":
        qkv[0, 3, 0, 5] = torch.nan
        qkv[0, LENGTH - 1, heads, 5] = torch.inf
        qkv[-1, LENGTH // 2, -1, 5] = -torch.inf
    sizes = (heads, kv_heads, kv_heads)
    return [x.transpose(1, 2) for x in qkv.bfloat16().split(sizes, 2)], gradient.bfloat16()


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(count) for count in row]) for row in rows])


@mock.patch.object(documents, "LONG", 24)
def attention(rows, heads, kv_heads, codes, kind="usual", implementation="packed"):
    """Output and gradients of this rank's tokens of rows of such documents, and bytes sent, as seen and as counted."""
    model = model_of(heads, kv_heads, implementation, head_dim=FEATURES)
    inputs, gradient = operands(len(rows), heads, kv_heads, kind)
    with shared(model, len(rows), ranks=dist.get_world_size()), contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.nullcontext() if codes else in_bf16())
        in_fp8(model)
        module = model.model.layers[0].self_attn
        function = functools.partial(ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation], module)
        own_positions = mine(positions_of(rows), 1).contiguous()
        leaves = [mine(x, 2).detach().requires_grad_() for x in inputs]
        seen, counted = stack.enter_context(bytes_sent()), exchanges.bytes_sent()
        output = function(*leaves, None, position_ids=own_positions)[0]
        forward = dict(seen)
        output.backward(mine(gradient, 1).flatten(2))
        counted, both = exchanges.bytes_sent() - counted, dict(seen)
        with torch.inference_mode():
            again = function(*leaves, None, position_ids=own_positions)[0]
        assert torch.equal(bits(again), bits(output.detach()))
        assert module.num_key_value_groups == heads // kv_heads
        return [output.detach(), *(leaf.grad for leaf in leaves)], forward, both, counted


SHAPES = [(2, 1, 4, 4), (2, 2, 4, 1), (3, 2, 6, 3), (4, 1, 8, 2)]  # Ranks, rows, heads, heads of k and v


def bits(x):
    """The bits of a BF16 tensor; those of NaN are not told apart."""
    return torch.where(x.isnan(), 0x7FFF, x.contiguous().view(torch.int16))


@pytest.mark.parametrize(
    ("world", "rows", "heads", "kv_heads", "kind"),
    [(*shape, kind) for shape, kind in zip(SHAPES, ("infinite", "tiny", "zeros", "usual"), strict=True)],
)
def test_codes_have_the_bits_of_casts_after_the_exchange_and_half_the_bytes(ranks, world, rows, heads, kv_heads, kind):
    whole = [(LENGTH,)] * rows
    in_codes, before = (ranks(world, attention, whole, heads, kv_heads, codes, kind) for codes in (True, False))
    for (ours, *_), (theirs, *_) in zip(in_codes, before, strict=True):
        for name, one, other in zip(NAMES, ours, theirs, strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype == torch.bfloat16
            assert torch.equal(bits(one), bits(other)), name
            assert one.isnan().any() == (kind == "infinite")
    assert any(x.count_nonzero() for (found, *_) in in_codes for x in found)
    dequantize_by_rank = rows * LENGTH // world * FEATURES
    qkv, o = dequantize_by_rank * (heads + 2 * max(kv_heads, world)), dequantize_by_rank * heads
    (_, forward, both, counted), (_, _, both_in_bf16, counted_in_bf16) = in_codes[0], before[0]
    # Where documents end was looked for, once; DeepSpeed gathers positions in every call.
    positions = {("all_gather", torch.int64): rows * LENGTH // world * 8}
    bounds, means = 4 * 4 * world, 8 * 2 * rows * kv_heads * FEATURES
    in_uint8, in_bf16 = ("all_to_all_single", torch.uint8), ("all_to_all_single", torch.bfloat16)
    reduced = {("all_reduce", torch.float32): bounds, ("all_reduce", torch.float64): means}
    assert forward == {in_uint8: qkv + o, **reduced, **positions}
    scales = {("all_gather_into_tensor", torch.float32): 3 * 4}
    assert both == {**forward, **scales, in_uint8: 2 * (qkv + o) - o, in_bf16: 2 * o}
    assert both_in_bf16[in_bf16] == 2 * 2 * (qkv + o)
    elsewhere = (world - 1) / world
    assert counted_in_bf16 == pytest.approx(elsewhere * 2 * 2 * (qkv + o), abs=2)
    assert counted == pytest.approx(elsewhere * (2 * qkv + 3 * o + 2 * (bounds + means) + 3 * 4 * world), abs=12)
    # An all-reduce sends its tensor twice.
    assert elsewhere * (qkv + 2 * bounds) <= 0.51 * elsewhere * 2 * qkv


DOCUMENTS = {
    "whole rows": [(96,), (96,)],
    "documents": [(60, 36), (16, 10, 70)],
    "one whole row": [(96,), (60, 36)],
    "short documents on one rank": [(96,), (48, 20, 28)],
}


@mock.patch.object(documents, "LONG", 36)
def training(codes, kind, fuse, recompute):
    """Losses, gradients, logits; how often a micro-step looked for documents; bytes in FP8, in all, and as counted."""
    model = model_of(4, 2, head_dim=FEATURES)
    positions = positions_of(DOCUMENTS[kind])
    ids = tokens(len(positions), LENGTH)
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    batch = {"input_ids": ids, "position_ids": positions, "labels": targets, "shift_labels": targets}
    section = {"monitor": {"every": 0}, "linear": {"backend": "reference"}, "fuse": fuse}
    found, looked = [], []
    with contextlib.ExitStack() as stack:
        stack.enter_context(shared(model, len(positions), ranks=dist.get_world_size()))
        stack.enter_context(contextlib.nullcontext() if codes else in_bf16())
        convert(model, parse_fp8({"fp8": {**section, "attention": {"format": "e4m3"}}}))
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
            model.enable_input_require_grads()
        look = stack.enter_context(mock.patch.object(documents, "ends_of", wraps=documents.ends_of))
        sent, counted = stack.enter_context(bytes_sent()), exchanges.bytes_sent()
        for _ in range(2):
            part = {name: mine(x, 1).contiguous() for name, x in batch.items()}
            loss = model(**part, use_cache=False, num_items_in_batch=torch.tensor(40.0)).loss
            loss.backward()
            found.append(loss.detach())
            looked.append(look.call_count)
            look.reset_mock()
        found += [p.grad for p in model.parameters()]
        part = {name: mine(batch[name], 1).contiguous() for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            found.append(model.eval()(**part, use_cache=False).logits)
        codes_sent, bf16_sent = (sent["all_to_all_single", dtype] for dtype in (torch.uint8, torch.bfloat16))
        # Without the sums of keys and values, 16 bytes a feature: beside so few tokens they are more than a little.
        counted = exchanges.bytes_sent() - counted - sent["all_reduce", torch.float64]
        return found, looked, codes_sent, codes_sent + bf16_sent, counted


@pytest.mark.parametrize(
    ("kind", "fuse", "recompute"),
    [
        ("whole rows", "off", "non-reentrant"),
        ("whole rows", "auto", "reentrant"),
        ("documents", "auto", "non-reentrant"),
        ("one whole row", "off", None),
        ("short documents on one rank", "off", None),
    ],
)
def test_training_has_the_bits_of_casts_after_the_exchange(ranks, kind, fuse, recompute):
    """Ranks look for documents once a micro-step, as before; long documents travel in FP8, wherever they lie."""
    in_codes, before = (ranks(2, training, codes, kind, fuse, recompute) for codes in (True, False))
    for (ours, looked, *_), (theirs, looked_before, none, *_) in zip(in_codes, before, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert looked == looked_before == [1, 1]
        assert none == 0
    (codes, sent, counted), (_, sent_before, counted_before) = (
        map(sum, zip(*(found[2:] for found in each), strict=True)) for each in (in_codes, before)
    )
    # Half of it stays on the rank that sends it.
    assert counted == pytest.approx(sent / 2, rel=0.02)
    assert counted_before == sent_before / 2
    assert codes > 0
    short = {"documents": 26, "short documents on one rank": 48}.get(kind, 0) / (2 * LENGTH)
    assert sent < (0.62 * (1 - short) + short) * sent_before


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "implementation", "rows"),
    [
        (2, 4, 2, "packed", [(5, 5, 86), (50, 46), (90, 6), (96,)]),
        (2, 4, 2, "sdpa", [(30, 8, 58)]),  # an attention that takes no ends
        (3, 6, 1, "packed", [(30, 8, 58)]),
        (4, 4, 2, "packed", [(7, 9, 24, 8, 24, 24), (10,) * 9 + (6,), (24,) * 4]),
    ],
)
def test_documents_anywhere_have_the_bits_of_casts_after_the_exchange(
    ranks, world, heads, kv_heads, implementation, rows
):
    in_codes, before = (
        ranks(world, attention, rows, heads, kv_heads, codes, "usual", implementation) for codes in (True, False)
    )
    fp8 = ("all_to_all_single", torch.uint8)
    for (ours, *_), (theirs, _, sent, _) in zip(in_codes, before, strict=True):
        for name, one, other in zip(NAMES, ours, theirs, strict=True):
            assert torch.equal(one, other), name
        assert fp8 not in sent
    assert any(x.count_nonzero() for found, *_ in in_codes for x in found)
    assert any(sent.get(fp8) for _, _, sent, _ in in_codes)
