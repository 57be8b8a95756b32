"""Causal attention with its matrix products in FP8, forward and backward.

    s = scaling · q kᵀ                                q, k: E4M3, one scale a tensor
    p = exp(s - max_j s) / Σ_j                        FP32; quantized to E4M3 in p v and in pᵀ do
    o = p v                                           v, o: E4M3
    dv = pᵀ do                                        do: E5M2
    ds = scaling · p ∘ (do vᵀ - Σ_d do ∘ o)           quantized to E5M2 in ds k and in dsᵀ q
    dq = ds k,   dk = dsᵀ q                           dq, dk, dv: E5M2

cuDNN's FP8 attention quantizes at these places (FlashAttention-3, arXiv 2407.08608, section 3.3), and so does the
reference. Saved for backward are q, k, v and o, one byte an element.

All scales follow from this call's tensors, before the kernel runs; no state goes from step to step. Scales of q, k, v
and do follow the amax, the others an upper bound: a floating-point format keeps its relative precision below the bound
as long as values are normal (E5M2: 2^-14 to 2^15).

    p      <= 1
    o      <= amax(v): rows of p sum to 1
    ds     <= ½ · scaling · max_i ‖do_i‖ · max_j ‖v_j‖: p (1 - p) <= ¼, |do vᵀ| <= ‖do‖ ‖v‖
    dq     <= scaling · max_i ‖do_i‖ · max_j ‖v_j‖ · amax(k): rows of p sum to 1
    dv     <= Σ_i |do_i| over the n queries that see a key, of all heads that share it
    dk     ~  ½ · scaling · max_j ‖v_j‖ · amax(q) · Σ_i ‖do_i‖ / n^(1/4)

The bound of dk is not strict: without n^(1/4) typical elements at 32k tokens would be below 2^-14. dk saturates
if most queries attend to one key with gradients of one sign.

Before quantization q, k and v are transformed without changing the result:

    softmax_j(q · (k_j - c)) = softmax_j(q · k_j)         for any c: q · c is the same for every key
    Σ_j p_ij (v_j - c) + c   = Σ_j p_ij v_j               rows of p sum to 1
    (q R) · (k R)            = q · k                      R Rᵀ = 1

c is the mean over the tokens: a common offset (a bias of k_proj, features that rotary embeddings turn slowly) costs
FP8 precision and carries no information (SageAttention, arXiv 2410.02367, section 4.2, for keys; here for values, too,
whose mean is added to o). R, a Hadamard transform of each head with random signs, spreads an outlier feature over the
head (FlashAttention-3). For the gradients: Σ_j ds_ij = 0, and dq and dk are rotated back.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.casts.primitives import dequantize_unscaled, quantize_with_scale, scale_from_amax
from ds_fp8.config.formats import FORMATS
from ds_fp8.layers.attention import cudnn
from ds_fp8.layers.attention.cudnn import BACKWARD, FORWARD, P_SCALE, GradientScales, Saved
from ds_fp8.layers.attention.hadamard import ROTATION_BLOCKS, Rotation, rotate, unrotate

SEED = 0  # of the random signs, the same in all layers, steps and ranks
PIECE = 16384  # tokens summed at a time: an FP64 copy of 134 MB at 1024 features


def _mean_over_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of x [B, heads, S, D] over its tokens, [B, heads, 1, D]."""
    # Sums in FP64, of pieces: torch copies its input to FP64.
    total = sum(piece.sum(2, keepdim=True, dtype=torch.float64) for piece in x.split(PIECE, 2))
    return (total / x.shape[2]).to(x.dtype)


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Rotate each head of x [B, heads, S, D], laid out as [B, S, heads, D], if D is in ROTATION_BLOCKS."""
    by_token = x.transpose(1, 2)
    # Row by row, with one order of sums: a token's bits do not depend on the other tokens.
    return rotate(by_token.flatten(2).flatten(0, 1), _rotation(x), x.dtype).view(by_token.shape).transpose(1, 2)


def dequantize_heads(
    data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, mean: torch.Tensor | None = None, rotated: bool = False
) -> torch.Tensor:
    """Dequantize data [B, S, heads, D], add a mean of v [B, kv_heads, 1, D], and rotate back if `rotated`."""
    x = dequantize_unscaled(data, dtype).mul_(scale.to(dtype))  # a power of two: exact in BF16
    if mean is not None:
        by_kv_head = x.unflatten(2, (mean.shape[1], -1))  # [B, S, kv_heads, heads / kv_heads, D]
        by_kv_head += mean.transpose(1, 2).unsqueeze(3)
    return unrotate(x.flatten(0, -2), _rotation(x)).view(x.shape) if rotated else x


def _rotation(x: torch.Tensor) -> Rotation | None:
    return Rotation(x.shape[-1], SEED) if x.shape[-1] in ROTATION_BLOCKS else None


# Lower limit of the bounds of gradients: ratios of scales, and 1 / scale, stay within FP32.
SMALLEST_BOUND = 2.0**-60


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scaling: float, reference: bool):
        v_mean = _mean_over_tokens(v)
        q, k, v = rotate_heads(q), rotate_heads(k - _mean_over_tokens(k)), v - v_mean
        casts = [quantize_heads(x.transpose(1, 2), FORWARD) for x in (q, k, v)]
        # Here, while v is in high precision: saved for backward is the quantized v.
        v_norm = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32).amax()
        data, scales = zip(*((x.data, x.scale) for x in casts), strict=True)
        o, log_sums = _forward(*data, *scales, scaling, reference)
        ctx.save_for_backward(*data, *scales, o, log_sums, v_norm)
        ctx.scaling, ctx.reference = scaling, reference
        return dequantize_heads(o, scales[2], v.dtype, mean=v_mean)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        # Kernels work on [B, S, heads, D]; callers have [B, heads, S, D], a view of the same memory.
        *tensors, o, log_sums, v_norm = ctx.saved_tensors
        q, k, v = (QuantizedTensor(*pair, "tensor", "pow2") for pair in zip(tensors[:3], tensors[3:], strict=True))
        saved = Saved(q, k, v, QuantizedTensor(o, v.scale, "tensor", "pow2"), log_sums, ctx.scaling)
        scales = gradient_scales(do, q, k, v_norm, ctx.scaling)
        found = (Reference if ctx.reference else cudnn).backward(saved, quantize_heads(do, BACKWARD), scales)
        gradients = (
            dequantize_heads(data, scale, do.dtype, rotated=which < 2)
            for which, (data, scale) in enumerate(zip(found, scales[1:], strict=True))
        )
        return *(x.transpose(1, 2) for x in gradients), None, None


# An operator of torch, whose results selective_checkpointing.py saves.
FORWARD_OPERATOR = "ds_fp8::attention_forward"
_LIBRARY = torch.library.Library(FORWARD_OPERATOR.split("::")[0], "DEF")
_LIBRARY.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, float scaling, "
    "bool reference) -> (Tensor, Tensor)"
)


def _run_forward(q, k, v, q_scale, k_scale, v_scale, scaling, reference):
    pairs = (q, q_scale), (k, k_scale), (v, v_scale)
    casts = (QuantizedTensor(data, scale, "tensor", "pow2") for data, scale in pairs)
    return (Reference if reference else cudnn).forward(*casts, scaling)


_LIBRARY.impl("attention_forward", _run_forward, "CompositeExplicitAutograd")
_forward = torch.ops.ds_fp8.attention_forward


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None = None, reference: bool = False
) -> torch.Tensor:
    """Compute causal attention in FP8 of BF16 q [B, heads, S, D], k and v [B, kv_heads, S, D]: [B, S, heads, D].

    Strides are free: [B, S, heads, D] seen through `transpose` is not copied. scaling: of q kᵀ, by default D^(-1/2).
    reference: plain torch on a GPU too, all scores at once in FP32, quantized where the kernels quantize.
    """
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attention.apply(q, k, v, scaling, reference or not q.is_cuda)


class Reference:
    """Plain torch in place of the module cudnn, on any device."""

    @staticmethod
    def forward(
        q: QuantizedTensor, k: QuantizedTensor, v: QuantizedTensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = q.shape[2] // k.shape[2]
        #     s = scaling q k' (causal);  p = exp(s - max_j s);  o = round(p) v / sum_j p
        #     log_sums = max_j s + log sum_j p                         p = exp(s - log_sums) in backward
        s = _scores(q, k, scaling)
        largest = s.amax(-1, keepdim=True)
        p = (s - largest).exp()
        sums = p.sum(-1, keepdim=True)
        o = _round_p(p) @ _heads(v, groups) / sums
        log_sums = (largest + sums.log()).squeeze(-1)
        return quantize_with_scale(o.transpose(1, 2), v.scale, FORWARD, "tensor"), log_sums

    @staticmethod
    def backward(saved: Saved, do: QuantizedTensor, scales: GradientScales) -> tuple[torch.Tensor, ...]:
        groups = saved.q.shape[2] // saved.k.shape[2]
        q, o, do = (_heads(x) for x in (saved.q, saved.o, do))
        k, v = (_heads(x, groups) for x in (saved.k, saved.v))
        #     dv = p' do;   ds = scaling p (do v' - sum_d do o)
        #     dq = ds k;    dk = ds' q                                 ds quantized to E5M2, as in the kernels
        p = (_scores(saved.q, saved.k, saved.scaling) - saved.log_sums[..., None]).exp()
        dv = _round_p(p).mT @ do
        ds = saved.scaling * p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        ds = dequantize_unscaled(quantize_with_scale(ds, scales.ds, BACKWARD, "tensor")) * scales.ds
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ q, dv))
        found = zip((ds @ k, dk, dv), scales[1:], strict=True)
        return tuple(quantize_with_scale(x.transpose(1, 2), scale, BACKWARD, "tensor") for x, scale in found)


def gradient_scales(
    do: torch.Tensor, q: QuantizedTensor, k: QuantizedTensor, v_norm: torch.Tensor, scaling: float
) -> GradientScales:
    """Return the scales of ds, dq, dk and dv from their bounds (docstring of this module)."""
    groups = q.shape[2] // k.shape[2]
    norms = torch.linalg.vector_norm(do, dim=-1, dtype=torch.float32)
    of_keys = norms.sum(1).unflatten(1, (-1, groups)).sum(2).amax()
    dv = torch.linalg.vector_norm(do, 1, dim=1, dtype=torch.float32).unflatten(1, (-1, groups)).sum(2).amax()
    # All on the device: no host sync.
    factor = abs(scaling) * v_norm
    ds = factor * norms.amax()
    q_amax, k_amax = (FORMATS[FORWARD].max * x.scale for x in (q, k))
    # A margin of 2 for ds, dq and dk, of 1.25 for dv: rounding to E5M2 and E4M3 adds up to 1/8 and 1/16 of a value, and
    # Σ_d do ∘ o does not cancel the rounding errors of do vᵀ.
    dk = factor * q_amax * of_keys / (do.shape[1] * groups) ** 0.25
    bounds = torch.stack([ds, 2 * ds * k_amax, dk, 1.25 * dv])
    return GradientScales(*scale_from_amax(bounds.clamp_min(SMALLEST_BOUND), BACKWARD, "pow2").unbind())


def quantize_heads(x: torch.Tensor, format: str) -> QuantizedTensor:
    """Quantize x [B, S, heads, D] to a format, contiguous, with one scale, a power of two."""
    found = quantize(x.reshape(-1, math.prod(x.shape[2:])), format, "tensor", "pow2")
    return QuantizedTensor(found.data.view(x.shape), found.scale, "tensor", "pow2")


def _heads(x: QuantizedTensor, groups: int = 1) -> torch.Tensor:
    return x.dequantize().transpose(1, 2).repeat_interleave(groups, dim=1)  # FP32 [B, heads · groups, S, D]


def _scores(q: QuantizedTensor, k: QuantizedTensor, scaling: float) -> torch.Tensor:
    # FP32 [B, heads, S, S], -inf above the diagonal.
    s = scaling * (_heads(q) @ _heads(k, q.shape[2] // k.shape[2]).mT)
    return s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _round_p(p: torch.Tensor) -> torch.Tensor:
    return dequantize_unscaled((p * P_SCALE).to(FORMATS[FORWARD].dtype)) / P_SCALE
