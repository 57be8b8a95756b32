"""Causal attention with its matrix products in FP8, forward and backward.

    s = scaling · q kᵀ                                q, k: E4M3, one scale a tensor
    p = exp(s - max_j s) / Σ_j                        FP32; E4M3 as operand of p v and of pᵀ do
    o = p v                                           v, o: E4M3
    dv = pᵀ do                                        do: E5M2
    ds = scaling · p ∘ (do vᵀ - Σ_d do ∘ o)           E5M2 as operand of ds k and of dsᵀ q
    dq = ds k,   dk = dsᵀ q                           dq, dk, dv: E5M2

with q and k rotated, and k and v less their means over the tokens, which changes nothing but the casts; o gets the mean
of v back. These are the casts of cuDNN's FP8 attention (FlashAttention-3, arXiv
2407.08608, section 3.3); the reference rounds at the same places. Backward keeps q, k, v and o in a byte an element.

Every scale is known before the kernel runs, from this call's own tensors, so that nothing is carried from step to step.
Those of q, k, v and do follow their amax. The others follow bounds, which an FP8 format with many exponents affords: a
number keeps its relative precision wherever in the format's range it falls (E5M2: 2^-14 to 2^15).

    p      at most 1
    o      at most amax(v), for each row of p sums to 1
    ds     ½ · scaling · max_i ‖do_i‖ · max_j ‖v_j‖, for p (1 - p) is at most ¼ and do vᵀ within ± ‖do‖ ‖v‖
    dq     scaling · max_i ‖do_i‖ · max_j ‖v_j‖ · amax(k), for each row of p sums to 1
    dv     Σ_i |do_i| over the n queries that see a key, of all heads that share it
    dk     ½ · scaling · max_j ‖v_j‖ · amax(q) · Σ_i ‖do_i‖ / n^(1/4)

All but the last hold for certain, with room for rounding. That one would without its divisor, and at 32k tokens leave
typical elements below 2^-14: to exceed it, most queries must look at one key with gradients of one sign. Then it
saturates.

Changes of q, k and v before their casts that attention itself does not notice:

    softmax_j(q · (k_j - c)) = softmax_j(q · k_j)         for any c: q · c is the same for every key
    Σ_j p_ij (v_j - c) + c   = Σ_j p_ij v_j               rows of p sum to 1
    (q R) · (k R)            = q · k                      R Rᵀ = 1

Gradients follow: Σ_j ds_ij = 0, and dq and dk are rotated back. A code of FP8 has a relative error, so that an offset
common to all tokens (a bias of k_proj; features that rotary embeddings turn slowly) costs accuracy without carrying
information: the means over the tokens are taken off, of keys as SageAttention does (arXiv 2410.02367, section 4.2), of
values likewise. And where one feature is most of a score, its error is: a Hadamard transform of each head with random
signs spreads it over all features (FlashAttention-3, arXiv 2407.08608, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.casts.primitives import cast, decode, scale_from_amax
from ds_fp8.config.formats import FORMATS
from ds_fp8.layers.attention import cudnn
from ds_fp8.layers.attention.cudnn import BACKWARD, FORWARD, P_SCALE, GradientScales, Saved
from ds_fp8.layers.attention.hadamard import ROTATION_BLOCKS, Rotation, rotate, unrotate

SEED = 0  # Of the signs: the same in every layer, for every step and rank
PIECE = 16384  # Tokens that are summed at a time: at 1024 features their copy takes 134 MB


def sum_over_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x [B, heads, S, D] over its tokens, FP64 [B, heads, 1, D]."""
    # FP64: partial sums of several ranks, in any order, round to the same BF16 mean. In pieces, for torch makes an FP64
    # copy of what it sums.
    return sum(piece.sum(2, keepdim=True, dtype=torch.float64) for piece in x.split(PIECE, 2))


def mean_over_tokens(x: torch.Tensor) -> torch.Tensor:
    return (sum_over_tokens(x) / x.shape[2]).to(x.dtype)


