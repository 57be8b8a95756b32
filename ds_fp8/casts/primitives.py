"""The steps of quantization in plain torch: amax, scale, rounding. Any device and granularity; the kernels' reference.

ZeRO-3 takes the three steps one by one, with an all-reduce of the amax in between:

    amax[g]  = max |x[i]|            over the elements i of group g
    scale[g] = amax[g] / format.max  (`pow2`: rounded up to a power of two; 1 where amax is 0; NaN where not finite)
    data[i]  = round(clamp(x[i] * (1 / scale[g]), -format.max, format.max))  to nearest even

so that x[i] ≈ data[i] * scale[g]. Inf or NaN makes the scale of its group NaN, and with it the group: overflow is never
hidden. With a scale type that needs no amax (ScaleType) large elements saturate, and Inf or NaN makes only its element
NaN.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import torch

from ds_fp8.config.formats import (
    FORMATS,
    SCALE_TYPES,
    SMALLEST_SCALE,
    check_scale_type,
    format_of,
    group_shape,
    scale_shape,
)


def apply_factors(x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None) -> torch.Tensor:
    """Return x [M, K] * row_factor [M] * column_factor [K] in FP32; x itself without factors."""
    if row_factor is not None:
        x = x.float() * row_factor.float()[:, None]
    if column_factor is not None:
        x = x.float() * column_factor.float()
    return x


def group_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return the amax of every group: FP32 of shape `scale_shape(x.shape, granularity)`.

    Inf for a group with Inf or NaN (not NaN, which an all-reduce MAX may drop); 0 for an empty tensor.
    """
    shape = scale_shape(x.shape, granularity)
    if x.numel() == 0:
        return torch.zeros(shape, device=x.device)
    # In x's dtype, which is exact, and of BF16 half the memory of FP32.
    amax = reduce_groups(torch.amax, x.detach().abs(), granularity)
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def reduce_groups(reduce: Callable[..., torch.Tensor], x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Reduce every group by torch.amax or torch.sum; result of shape `scale_shape`."""
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
    """Reduce [..., K] to [..., ceil(K/size)], `size` elements to one."""
    full = x.shape[-1] // size * size
    groups = reduce(x[..., :full].unflatten(-1, (-1, size)), -1) if full else x[..., :0]
    return groups if full == x.shape[-1] else torch.cat([groups, reduce(x[..., full:], -1, keepdim=True)], -1)


def scale_from_amax(amax: torch.Tensor, format: str, scale: str) -> torch.Tensor:
    """Return the scales that map `amax` to the format's largest value: FP32 of amax's shape.

    1 where amax is 0, NaN where it is not finite, at least SMALLEST_SCALE. Raises ValueError for scale types that are
    unknown or not made from an amax.
    """
    check_scale_type(scale)
    kind, amax = SCALE_TYPES[scale], amax.float()
    if kind.from_amax is not None:
        return kind.from_amax(amax, format)
    if kind.from_numbers is not None:
        raise ValueError(f"scale {scale!r} does not follow from an amax")
    exact = exact_scale(amax, FORMATS[format].max)
    if scale == "pow2":
        # frexp and ldexp, not log2 and exp2: those round, and a scale one power too small would saturate.
        mantissa, exponent = torch.frexp(exact)  # exact = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exact = torch.ldexp(torch.ones_like(exact), exponent)
    return of_finite_groups(amax, exact)


def exact_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    # Divided by a tensor: CUDA replaces division by a number with its rounded reciprocal.
    return (amax / torch.full_like(amax, largest)).clamp_min(SMALLEST_SCALE)


def of_finite_groups(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the scales, but 1 where amax is 0 and NaN where it is not finite."""
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, scale), torch.nan)


def scales_for(x: torch.Tensor, format: str, granularity: str, scale: str) -> torch.Tensor:
    """Return the scales of `x`: FP32 of shape `scale_shape(x.shape, granularity)`; arguments as of `quantize`."""
    kind = SCALE_TYPES[scale]
    if kind.from_numbers is not None:
        return kind.from_numbers(x, format, granularity)
    if kind.needs_amax:
        return scale_from_amax(group_amax(x, granularity), format, scale)
    return scale_from_amax(torch.zeros(scale_shape(x.shape, granularity), device=x.device), format, scale)


