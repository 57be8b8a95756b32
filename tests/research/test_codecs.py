"""Emulated formats: all codes against an enumeration of their own, groups and scales against loops."""

import itertools

import numpy as np
import pytest
import torch

from ds_fp8.casts import quantize, quantize_both
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.research.codecs import encode, midpoints
from ds_fp8.research.codecs_triton import encode_elements
from ds_fp8.research.formats import EMULATED


def value(name: str, code: int) -> float | None:
    """The number of a code by the definition of its format, bit by bit; None where the format has no such code."""
    if name.startswith("int"):
        bits = int(name[3:])
        sign, magnitude = code >> (bits - 1), code % 2 ** (bits - 1)
        number = float(magnitude)
    elif name == "log8":
        sign, magnitude = code >> 7, code % 128
        number = 0.0 if magnitude == 0 else float(np.float32(2.0 ** ((magnitude - 127) / 8)))
    else:
        x, y = int(name[1]), int(name[3])
        digits = f"{code:0{1 + x + y}b}"
        sign, exponent, fraction = int(digits[0]), int(digits[1 : 1 + x], 2), int(digits[1 + x :] or "0", 2)
        bias = 2 ** (x - 1) - 1
        if 1 + x + y == 8 and "0" not in digits[1:]:
            return None  # NaN
        if exponent:
            number = (1 + fraction * 2.0**-y) * 2.0 ** (exponent - bias)
        else:
            number = fraction * 2.0**-y * 2.0 ** (1 - bias)
    return -number if sign else number


def all_codes(name: str) -> dict[int, float]:
    numbers = {code: value(name, code) for code in range(2 ** FORMATS[name].codec.bits)}
    return {code: number for code, number in numbers.items() if number is not None}


def nearest(name: str, numbers: np.ndarray) -> np.ndarray:
    """By comparing every number with every code of its sign, in FP64: the nearest, of two the even one."""
    signed = np.signbit(numbers)
    half = 2 ** (FORMATS[name].codec.bits - 1)
    magnitudes = {code: number for code, number in all_codes(name).items() if code < half}
    order = sorted(magnitudes, key=lambda code: code % 2)  # argmin takes the first: even codes
    distance = np.abs(np.abs(numbers.astype(np.float64))[:, None] - np.array([magnitudes[code] for code in order]))
    return np.array(order)[distance.argmin(1)] + half * signed


@pytest.mark.parametrize("name", EMULATED)
def test_casts_are_the_nearest_of_all_codes(name):
    format, codec = FORMATS[name], FORMATS[name].codec
    codes = all_codes(name)
    found = codec.decode(torch.tensor(list(codes), dtype=torch.uint8), torch.float32)
    assert found.tolist() == list(codes.values())
    middle = np.array(sorted(set(codes.values())))
    middle = ((middle[1:] + middle[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    spread = (rng.standard_normal(2000) * format.max * 2.0 ** rng.uniform(-12, 1, 2000)).astype(np.float32)
    parts = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf)), spread]
    numbers = np.concatenate([*parts, np.array([0.0, -0.0, 9 * format.max, -9 * format.max, 1e-40], dtype=np.float32)])
    expected = torch.from_numpy(nearest(name, numbers)).to(torch.uint8)
    assert torch.equal(encode(torch.from_numpy(numbers), codec), expected)
    on_device = torch.from_numpy(numbers).to("cuda" if torch.cuda.is_available() else "cpu")
    found = encode_elements(on_device, midpoints(codec, on_device.device), codec.bits)
    assert torch.equal(found.cpu(), expected)


def test_e4m3_by_the_rule_of_minifloats_is_that_of_the_hardware():
    codes = torch.arange(127, dtype=torch.uint8)
    numbers = [value("e4m3", code) for code in range(127)]
    assert codes.view(torch.float8_e4m3fn).float().tolist() == numbers


def scale_of(amax: float, largest: float, kind: str, unit: float) -> float:
    if amax == 0 and kind != "e4m3":
        return 1.0
    if kind == "pow2":
        return min(p for p in 2.0 ** np.arange(-126.0, 128) if p >= amax / largest)
    e4m3 = [value("e4m3", code) for code in range(1, 127)]
    return unit * min(e4m3, key=lambda number: abs(number - np.float32(amax / largest) / unit))


@pytest.mark.parametrize(
    ("format", "granularity", "scale"),
    [("e4m3", "1x32", "pow2"), ("e2m1", "1x32", "pow2"), ("e2m1", "1x16", "e4m3"), ("e2m1", "16x16", "e4m3")],
    ids=["MXFP8", "MXFP4", "NVFP4", "NVFP4 weights"],
)
def test_groups_and_their_scales(format, granularity, scale):
    torch.manual_seed(0)
    x = torch.randn(40, 70) * torch.logspace(-6, 2, 70, base=2)
    cast = quantize(x, format, granularity, scale)
    rows, columns = (int(side) for side in granularity.split("x"))
    unit = np.float32(x.abs().amax().item() / FORMATS[format].max) / np.float32(448)
    numbers = cast.dequantize()
    for top, left in itertools.product(range(0, 40, rows), range(0, 70, columns)):
        block, result = (t[top : top + rows, left : left + columns] for t in (x, numbers))
        expected = scale_of(block.abs().amax().item(), FORMATS[format].max, scale, unit)
        found = cast.scale[top // rows, left // columns].item()
        assert found == pytest.approx(expected, rel=1e-6)
        in_units = (block / found).flatten().numpy()
        if format == "e2m1":
            codes = nearest(format, in_units)
            assert torch.equal(result.flatten(), torch.tensor([value(format, c) for c in codes]).float() * found)


def test_nan_and_inf_are_seen_and_zeros_stay():
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 40] = torch.inf, 2.0
    numbers = quantize(x, "e2m1", "1x32").dequantize()
    assert numbers[0, :32].isnan().all()
    assert torch.equal(numbers[1], x[1])
    assert torch.equal(quantize(torch.zeros(4, 32), "e2m1", "1x16", "e4m3").dequantize(), torch.zeros(4, 32))


@pytest.mark.parametrize("name", ["e2m1", "int4", "log8"])
def test_stochastic_rounding_keeps_the_mean(name):
    torch.manual_seed(0)
    format = FORMATS[name]
    x = torch.tensor([0.3, -0.71, 0.05, 1.0, -1.5]) * format.max
    draws = torch.rand(20_000, len(x))
    numbers = format.codec.decode(format.codec.encode(x.expand_as(draws), draws), torch.float32)
    error = (numbers.mean(0) - x.clamp(-format.max, format.max)).abs()
    assert (error < 0.01 * format.max).all()
    assert len(numbers[:, 0].unique()) <= 2


def test_columnwise_is_the_cast_of_the_transposed_matrix():
    x = torch.randn(48, 80)
    row, column = quantize_both(x, "e2m1", "1x16", "1x32", "pow2")
    assert torch.equal(row.dequantize(), quantize(x, "e2m1", "1x16").dequantize())
    assert torch.equal(column.dequantize(), quantize(x.t(), "e2m1", "1x32").dequantize())


def test_a_backend_that_multiplies_no_emulated_format():
    with pytest.raises(UserError, match="cannot run here"):
        recipe_from_config(parse_fp8({"fp8": {"linear": {"backend": "cublas", "input": {"format": "int8"}}}}))
