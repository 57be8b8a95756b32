"""What is stored is what was meant, within the format's spacing, and is found again exactly."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.optim.moments import CODECS, dequantize_moment, quantize_moment
from tests.optim.numbers import COMPRESSED, ROUNDING, SCALES, SIZES, awkward, combinations, gradients

NOISE_DRAWS = 400


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("codec", "granularity", "scale"), combinations())
def test_numbers_near_the_largest_are_kept_to_the_formats_precision(codec, granularity, scale, numel):
    x = gradients(numel, spread=0.3).sign() * (1e-4 + gradients(numel, spread=0.3).abs())
    dequantized = dequantize_moment(quantize_moment(x, CODECS[codec], granularity, scale), CODECS[codec], granularity)
    assert ((dequantized - x).abs() <= 1.01 * ROUNDING[codec] * x.abs()).all()


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("codec", "granularity", "scale"), combinations())
@pytest.mark.parametrize("name", ["spread", *awkward()])
def test_decoding_and_encoding_again_changes_nothing(name, codec, granularity, scale, noisy):
    x = gradients(1000, spread=4) if name == "spread" else awkward()[name]
    kind = CODECS[codec]
    for never_zero in (False, True):
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) if noisy else None
        first = quantize_moment(x, kind, granularity, scale, never_zero=never_zero, noise=noise)
        numbers = dequantize_moment(first, kind, granularity)
        second = quantize_moment(numbers, kind, granularity, scale, never_zero=never_zero, exponent=first.exponent)
        assert torch.equal(numbers, dequantize_moment(second, kind, granularity))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("name", list(awkward()))
def test_awkward_groups(name, codec, scale):
    x = awkward()[name]
    dequantized = dequantize_moment(quantize_moment(x, CODECS[codec], "1x128", scale), CODECS[codec])
    assert dequantized.isfinite().all()
    assert (dequantized[x == 0] == 0).all()
    assert (dequantized * x >= 0).all()
    # Where there is anything, the largest keeps its size, whatever else is in the group.
    largest = x.abs().argmax()
    assert dequantized[largest] == pytest.approx(x[largest].item(), rel=1.01 * ROUNDING[codec])


def test_equal_values_and_extremes_survive_expansion_exactly():
    codec = CODECS["e4m3_expanded"]
    for name in ("all zero", "equal", "equal magnitudes", "one not zero"):
        x = awkward()[name]
        assert torch.equal(dequantize_moment(quantize_moment(x, codec), codec), x), name


def test_expansion_follows_the_papers_formula():
    """c = sqrt(max min), s = (max / c)^k / 448, code = cast(sign(x) (|x| / c)^k / s)."""
    x = gradients(128, spread=1)
    largest, smallest = x.abs().max(), x.abs().min()
    k = (torch.log(torch.tensor(448.0**2 / 2)) / torch.log(largest / smallest) * 16).floor() / 16
    c = (largest * smallest).sqrt()
    s = (largest / c) ** k / 448
    expected = (x.sign() * (x.abs() / c) ** k / s).to(torch.float8_e4m3fn).float()
    quantized = quantize_moment(x, CODECS["e4m3_expanded"])
    assert quantized.exponent.item() == k.item() * 16
    different = quantized.data.float() != expected
    assert different.float().mean() <= 1 / 128  # the two orders of operations may part at a tie


def test_zeros_do_not_narrow_the_expansion():
    x = gradients(128)
    with_zeros = x.clone()
    with_zeros[x.abs() < x.abs().median()] = 0
    kept = x[with_zeros != 0]
    alone = quantize_moment(kept, CODECS["e4m3_expanded"])
    assert torch.equal(quantize_moment(with_zeros, CODECS["e4m3_expanded"]).exponent, alone.exponent)


def test_expansion_is_more_precise_than_plain_e4m3():
    x = gradients(128 * 100, spread=2) ** 2
    errors = {}
    for codec in ("e4m3", "e4m3_expanded"):
        dequantized = dequantize_moment(quantize_moment(x, CODECS[codec], never_zero=True), CODECS[codec])
        errors[codec] = ((dequantized - x).abs() / x).mean().item()
    assert errors["e4m3_expanded"] < 0.5 * errors["e4m3"]


@pytest.mark.parametrize(("codec", "granularity", "scale"), combinations())
def test_a_positive_number_never_becomes_zero_where_it_must_not(codec, granularity, scale):
    x = torch.full((256,), 1e-30)
    x[0], x[200], x[3] = 1.0, 1.0, 0.0
    dequantized = dequantize_moment(
        quantize_moment(x, CODECS[codec], granularity, scale, never_zero=True), CODECS[codec], granularity
    )
    assert ((dequantized > 0) == (x > 0)).all()


@pytest.mark.parametrize("codec", [*COMPRESSED, "int8", "int4", "log8", "e3m4", "e2m1"])
def test_numbers_that_are_not_finite_stay_so(codec):
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = gradients(256)
        x[130] = bad
        dequantized = dequantize_moment(quantize_moment(x, CODECS[codec]), CODECS[codec])
        assert not dequantized[130].isfinite()
        assert dequantized[:128].isfinite().all()


@pytest.mark.parametrize("codec", ["bf16", *COMPRESSED])
def test_noise_is_right_on_average_and_hits_the_neighbours_only(codec):
    kind = CODECS[codec]
    x = gradients(128, spread=1).abs()
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [
            dequantize_moment(quantize_moment(x, kind, noise=torch.rand(128, generator=generator)), kind)
            for _ in range(NOISE_DRAWS)
        ]
    )
    assert all(len(column.unique()) <= 2 for column in draws.t())
    spacing = torch.maximum(draws.amax(0) - draws.amin(0), 2 * ROUNDING[codec] * x)
    # The mean of so many yes-or-no draws is within five standard deviations, each of at most half a spacing.
    assert ((draws.mean(0) - x).abs() <= 5 * 0.5 * spacing / NOISE_DRAWS**0.5).all()
    # Over all elements chance evens out further, and what is left would be a bias.
    bias = ((draws.mean(0) - x) / spacing).mean().abs()
    assert bias <= 5 * 0.5 / (NOISE_DRAWS * len(x)) ** 0.5


def test_the_same_noise_gives_the_same_codes():
    x, noise = gradients(1000), torch.rand(1000)
    first, second = (quantize_moment(x, CODECS["e4m3"], noise=noise).data.view(torch.uint8) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, quantize_moment(x, CODECS["e4m3"]).data.view(torch.uint8))
