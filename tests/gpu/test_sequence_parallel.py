"""Attention in FP8 on two GPUs that share sequences, compared with one GPU."""

import contextlib
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention import cudnn as fp8_attention_cudnn
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.fp8_attention import fp8_attention
from ds_fp8.layers.decoder.rotary import HeadLayout
from ds_fp8.train import packed_attention
from tests.engine.test_graphs_of_rows import TWO, WHOLE, trained
from tests.engine.test_sequence_parallel import losses
from tests.layers.hugging_face import causal_lm
from tests.layers.test_sequence_parallel import shared
from tests.numerics import error
from tests.ranks import RankPool, on_ranks

UNAVAILABLE = fp8_attention_cudnn.unavailable()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS, FEATURES = 2, 128
NAMES = ("output", "dq", "dk", "dv")
DEVICE = "cuda"


def operands(heads, kv_heads, rows, length, by_head=False):
    """q, k, v [B, heads, S, D] and the output's gradient, whose spread differs by token, or that of all by head too."""
    generator = torch.Generator().manual_seed(length)
    layout = HeadLayout(heads, kv_heads, FEATURES)
    qkv = torch.randn(rows * length, sum(layout.sizes), generator=generator)
    gradient = 1e-4 * torch.randn(rows, length, heads, FEATURES, generator=generator)
    if by_head:
        for x in (qkv.view(rows, length, -1, FEATURES), gradient):
            x *= 2.0 ** torch.randint(-6, 6, (rows, length, x.shape[2], 1), generator=generator)
    else:
        gradient *= torch.randn(rows, length, 1, 1, generator=generator).exp()
    return [x.to(DEVICE) for x in layout.split(qkv.bfloat16(), rows, length)], gradient.bfloat16().to(DEVICE)


@contextlib.contextmanager
def attention_of(heads, kv_heads, positions, setting=None):
    """Attention in FP8 of this rank's tokens of rows at these positions, as a model's layer has it."""
    packed_attention.register()
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": FEATURES}
    model = causal_lm("qwen3", **sizes, attn_implementation="packed").to(DEVICE)
    with shared(model, len(positions)), setting or contextlib.nullcontext():
        convert(model, parse_fp8({"fp8": {"monitor": {"every": 0}, "attention": {"format": "e4m3"}}}))
        own = {"position_ids": mine(positions, 1).contiguous().to(DEVICE)}
        attention = functools.partial(ALL_ATTENTION_FUNCTIONS["fp8_packed"], model.model.layers[0].self_attn)

        def of_slices(inputs, gradient):
            return step(
                lambda q, k, v: attention(q, k, v, None, **own)[0], [mine(x, 2) for x in inputs], mine(gradient, 1)
            )

        yield of_slices


