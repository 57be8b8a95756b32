"""Residual add, RMSNorm and 1x128 quantization, and the backward; rms_norm.py has the maths and the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives_triton import (
    amax_bits,
    empty_result,
    format_arguments,
    multiprocessors,
    scale_of,
    tiles,
    to_fp8,
)
from ds_fp8.config.formats import CastSpec


@triton.jit
def _normalise_rows(
    x, residual, weight, hidden, rstd, data, scale, M, H, eps, stride_x, stride_residual, pitch,
    ADD: tl.constexpr, CAST: tl.constexpr, GROUPS: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """One token a program, as [GROUPS, 128]: h = x + residual; n = h * rsqrt(mean h² + eps) * w; a scale per group."""
    m = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    h = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = h < H
    row = tl.load(x + m.to(tl.int64) * stride_x + h, mask=inside, other=0.0)
    if ADD:
        added = row.to(tl.float32) + tl.load(
            residual + m.to(tl.int64) * stride_residual + h, mask=inside, other=0.0
        ).to(tl.float32)
        row = added.to(hidden.dtype.element_ty)  # rounded as it is stored and read by backward
        tl.store(hidden + m.to(tl.int64) * H + h, row, mask=inside)
    row = row.to(tl.float32)
    # columns beyond H were loaded as zeros
    factor = tl.rsqrt(tl.sum(row * row) / H + eps)
    tl.store(rstd + m, factor)
    if CAST:
        normed = row * factor * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
        scales, reciprocal = scale_of(amax_bits(normed, 1), LARGEST, SMALLEST, POW2)
        # Scales group-major [H / 128, M]: programs of neighbouring tokens write neighbouring scales.
        tl.store(scale + groups.to(tl.int64) * M + m, scales, mask=groups * 128 < H)
        tl.store(data + m.to(tl.int64) * pitch + h, to_fp8(normed, reciprocal[:, None], DTYPE), mask=inside)


def normalise(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, spec: CastSpec, room: int = 0
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor | None]:
    """Return (hidden [T, H], rstd [T], n quantized rowwise [T, H]; None for granularities other than 1x128).

    room: unused columns after each quantized row, as of empty_result.
    """
    M, H = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    hidden = x if residual is None else torch.empty(M, H, dtype=x.dtype, device=x.device)
    rstd = torch.empty(M, device=x.device)
    fused = spec.granularity == "1x128" and not spec.by_torch
    quantized = empty_result(M, H, spec.format, "1x128", spec.scale, x.device, room) if fused else None
    if x.numel():
        groups = triton.next_power_of_2(tiles(H))
        _normalise_rows[(M,)](
            x, residual, weight, hidden, rstd, quantized and quantized.data, quantized and quantized.scale, M, H, eps,
            x.stride(0), residual.stride(0) if residual is not None else 0, H + room,
            ADD=residual is not None, CAST=quantized is not None, GROUPS=groups,
            num_warps=max(1, min(8, groups // 8)), **format_arguments(spec.format, spec.scale),
        )
    return hidden, rstd, quantized


@triton.jit
def _normalise_rows_backward(
    dn, hidden, weight, rstd, dresidual, dhidden, dweight, M, H, stride_dn, stride_dresidual, BLOCK_H: tl.constexpr,
):
    program = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    #     n  = h_hat * w,  h_hat = hidden * rstd               forward
    #     g  = dn * w;     dh = rstd * (g - h_hat * mean(g * h_hat)) + dresidual
    #     dw = sum over tokens of dn * h_hat                   one row per program, summed by torch
    # A program takes tokens pid, pid + programs, ...: one row of dw per token would be as large as the input.
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    m = program
    while m < M:
        at = m.to(tl.int64)
        factor = tl.load(rstd + m)
        gradient = tl.load(dn + at * stride_dn + h, mask=inside, other=0.0).to(tl.float32)
        scaled = tl.load(hidden + at * H + h, mask=inside, other=0.0).to(tl.float32) * factor
        past = tl.load(dresidual + at * stride_dresidual + h, mask=inside, other=0.0).to(tl.float32)
        total += gradient * scaled
        gradient *= w
        result = factor * (gradient - scaled * (tl.sum(gradient * scaled) / H)) + past
        tl.store(dhidden + at * H + h, result.to(dhidden.dtype.element_ty), mask=inside)
        m += tl.num_programs(0)
    tl.store(dweight + program.to(tl.int64) * H + h, total, mask=inside)


def normalise_backward(
    dn: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dresidual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    M, H = hidden.shape
    dn = dn if dn.stride(-1) == 1 else dn.contiguous()
    hidden = hidden.contiguous()  # the kernel has one row stride for hidden and dhidden: H
    dresidual = dresidual if dresidual.stride(-1) == 1 else dresidual.contiguous()
    dhidden = torch.empty_like(hidden)
    if not hidden.numel():
        return dhidden, torch.zeros_like(weight)
    block = triton.next_power_of_2(H)
    warps = max(4, min(16, block // 512))
    # as many as the GPU holds at once (32 warps a multiprocessor): each holds its row of dw in registers to the end
    programs = min(M, multiprocessors(hidden.device) * (32 // warps))
    partial = torch.empty(programs, H, device=hidden.device)
    _normalise_rows_backward[(programs,)](
        dn, hidden, weight, rstd, dresidual, dhidden, partial, M, H, dn.stride(0), dresidual.stride(0),
        BLOCK_H=block, num_warps=warps,
    )
    # torch sums the rows in a fixed order, atomics would not: runs are equal to the bit
    return dhidden, partial.sum(0).to(weight.dtype)
