"""The steps of a cast in plain torch: amax, scale, rounding. Any device and granularity; the oracle of every kernel.

A cast is three steps, which the ZeRO-3 parameter gather also takes one by one (its amax spans ranks):

    amax[g]  = max |x[i]|            over the elements i of group g
    scale[g] = amax[g] / format.max  (`pow2`: rounded up to a power of two; 1 where amax is 0; NaN where not finite)
    data[i]  = cast(clamp(x[i] * (1 / scale[g]), -format.max, format.max))   round to nearest even

so that x[i] is approximately data[i] * scale[g]. Inf or NaN anywhere in a group turns its scale, and with it the whole
group, into NaN: overflow is seen downstream, never hidden. A static scale is one number for all: it takes no amax, what
is too large saturates, and of Inf and NaN the element alone becomes NaN (which only E4M3 and E5M2 have). Scales of type
`mse` follow from all elements (scales_of_least_error).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fp8.casts import emulated
from ds_fp8.casts.emulated import encode, encode_stochastically
from ds_fp8.casts.stochastic import round_stochastically
from ds_fp8.config.formats import (
    FORMATS,
    SMALLEST_SCALE,
    check_scale_type,
    fixed_scale,
    format_of,
    group_shape,
    has_power_of_two_scales,
    scale_shape,
)


def apply_factors(x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None) -> torch.Tensor:
    """Return a matrix x [M, K] times row_factor [M] and then column_factor [K], in FP32; x itself without factors."""
    if row_factor is not None:
        x = x.float() * row_factor.float()[:, None]
    if column_factor is not None:
        x = x.float() * column_factor.float()
    return x


def group_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return the largest magnitude of every group.

    Args:
        x: Floating point, of any shape that the granularity fits.
        granularity: As for `quantize`.

    Returns:
        FP32 of shape `scale_shape(x.shape, granularity)`. A group that holds Inf or NaN has amax Inf (not NaN: an
        all-reduce MAX must carry it across ranks). An empty tensor has amax 0.
    """
    shape = scale_shape(x.shape, granularity)
    if x.numel() == 0:
        return torch.zeros(shape, device=x.device)
    # Before the conversion to FP32: half the memory for BF16, and exact, since a maximum rounds nothing.
    amax = _per_group(torch.amax, x.detach().abs(), granularity)
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _per_group(reduce: Callable[..., torch.Tensor], x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Reduce the elements of every group to one, by torch.amax or torch.sum: of shape `scale_shape`."""
    if granularity == "tensor":
        return reduce(x.flatten(), -1)
    if granularity == "row":
        return reduce(x, -1, keepdim=True)
    rows, columns = group_shape(granularity)
    result = _per_run(reduce, x, columns)
    if rows > 1:
        result = _per_run(reduce, result.t(), rows).t().contiguous()  # [M, K] -> [M, K/128] -> [M/128, K/128]
    return result


def _per_run(reduce: Callable[..., torch.Tensor], x: torch.Tensor, size: int) -> torch.Tensor:
    """Reduce [..., K] to [..., ceil(K/size)]: every `size` elements to one, and the ragged rest."""
    full = x.shape[-1] // size * size
    groups = reduce(x[..., :full].unflatten(-1, (-1, size)), -1) if full else x[..., :0]
    return groups if full == x.shape[-1] else torch.cat([groups, reduce(x[..., full:], -1, keepdim=True)], -1)


def scale_from_amax(amax: torch.Tensor, format: str, scale: str) -> torch.Tensor:
    """Return the dequantisation factors that bring `amax` to the format's largest value.

    Args:
        amax: Largest magnitudes, at least 0, of any shape.
        format: A name of config/formats.py.
        scale: "fp32"; "pow2" to round up to powers of two; "e4m3" for scales in units of one of the tensor.

    Returns:
        FP32 of amax's shape: 1 where amax is 0, NaN where it is not finite, never below SMALLEST_SCALE.

    Raises:
        ValueError: For an unknown scale type, or one which no amax makes: static, "mse".
    """
    check_scale_type(scale)
    if fixed_scale(scale) is not None or scale == "mse":
        raise ValueError(f"scale {scale!r} does not follow from an amax")
    amax = amax.float()
    exact = _bringing_to(amax, FORMATS[format].max)
    if scale == "pow2":
        # frexp and ldexp, not log2 and exp2: those round, and a scale one power too small would saturate.
        mantissa, exponent = torch.frexp(exact)  # exact = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exact = torch.ldexp(torch.ones_like(exact), exponent)
    elif scale == "e4m3":
        exact = _in_units_of_the_tensor(exact)
    return _of_finite_groups(amax, exact)


def _bringing_to(amax: torch.Tensor, largest: float) -> torch.Tensor:
    # A tensor as divisor: dividing by a number, CUDA multiplies by its rounded reciprocal.
    return (amax / torch.full_like(amax, largest)).clamp_min(SMALLEST_SCALE)


def _of_finite_groups(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the scales, 1 where all of the group is 0 and NaN where something is not finite."""
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, scale), torch.nan)


