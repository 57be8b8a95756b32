"""Formats, scale types and casts of papers, registered beside core's (config/formats.py).

    formats         minifloats of 4 to 8 bits, integers, logarithms: a byte an element, decoded for their products
    granularity     1x32 | 32x32 | 1x16 | 16x16 ...
    scale           e4m3 | mse | fitted | static, static 2^-24 ...

MXFP8 and MXFP4 are e4m3 and e2m1 in groups of 32 with a power-of-two scale, NVFP4 is e2m1 in groups of 16 with scale
type "e4m3": a scale of E4M3 each, in units of one FP32 scale of the tensor. "mse" is the scale of "pow2" or half of it,
whichever leaves the group the smaller squared error: with half of it the largest elements may saturate. "fitted" brings
the amax of each 1x128 group to one of the format's four largest numbers, likewise by the squared error. "static" is one
fixed power of two for all of a tensor, whatever its values: nothing looks for an amax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ds_fp8.casts.primitives import (
    apply_factors,
    dequantize,
    dequantize_unscaled,
    exact_scale,
    group_amax,
    infinite_to_nan,
    of_finite_groups,
    per_element,
    quantize_with_scale,
    reduce_groups,
    round_stochastically,
    scale_from_amax,
    scales_for,
)
from ds_fp8.casts.quantization import QuantizedTensor, quantize, quantize_columnwise
from ds_fp8.config.formats import (
    FORMATS,
    SCALE_TYPES,
    SMALLEST_SCALE,
    CastSpec,
    Format,
    ScaleType,
    is_of_groups,
)
from ds_fp8.layers.attention.hadamard import Rotation, rotate
from ds_fp8.research.codecs import TableCodec

EmulatedFormat = Literal[
    "e2m1", "e3m0", "e2m2", "e3m1", "e4m0", "e2m3", "e3m2", "e4m1", "e5m0", "e2m4", "e3m3", "e4m2", "e5m1", "e2m5",
    "e3m4", "int4", "int6", "int8", "log8",
]  # fmt: skip
EMULATED: tuple[str, ...] = get_args(EmulatedFormat)


def _minifloat(name: str) -> Format:
    """Return ExMy: sign, x bits of exponent, y of mantissa, subnormals, no Inf; in 8 bits the last code is NaN's."""
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    bits, bias, ones = 1 + exponent_bits + mantissa_bits, 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    magnitudes = []
    # Each code in turn: subnormals share the exponent of the first normal numbers, without the leading one.
    for code in range(2 ** (bits - 1) - (bits == 8)):
        exponent, mantissa = divmod(code, ones)
        significand = mantissa / ones + (exponent > 0)
        magnitudes.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return _emulated(name, bits, magnitudes)


def _integer(name: str) -> Format:
    """Return INTb as sign and magnitude, so that the range is symmetric."""
    bits = int(name[3:])
    return _emulated(name, bits, [float(number) for number in range(2 ** (bits - 1))])


def _logarithmic(name: str) -> Format:
    """Return zero and powers of 2^(1/8) up to 1, rounded to FP32 (a logarithmic number system, 2106.13914)."""
    bits = int(name[3:])
    # In FP64, rounded once: every platform has the same table.
    powers = torch.arange(2 - 2 ** (bits - 1), 1, dtype=torch.float64).div(8).exp2().float()
    return _emulated(name, bits, [0.0, *powers.tolist()])


def _emulated(name: str, bits: int, magnitudes: list[float]) -> Format:
    exact = all(torch.tensor(number).bfloat16().item() == number for number in magnitudes)
    return Format(name, torch.uint8, magnitudes[-1], magnitudes[1], TableCodec(tuple(magnitudes), bits), exact)


_KINDS = {"e": _minifloat, "i": _integer, "l": _logarithmic}
FORMATS.update({name: _KINDS[name[0]](name) for name in EMULATED})


