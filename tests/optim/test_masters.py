"""Masters as E4M3 codes and 16-bit corrections: a cast of what they stand for finds them again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.casts import group_amax, quantize, scale_from_amax
from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.optim.masters import SplitMasters, dequantize_masters, quantize_masters, stored_amax

SCALES = ["pow2", "fp32"]
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