@contextlib.contextmanager
def silent():
    """Nothing is said to stay in BF16 inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def step(attention, inputs, gradient):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attention(*leaves)
    output = output.view(*output.shape[:2], -1, FEATURES)
    output.backward(gradient.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def exact(q, k, v):
    q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def by_document(attend, counts, q, k, v):
    """Attention of each document by itself."""
    parts = zip(*(x.split(counts, 2) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*part) for part in parts], 1)


def of_heads(attend, place, inputs, gradient):
    """Output and gradients of the heads of one rank, of whole sequences."""
    copies = max(1, RANKS // inputs[1].shape[1])
    q, k, v = inputs[0], *(x.repeat_interleave(copies, 1) for x in inputs[1:])
    return step(attend, [x.chunk(RANKS, 1)[place] for x in (q, k, v)], gradient.chunk(RANKS, 2)[place])


def mine(x, dim):
    return x.chunk(RANKS, dim)[dist.get_rank()]


def shared_and_whole(heads, kv_heads, counts, long):
    """Relative errors by tensor: of two GPUs against one and against FP32, and of one GPU against FP32.

    Every rank computes the heads of both ranks, too, and compares its own tokens.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    inputs, gradient = operands(heads, kv_heads, 1, sum(counts))
    positions = torch.cat([torch.arange(count) for count in counts])[None]
    with (
        mock.patch.object(documents, "LONG", long),
        attention_of(heads, kv_heads, positions, silent()) as attend,
    ):
        found = attend(inputs, gradient)
    torch.use_deterministic_algorithms(False)
    in_fp8, in_fp32 = (functools.partial(by_document, attend, counts) for attend in (fp8_attention, exact))
    parts = [of_heads(in_fp8, place, inputs, gradient) for place in range(RANKS)]
    outputs, *gradients = zip(*parts, strict=True)
    copies = max(1, RANKS // kv_heads)
    dq, dk, dv = (torch.cat(x, 1) for x in gradients)
    one_by_one = [torch.cat(outputs, 2), dq, *(x.unflatten(1, (-1, copies)).sum(2) for x in (dk, dv))]
    whole, wanted = (step(attend, inputs, gradient) for attend in (in_fp8, in_fp32))
    dims = (1, 2, 2, 2)
    one_by_one, whole, wanted = (
        [mine(x, dim) for x, dim in zip(r, dims, strict=True)] for r in (one_by_one, whole, wanted)
    )
    pairs = ((found, one_by_one), (found, wanted), (whole, wanted))
    return [dict(zip(NAMES, map(error, *pair), strict=True)) for pair in pairs]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "counts"),
    [(4, 2, [8192]), (8, 8, [2048]), (4, 1, [4096]), (4, 2, [5000, 3192]), (14, 2, [1000, 6168, 1024])],
)
def test_attention_of_two_gpus_is_that_of_one(gpu_ranks, heads, kv_heads, counts):
    """Forward bit for bit; gradients up to the order in which cuDNN sums dq. Errors against FP32 are as on one GPU."""
    for to_one, to_fp32, of_one in gpu_ranks(RANKS, shared_and_whole, heads, kv_heads, counts, 1000):
        print(heads, kv_heads, counts, to_one, to_fp32, of_one)
        assert to_one["output"] == 0
        for name in NAMES[1:]:
            assert to_one[name] < 0.01, name
        for name in NAMES:
            assert to_fp32[name] < 1.1 * of_one[name], name


@on_ranks(RANKS, fixture="gpu_ranks")
def test_only_the_first_layer_waits_for_the_device():
    given = operands(4, 2, 1, 2048)
    with attention_of(4, 2, torch.arange(2048)[None]) as layer:
        layer(*given)  # finds documents, and the kernels their plans
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.ranks
def test_training_follows_one_gpu_a_sequence():
    results = []
    for size in (1, RANKS):
        pool = RankPool(RANKS, "cuda")  # DeepSpeed's groups of sequence parallelism stay with a process
        try:
            results.append(pool.run(losses, size, 2048, 6)[0])
        finally:
            pool.close()
    whole, split = results
    assert split == pytest.approx(whole, rel=5e-3)
    assert split[-1] < split[0]


@pytest.fixture
def own_ranks():
    """Two ranks of the test's own: DeepSpeed's groups of sequence parallelism stay with a process."""
    pool = RankPool(RANKS, "cuda")
    yield pool.run
    pool.close()


@pytest.mark.parametrize(("attention", "number_format"), [("sdpa", "bf16"), ("packed", "bf16"), ("packed", "e4m3")])
def test_graphs_of_rows_that_two_gpus_share(own_ranks, attention, number_format):
    """Forward, backward, exchanges, gathers and reductions in one graph, over two NCCL communicators: a hang shows."""
    arguments = attention, number_format, [*[WHOLE] * 12, TWO, *[WHOLE] * 3]
    eager = own_ranks(trained, *arguments, False)
    graphs = own_ranks(trained, *arguments, True)
    for (losses_of_graphs, sent, log, said), (wanted, wanted_bytes, _, _) in zip(graphs, eager, strict=True):
        assert log == ["1 captured"], said
        assert not any("graphs are off" in line for line in said)
        assert losses_of_graphs == pytest.approx(wanted, rel=1e-3)  # attention's backward sums in no fixed order
        assert sent == wanted_bytes
