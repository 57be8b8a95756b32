"""The casts in plain torch: any device, any granularity, the oracle of every kernel.

A cast is three steps, which the ZeRO-3 parameter gather also takes one by one (its amax spans ranks):

    amax[g]  = max |x[i]|            over the elements i of group g
    scale[g] = amax[g] / format.max  (`pow2`: rounded up to a power of two; 1 where amax is 0; NaN where not finite)
    data[i]  = cast(clamp(x[i] / scale[g], -format.max, format.max))   round to nearest even

so that x[i] is approximately data[i] * scale[g]. Inf or NaN anywhere in a group turns its scale, and with it the whole
group, into NaN: overflow is seen downstream, never hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fp8.formats import BLOCK, FORMATS, SCALE_TYPES, SMALLEST_SCALE, format_of, scale_shape


def apply_factors(x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None) -> torch.Tensor:
    """A matrix x [M, K] times row_factor [M] and then column_factor [K], in FP32; x itself without factors."""
    if row_factor is not None:
        x = x.float() * row_factor.float()[:, None]
    if column_factor is not None:
        x = x.float() * column_factor.float()
    return x


def group_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Largest magnitude per group, FP32, of shape `scale_shape(x.shape, granularity)`.

    A group that holds Inf or NaN has amax Inf (not NaN: an all-reduce MAX must carry it across ranks). An empty
    tensor has amax 0.
    """
    shape = scale_shape(x.shape, granularity)
    if x.numel() == 0:
        return torch.zeros(shape, device=x.device)
    magnitude = x.detach().abs()
    if granularity == "tensor":
        amax = magnitude.amax()
    elif granularity == "row":
        amax = magnitude.amax(-1, keepdim=True)
    elif granularity == "1x128":
        amax = _max_per_group(magnitude)
    else:
        amax = _max_per_group(_max_per_group(magnitude).t()).t().contiguous()  # [M, K] -> [M, K/128] -> [M/128, K/128]
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _max_per_group(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., ceil(K/128)]: the largest of every 128 elements, and of the ragged rest."""
    full = x.shape[-1] // BLOCK * BLOCK
    groups = x[..., :full].unflatten(-1, (-1, BLOCK)).amax(-1) if full else x[..., :0]
    return groups if full == x.shape[-1] else torch.cat([groups, x[..., full:].amax(-1, keepdim=True)], -1)


def scale_from_amax(amax: torch.Tensor, format: str, scale: str) -> torch.Tensor:
    """Dequantisation factors (FP32, the shape of `amax`) that bring `amax` to the format's largest value."""
    if scale not in SCALE_TYPES:
        raise ValueError(f"scale {scale!r} is not one of {', '.join(SCALE_TYPES)}")
    amax = amax.float()
    # A tensor as divisor: dividing by a number, CUDA multiplies by its rounded reciprocal.
    exact = (amax / torch.full_like(amax, FORMATS[format].max)).clamp_min(SMALLEST_SCALE)
    if scale == "pow2":
        mantissa, exponent = torch.frexp(exact)  # exact = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exact = torch.ldexp(torch.ones_like(exact), exponent)
    exact = torch.where(amax == 0, 1.0, exact)
    return torch.where(amax.isfinite(), exact, torch.nan)


def per_element(
    operation: Callable[..., torch.Tensor], x: torch.Tensor, scale: torch.Tensor, granularity: str
) -> torch.Tensor:
    """operation(x, the scale of each element), in the scale's dtype; `operation` is torch.mul or torch.div.

    Groups of 128 are a dimension of their own, along which their scale broadcasts: one scale per element in memory
    would be four times the size of a BF16 x.
    """
    if granularity in ("tensor", "row"):
        return operation(x.to(scale.dtype), scale)
    if granularity == "128x128":
        scale = scale.repeat_interleave(BLOCK, 0)[: x.shape[0]]  # [M/128, K/128] -> [M, K/128], as of 1x128
    full = x.shape[-1] // BLOCK * BLOCK
    result = torch.empty(x.shape, dtype=scale.dtype, device=x.device)
    if full:
        groups = result[..., :full].unflatten(-1, (-1, BLOCK))
        operation(x[..., :full].unflatten(-1, (-1, BLOCK)), scale[..., : full // BLOCK, None], out=groups)
    if full < x.shape[-1]:
        operation(x[..., full:], scale[..., full // BLOCK :], out=result[..., full:])
    return result


def cast(x: torch.Tensor, scale: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """The elements of `x` in units of `scale`, rounded to nearest even and saturated, as an FP8 tensor of x's shape."""
    target = FORMATS[format]
    in_units = per_element(torch.div, x.detach(), scale, granularity)
    return in_units.clamp_(-target.max, target.max).to(target.dtype)


def decode(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """FP8 codes as numbers (scale 1), exact in FP32 and BF16."""
    if data.device.type == "cuda":
        return data.to(dtype)
    # A look-up in the table of all 256 codes: on a CPU several times faster than torch's element-wise conversion.
    table = torch.arange(256, dtype=torch.uint8).view(format_of(data.dtype).dtype).to(dtype)
    return table.index_select(0, data.contiguous().view(torch.uint8).flatten().int()).view(data.shape)


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, granularity: str, scale_type: str, dtype: torch.dtype
) -> torch.Tensor:
    """data * scale, rounded once to `dtype`."""
    if dtype is torch.bfloat16 and scale_type == "pow2":
        # Both factors are exact in BF16, so the BF16 product is the FP32 product rounded once, in half the memory.
        return per_element(torch.mul, decode(data, dtype), scale.to(dtype), granularity)
    return per_element(torch.mul, decode(data), scale, granularity).to(dtype)
