"""Experts as folders hold them: a matrix of each, under the names that the model's first release gave them.

transformers stacks them into 3-D parameters when it loads a folder, and knows how to take them apart: the names, and
which rows are whose, come from it. Scales lie as their weight does, a block to an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import scale_shape
from ds_fp8.layers.experts.selection import expert_weights

Parts = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""Returns the tensors that a parameter is stored as, by name."""


def parts_of_parameters(model: nn.Module) -> dict[str, Parts]:
    """Return how the parameters of layers with experts are stored, by name; those of all others as they are."""
    if not isinstance(model, PreTrainedModel):
        return {}
    layers = {name.rpartition(".")[0] for name, module in model.named_modules() if expert_weights(name, module)}
    names = [name for name, _ in model.named_parameters() if any(name.startswith(f"{layer}.") for layer in layers)]

    def parts_of(name: str) -> Parts:
        return lambda numbers: {
            stored: part.contiguous() if part.device.type != "meta" else part
            for stored, part in revert_weight_conversion(model, {name: numbers}).items()
        }

    return {name: parts_of(name) for name in names}


def split(
    numbers: torch.Tensor | QuantizedTensor, parts: Parts, shape: tuple[int, ...]
) -> dict[str, torch.Tensor | QuantizedTensor]:
    """Return what a parameter of `shape` is stored as, by name: BF16 tensors, or FP8 matrices of an expert each.

    Args:
        numbers: The parameter, or of experts [E, N, K] its codes and scales [E*N, K].
        parts: How it is stored.
        shape: Of the parameter.
    """
    if not isinstance(numbers, QuantizedTensor):
        return parts(numbers)
    codes = parts(numbers.data.view(torch.uint8).view(shape))
    rows, columns = numbers.scale.shape
    scales = parts(numbers.scale.contiguous().view(shape[0], rows // shape[0], columns))
    result = {}
    for name, own in codes.items():
        # Sides of one block are lost where transformers takes the experts apart.
        scale = scales[name].view(scale_shape(own.shape, numbers.granularity))
        result[name] = replace(numbers, data=own.view(numbers.data.dtype), scale=scale)
    return result
