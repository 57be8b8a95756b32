"""Recomputed layers that keep what attention returns: its forward, which long rows make the largest part, runs once.

What the operators below return is kept, an output of 2 bytes (FP8: 1) and 4 bytes a head and token; all else of a layer
is computed again. torch's own selective activation checkpointing wants every operator of the first run in the second,
but ZeRO-3 gathers at other places then, and outlier channels are found once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fp8.config.errors import UserError
from ds_fp8.config.log import logger
from ds_fp8.layers.attention.fp8_attention import FORWARD_OPERATOR

FUNCTION = "_gradient_checkpointing_func"  # Attribute in which transformers keeps the function that recomputes a layer
KEY = "fp8.activations.keep_attention"
# Forward kernels of attention; of those that this torch lacks there is nothing to keep
OPERATORS = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "torch_attn::_varlen_attn",
    FORWARD_OPERATOR,
)


def keep_attention(model: nn.Module) -> None:
    """Let the layers of a model that transformers recomputes keep their attention's results.

    Called after `model.gradient_checkpointing_enable()`, which takes it back when it is called again.

    Raises:
        UserError: The model recomputes no layer, or does so with reentrant checkpointing.
    """
    parts = [part for part in model.modules() if vars(part).get("gradient_checkpointing") and hasattr(part, FUNCTION)]
    for part in parts:
        function = getattr(part, FUNCTION)
        options = getattr(function, "keywords", {})
        if options.get("use_reentrant", True):
            problem = "layers are recomputed by reentrant checkpointing, which keeps nothing else than their inputs"
            raise UserError(problem, key=KEY, remedy='gradient_checkpointing_enable({"use_reentrant": False})')
        setattr(part, FUNCTION, functools.partial(function, context_fn=_contexts))
    if not parts:
        raise UserError(
            "no layer of this model is recomputed, so that attention's results are kept anyhow",
            key=KEY,
            remedy="model.gradient_checkpointing_enable() before initialize (in a stage "
            '"model": {"activation_checkpointing": true}), or remove the key',
        )


class _Keeping(TorchDispatchMode):
    """Appends what attention's operators return to `results`."""

    def __init__(self, results: list[tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self, function: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in _known():
            # Detached: autograd gives the tensors that it returns a history.
            self._results.append(_detached(found))
        return found


class _Returning(_Keeping):
    """Returns `results` in place of attention's operators, from the first on each time that it is entered."""

    def __enter__(self) -> _Returning:
        if not self._results:
            _warn()
        self._next = iter(self._results)
        return super().__enter__()

    def __torch_dispatch__(
        self, function: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _detached(next(self._next)) if function in _known() else function(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=1)
def _warn() -> None:
    words = "warning: %s keeps nothing of a recomputed layer: none of the kernels whose results can be kept runs in it"
    logger.warning(words + ' (attn_implementation "eager" and "flex_attention" have none)', KEY)


def _contexts() -> tuple[_Keeping, _Returning]:
    results: list[tuple[torch.Tensor, ...]] = []
    return _Keeping(results), _Returning(results)


def _detached(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in found)


@functools.lru_cache(maxsize=1)
def _known() -> tuple[torch._ops.OpOverload, ...]:
    found = []
    for name in OPERATORS:
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found.append(packet.default)
    return tuple(found)
