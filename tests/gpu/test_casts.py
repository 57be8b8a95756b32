"""The reference casts give the same bits on a GPU as on a CPU."""

import pytest
import torch
import triton
import triton.language as tl

from ds_fp8.casts import quantize
from ds_fp8.casts.primitives_triton import over_largest, reciprocal_of
from ds_fp8.config.formats import NATIVE_FORMATS, NATIVE_GRANULARITIES
from ds_fp8.gemm import scaled_matmul

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", NATIVE_FORMATS)
@pytest.mark.parametrize("granularity", NATIVE_GRANULARITIES)
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (200, 560), (129, 257)])
def test_cast_is_bit_equal_to_the_cpu(format, granularity, scale, shape):
    x = torch.randn(shape) * torch.logspace(-40, 30, shape[1])
    x[0, 0] = 0
    host, device = quantize(x, format, granularity, scale), quantize(x.cuda(), format, granularity, scale)
    assert torch.equal(host.scale, device.scale.cpu())
    assert torch.equal(host.data.view(torch.uint8), device.data.cpu().view(torch.uint8))
    assert torch.equal(host.dequantize(), device.dequantize().cpu())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_overflow_survives(value):
    x = torch.randn(3, 256, device="cuda")
    x[1, 130] = value
    bad = quantize(x).dequantize().isnan()
    assert bad[1, 128:].all()
    assert bad.sum() == 128


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
