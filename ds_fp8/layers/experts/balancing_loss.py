"""The load balancing loss of transformers' mixtures, counted without a wait of the host.

`load_balancing_loss_func` counts the tokens of each expert by torch.bincount, which waits for the GPU to learn how long
its result is: once a layer, and never inside a CUDA graph. The length is known: it is the number of experts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NAME = "load_balancing_loss_func"
"""Function of the files of transformers' mixtures."""
_MARK = "_ds_fp8_counts_without_waiting"


def count_without_waiting(model: nn.Module) -> None:
    """Let the load balancing losses of a model's classes count without a wait. No number changes.

    A loss is a function of the file that holds the class, so that it counts so for all models of the class.

    Args:
        model: Any module, wrapped by PEFT or not.
    """
    for name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        function = getattr(sys.modules.get(name), NAME, None)
        if callable(function) and not hasattr(function, _MARK):
            setattr(sys.modules[name], NAME, _counting(function))


def counts(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Return how often each of 0 to length - 1 occurs in integers [N], int64 [length], as torch.bincount does."""
    zeros = torch.zeros(length, dtype=torch.int64, device=indices.device)
    return zeros.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))


class _Counts(TorchFunctionMode):
    """Answers torch.bincount of a length that the caller gives."""

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.bincount and len(args) == 1 and set(kwargs) == {"minlength"}:
            return counts(args[0], kwargs["minlength"])
        return function(*args, **kwargs)


def _counting(function: Callable) -> Callable:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _Counts():
            return function(*args, **kwargs)

    setattr(counted, _MARK, True)
    return counted
