"""The casts in plain torch: any device, any granularity, the oracle of every kernel.

A cast is three steps, which the ZeRO-3 parameter gather also takes one by one (its amax spans ranks):

    amax[g]  = max |x[i]|            over the elements i of group g
    scale[g] = amax[g] / format.max  (`pow2`: rounded up to a power of two; 1 where amax is 0; NaN where not finite)
    data[i]  = cast(clamp(x[i] / scale[g], -format.max, format.max))   round to nearest even

so that x[i] is approximately data[i] * scale[g]. Inf or NaN anywhere in a group turns its scale, and with it the whole
group, into NaN: overflow is seen downstream, never hidden.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ds_fp8.formats import BLOCK, FORMATS, SCALE_TYPES, SMALLEST_SCALE, format_of, scale_shape


def group_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Largest magnitude per group, FP32, of shape `scale_shape(x.shape, granularity)`.

    A group that holds Inf or NaN has amax Inf (not NaN: an all-reduce MAX must carry it across ranks). An empty
    tensor has amax 0.
    """
    shape = scale_shape(x.shape, granularity)
    magnitude = x.detach().abs().float()
    if x.numel() == 0:
        return magnitude.new_zeros(shape)
    if granularity == "tensor":
        amax = magnitude.amax()
    elif granularity == "row":
        amax = magnitude.amax(-1, keepdim=True)
    elif granularity == "1x128":
        groups = pad(magnitude, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        amax = groups.amax(-1)
    else:
        rows, columns = x.shape
        padded = pad(magnitude, (0, -columns % BLOCK, 0, -rows % BLOCK))
        # [M, K] -> [M/128, 128, K/128, 128]
        amax = padded.view(shape[0], BLOCK, shape[1], BLOCK).amax((1, 3))
    return amax.nan_to_num(nan=torch.inf, posinf=torch.inf)


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


def expand_scale(scale: torch.Tensor, shape: tuple[int, ...] | torch.Size, granularity: str) -> torch.Tensor:
    """Scales broadcast to one per element, or to a shape that broadcasts against `shape`."""
    if granularity in ("tensor", "row"):
        return scale
    per_element = scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    if granularity == "128x128":
        per_element = per_element.repeat_interleave(BLOCK, 0)[: shape[0]]
    return per_element


def cast(x: torch.Tensor, scale: torch.Tensor, format: str, granularity: str) -> torch.Tensor:
    """The elements of `x` in units of `scale`, rounded to nearest even and saturated, as an FP8 tensor of x's shape."""
    target = FORMATS[format]
    in_units = x.detach().float() / expand_scale(scale, x.shape, granularity)
    return in_units.clamp_(-target.max, target.max).to(target.dtype)


def decode(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """FP8 codes as numbers (scale 1), exact in FP32 and BF16."""
    if data.device.type == "cuda":
        return data.to(dtype)
    # A look-up in the table of all 256 codes: on a CPU several times faster than torch's element-wise conversion.
    table = torch.arange(256, dtype=torch.uint8).view(format_of(data.dtype).dtype).to(dtype)
    return table.index_select(0, data.contiguous().view(torch.uint8).flatten().int()).view(data.shape)


def dequantize(data: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype) -> torch.Tensor:
    """data * scale, computed in FP32 and rounded once to `dtype`."""
    return (decode(data) * expand_scale(scale, data.shape, granularity)).to(dtype)
