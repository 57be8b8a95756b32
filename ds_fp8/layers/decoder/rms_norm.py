"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) joined with the residual add before it and the cast after it.

    h    = x + residual                                  (optional)
    rstd = 1 / sqrt(mean_k h² + eps)
    n    = h · rstd · weight                             never stored: only its cast is

Backward needs n once more, cast along the tokens for wgrad. It is formed again from h and rstd, which costs the bytes
that storing it would have cost, and no memory in between.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.layers.linear.recipe import LinearRecipe


class NormedCast(NamedTuple):
    hidden: torch.Tensor
    """[T, H], the norm's input: x, or x + residual."""
    rstd: torch.Tensor
    """FP32 [T], 1 / root mean square of each token."""
    cast: QuantizedTensor
    """[T, H], the normalised tokens as fprop reads them; with an outlier block, where the recipe has one, wider."""


def rms_norm_cast(
    x: torch.Tensor, weight: torch.Tensor, eps: float, recipe: LinearRecipe, residual: torch.Tensor | None = None
) -> NormedCast:
    """Add, normalise and cast tokens x [T, H] with norm weight [H]."""
    if x.device.type == "cuda":
        from ds_fp8.layers.decoder.rms_norm_triton import normalise

        hidden, rstd, cast = normalise(x, residual, weight, eps, recipe.input, recipe.room_for_outliers(x.shape[1]))
    else:
        hidden = x if residual is None else x + residual
        rstd, cast = torch.rsqrt(hidden.float().square().mean(-1) + eps), None
    if cast is None:
        cast = recipe.cast_input(hidden, rstd, weight)
    else:
        recipe.observe("input", hidden, cast, rstd, weight)
    return NormedCast(hidden, rstd, recipe.with_outliers(cast, hidden, rstd, weight))


def rms_norm_backward(
    dn: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden [T, H] (plus `dresidual`, what reached it past the norm) and of weight [H]."""
    if dn.device.type == "cuda":
        from ds_fp8.layers.decoder.rms_norm_triton import normalise_backward

        return normalise_backward(dn, hidden, weight, rstd, dresidual)
    return rms_norm_backward_reference(dn, hidden, weight, rstd, dresidual)


def rms_norm_backward_reference(
    dn: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dh = rstd · (g - ĥ · mean_k(g · ĥ)) + dresidual, g = dn · weight, ĥ = h · rstd; dweight = sum_t dn · ĥ."""
    scaled = hidden.float() * rstd[:, None]
    gradient = dn.float() * weight.float()
    dhidden = rstd[:, None] * (gradient - scaled * (gradient * scaled).mean(-1, keepdim=True))
    if dresidual is not None:
        dhidden = dhidden + dresidual.float()
    return dhidden.to(hidden.dtype), (dn.float() * scaled).sum(0).to(weight.dtype)
