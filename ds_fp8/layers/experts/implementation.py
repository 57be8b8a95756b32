"""The experts implementation "ds_fp8" of transformers: FP8 products for modules of its ExpertsInterface.

Experts whose weights are [E, 2F, H] and [E, H, F] by their flags, the rows of gate before those of up, and whose gating
is act(gate) · up, can have `expert_products` (products_of), by which `experts_forward` multiplies. A module comes to it
by `config._experts_implementation`, or because its own forward calls it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from ds_fp8.config.errors import UserError
from ds_fp8.layers.experts.products import (
    ExpertProducts,
    ExpertWeights,
    expert_products,
    unsupported,
    unsupported_shapes,
)
from ds_fp8.layers.linear.activations import ACTIVATIONS, activate
from ds_fp8.layers.linear.linear import runs_eagerly
from ds_fp8.layers.linear.recipe import LinearRecipe

NAME = "ds_fp8"
"""Name of the implementation in `config._experts_implementation`."""

PRODUCTS = "expert_products"
"""Attribute of a module of experts that holds its ExpertProducts."""

FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""By flag of transformers' interface: the value of the experts whose products are known."""


def products_of(module: nn.Module, gate_up: LinearRecipe, down: LinearRecipe) -> ExpertProducts | str:
    """Return the FP8 products of a module of experts, or the reason why it can have none.

    Args:
        module: Experts of transformers' ExpertsInterface.
        gate_up: Recipe of gate_up_proj.
        down: Recipe of down_proj.
    """
    for flag, value in FLAGS.items():
        if getattr(module, flag, None) is not value:
            return f"{type(module).__name__} has {flag} = {getattr(module, flag, 'not set')}"
    shapes = [shape_of(getattr(module, name, None)) for name in ("gate_up_proj", "down_proj")]
    reason = unsupported(gate_up) or unsupported(down) or unsupported_shapes(*shapes)
    activation = _activation(module)
    if reason is None and activation is None:
        reason = f"its gating is not act(gate) · up with act one of {', '.join(ACTIVATIONS)}"
    return reason or ExpertProducts(activation, gate_up, down)


@runs_eagerly
def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the sum [T, H] of each token's experts, times the router's weights.

    Args:
        self: A module of experts with `expert_products`.
        hidden_states: [T, H], the tokens.
        top_k_index: [T, k], the experts of each token.
        top_k_weights: [T, k], the router's weights.

    Raises:
        UserError: The module has no `expert_products`.
    """
    products = getattr(self, PRODUCTS, None)
    if products is None:
        raise UserError(
            f'experts of {type(self).__name__} without FP8 products were asked for the implementation "{NAME}"',
            key="experts_implementation",
            remedy='use "grouped_mm", and let ds_fp8 choose the experts that it multiplies',
        )
    return expert_products(
        hidden_states, top_k_index, top_k_weights, ExpertWeights(self.gate_up_proj, self.down_proj), products
    )


def register() -> None:
    """Let transformers know the implementation by its name."""
    ExpertsInterface.register(NAME, experts_forward)


def _activation(module: nn.Module) -> str | None:
    """Return the activation, one of ACTIVATIONS, of experts whose gating is act(gate) · up; else None."""
    gate_up = torch.linspace(-6, 6, 4 * 49).view(2, 98).flip(-1)
    gate, up = gate_up.chunk(2, -1)
    with torch.no_grad():
        gated = module._apply_gate(gate_up)
    for activation in ACTIVATIONS:
        if gated.shape == gate.shape and torch.allclose(gated, activate(gate, activation) * up, atol=1e-5):
            return activation
    return None


def shape_of(parameter: torch.Tensor | None) -> torch.Size:
    """Return the shape of a parameter, also of one that deepspeed.zero.Init has partitioned; empty for None."""
    return torch.Size() if parameter is None else getattr(parameter, "ds_shape", parameter.shape)