def add_mean_of_values(output: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Add the mean of the values [B, kv_heads, 1, D] to attention's output [B, S, heads, D], in place."""
    by_kv_head = output.unflatten(2, (mean.shape[1], -1))  # [B, S, kv_heads, heads / kv_heads, D]
    by_kv_head += mean.transpose(1, 2).unsqueeze(3)
    return output


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Rotate each head of x [B, heads, S, D], in memory then as [B, S, heads, D].

    As it is where D is no power of two that `Rotation` has.
    """
    rotation = _rotation(x.shape[-1])
    if rotation is None:
        return x
    by_token = x.transpose(1, 2)
    # A token at a time, in kernels whose sums have one order: on whichever rank a token lies, the bits are the same.
    return rotate(by_token.flatten(2).flatten(0, 1), rotation, x.dtype).view(by_token.shape).transpose(1, 2)


def rotate_back(dx: torch.Tensor) -> torch.Tensor:
    """Undo `rotate_heads` on gradients [..., D], contiguous."""
    rotation = _rotation(dx.shape[-1])
    return dx if rotation is None else unrotate(dx.flatten(0, -2), rotation).view(dx.shape)


def decode_output(codes: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return attention's output [B, S, heads, D] from its codes, with the mean of the values [B, kv_heads, 1, D]."""
    if codes.is_cuda:
        from ds_fp8.layers.attention.decode_triton import decode_tiles

        return decode_tiles(codes, scale, mean.dtype, mean=mean)
    return add_mean_of_values(decode_exactly(codes, scale, mean.dtype), mean)


def decode_gradient(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, rotated: bool) -> torch.Tensor:
    """Return the gradient [B, S, heads, D] from its codes, not `rotated` any more."""
    if codes.is_cuda:
        from ds_fp8.layers.attention.decode_triton import decode_tiles

        return decode_tiles(codes, scale, dtype, rotation=_rotation(codes.shape[-1]) if rotated else None)
    gradient = decode_exactly(codes, scale, dtype)
    return rotate_back(gradient) if rotated else gradient


def _rotation(features: int) -> Rotation | None:
    return Rotation(features, SEED) if features in ROTATION_BLOCKS else None


Implementation = Any  # cudnn, or a `Reference` in its place: forward and backward
# Bounds of gradients are no smaller, so that ratios of their scales, and 1 / scale, stay within FP32
SMALLEST_BOUND = 2.0**-60


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scaling: float, implementation: Implementation):
        v_mean = mean_over_tokens(v)
        q, k, v = rotate_heads(q), rotate_heads(k - mean_over_tokens(k)), v - v_mean
        casts = [cast_heads(x.transpose(1, 2), FORWARD) for x in (q, k, v)]
        # Of v in high precision, which backward does not have any more.
        v_norm = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32).amax()
        o, kept = attend(*casts, v_norm, scaling, implementation)
        ctx.save_for_backward(*kept)
        ctx.scaling, ctx.implementation = scaling, implementation
        return decode_output(o, casts[2].scale, v_mean)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        # The kernels work on [B, S, heads, D]; callers have [B, heads, S, D], a view of the same memory.
        found = find_gradients(ctx.saved_tensors, do, ctx.scaling, ctx.implementation)
        gradients = (decode_gradient(*each, do.dtype, which < 2) for which, each in enumerate(found))
        return *(x.transpose(1, 2) for x in gradients), None, None


def attend(
    q: QuantizedTensor,
    k: QuantizedTensor,
    v: QuantizedTensor,
    v_norm: torch.Tensor,
    scaling: float,
    implementation: Implementation,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the output's codes [B, S, heads, D], in E4M3 with the scale of v, and KEPT tensors for `find_gradients`.

    q, k, v: [B, S, heads, D] rotated, [B, S, kv_heads, D] rotated and less their mean, and less their mean. v_norm:
    max_j ‖v_j‖ of the latter before the cast.
    """
    data, scales = zip(*((x.data, x.scale) for x in (q, k, v)), strict=True)
    o, log_sums = _forward(*data, *scales, scaling, isinstance(implementation, Reference))
    return o, (*data, *scales, o, log_sums, v_norm)


KEPT = 9
# An operator of torch's, so that recomputed layers can keep what it returns (kept.py)
FORWARD_OPERATOR = "ds_fp8::attention_forward"
_LIBRARY = torch.library.Library(FORWARD_OPERATOR.split("::")[0], "DEF")
_LIBRARY.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, float scaling, "
    "bool reference) -> (Tensor, Tensor)"
)


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    scaling: float,
    reference: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = (q, q_scale), (k, k_scale), (v, v_scale)
    casts = (QuantizedTensor(codes, scale, "tensor", "pow2") for codes, scale in pairs)
    return (Reference() if reference else cudnn).forward(*casts, scaling)


_LIBRARY.impl("attention_forward", _run_forward, "CompositeExplicitAutograd")
_forward = torch.ops.ds_fp8.attention_forward


def find_gradients(
    kept: Sequence[torch.Tensor], do: torch.Tensor, scaling: float, implementation: Implementation
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return codes, in E5M2, and scale of dq, dk and dv from the output's gradient [B, S, heads, D]."""
    *tensors, o, log_sums, v_norm = kept
    q, k, v = (QuantizedTensor(*pair, "tensor", "pow2") for pair in zip(tensors[:3], tensors[3:], strict=True))
    saved = Saved(q, k, v, QuantizedTensor(o, v.scale, "tensor", "pow2"), log_sums, scaling)
    scales = gradient_scales(do, q, k, v_norm, scaling)
    found = implementation.backward(saved, cast_heads(do, BACKWARD), scales)
    return list(zip(found, scales[1:], strict=True))


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def fp8_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None = None) -> torch.Tensor:
    """Compute causal attention in FP8 of BF16 q [B, heads, S, D], k and v [B, kv_heads, S, D]: [B, S, heads, D].

    Of any strides: [B, S, heads, D] seen through `transpose` is not copied. scaling: factor of q kᵀ, D^(-1/2) by
    default.
    """
    return _Attention.apply(q, k, v, factor_of(q, scaling), implementation_for(q))


