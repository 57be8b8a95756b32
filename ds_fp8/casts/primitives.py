"""The steps of a cast in plain torch: amax, scale, rounding. Any device and granularity; the oracle of every kernel.

A cast is three steps, which the ZeRO-3 parameter gather also takes one by one (its amax spans ranks):

    amax[g]  = max |x[i]|            over the elements i of group g
    scale[g] = amax[g] / format.max  (`pow2`: rounded up to a power of two; 1 where amax is 0; NaN where not finite)
    data[i]  = cast(clamp(x[i] * (1 / scale[g]), -format.max, format.max))   round to nearest even

so that x[i] is approximately data[i] * scale[g]. Inf or NaN anywhere in a group turns its scale, and with it the whole
group, into NaN: overflow is seen downstream, never hidden. Under a scale that needs no amax (ScaleType) what is too
large saturates, and of Inf and NaN the element alone becomes NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fp8.config.formats import (
    FORMATS,
    SCALE_TYPES,
    SMALLEST_SCALE,
    check_scale_type,
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
    amax = reduce_groups(torch.amax, x.detach().abs(), granularity)
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def reduce_groups(reduce: Callable[..., torch.Tensor], x: torch.Tensor, granularity: str) -> torch.Tensor:
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
        scale: "fp32"; "pow2" to round up to powers of two; another of SCALE_TYPES that follows from an amax.

    Returns:
        FP32 of amax's shape: 1 where amax is 0, NaN where it is not finite, never below SMALLEST_SCALE.

    Raises:
        ValueError: For an unknown scale type, or one which no amax makes.
    """
    check_scale_type(scale)
    kind = SCALE_TYPES[scale]
    if kind.from_numbers is not None:
        raise ValueError(f"scale {scale!r} does not follow from an amax")
    amax = amax.float()
    if kind.from_amax is not None:
        return kind.from_amax(amax, format)
    exact = exact_scale(amax, FORMATS[format].max)
    if scale == "pow2":
        # frexp and ldexp, not log2 and exp2: those round, and a scale one power too small would saturate.
        mantissa, exponent = torch.frexp(exact)  # exact = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exact = torch.ldexp(torch.ones_like(exact), exponent)
    return of_finite_groups(amax, exact)


def exact_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return amax / largest, at least SMALLEST_SCALE."""
    # A tensor as divisor: dividing by a number, CUDA multiplies by its rounded reciprocal.
    return (amax / torch.full_like(amax, largest)).clamp_min(SMALLEST_SCALE)


def of_finite_groups(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the scales, 1 where all of the group is 0 and NaN where something is not finite."""
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, scale), torch.nan)


def scales_for(x: torch.Tensor, format: str, granularity: str, scale: str) -> torch.Tensor:
    """Return the scales of a cast of `x`: FP32 of shape `scale_shape(x.shape, granularity)`, as for `quantize`."""
    kind = SCALE_TYPES[scale]
    if kind.from_numbers is not None:
        return kind.from_numbers(x, format, granularity)
    if scale == "fitted" and granularity == "1x128":
        return fitted_scales(x, format)
    if kind.needs_amax:
        return scale_from_amax(group_amax(x, granularity), format, scale)
    return scale_from_amax(torch.zeros(scale_shape(x.shape, granularity), device=x.device), format, scale)


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
        scale = of_finite_groups(amax, exact_scale(amax, largest * sevenths / 7))
        in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), "1x128")
        rounded = decode(in_units.clamp(-largest, largest).to(FORMATS[format].dtype))
        # In units of the scale, for squares of small numbers vanish, and then of the largest c's.
        lost = reduce_groups(torch.sum, (in_units - rounded).square_(), "1x128") * (7 / sevenths) ** 2
        if best is None:
            best, least = scale, lost
        else:
            best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return best


def infinite_to_nan(x: torch.Tensor, scale: str) -> torch.Tensor:
    """Return `x` for `cast`: Inf as NaN where it would saturate, under a scale that needs no amax."""
    return x if SCALE_TYPES[scale].needs_amax else x.detach().masked_fill(x.isinf(), torch.nan)


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


def cast(x: torch.Tensor, scale: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """Return `x` in units of `scale`, rounded to nearest even and saturated.

    Args:
        x: Floating point, of any shape.
        scale: FP32, of shape `scale_shape(x.shape, granularity)`.
        format: A name of FORMATS.
        granularity: As for `quantize`.

    Returns:
        FP8, or uint8 codes of a format with a codec, of x's shape; NaN where x or its scale is NaN.
    """
    target = FORMATS[format]
    in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), granularity)
    if target.codec is not None:
        return target.codec.encode(in_units)
    # Clamped first: torch converts what is too large to NaN in E4M3 and to Inf in E5M2.
    return in_units.clamp_(-target.max, target.max).to(target.dtype)


def decode(data: torch.Tensor, dtype: torch.dtype = torch.float32, format: str | None = None) -> torch.Tensor:
    """Return codes as numbers (scale 1), exact in FP32 and, where Format says so, in BF16.

    Args:
        data: FP8, or uint8 codes of a format with a codec.
        dtype: Dtype of the numbers.
        format: Name of the format of uint8 codes; FP8 dtypes say theirs.
    """
    if data.dtype is torch.uint8:
        return FORMATS[format].codec.decode(data, dtype)
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
