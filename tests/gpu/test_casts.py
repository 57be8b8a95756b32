"""Casts, outlier channels and rotations on a GPU: the references' bits, torchao's and Transformer Engine's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ds_fp8.casts import quantize
from ds_fp8.casts.primitives_triton import over_largest, reciprocal_of
from ds_fp8.gemm import scaled_matmul
from ds_fp8.layers.attention.hadamard import ROTATION_BLOCKS, Rotation, rotate, unrotate
from tests.casts.peers import assert_same_as_torchao, inputs
from tests.layers.linears import fp8_linear
from tests.zero.test_outlier_residuals import CUT_ROWS, WHOLE_ROWS, kernel_and_reference, losses_and_channels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_product_against_fp64(scale):
    a = quantize(torch.randn(200, 560, device="cuda"), scale=scale)
    b = quantize(torch.randn(130, 560, device="cuda"), granularity="128x128", scale=scale)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    error = (scaled_matmul(a, b).double() - exact).norm() / exact.norm()
    assert error < 3e-3  # one rounding to BF16


@triton.jit
def _divisions(x, reciprocals, quotients, largest: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    number = tl.load(x + at)
    tl.store(reciprocals + at, reciprocal_of(number))
    tl.store(quotients + at, over_largest(number, largest))


@pytest.mark.parametrize("largest", [448.0, 57344.0])
@pytest.mark.parametrize("exponent", [1, 2, 30, 63, 126, 127, 128, 200, 251, 252])
def test_divisions_are_those_of_ieee(exponent, largest):
    """All mantissas; below 2^-126 a quotient is no scale."""
    x = (torch.arange(2**23, dtype=torch.int32, device="cuda") + (exponent << 23)).view(torch.float32)
    reciprocals, quotients = torch.empty_like(x), torch.empty_like(x)
    _divisions[(2**13,)](x, reciprocals, quotients, largest)
    assert torch.equal(reciprocals, 1 / x)
    expected = x / torch.full_like(x, largest)  # CUDA multiplies by the reciprocal of a number
    assert torch.equal(quotients.clamp(min=2.0**-126), expected.clamp(min=2.0**-126))


# -------------------- torchao and Transformer Engine


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_casts_are_torchaos(format, granularity, scale):
    assert_same_as_torchao(format, granularity, scale, "cuda")


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("granularity", "dimensions"), [("1x128", 1), ("128x128", 2)])
def test_casts_are_transformer_engines(format, granularity, dimensions):
    """Its block quantizer's default scales are powers of two."""
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine_torch import DType

    x = inputs("cuda")
    dtype = DType.kFloat8E4M3 if format == "e4m3" else DType.kFloat8E5M2
    theirs = Float8BlockQuantizer(dtype, rowwise=True, columnwise=False, block_scaling_dim=dimensions)(x)
    ours = quantize(x, format, granularity, "pow2")
    assert torch.equal(ours.data.view(torch.uint8), theirs._rowwise_data)
    assert torch.equal(ours.dequantize(torch.float32), theirs.dequantize(dtype=torch.float32))


# -------------------- outlier channels


@pytest.mark.parametrize(
    ("world", "master", "sizes"),
    [(1, "fp32", CUT_ROWS), (2, "fp32", CUT_ROWS), (2, "fp32", WHOLE_ROWS), (1, "fp8_plus16", CUT_ROWS)],
)
def test_residuals_of_shards_are_the_references(gpu_ranks, world, master, sizes):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for pairs in gpu_ranks(world, kernel_and_reference, master, sizes):
        for expected, found in pairs:
            assert torch.equal(expected, found)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sizes", [WHOLE_ROWS, (256, 512)])
def test_blocks_that_gathers_bring_change_no_number(gpu_ranks, world, sizes):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    section = {"preset": "precise", "monitor": {"every": 2}}
    found, expected = (gpu_ranks(world, losses_and_channels, room, section, sizes, 6) for room in (True, False))
    assert found == expected


# -------------------- rotations


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", ROTATION_BLOCKS)
@pytest.mark.parametrize("axis", [0, 1])
def test_rotations_are_those_of_the_reference(axis, block, dtype):
    rotation, x = Rotation(block, 1, axis), torch.randn(300, 384).to(dtype)
    rotated = rotate(x.cuda(), rotation)
    torch.testing.assert_close(rotated.cpu(), rotate(x, rotation), rtol=0, atol=1e-5)
    exact = torch.randint(-64, 65, (300, 384)).to(dtype)  # sums are exact in whatever order
    assert torch.equal(rotate(exact.cuda(), rotation).cpu(), rotate(exact, rotation))
    back = unrotate(rotated, rotation, 300)
    torch.testing.assert_close(back.cpu(), x.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["infir2", "tensorwise", "rowwise", "halo", "nvfp4", "quartet"])
def test_a_linear_computes_as_on_a_cpu(preset):
    rotation = (
        {} if preset in ("halo", "nvfp4", "quartet") else {"fprop": "in_features", "dgrad": "tokens", "wgrad": "tokens"}
    )
    linear = fp8_linear(
        384, 256, preset=preset, linear={"backend": "reference", "rotation": rotation}, monitor={"every": 0}
    )
    x, dy = torch.randn(300, 384).bfloat16(), torch.randn(300, 256).bfloat16()
    results = []
    for where in ("cpu", "cuda"):
        linear = linear.to(where)
        leaf = x.to(where).requires_grad_()
        y = linear(leaf)
        results.append(
            [part.cpu().float() for part in (y, *torch.autograd.grad(y, [leaf, linear.weight], dy.to(where)))]
        )
    # Stochastic rounding draws other numbers there; two draws on a CPU part by 0.19 and 0.32.
    bound = {"nvfp4": 0.3, "quartet": 0.45}.get(preset, 0.02)
    for host, device in zip(*results, strict=True):
        assert (device - host).norm() < bound * host.norm()
