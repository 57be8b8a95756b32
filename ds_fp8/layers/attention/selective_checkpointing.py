"""Selective activation checkpointing: recomputed layers save the results of attention, the largest part of long rows.

Saved are the results of OPERATORS: an output of 2 bytes an element (FP8: 1) and 4 bytes a head and token. torch's own
selective checkpointing requires the same operators in forward and recomputation; ZeRO-3 gathers at other places in the
recomputation, and outlier channels are selected in forward alone.
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

FUNCTION = "_gradient_checkpointing_func"  # transformers' attribute: the function that recomputes a layer
KEY = "fp8.activations.keep_attention"
# Forward kernels of attention; a torch release may lack some.
OPERATORS = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "torch_attn::_varlen_attn",
    FORWARD_OPERATOR,
)


def keep_attention(model: nn.Module) -> None:
    """Save the results of attention in the recomputed layers of a model of transformers.

    To be called after `model.gradient_checkpointing_enable()`, which undoes it when called again.

    Raises:
        UserError: The model recomputes no layer, or does so with reentrant checkpointing.
    """
    parts = [part for part in model.modules() if vars(part).get("gradient_checkpointing") and hasattr(part, FUNCTION)]
    for part in parts:
        function = getattr(part, FUNCTION)
        options = getattr(function, "keywords", {})
        if options.get("use_reentrant", True):
            problem = "layers are recomputed by reentrant checkpointing, which saves nothing but their inputs"
            raise UserError(problem, key=KEY, remedy='gradient_checkpointing_enable({"use_reentrant": False})')
        setattr(part, FUNCTION, functools.partial(function, context_fn=_contexts))
    if not parts:
        raise UserError(
            "no layer of this model is recomputed: the results of attention are saved without this key",
            key=KEY,
            remedy="model.gradient_checkpointing_enable() before initialize (in a stage "
            '"model": {"activation_checkpointing": true}), or remove the key',
        )


class _Keep(TorchDispatchMode):
    """Forward: appends the results of OPERATORS to `results`. Recomputation: returns them in their order instead."""

    def __init__(self, results: list[tuple[torch.Tensor, ...]], recomputes: bool) -> None:
        super().__init__()
        self._results, self._recomputes = results, recomputes

    def __enter__(self) -> _Keep:
        if self._recomputes and not self._results:
            _warn()
        self._next = iter(self._results)
        return super().__enter__()

    def __torch_dispatch__(
        self, function: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = function in _known()
        result = next(self._next) if known and self._recomputes else function(*args, **(kwargs or {}))
        if known:
            # detached: autograd gives the returned tensors a history
            kept = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in result)
            if self._recomputes:
                return kept
            self._results.append(kept)
        return result


@functools.lru_cache(maxsize=1)
def _warn() -> None:
    words = "warning: %s saves nothing in a recomputed layer, which calls no kernel with results to save"
    logger.warning(words + ' (attn_implementation "eager" and "flex_attention" have none)', KEY)


def _contexts() -> tuple[_Keep, _Keep]:
    results: list[tuple[torch.Tensor, ...]] = []
    return _Keep(results, False), _Keep(results, True)


@functools.lru_cache(maxsize=1)
def _known() -> tuple[torch._ops.OpOverload, ...]:
    names = (name.split("::") for name in OPERATORS)
    packets = (getattr(getattr(torch.ops, namespace), operator, None) for namespace, operator in names)
    return tuple(packet.default for packet in packets if packet is not None)
