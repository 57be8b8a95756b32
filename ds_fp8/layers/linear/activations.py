"""Activation functions of gated MLPs, in torch; activations_triton.py has them for kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) in gate's dtype; activation is one of ACTIVATIONS."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
