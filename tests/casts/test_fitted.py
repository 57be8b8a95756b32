"""Fitted scales: the least squared error of four, on awkward sizes, and the kernels beside the reference."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize, quantize_columnwise
from ds_fp8.casts.primitives import FITTED_SEVENTHS, fitted_scales
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS, CastSpec
from ds_fp8.config.fp8 import parse_fp8
from tests.casts.test_kernels import DEVICE

SIZES = [(1, 1), (7, 130), (130, 257), (128, 256), (256, 128)]
FORMAT_NAMES = ["e4m3", "e5m2"]
NEARLY_EQUAL = 1e-4
"""Relative: sums in another order take another of two scales that leave errors as close as this."""


def with_outliers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of which one column in 16 is 30 times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, ::16] *= 30
    return x.bfloat16()


def errors(x: torch.Tensor, cast: QuantizedTensor) -> torch.Tensor:
    """Return the squared error of every group, FP64 [M, ceil(K / 128)]."""
    lost = (x.double() - cast.dequantize().double()).square()
    return torch.nn.functional.pad(lost, (0, -lost.shape[1] % 128)).unflatten(1, (-1, 128)).sum(-1)


def error_with(x: torch.Tensor, format: str, sevenths: int) -> torch.Tensor:
    """Return the squared error of every group with its largest number on `sevenths` of the format's largest code."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scale = padded.abs().amax(-1, keepdim=True) / (FORMATS[format].max * sevenths / 7)
    rounded = (padded / scale).float().to(FORMATS[format].dtype).double() * scale
    return (padded - rounded).square().sum(-1)


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_no_other_code_for_the_largest_number_leaves_a_smaller_error(rows, columns, format):
    x = with_outliers(rows, columns)
    cast = quantize(x, format, scale="fitted")
    best = torch.stack([error_with(x, format, sevenths) for sevenths in FITTED_SEVENTHS]).amin(0)
    torch.testing.assert_close(errors(x, cast), best, rtol=NEARLY_EQUAL, atol=1e-12)
    if columns >= 128:
        assert errors(x, cast).sum() < 0.95 * errors(x, quantize(x, format, scale="fp32")).sum()


def test_zeros_and_what_is_not_finite():
    x = torch.zeros(4, 128)
    x[1, 3], x[2, 5], x[3, 7] = torch.inf, torch.nan, 2.0**-130
    scale = fitted_scales(x, "e4m3").flatten()
    assert scale[0] == 1
    assert scale[1:3].isnan().all()
    assert scale[3] >= 2.0**-126
    assert fitted_scales(x[:0], "e4m3").shape == (0, 1)


@pytest.mark.parametrize("granularity", ["128x128", "row", "tensor"])
def test_other_granularities_have_fp32_scales(granularity):
    x = with_outliers(130, 256)
    fitted, plain = (quantize(x, granularity=granularity, scale=scale) for scale in ("fitted", "fp32"))
    assert torch.equal(fitted.data.view(torch.uint8), plain.data.view(torch.uint8))
    assert torch.equal(fitted.scale, plain.scale)


def test_emulated_formats_have_none():
    with pytest.raises(UserError, match="fitted"):
        parse_fp8(
            {"fp8": {"linear": {"input": {"format": "e2m1", "scale": "fitted"}}, "param_gather": {"format": "bf16"}}}
        )


def assert_nearly_the_same(x: torch.Tensor, found: QuantizedTensor, expected: QuantizedTensor, format: str) -> None:
    """Assert that scales are the reference's, or of errors as small."""
    scale, wanted = found.scale.cpu(), expected.scale
    other = scale != wanted
    assert other.float().mean() <= 0.01
    candidates = torch.stack([error_with(x, format, sevenths) for sevenths in FITTED_SEVENTHS])
    amax = torch.nn.functional.pad(x.float().abs(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).amax(-1)
    ratios = torch.tensor([FORMATS[format].max * sevenths / 7 for sevenths in FITTED_SEVENTHS])
    chosen = (amax[None] / scale[None] - ratios[:, None, None]).abs().argmin(0)
    error = candidates.gather(0, chosen[None])[0]
    assert (error <= candidates.amin(0) * (1 + NEARLY_EQUAL))[other].all()
    if DEVICE == "cuda":  # Triton's interpreter rounds to FP8 in its own way
        same = ~other.repeat_interleave(128, 1)[:, : x.shape[1]]
        assert torch.equal(found.data.cpu().view(torch.uint8)[same], expected.data.view(torch.uint8)[same])


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_kernel_of_both_directions(rows, columns, format):
    from ds_fp8.casts.quantization_triton import quantize_tiles

    x = with_outliers(rows, columns)
    row, column = quantize_tiles(x.to(DEVICE), format, "fitted", "1x128", "1x128")
    assert_nearly_the_same(x, row, quantize(x, format, scale="fitted"), format)
    assert_nearly_the_same(x.t().contiguous(), column, quantize_columnwise(x, format, scale="fitted"), format)


def test_kernel_of_the_norm():
    from ds_fp8.layers.decoder.rms_norm_triton import normalise

    x, weight = with_outliers(130, 300), torch.ones(300, dtype=torch.bfloat16)
    _, rstd, cast = normalise(x.to(DEVICE), None, weight.to(DEVICE), 1e-6, CastSpec(scale="fitted"))
    normed = x.float() * rstd.cpu()[:, None]
    assert_nearly_the_same(normed, cast, quantize(normed, scale="fitted"), "e4m3")
