"""Memory on GPUs: inputs of recomputed layers that wait in pinned host memory, and the gated MLP in tiles."""

import gc

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.gemm import BACKENDS, unavailable, why_not_in_fp32
from ds_fp8.graphs.host_checkpoints import _Input, keep_on_host
from tests.layers import test_tiled_mlp as on_any_device
from tests.layers.hugging_face import causal_lm

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, TOKENS = 12, 1024, 4096
INPUT = 2 * HIDDEN * TOKENS


def model_of(fp8, reentrant, on_host):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "num_hidden_layers": LAYERS, "max_position_embeddings": TOKENS}
    model = causal_lm("llama", **sizes, attn_implementation="sdpa").cuda()
    if fp8:
        convert(model, parse_fp8({"fp8": {}}))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert not on_host or keep_on_host(model)
    return model


def steps(model, count=3):
    """Gradients summed over steps without a wait in between, and what the last took beyond what it began with."""
    ids = torch.arange(TOKENS, device="cuda")[None] % 97
    for step in range(count):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model.model(input_ids=ids.roll(step, 1), use_cache=False).last_hidden_state.float().square().mean()
        loss.backward()
    torch.cuda.synchronize()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, torch.cuda.max_memory_allocated() - before


@pytest.fixture
def one_order():
    """Kernels that add up in one order: flash attention's backward adds with atomics, deterministic mode or not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_bits_in_the_memory_of_two_inputs(fp8, reentrant):
    expected, most = steps(model_of(fp8, reentrant, False))
    gc.collect()
    found, less = steps(model_of(fp8, reentrant, True))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert less < most - (LAYERS - 3) * INPUT


def test_copies_go_to_pinned_memory_beside_the_computing_stream():
    from ds_fp8.graphs.host_checkpoints import HostCheckpoints

    on_host, kept = HostCheckpoints(), []
    pack = on_host._pack
    on_host._pack = lambda x: kept.append(pack(x)) or kept[-1]
    weight = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    y = on_host(lambda x: torch.tanh(x @ weight), x, use_reentrant=False)
    # Beside it torch's checkpoint hands over an empty tensor of its own.
    (one,) = (saved for saved in kept if isinstance(saved, _Input) and saved.host.numel())
    assert one.host.is_pinned()
    assert on_host._stream != torch.cuda.current_stream()
    torch.cuda.synchronize()
    assert torch.equal(one.host, x.detach().cpu())
    y.sum().backward()
    plain = torch.autograd.grad(torch.tanh(x @ weight).sum(), x)[0]
    assert torch.equal(x.grad, plain)


# ---------------------------------------------------------------- the gated MLP in tiles of tokens on a GPU


OPERAND = CastSpec("e4m3", "1x128", "pow2")


@pytest.mark.parametrize("input_granularity", ["1x128", "128x128"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("reference", "mxfp8")])
def test_backends_give_fp32(backend, input_granularity):
    other = CastSpec("e4m3", input_granularity, "pow2")
    reason = unavailable(backend, [(OPERAND, other)])
    if reason is not None:
        pytest.skip(reason)
    assert why_not_in_fp32(backend, OPERAND, other) is None


@pytest.mark.parametrize("length", [16384, 16000])
@pytest.mark.parametrize("preset", ["infir2", "hybrid_fast"])
def test_tiles_are_the_whole_within_rounding(preset, length):
    whole = on_any_device.results(None, preset, length)
    on_any_device.assert_alike(on_any_device.results(2048, preset, length), whole)


@pytest.mark.alone
def test_the_peak_is_that_of_a_tile(monkeypatch):
    monkeypatch.setattr(on_any_device, "H", 1024)
    monkeypatch.setattr(on_any_device, "F", features := 4096)
    length, most = 65536, []
    for tile in (None, 4096):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        on_any_device.results(tile, length=length)
        most.append(torch.cuda.max_memory_allocated())
    # gate_up kept in FP8, the product's gradient and three casts: 9 bytes a token and feature, of which 1/16 is left.
    sums = 2 * 12 * 1024 * features
    assert most[0] - most[1] > 0.8 * 9 * length * features - sums
