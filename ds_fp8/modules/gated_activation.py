"""The gated activation of an MLP, act(gate) · up, joined with the casts around it.

    forward   p = act(g) · u                        cast row-wise for down_proj; g and u kept in FP8 (or BF16)
    backward  dg = dp · u · act'(g),  du = dp · act(g)   cast row-wise for dgrad and along the tokens for wgrad
              p  = act(g) · u                       once more, cast along the tokens for down_proj's wgrad

gate and up are the two halves of one matrix gate_up [T, 2F]. Kept in FP8, g and u of backward carry that cast's
rounding; everything else is computed in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ds_fp8.formats import BLOCK
from ds_fp8.modules.recipe import LinearRecipe
from ds_fp8.quantize import QuantizedTensor, quantize

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

Saved = QuantizedTensor | torch.Tensor
"""gate_up [T, 2F] as kept for backward."""


class GatedGradients(NamedTuple):
    """What backward's products read."""

    dgate_up: QuantizedTensor
    """[T, 2F], for dgrad."""
    dgate_up_columnwise: QuantizedTensor
    """[2F, T], for wgrad of gate_proj and up_proj."""
    product_columnwise: QuantizedTensor
    """[F, T], for wgrad of down_proj."""


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) in gate's dtype; activation is one of ACTIVATIONS."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_product_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) · up in FP32, [T, F]."""
    gate, up = gate_up.float().chunk(2, -1)
    return activate(gate, activation) * up


def gated_backward_reference(
    dproduct: torch.Tensor, gate_up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate_up [T, 2F], product [T, F]) in FP32."""
    with torch.enable_grad():
        leaf = gate_up.detach().float().requires_grad_()
        product = gated_product_reference(leaf, activation)
    (dgate_up,) = torch.autograd.grad(product, leaf, dproduct.float())
    return dgate_up, product.detach()


def gated_activation_cast(
    gate_up: torch.Tensor, activation: str, recipe: LinearRecipe, keep: bool = True
) -> tuple[QuantizedTensor, Saved | None]:
    """gate_up [T, 2F] -> (product [T, F] as fprop reads it, what to keep for backward: None if `keep` is false)."""
    in_fp8 = keep and recipe.save == "fp8"
    if gate_up.device.type == "cuda":
        from ds_fp8.modules.kernels.gated_activation import gated_forward

        product, cast, saved = gated_forward(gate_up, activation, recipe.input, in_fp8)
    else:
        product, cast = gated_product_reference(gate_up, activation), None
        saved = quantize(gate_up, "e4m3", "1x128", "pow2") if in_fp8 else None
    if cast is None:
        cast = recipe.cast_input(product)
    elif recipe.monitor.active:
        recipe.observe("input", lambda rows: gated_product_reference(gate_up[rows], activation), cast)
    return cast, gate_up if keep and not in_fp8 else saved


def gated_activation_backward(
    dproduct: torch.Tensor,
    saved: Saved,
    activation: str,
    recipe: LinearRecipe,
    dgrad_factor: torch.Tensor | None = None,
) -> GatedGradients:
    """The casts of backward from dproduct [T, F]; `dgrad_factor` [2F] is what dgrad folds into dgate_up."""
    if dproduct.device.type == "cuda":
        from ds_fp8.modules.kernels.gated_activation import gated_backward, gated_backward_cast

        whole_tiles = all(length % BLOCK == 0 for length in dproduct.shape)
        if dgrad_factor is None and recipe.casts_by_tile and whole_tiles:
            row, column, product_column = gated_backward_cast(dproduct, saved, activation, recipe)
            if recipe.monitor.active:
                dgate_up, _ = gated_backward(dproduct, saved, activation)
                recipe.observe("grad_output", dgate_up, row)
            return GatedGradients(row, column, product_column)
        dgate_up, product = gated_backward(dproduct, saved, activation)
    else:
        gate_up = saved.dequantize() if isinstance(saved, QuantizedTensor) else saved
        dgate_up, product = gated_backward_reference(dproduct, gate_up, activation)
    row, column = recipe.cast_grad_output(dgate_up, column_factor=dgrad_factor)
    return GatedGradients(row, column, recipe.cast_input_columnwise(product))
