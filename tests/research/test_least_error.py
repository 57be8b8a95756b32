"""Scales of least squared error, beside an enumeration of all powers of two."""

import numpy as np
import pytest
import torch

from ds_fp8.casts import quantize, scale_from_amax
from ds_fp8.research.formats import ResearchSpec, clipped

E2M1 = np.array([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # Even codes first: of two as near argmin takes the first
POWERS = 2.0 ** np.arange(-40, 20)


def rounded(group, scale):
    """The group as numbers of E2M1 times `scale`, nearest."""
    distance = np.abs(np.abs(group / scale)[:, None] - E2M1)
    return np.sign(group) * E2M1[distance.argmin(1)] * scale


def groups(x, rows, columns):
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            yield (top // rows, left // columns), (slice(top, top + rows), slice(left, left + columns))


def numbers(kind):
    """[24, 70], groups of which differ in size by 2^12."""
    rng = np.random.default_rng(1)
    x = {
        "normal": rng.standard_normal((24, 70)),
        "heavy tails": rng.standard_t(2, (24, 70)),
        "few sizes": rng.choice([0.25, 0.75, 1.25, 2.5, 3.1, 5.0, 6.5], (24, 70)) * rng.choice([-1, 1], (24, 70)),
        "the worst for p / 2": np.where(np.arange(70) % 32 == 0, 3.01, 0.125) * np.ones((24, 1)),
    }[kind]
    return torch.from_numpy(x * 2.0 ** rng.integers(-8, 5, (24, 1))).float()


@pytest.mark.parametrize("granularity", ["1x32", "1x16"])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "few sizes", "the worst for p / 2"])
def test_no_power_of_two_leaves_less(kind, granularity):
    x = numbers(kind)
    cast = quantize(x, "e2m1", granularity, "mse")
    rows, columns = (int(side) for side in granularity.split("x"))
    halved = 0
    for index, where in groups(x, rows, columns):
        group = x[where].double().flatten().numpy()
        errors = [((group - rounded(group, power)) ** 2).sum() for power in POWERS]
        scale = cast.scale[index].item()
        assert scale in POWERS
        found = ((group - rounded(group, scale)) ** 2).sum()
        assert found <= min(errors) * (1 + 1e-5)
        np.testing.assert_array_equal(cast.dequantize()[where].flatten().numpy(), rounded(group, scale))
        beyond = np.abs(group) > 6 * scale
        np.testing.assert_array_equal(clipped(x, cast)[where].flatten().numpy(), beyond)
        halved += beyond.any()
    assert halved or kind == "the worst for p / 2"
    assert clipped(x, quantize(x, "e2m1", granularity, "pow2")).sum() == 0


@pytest.mark.parametrize(("granularity", "sides"), [("tensor", (24, 70)), ("row", (1, 70)), ("16x16", (16, 16))])
@pytest.mark.parametrize("format", ["e2m1", "int8", "e4m3"])
def test_the_better_of_two_scales_by_any_group(format, granularity, sides):
    x = numbers("normal")
    cast = quantize(x, format, granularity, "mse")
    by_amax = quantize(x, format, granularity, "pow2").dequantize()
    scales = cast.scale.expand(1, 1) if granularity == "tensor" else cast.scale
    for index, where in groups(x, *sides):
        whole = scale_from_amax(x[where].abs().amax(), format, "pow2").item()
        assert scales[index].item() in (whole, whole / 2)
        error = ((cast.dequantize() - x)[where] ** 2).sum()
        assert error <= ((by_amax - x)[where] ** 2).sum() * (1 + 1e-5)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_and_zeros_stay(bad):
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 40] = bad, 1e-42
    cast = quantize(x, "e2m1", "1x32", "mse")
    assert cast.dequantize()[0, :32].isnan().all()
    assert torch.equal(cast.scale[0, 1:], torch.ones(1))
    assert cast.scale[1, 1] == 2.0**-126
    assert quantize(x[:0], "e2m1", "1x32", "mse").shape == (0, 64)


def test_an_amax_alone_makes_no_such_scale():
    with pytest.raises(ValueError, match="does not follow"):
        scale_from_amax(torch.ones(1), "e2m1", "mse")
    assert "mse" in ResearchSpec("e2m1", "32x32", "mse").why_not_gathered