def scales_of_least_error(x: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """Return for every group the power of two with which a cast to nearest leaves the smaller squared error.

        scale[g] = the s of {p, p / 2} with the smaller sum over g of (x[i] - s * cast(x[i] / s))^2,  p that of `pow2`

    With p / 2 the largest elements may saturate. For E2M1 in groups of up to 32 no other power of two leaves less: the
    numbers of larger scales are, within reach, among those of p. Of smaller ones 1.5 p is the end; what lies beyond
    loses no less there than with p / 2, the largest element, above 3 p, at least (1.5 p)^2 = 2.25 p^2 more, and the
    other 31 have at most 31 (p / 4)^2 = 1.94 p^2 to gain. So this is the projection of least squared error that QuEST
    (arXiv 2502.05003) approximates by a multiple of the group's root mean square, fitted to a normal distribution.
    """
    whole = scale_from_amax(group_amax(x, granularity), format, "pow2")
    if x.numel() == 0:
        return whole
    half = (whole / 2).clamp_min(SMALLEST_SCALE)
    errors = []
    for scale in (whole, half):
        codes = quantize_with_scale(x, scale, format, granularity)
        rounded = dequantize(codes, scale, granularity, "mse", torch.float32, format)
        # In units of p: squares of the smallest numbers would vanish in FP32.
        lost = per_element(torch.div, x.detach().float() - rounded, whole, granularity).square_()
        errors.append(reduce_groups(torch.sum, lost, granularity))
    return torch.where(errors[1] < errors[0], half, whole)  # equal, or NaN: whole


# The largest numbers of E4M3 and of E5M2 are 1.75, 1.5, 1.25 and 1 times a power of two: so many sevenths of the first
FITTED_SEVENTHS = (7, 6, 5, 4)


def fitted_scales(x: torch.Tensor, format: str, granularity: str = "1x128") -> torch.Tensor:
    """Return for every 1x128 group the scale that leaves the smallest squared error.

        scale[g] = amax[g] / c, with the c of {max, 6/7 max, 5/7 max, 4/7 max} of the smallest sum of (x[i] - rounded)^2

    The largest number of a group, often a channel's that dwarfs the others, then loses nothing. Of equal errors the
    largest c.

    For E4M3 and E5M2. In other granularities, and from an amax alone, the scales are those of "fp32".
    """
    amax, largest = group_amax(x, granularity), FORMATS[format].max
    if x.numel() == 0 or granularity != "1x128":
        return scale_from_amax(amax, format, "fp32")
    best = least = None
    for sevenths in FITTED_SEVENTHS:
        scale = of_finite_groups(amax, exact_scale(amax, largest * sevenths / 7))
        in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), "1x128")
        rounded = dequantize_unscaled(in_units.clamp(-largest, largest).to(FORMATS[format].dtype))
        # In units of the scale, for squares of small numbers vanish, and then of the largest c's.
        lost = reduce_groups(torch.sum, (in_units - rounded).square_(), "1x128") * (7 / sevenths) ** 2
        if best is None:
            best, least = scale, lost
        else:
            best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return best


def e4m3_scales(amax: torch.Tensor, format: str) -> torch.Tensor:
    """Return the scales of groups, rounded to E4M3 in units of one FP32 scale of the tensor, as NVFP4 stores them."""
    scale = exact_scale(amax, FORMATS[format].max)
    if scale.numel() == 0:
        return scale
    codes = FORMATS["e4m3"]
    unit = (scale.amax() / torch.full_like(scale, codes.max)).clamp_min(SMALLEST_SCALE)
    rounded = (scale / unit).clamp(codes.smallest_subnormal, codes.max).to(codes.dtype).float() * unit
    return of_finite_groups(amax, rounded)


def static_scale_type(exponent: int = 0) -> str:
    return f"static 2^{exponent}" if exponent else "static"


def _static(exponent: int) -> ScaleType:
    fixed = 2.0**exponent
    return ScaleType(True, needs_amax=False, from_amax=lambda amax, format: torch.full_like(amax, fixed))