def scales_for(x: torch.Tensor, format: str, granularity: str, scale: str) -> torch.Tensor:
    """Return the scales of a cast of `x`: FP32 of shape `scale_shape(x.shape, granularity)`, as for `quantize`."""
    fixed = fixed_scale(scale)
    if scale == "mse":
        return scales_of_least_error(x, format, granularity)
    if scale == "fitted" and granularity == "1x128":
        return fitted_scales(x, format)
    if fixed is None:
        return scale_from_amax(group_amax(x, granularity), format, scale)
    return torch.full(scale_shape(x.shape, granularity), fixed, device=x.device)


FITTED_SEVENTHS = (7, 6, 5, 4)
"""The largest numbers of E4M3 and of E5M2 are 1.75, 1.5, 1.25 and 1 times a power of two: so many sevenths of the
first."""


def fitted_scales(x: torch.Tensor, format: str) -> torch.Tensor:
    """Return for every 1x128 group the scale that leaves the smallest squared error.

        scale[g] = amax[g] / c, with the c of {max, 6/7 max, 5/7 max, 4/7 max} of the smallest sum of (x[i] - rounded)^2

    The largest number of a group, often a channel's that dwarfs the others, then loses nothing. Of equal errors the
    largest c.

    Args:
        x: Floating point, of any shape.
        format: "e4m3" or "e5m2".

    Returns:
        FP32 of shape `scale_shape(x.shape, "1x128")`; 1 where all is 0, NaN where anything is not finite.
    """
    amax, largest = group_amax(x, "1x128"), FORMATS[format].max
    if x.numel() == 0:
        return scale_from_amax(amax, format, "fp32")
    best = least = None
    for sevenths in FITTED_SEVENTHS:
        scale = _of_finite_groups(amax, _bringing_to(amax, largest * sevenths / 7))
        in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), "1x128")
        rounded = decode(in_units.clamp(-largest, largest).to(FORMATS[format].dtype))
        # In units of the scale, for squares of small numbers vanish, and then of the largest c's.
        lost = _per_group(torch.sum, (in_units - rounded).square_(), "1x128") * (7 / sevenths) ** 2
        if best is None:
            best, least = scale, lost
        else:
            best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return best


