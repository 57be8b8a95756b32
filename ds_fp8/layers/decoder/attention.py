"""Attention of a fused decoder layer: RMSNorm, one product for q, k and v, rotary embedding, attention core.

    n            = RMSNorm(x)                              stored in FP8 only
    qkv [T, N]   = n [T, H] · [q; k; v] [N, H]ᵀ + bias     plus LoRA
    q, k, v      = rotate(qkv)                             in place; head norms where the model has them (Qwen3)
    o            = attention(q, k, v)                      BF16, through the model's attention implementation

x passes through the autograd function, so that one kernel adds the residual's gradient and writes the norm's. Saved for
backward: x, which the residual stream holds anyway, and 4 bytes a token.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.layers.attention.format import is_attention, window_of
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_quantize
from ds_fp8.layers.decoder.rotary import HeadLayout, HeadNorms, HeadTransform, rotate, rotate_backward
from ds_fp8.layers.linear.adapters import Adapters
from ds_fp8.layers.linear.linear import Swapped, swapped_class
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import BEFORE_BACKWARD, dgrad_weight, fprop_weight, split_rows

# Kernels of scaled_dot_product_attention in the order of their speed, with torch's switch of each
FASTEST_FIRST = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


@dataclass(frozen=True)
class NormedHeads:
    """Settings of the product of q, k and v; its parameters are separate arguments."""

    layout: HeadLayout
    eps: float  # of the RMSNorm before the product
    head_eps: float  # of the heads' RMSNorm, if any
    recipe: LinearRecipe


class _NormedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, norm, cos, sin, q_norm, k_norm, heads: NormedHeads, save: bool, adapters: Adapters, *parameters
    ):
        recipe, layout = heads.recipe, heads.layout
        weights, biases, x_TH = parameters[:3], parameters[3:6], x.reshape(-1, x.shape[-1])
        # backward recomputes n from x and rstd: 4 bytes a token instead of 2H
        _, rstd, quantized = rms_norm_quantize(x_TH, norm, heads.eps, recipe)
        low_rank = adapters.project(x_TH, rstd, norm)
        qkv = adapters.add(recipe.multiply(quantized, fprop_weight(weights, recipe), x.dtype), low_rank)
        bias = None if biases[0] is None else torch.cat(biases)
        norms = None if q_norm is None else HeadNorms(q_norm, k_norm, heads.head_eps)
        # in place without head norms: the backward of a rotation reads the gradients alone
        rotated = rotate(qkv, HeadTransform(cos, sin, layout, bias, norms))
        # Not save_for_backward: ZeRO-3 reshards parameters after forward, and unshards them for backward.
        ctx.heads, ctx.weights, ctx.biases, ctx.norm, ctx.head_norms = heads, weights, biases, norm, norms
        ctx.adapters = adapters
        if save:
            ctx.save_for_backward(x, rstd, cos, sin, None if norms is None else qkv, *low_rank)
        return *layout.split(rotated, *x.shape[:2]), x

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, dresidual):
        x, rstd, cos, sin, qkv, *low_rank = ctx.saved_tensors
        heads, recipe, weights, norm = ctx.heads, ctx.heads.recipe, ctx.weights, ctx.norm
        # ZeRO-3 unshards the layer when a gradient reaches its output; gradients of a KV cache arrive by another way.
        if (unshard := getattr(weights[0], BEFORE_BACKWARD, None)) is not None:
            unshard()
        norms, has_bias = ctx.head_norms, ctx.biases[0] is not None
        bias = torch.cat(ctx.biases) if has_bias and norms is not None else None
        # One matrix [T, N]: dgrad and wgrad of q, k and v are one product each.
        dqkv, *dnorms = rotate_backward((dq, dk, dv), HeadTransform(cos, sin, heads.layout, bias, norms), qkv)
        dbiases = (None, None, None)
        if has_bias and any(bias.requires_grad for bias in ctx.biases):
            dbiases = split_rows(dqkv.sum(0), ctx.biases)
        stacked, factor = dgrad_weight(weights, recipe)
        wants_wgrad = any(weight.requires_grad for weight in weights)
        dqkv_rowwise, dqkv_columnwise = recipe.quantize_grad_output(dqkv, True, wants_wgrad, factor)
        dn = recipe.multiply(dqkv_rowwise, stacked, dqkv.dtype)
        x_TH = x.reshape(-1, x.shape[-1])
        of_adapters = ctx.adapters.backward(dqkv, dn, low_rank, x_TH, rstd, norm)
        dweights = (None, None, None)
        if wants_wgrad:
            n_columnwise = recipe.quantize_input_columnwise(x_TH, rstd, norm)
            dweights = split_rows(recipe.multiply(dqkv_columnwise, n_columnwise, weights[0].dtype), weights)
        dx, dnorm = rms_norm_backward(dn, x_TH, norm, rstd, dresidual.reshape(x_TH.shape))
        if norms is not None:
            dnorms = [d.to(w.dtype) if w.requires_grad else None for d, w in zip(dnorms, norms[:2], strict=True)]
        dnorm = dnorm if norm.requires_grad else None
        return dx.view(x.shape), dnorm, None, None, *dnorms, None, None, None, *dweights, *dbiases, *of_adapters


def normed_heads(
    x: torch.Tensor,
    norm: nn.Parameter,
    projections: tuple[nn.Module, nn.Module, nn.Module],
    head_norms: tuple[nn.Parameter, nn.Parameter] | tuple[None, None],
    rotation: tuple[torch.Tensor, torch.Tensor],
    heads: NormedHeads,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q [B, heads, S, D], k and v [B, kv_heads, S, D], x) of x [B, S, H]; the returned x is the residual."""
    # Parameters are arguments: autograd accumulates gradients of, and calls the hooks of, its inputs alone.
    adapters = Adapters(projections)
    parameters = [p.weight for p in projections] + [p.bias for p in projections] + adapters.parameters
    return _NormedHeads.apply(x, norm, *rotation, *head_norms, heads, torch.is_grad_enabled(), adapters, *parameters)


def fastest_kernel_first() -> contextlib.AbstractContextManager:
    """Return a context in which scaled_dot_product_attention tries its enabled kernels, the fastest first."""
    enabled = [kernel for kernel, is_enabled in FASTEST_FIRST.items() if is_enabled()]
    # With none enabled the attention itself raises torch's error.
    return sdpa_kernel(enabled, set_priority=True) if enabled else contextlib.nullcontext()


def attend(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """Return the output [B, S, heads · D] of the attention of `module`, by the fastest kernel that is enabled."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    with fastest_kernel_first() if q.is_cuda else contextlib.nullcontext():
        output, _ = attention(
            module,
            q,
            k,
            v,
            mask,
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            sliding_window=window_of(module),
            **options,
        )
    return output.flatten(2)


class FastAttention(Swapped):
    """An attention module of an unfused layer, with the kernels of fused layers."""

    prefix = "Fast"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with fastest_kernel_first():
            return super().forward(*args, **kwargs)


def use_fastest_kernels(model: nn.Module) -> None:
    """Let attention modules that unfused layers call take the fastest kernel, in place."""
    for module in list(model.modules()):
        if is_attention(module) and not isinstance(module, FastAttention) and "forward" not in vars(module):
            module.__class__ = swapped_class(FastAttention, type(module))


def use_own_kernels(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, FastAttention):
            _, module.__class__ = type(module).__bases__
