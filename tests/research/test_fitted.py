"""Fitted scales: the least squared error of four, on awkward sizes."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.research.formats import FITTED_SEVENTHS, fitted_scales

SIZES = [(1, 1), (7, 130), (130, 257), (128, 256), (256, 128)]
FORMAT_NAMES = ["e4m3", "e5m2"]
NEARLY_EQUAL = 1e-4  # Relative: sums in another order take another of two scales that leave errors as close as this


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