def infinite_to_nan(x: torch.Tensor, scale: str) -> torch.Tensor:
    """Return `x` with Inf as NaN for scale types without amax, under which it would saturate."""
    return x if SCALE_TYPES[scale].needs_amax else x.detach().masked_fill(x.isinf(), torch.nan)


def per_element(
    operation: Callable[..., torch.Tensor], x: torch.Tensor, scale: torch.Tensor, granularity: str
) -> torch.Tensor:
    """Compute operation(x, scale of each element) in the scale's dtype; `operation` is torch.mul or torch.div.

    Scales broadcast along a dimension of groups; expanded, they would take twice the memory of a BF16 x.
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


def quantize_with_scale(x: torch.Tensor, scale: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """Quantize `x` with given scales: round(x / scale) to nearest even, saturated; NaN where x or its scale is NaN.

    Returns data of x's shape: FP8, or uint8 for formats with a codec.
    """
    target = FORMATS[format]
    in_units = per_element(torch.mul, x.detach(), scale.reciprocal(), granularity)
    if target.codec is not None:
        return target.codec.encode(in_units)
    # torch converts larger values to NaN in E4M3 and to Inf in E5M2.
    return in_units.clamp_(-target.max, target.max).to(target.dtype)


def dequantize_unscaled(
    data: torch.Tensor, dtype: torch.dtype = torch.float32, format: str | None = None
) -> torch.Tensor:
    """Dequantize data with scale 1: exact in FP32 and, if Format.exact_in_bf16, in BF16.

    `format` is required for uint8 data only.
    """
    if data.dtype is torch.uint8:
        return FORMATS[format].codec.decode(data, dtype)
    if data.device.type != "cpu":
        return data.to(dtype)
    # Table of all 256 bytes: on a CPU several times faster than torch's conversion.
    table = torch.arange(256, dtype=torch.uint8).view(format_of(data.dtype).dtype).to(dtype)
    return table.index_select(0, data.contiguous().view(torch.uint8).flatten().int()).view(data.shape)


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, granularity: str, scale_type: str, dtype: torch.dtype, format: str
) -> torch.Tensor:
    """Return data * scale, rounded once to `dtype`."""
    if dtype is torch.bfloat16 and SCALE_TYPES[scale_type].powers_of_two and FORMATS[format].exact_in_bf16:
        # Data and scale are exact in BF16: the BF16 product is the FP32 product rounded once, in half the memory.
        return per_element(torch.mul, dequantize_unscaled(data, dtype, format), scale.to(dtype), granularity)
    return per_element(torch.mul, dequantize_unscaled(data, format=format), scale, granularity).to(dtype)


# Stochastic rounding, equal on all devices: the random bits are a hash of a key and an element's index.
# The golden ratio, which spreads neighbouring indices, and the two multipliers of the 32-bit integer hash "lowbias32"
# (Chris Wellons, Hash Prospector; public domain)
MULTIPLIERS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B)
_WORD = 0xFFFFFFFF


def random_key(*parts: int | str) -> int:
    """Return a 31-bit hash of 64-bit integers and names, equal in all processes and Python versions."""
    # crc32 and not hash(), which differs between processes; 31 bits fit a signed argument of a kernel.
    return zlib.crc32(b"".join(p.encode() if isinstance(p, str) else struct.pack("q", p) for p in parts)) >> 1


def uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """Return a random FP32 number k / 65536 in [0, 1) for every index (int64), a hash of it and the 31-bit `key`.

    16 bits, so that the sum with an element in units of its spacing is exact.
    """
    step, first, second = MULTIPLIERS
    # int64 emulates the kernel's uint32: the mask drops the overflow.
    word = (index * step + key) & _WORD
    word = ((word ^ (word >> 16)) * first) & _WORD
    word = ((word ^ (word >> 15)) * second) & _WORD
    return ((word ^ (word >> 16)) >> 16).float() * 2.0**-16


def round_stochastically(x: torch.Tensor, draw: torch.Tensor, format: str) -> torch.Tensor:
    """Round FP32 x stochastically and unbiased to a format's numbers; `draw` in [0, 1). NaN stays NaN."""
    target = FORMATS[format]
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e of every element
    spacing = (binade * torch.finfo(target.dtype).eps).clamp_min(target.smallest_subnormal)
    return torch.copysign((x.abs() / spacing + draw).floor() * spacing, x)
