"""FP8Linear as users get it: made by `convert` from a section of the JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.linear.linear import FP8Linear


def fp8_linear(
    inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False, **section: Any
) -> FP8Linear:
    """A random FP8Linear under the "fp8" section `section`; the same arguments give the same numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias, dtype=dtype))
    convert(model, parse_fp8({"fp8": section}))
    return model[0]


def results_of(linear: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of the input and the weight."""
    leaf = x.clone().requires_grad_()
    y = linear(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, linear.weight], dy)]