EXPONENTS = range(-100, 101)  # exponents of static scales
SCALE_TYPES.update({static_scale_type(exponent): _static(exponent) for exponent in EXPONENTS})
SCALE_TYPES["e4m3"] = ScaleType(multiplied=False, from_amax=e4m3_scales)
SCALE_TYPES["fitted"] = ScaleType(
    from_amax=lambda amax, format: scale_from_amax(amax, format, "fp32"), from_numbers=fitted_scales
)
SCALE_TYPES["mse"] = ScaleType(True, multiplied=False, from_numbers=scales_of_least_error)


@dataclass(frozen=True)
class ResearchSpec(CastSpec):
    """A cast that may be rounded at random, and rotated before."""

    rounding: str = "nearest"  # nearest, or stochastic: unbiased, with torch's random numbers
    rotation: Rotation | None = None

    def __str__(self) -> str:
        words = super().__str__() + " stochastic" * (self.rounding == "stochastic")
        return words if self.rotation is None else f"{words}, {self.rotation}"

    @property
    def by_torch(self) -> bool:
        return super().by_torch or not self.plain

    @property
    def plain(self) -> bool:
        return self.rounding == "nearest" and self.rotation is None

    @property
    def why_not_gathered(self) -> str | None:
        if is_of_groups(self.granularity):
            return f"{self.granularity} weights are cast along either contraction, from high precision"
        if self.rounding == "stochastic":
            return "weights rounded stochastically are cast where they are used"
        if SCALE_TYPES[self.scale].from_numbers is not None and self.scale != "fitted":
            return f'scales of type "{self.scale}" follow from all of a group, of which a rank may have a part'
        return None

    def why_not_sharded(self, numel: int, columns: int) -> str | None:
        if self.rotation is None or not (numel % self.rotation.block or columns % self.rotation.block):
            return None
        return f"are not whole blocks of {self.rotation.block}, which are rotated together"

    def before_cast(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.rotation is None:
            return numbers
        return rotate(numbers.view(-1, self.rotation.block), self.rotation).flatten()

    def in_granularity(self, granularity: str) -> ResearchSpec:
        return replace(self, granularity=granularity, rotation=None)


def cast_matrix(
    x: torch.Tensor,
    spec: CastSpec,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    columnwise: bool = False,
) -> QuantizedTensor:
    """Cast a matrix [M, K] times its factors, rotated then, along K, or `columnwise` along M, to [K, M]."""
    rounding, rotation = getattr(spec, "rounding", "nearest"), getattr(spec, "rotation", None)
    if rotation is not None:
        x, row_factor, column_factor = rotate(apply_factors(x, row_factor, column_factor), rotation), None, None
    words = spec.format, spec.granularity, spec.scale
    if rounding == "nearest":
        cast_one = quantize_columnwise if columnwise else quantize
        return cast_one(x, *words, row_factor=row_factor, column_factor=column_factor)
    x = apply_factors(x.detach(), row_factor, column_factor)
    if columnwise:
        x = x.t().contiguous()
    scale = scales_for(x, *words)
    codes = cast_stochastically(infinite_to_nan(x, spec.scale), scale, spec.format, spec.granularity)
    name = None if FORMATS[spec.format].codec is None else spec.format
    return QuantizedTensor(codes, scale, spec.granularity, spec.scale, name)


def cast_stochastically(x: torch.Tensor, scale: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """Return `x` in units of `scale`, rounded up or down at random so that the expectation stays, and saturated."""
    target = FORMATS[format]
    in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), granularity)
    draw = torch.rand_like(in_units)
    if target.codec is not None:
        return target.codec.encode(in_units, draw)
    in_units = round_stochastically(in_units.clamp_(-target.max, target.max), draw, format)
    return in_units.clamp_(-target.max, target.max).to(target.dtype)


def clipped(x: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """Return which elements saturated when x, as it was after factors and rotation, was cast to q: bool, of its shape.

    Only scales of type "mse" and static ones let an element saturate.
    """
    in_units = per_element(torch.div, x.detach(), q.scale, q.granularity)
    return in_units.abs_() > FORMATS[q.format].max