def implementation_for(q: torch.Tensor) -> Implementation:
    return cudnn if q.is_cuda else Reference()


def fp8_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Do `fp8_attention` in plain torch: all scores at once, in FP32, rounded where the kernels round."""
    return _Attention.apply(q, k, v, factor_of(q, scaling), Reference())


class Reference:
    """The implementation in plain torch, on any device."""

    def forward(
        self, q: QuantizedTensor, k: QuantizedTensor, v: QuantizedTensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = q.shape[2] // k.shape[2]
        #     s = scaling q k' (causal);  p = exp(s - max_j s);  o = round(p) v / sum_j p
        #     log_sums = max_j s + log sum_j p                         all that backward needs to make p again
        s = _scores(q, k, scaling)
        largest = s.amax(-1, keepdim=True)
        p = (s - largest).exp()
        sums = p.sum(-1, keepdim=True)
        o = _round_p(p) @ _heads(v, groups) / sums
        log_sums = (largest + sums.log()).squeeze(-1)
        return cast(o.transpose(1, 2), v.scale, FORWARD, "tensor"), log_sums

    def backward(self, saved: Saved, do: QuantizedTensor, scales: GradientScales) -> tuple[torch.Tensor, ...]:
        groups = saved.q.shape[2] // saved.k.shape[2]
        q, o, do = (_heads(x) for x in (saved.q, saved.o, do))
        k, v = (_heads(x, groups) for x in (saved.k, saved.v))
        #     dv = p' do;   ds = scaling p (do v' - sum_d do o)
        #     dq = ds k;    dk = ds' q                                 ds rounded to E5M2 between, as in the kernels
        p = (_scores(saved.q, saved.k, saved.scaling) - saved.log_sums[..., None]).exp()
        dv = _round_p(p).mT @ do
        ds = saved.scaling * p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        ds = decode(cast(ds, scales.ds, BACKWARD, "tensor")) * scales.ds
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ q, dv))
        found = zip((ds @ k, dk, dv), scales[1:], strict=True)
        return tuple(cast(x.transpose(1, 2), scale, BACKWARD, "tensor") for x, scale in found)


def gradient_scales(
    do: torch.Tensor, q: QuantizedTensor, k: QuantizedTensor, v_norm: torch.Tensor, scaling: float
) -> GradientScales:
    """Return the scales of ds, dq, dk and dv from their bounds (at the head of this file)."""
    groups = q.shape[2] // k.shape[2]
    norms = torch.linalg.vector_norm(do, dim=-1, dtype=torch.float32)
    of_keys = norms.sum(1).unflatten(1, (-1, groups)).sum(2).amax()
    dv = torch.linalg.vector_norm(do, 1, dim=1, dtype=torch.float32).unflatten(1, (-1, groups)).sum(2).amax()
    # Everything below stays on the device: no scale makes the host wait.
    factor = abs(scaling) * v_norm
    ds = factor * norms.amax()
    q_amax, k_amax = (FORMATS[FORWARD].max * x.scale for x in (q, k))
    # Twice the bounds of ds, dq and dk and 1.25 of dv's: rounding to E5M2 and E4M3 adds up to 1/8 and 1/16 of a number,
    # and the sum over do ∘ o does not cancel what was rounded in do vᵀ.
    dk = factor * q_amax * of_keys / (do.shape[1] * groups) ** 0.25
    bounds = torch.stack([ds, 2 * ds * k_amax, dk, 1.25 * dv])
    return GradientScales(*scale_from_amax(bounds.clamp_min(SMALLEST_BOUND), BACKWARD, "pow2").unbind())


def cast_heads(x: torch.Tensor, format: str) -> QuantizedTensor:
    """Cast x [B, S, heads, D] to a format with one scale, a power of two; in memory in that order."""
    found = quantize(x.reshape(-1, math.prod(x.shape[2:])), format, "tensor", "pow2")
    return QuantizedTensor(found.data.view(x.shape), found.scale, "tensor", "pow2")


def factor_of(q: torch.Tensor, scaling: float | None) -> float:
    return q.shape[-1] ** -0.5 if scaling is None else scaling


def decode_exactly(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return FP8 codes as numbers, of which BF16 holds all; `scale`: a power of two, or several that broadcast."""
    return decode(codes, dtype).mul_(scale.to(dtype))


def _heads(x: QuantizedTensor, groups: int = 1) -> torch.Tensor:
    return x.dequantize().transpose(1, 2).repeat_interleave(groups, dim=1)


def _scores(q: QuantizedTensor, k: QuantizedTensor, scaling: float) -> torch.Tensor:
    """Return the masked scores, FP32 [B, heads, S, S], -inf after the diagonal."""
    s = scaling * (_heads(q) @ _heads(k, q.shape[2] // k.shape[2]).mT)
    return s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _round_p(p: torch.Tensor) -> torch.Tensor:
    return decode((p * P_SCALE).to(FORMATS[FORWARD].dtype)) / P_SCALE
