"""Bias, head norm and rotary embedding of q, k and v, and the backward; rotary.py has the maths and the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# rotary.HeadTransform: (cos, sin, layout, bias, norms)
Norms = tuple[torch.Tensor, torch.Tensor, float]
Transform = tuple[torch.Tensor, torch.Tensor, tuple[int, int, int], torch.Tensor | None, Norms | None]

ROWS = 32  # tokens of a program, one head of each


@triton.jit
def _load_half(x, at, inside, bias, column, d, half, BIAS: tl.constexpr):
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _load_angles(cos, sin, t, S, stride_b, stride_s, d, half, inside):
    """Return (cos, sin of the first half of a head, cos, sin of the second) at tokens t, FP32."""
    # t // S is the sequence, t % S the position in it
    angle = (t // S)[:, None] * stride_b + (t % S)[:, None] * stride_s + d[None, :]
    cos1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
    return cos1, sin1, cos2, sin2


@triton.jit
def _rotate_tiles(
    qkv, result, cos, sin, bias, q_norm, k_norm, T, S, stride, cos_stride_b, cos_stride_s, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    inside = (t < T)[:, None] & (d < half)[None, :]
    at = t[:, None].to(tl.int64) * stride + head * D + d[None, :]
    #     x  = qkv + bias;   x = x / rms(x) * w                head norms
    #     y1 = x1 cos1 - x2 sin1;   y2 = x2 cos2 + x1 sin2     x1, x2: halves of a head
    # v is neither normed nor rotated. In place is safe: a program reads both halves of its head before it writes one.
    x1 = _load_half(qkv, at, inside, bias, head * D, d, half, BIAS)
    x2 = _load_half(qkv, at + half, inside, bias, head * D + half, d, half, BIAS)
    if head < HEADS + KV_HEADS:
        if NORM:
            weight = q_norm if head < HEADS else k_norm
            rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            x1 = x1 * rstd * tl.load(weight + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            x2 = x2 * rstd * tl.load(weight + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        cos1, sin1, cos2, sin2 = _load_angles(cos, sin, t, S, cos_stride_b, cos_stride_s, d, half, inside)
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    else:
        y1 = x1
        y2 = x2
    tl.store(result + at, y1.to(result.dtype.element_ty), mask=inside)
    tl.store(result + at + half, y2.to(result.dtype.element_ty), mask=inside)


def rotate_heads(qkv: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Compute rotary.rotate on the GPU; qkv is contiguous."""
    T, width = qkv.shape
    cos, sin, layout, bias, norms = transform
    # backward of head norms reads qkv
    result = qkv if norms is None else torch.empty_like(qkv)
    if qkv.numel():
        # programs for v only with a bias, or where the result is another matrix
        heads, kv_heads, head_dim = layout
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        number = heads + kv_heads * (2 if bias is not None or norms is not None else 1)
        cos, sin, strides = _angles(cos, sin, T)
        _rotate_tiles[(triton.cdiv(T, ROWS), number)](
            qkv, result, cos, sin, bias, q_norm, k_norm, T, cos.shape[1], width, *strides, eps,
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), ROWS=ROWS, BIAS=bias is not None,
            NORM=norms is not None, num_warps=4,
        )
    return result


@triton.jit
def _rotate_tiles_backward(
    dq, dk, dv, qkv, dqkv, cos, sin, bias, q_norm, k_norm, dnorm, T, S, stride, cos_stride_b, cos_stride_s, eps,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr,
):
    """Rotate back: dn; dx = rstd * (g - x̂ * mean(g * x̂)) with g = dn * w; dnorm[block, head] = sum_t dn * x̂."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    inside = (t < T)[:, None] & (d < half)[None, :]
    b = (t // S)[:, None].to(tl.int64)
    s = (t % S)[:, None].to(tl.int64)
    at = t[:, None].to(tl.int64) * stride + head * D + d[None, :]
    if head < HEADS:
        source = dq + b * q_b + head.to(tl.int64) * q_h + s * q_s + d[None, :]
    elif head < HEADS + KV_HEADS:
        source = dk + b * k_b + (head - HEADS).to(tl.int64) * k_h + s * k_s + d[None, :]
    else:
        source = dv + b * v_b + (head - HEADS - KV_HEADS).to(tl.int64) * v_h + s * v_s + d[None, :]
    y1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    y2 = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        cos1, sin1, cos2, sin2 = _load_angles(cos, sin, t, S, cos_stride_b, cos_stride_s, d, half, inside)
        # the transpose of forward's 2 x 2 matrix, its inverse only if both halves have the same cos and sin
        n1 = y1 * cos1 + y2 * sin2
        n2 = y2 * cos2 - y1 * sin1
        if NORM:
            weight = q_norm if head < HEADS else k_norm
            x1 = _load_half(qkv, at, inside, bias, head * D, d, half, BIAS)
            x2 = _load_half(qkv, at + half, inside, bias, head * D + half, d, half, BIAS)
            rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            x1 *= rstd
            x2 *= rstd
            # One row per block of tokens and head: atomics would add in another order in every run.
            partial = dnorm + (tl.program_id(0) * (HEADS + KV_HEADS) + head).to(tl.int64) * D + d
            tl.store(partial, tl.sum(n1 * x1, 0), mask=d < half)
            tl.store(partial + half, tl.sum(n2 * x2, 0), mask=d < half)
            g1 = n1 * tl.load(weight + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            g2 = n2 * tl.load(weight + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            mean = ((tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / D)[:, None]
            n1 = rstd * (g1 - x1 * mean)
            n2 = rstd * (g2 - x2 * mean)
    else:
        n1 = y1
        n2 = y2
    tl.store(dqkv + at, n1.to(dqkv.dtype.element_ty), mask=inside)
    tl.store(dqkv + at + half, n2.to(dqkv.dtype.element_ty), mask=inside)


def rotate_heads_backward(
    gradients: tuple[torch.Tensor, ...], transform: Transform, qkv: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute rotary.rotate_backward on the GPU."""
    cos, sin, layout, bias, norms = transform
    # attention returns [B, heads, S, D] transposed or not: the kernel takes any strides, 1 within a head
    gradients = tuple(part if part.stride(-1) == 1 else part.contiguous() for part in gradients)
    batch, _, length, _ = gradients[0].shape
    heads, kv_heads, head_dim = layout
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    T, number = batch * length, heads + 2 * kv_heads
    width = number * head_dim
    dqkv = torch.empty(T, width, dtype=gradients[0].dtype, device=gradients[0].device)
    blocks = triton.cdiv(T, ROWS)
    dnorm = torch.empty(blocks, heads + kv_heads, head_dim, device=dqkv.device) if norms else None
    if T:
        cos, sin, strides = _angles(cos, sin, T)
        _rotate_tiles_backward[(blocks, number)](
            *gradients, qkv, dqkv, cos, sin, bias, q_norm, k_norm, dnorm, T, length, width, *strides, eps,
            *(stride for part in gradients for stride in part.stride()[:3]),
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), ROWS=ROWS, BIAS=bias is not None,
            NORM=norms is not None, num_warps=4,
        )
    if dnorm is None:
        return dqkv, None, None
    return dqkv, dnorm[:, :heads].sum((0, 1)), dnorm[:, heads:].sum((0, 1))


def _angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Return cos and sin with equal strides, and these per sequence (0: all share the angles) and per position."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
