"""Masters as E4M3 data and 16-bit corrections, and compressed moments: what is stored is found again exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.casts import group_amax, quantize, scale_from_amax
from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.optim.masters import SplitMasters, dequantize_masters, quantize_masters, stored_amax
from ds_fp8.optim.moments import CODECS, dequantize_moment, quantize_moment
from tests.optim.numbers import COMPRESSED, ROUNDING, SCALES, SIZES, awkward, combinations, gradients

BLOCKS = "128x128"
EDGE = 448 * 2.0**-10  # Between two powers of two for a scale


def encoded(numbers: torch.Tensor, scale_type: str):
    scale = scale_from_amax(stored_amax(group_amax(numbers, BLOCKS), scale_type), "e4m3", scale_type)
    return scale, *quantize_masters(numbers, scale, BLOCKS)


def assert_fixed(numbers: torch.Tensor, scale_type: str) -> torch.Tensor:
    """The masters of these numbers, after it has been shown that casting them changes nothing."""
    scale, codes, correction = encoded(numbers, scale_type)
    masters = dequantize_masters(codes, correction, scale, BLOCKS)
    again = encoded(masters, scale_type)
    assert torch.equal(again[0], scale)
    assert torch.equal(again[1].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again[2], correction)
    whole = quantize(masters, "e4m3", BLOCKS, scale_type)
    assert torch.equal(whole.scale, scale)
    assert torch.equal(whole.data.view(torch.uint8), codes.view(torch.uint8))
    assert correction.int().abs().max() <= 32767
    return masters


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(SCALES), st.floats(0, 4), st.integers(-9, 9))
def test_masters_are_what_their_fp32_numbers_are_cast_to(seed, scale_type, spread, nudge):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(130, 200, generator=generator) * (torch.randn(130, 200, generator=generator) * spread).exp2() * 0.02
    assert_fixed(x, scale_type)
    # The amax beside the number at which a power of two changes, by less than masters keep.
    x = x.clamp(-EDGE / 2, EDGE / 2)
    x[0, 0], x[129, 199] = EDGE * (1 + nudge * 2.0**-22), -EDGE * (1 - nudge * 2.0**-23)
    assert_fixed(x, scale_type)


@pytest.mark.parametrize("scale_type", SCALES)
def test_no_master_is_further_than_half_a_step_from_its_number(scale_type):
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * 0.02
    x[::3] *= 2.0**-9  # subnormal codes
    scale, codes, correction = encoded(x, scale_type)
    masters = dequantize_masters(codes, correction, scale, BLOCKS)
    in_units = x.abs() / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    step = (in_units.clamp_min(2.0**-6).log2().floor() - 19).exp2() * (x.abs() / in_units)
    # A whole step beside ties, where corrections stop in time; and FP32's own rounding.
    tie = correction.int().abs() == 32767
    assert ((masters - x).abs() <= step * torch.where(tie, 1.1, 0.6)).all()


@pytest.mark.parametrize("scale_type", SCALES)
def test_ties_zeros_and_what_is_not_finite(scale_type):
    """Every code, every middle between two, both signs, and their neighbours."""
    codes = dequantize_unscaled(torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, middles, middles * (1 + 2.0**-22), middles * (1 - 2.0**-22), torch.zeros(5)])
    masters = assert_fixed(torch.stack([x, -x]), scale_type)
    assert torch.equal(masters[0, : len(codes)], codes)
    assert torch.equal(masters[0], -masters[1])
    assert not assert_fixed(torch.zeros(3, 4), scale_type).any()
    for bad in (torch.nan, torch.inf):
        scale, found, correction = encoded(torch.tensor([[1.0, bad]]), scale_type)
        assert dequantize_masters(found, correction, scale, BLOCKS).isnan().all()


@pytest.mark.parametrize(
    ("scale_type", "lr", "most"),
    [("fp32", 1e-5, 2.5e-4), ("fp32", 1e-6, 3.5e-3), ("fp32", 1e-7, 4e-2),
     ("pow2", 1e-5, 8e-4), ("pow2", 1e-6, 8e-3), ("pow2", 1e-7, 8e-2)],
)  # fmt: skip
def test_small_updates_survive(scale_type, lr, most):
    """500 noisy updates with a direction: the error of the displacement by the displacement; of BF16 it is about 1.

    A third of the updates are lr itself: on the grid of powers of two, which stays, their rounding errors are the same.
    """
    start = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).double() * 0.02
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(128, 128, generator=generator).double().sign()
    exact, kept, bf16 = start.clone(), start.float(), start.bfloat16()
    for _ in range(500):
        noise = torch.randn(128, 128, generator=generator).double()
        update = lr * (0.3 * direction + noise).clamp(-1, 1)
        exact += update
        scale, codes, correction = encoded(kept + update.float(), scale_type)
        kept = dequantize_masters(codes, correction, scale, BLOCKS)
        bf16 = (bf16 + update).bfloat16()
    displacement = (exact - start).norm()
    assert (kept - exact).norm() / displacement < most
    assert (bf16 - exact).norm() / displacement > 0.8


def split(numbers: torch.Tensor) -> SplitMasters:
    kept = SplitMasters.of(torch.zeros(len(numbers), dtype=torch.bfloat16))
    kept.write_all(numbers)
    return kept


def assert_exact(numbers: torch.Tensor):
    kept = split(numbers)
    assert torch.equal(kept.bf16.view(torch.int16), numbers.bfloat16().view(torch.int16))
    found, real = kept.read_all(), ~numbers.isnan()
    assert torch.equal(found.view(torch.int32)[real], numbers.view(torch.int32)[real])
    assert found[~real].isnan().all()


LOW_HALVES = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]


@pytest.mark.parametrize("low", LOW_HALVES)
def test_bf16_and_corrections_are_fp32(low):
    """Every BF16 number of both signs, and what lies beside and between them: NaN, Inf, subnormals and zeros too."""
    high = torch.arange(-(2**15), 2**15)
    assert_exact(((high << 16) + low).int().view(torch.float32)[:-3])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 70))
def test_bf16_and_corrections_are_any_fp32(seed, numel):
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(seed))
    assert_exact(bits.int().view(torch.float32))


def test_bf16_alone_is_its_masters():
    bf16 = torch.randn(1000).bfloat16()
    assert torch.equal(SplitMasters.of(bf16).read_all(), bf16.float())


# ---------------------------------------------------------------- moments


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
