"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) fused with the residual add before and the quantization after it.

    h    = x + residual                                  (optional)
    rstd = 1 / sqrt(mean_k h² + eps)
    n    = h · rstd · weight                             stored in FP8 only

wgrad reads n quantized along the tokens: backward recomputes n from h and rstd, which moves as many bytes as saving it
would, and takes no memory between forward and backward.
"""

from __future__ import annotations

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.layers.linear.recipe import LinearRecipe


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, recipe: LinearRecipe, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """Add the residual to tokens x [T, H], normalise with weight [H], and quantize rowwise.

    Returns:
        (h [T, H]; rstd FP32 [T]; n [T, H] quantized for fprop, followed by the recipe's outlier block).
    """
    if x.device.type == "cuda":
        from ds_fp8.layers.decoder.rms_norm_triton import normalise

        hidden, rstd, quantized = normalise(
            x, residual, weight, eps, recipe.input, recipe.room_for_outliers(x.shape[1])
        )
    else:
        hidden = x if residual is None else x + residual
        rstd, quantized = torch.rsqrt(hidden.float().square().mean(-1) + eps), None
    if quantized is None:
        quantized = recipe.quantize_input(hidden, rstd, weight)
    else:
        recipe.observe("input", hidden, quantized, rstd, weight)
    return hidden, rstd, recipe.with_outliers(quantized, hidden, rstd, weight)


def rms_norm_backward(
    dn: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dresidual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden [T, H], with `dresidual` of the residual stream added, and of weight [H].

    dh = rstd · (g - ĥ · mean_k(g · ĥ)) + dresidual, g = dn · weight, ĥ = h · rstd; dweight = sum_t dn · ĥ.
    """
    if dn.device.type == "cuda":
        from ds_fp8.layers.decoder.rms_norm_triton import normalise_backward

        return normalise_backward(dn, hidden, weight, rstd, dresidual)
    scaled = hidden.float() * rstd[:, None]
    gradient = dn.float() * weight.float()
    dhidden = rstd[:, None] * (gradient - scaled * (gradient * scaled).mean(-1, keepdim=True)) + dresidual.float()
    return dhidden.to(hidden.dtype), (dn.float() * scaled).sum(0).to(weight.dtype)