def scales_of_least_error(x: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """Return for every group the power of two with which a cast to nearest leaves the smaller squared error.

        scale[g] = the s of {p, p / 2} with the smaller sum over g of (x[i] - s * cast(x[i] / s))^2,  p that of `pow2`

    With p / 2 the largest elements may saturate. For E2M1 in groups of up to 32 no other power of two leaves less: the
    numbers of larger scales are, within reach, among those of p. Of smaller ones 1.5 p is the end; what lies beyond
    loses no less there than with p / 2, the largest element, above 3 p, at least (1.5 p)^2 = 2.25 p^2 more, and the
    other 31 have at most 31 (p / 4)^2 = 1.94 p^2 to gain. So this is the projection of least squared error that QuEST
    (arXiv 2502.05003) approximates by a multiple of the group's root mean square, fitted to a normal distribution.

    Args:
        x: Floating point, of any shape that the granularity fits.
        format: A name of FORMATS.
        granularity: As for `quantize`.

    Returns:
        FP32 of shape `scale_shape(x.shape, granularity)`; 1 where all is 0, NaN where anything is not finite.
    """
    whole = scale_from_amax(group_amax(x, granularity), format, "pow2")
    if x.numel() == 0:
        return whole
    half = (whole / 2).clamp_min(SMALLEST_SCALE)
    errors = []
    for scale in (whole, half):
        codes = cast(x, scale, format, granularity)
        rounded = dequantize(codes, scale, granularity, "mse", torch.float32, format)
        # In units of p: squares of the smallest numbers would vanish in FP32.
        lost = per_element(torch.div, x.detach().float() - rounded, whole, granularity).square_()
        errors.append(_per_group(torch.sum, lost, granularity))
    return torch.where(errors[1] < errors[0], half, whole)  # equal, or NaN: whole


def infinite_to_nan(x: torch.Tensor, scale: str) -> torch.Tensor:
    """Return `x` for `cast`, with Inf replaced by NaN: under a static scale Inf would saturate."""
    return x if fixed_scale(scale) is None else x.detach().masked_fill(x.isinf(), torch.nan)


def _in_units_of_the_tensor(scale: torch.Tensor) -> torch.Tensor:
    """Round the scales of all groups of a tensor to E4M3 in units of one FP32 scale, as NVFP4 stores them."""
    if scale.numel() == 0:
        return scale
    codes = FORMATS["e4m3"]
    unit = (scale.amax() / torch.full_like(scale, codes.max)).clamp_min(SMALLEST_SCALE)
    return (scale / unit).clamp(codes.smallest_subnormal, codes.max).to(codes.dtype).float() * unit


def per_element(
    operation: Callable[..., torch.Tensor], x: torch.Tensor, scale: torch.Tensor, granularity: str
) -> torch.Tensor:
    """Compute operation(x, the scale of each element), in the scale's dtype; `operation` is torch.mul or torch.div.

    Groups are a dimension of their own, along which their scale broadcasts: one scale per element in memory
    would be four times the size of a BF16 x.
    """
    if granularity in ("tensor", "row"):
        return operation(x.to(scale.dtype), scale)
    rows, size = group_shape(granularity)
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[: x.shape[0]]  # [M/128, K/128] -> [M, K/128], as of 1x128
    full = x.shape[-1] // size * size
    result = torch.empty(x.shape, dtype=scale.dtype, device=x.device)
    if full:
        groups = result[..., :full].unflatten(-1, (-1, size))
        operation(x[..., :full].unflatten(-1, (-1, size)), scale[..., : full // size, None], out=groups)
    if full < x.shape[-1]:
        operation(x[..., full:], scale[..., full // size :], out=result[..., full:])
    return result


def cast(
    x: torch.Tensor, scale: torch.Tensor, format: str, granularity: str, rounding: str = "nearest"
) -> torch.Tensor:
    """Return `x` in units of `scale`, rounded and saturated.

    Args:
        x: Floating point, of any shape.
        scale: FP32, of shape `scale_shape(x.shape, granularity)`.
        format: A name of FORMATS.
        granularity: As for `quantize`.
        rounding: "nearest", to even, or "stochastic", with torch's random numbers.

    Returns:
        FP8, or uint8 codes of an emulated format, of x's shape; NaN where x or its scale is NaN.
    """
    target = FORMATS[format]
    in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), granularity)
    if rounding == "stochastic":
        draw = torch.rand_like(in_units)
        if target.magnitudes:
            return encode_stochastically(in_units, draw, target)
        in_units = round_stochastically(in_units.clamp_(-target.max, target.max), draw, format)
    elif target.magnitudes:
        return encode(in_units, target)
    # Clamped first: torch converts what is too large to NaN in E4M3 and to Inf in E5M2.
    return in_units.clamp_(-target.max, target.max).to(target.dtype)


def decode(data: torch.Tensor, dtype: torch.dtype = torch.float32, format: str | None = None) -> torch.Tensor:
    """Return codes as numbers (scale 1), exact in FP32 and, but for those of log8, in BF16.

    Args:
        data: FP8, or uint8 codes of an emulated format.
        dtype: Dtype of the numbers.
        format: Name of the format of uint8 codes; FP8 dtypes say theirs.
    """
    if data.dtype is torch.uint8:
        return emulated.decode(data, FORMATS[format], dtype)
    if data.device.type != "cpu":
        return data.to(dtype)
    # A look-up in the table of all 256 codes: on a CPU several times faster than torch's element-wise conversion.
    table = torch.arange(256, dtype=torch.uint8).view(format_of(data.dtype).dtype).to(dtype)
    return table.index_select(0, data.contiguous().view(torch.uint8).flatten().int()).view(data.shape)


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, granularity: str, scale_type: str, dtype: torch.dtype, format: str
) -> torch.Tensor:
    """Return data * scale, rounded once to `dtype`."""
    if dtype is torch.bfloat16 and has_power_of_two_scales(scale_type) and FORMATS[format].exact_in_bf16:
        # Both factors are exact in BF16, so the BF16 product is the FP32 product rounded once, in half the memory.
        return per_element(torch.mul, decode(data, dtype, format), scale.to(dtype), granularity)
    return per_element(torch.mul, decode(data, format=format), scale, granularity).to(dtype)
