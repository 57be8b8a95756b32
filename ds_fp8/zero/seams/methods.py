"""Replacement of DeepSpeed's methods, each once, by the handler that gets its calls.

A handler is called with DeepSpeed's own method before the arguments: it decides when that runs, and whether it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

import deepspeed
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from ds_fp8.zero.deepspeed_versions import AVERAGE_GRADIENTS, GRADIENT_WRITES
from ds_fp8.zero.seams.installation import LIFECYCLE, on_destroy, replace
from ds_fp8.zero.seams.parameters import is_zero_parameter

OF_ENGINE = {"save_checkpoint": "save_checkpoint", "load_checkpoint": "load_checkpoint"}
OF_OPTIMIZER = {"step": "step", "set_full_hp_param": "write_state", "set_local_hp_param": "write_local_state"}
BELOW_ZERO3 = OF_OPTIMIZER | {"_link_all_hp_params": "link_state"}
OF_ZERO3 = OF_OPTIMIZER | {
    "reduce_ready_partitions_and_remove_grads": "gradient_ready",
    AVERAGE_GRADIENTS: "reduce",
    "partition_grads": "accumulate",
    "independent_gradient_partition_epilogue": "end_backward",
    **dict.fromkeys(GRADIENT_WRITES, "write_gradients"),
    "load_state_dict": "write_masters",
    "_restore_from_bit16_weights": "write_masters",
    "offload_states": "offload",
    "reload_states": "reload",
}
OF_PARAMETERS = {"all_gather_coalesced": "gather"}
"""Closures that DeepSpeed puts on every parameter of ZeRO-3; fetches of one engine call them."""
OF_LISTS = {"_all_gather": "gather_bf16", "_partition": "release"}
"""Methods of zero.Init behind the parameters' closures, which get lists of parameters of any engines."""
_engines_alive = 0
"""Engines whose parameters' lists are handed to them."""


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")


def replace_methods(engine: deepspeed.DeepSpeedEngine, handlers: object) -> None:
    """Let methods of `handlers`, by the names of the tables above, take the calls until the engine is destroyed.

    Args:
        engine: Engine of any ZeRO stage.
        handlers: Has a method of every name in the tables.
    """
    replace(engine, engine, LIFECYCLE, handlers)
    for name, handler in OF_ENGINE.items():
        replace(engine, engine, name, _handled(getattr(handlers, handler), getattr(engine, name)))
    if has_optimizer(engine):
        names = OF_ZERO3 if engine.zero_optimization_stage() == 3 else BELOW_ZERO3
        for name, handler in names.items():
            if hasattr(engine.optimizer, name):  # below stage 3 not all are there
                handled = _handled(getattr(handlers, handler), getattr(engine.optimizer, name))
                replace(engine, engine.optimizer, name, handled)
    for parameter in filter(is_zero_parameter, engine.module.parameters()):
        for name, handler in OF_PARAMETERS.items():
            replace(engine, parameter, name, _handled(getattr(handlers, handler), getattr(parameter, name)))
        replace(engine, parameter, LIFECYCLE, handlers)
    if engine.zero_optimization_partition_weights():
        _hand_out_lists(engine)


def _hand_out_lists(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let every engine's handlers take the lists of its parameters, until the last such engine is destroyed.

    GatheredParameters hands the parameters of several engines to the closure of the first, which may be of an engine
    without FP8. So the methods of the class are replaced that all closures call: without effect on parameters that no
    handlers own.
    """
    global _engines_alive
    if _engines_alive == 0:
        for name, handler in OF_LISTS.items():
            setattr(Init, name, _handed_out(getattr(Init, name), handler))
    _engines_alive += 1

    def forget() -> None:
        global _engines_alive
        _engines_alive -= 1
        if _engines_alive == 0:
            for name in OF_LISTS:
                setattr(Init, name, getattr(Init, name).__wrapped__)

    on_destroy(engine, forget)


def _handed_out(stock: Callable[..., Any], handler: str) -> Callable[..., Any]:
    def method(init: Init, param_list: Iterable[nn.Parameter], *args, **kwargs):
        # In the order of the list, which is one on all ranks: what handlers do is collective. Stock engines come last.
        by_owner: dict[int, tuple[Any, list[nn.Parameter]]] = {}
        stock_parameters = []
        for parameter in param_list:
            owner = vars(parameter).get(LIFECYCLE)
            if owner is None:
                stock_parameters.append(parameter)
            else:
                by_owner.setdefault(id(owner), (owner, []))[1].append(parameter)
        own = functools.partial(stock, init)
        results = [getattr(owner, handler)(own, some, *args, **kwargs) for owner, some in by_owner.values()]
        if stock_parameters:
            results.append(own(stock_parameters, *args, **kwargs))
        handles = [handle for result in results if result is not None for handle in result]
        return handles if any(result is not None for result in results) else None

    return functools.wraps(stock)(method)


def _handled(handler: Callable[..., Any], stock: Callable[..., Any], *first: object) -> Callable[..., Any]:
    def method(*args, **kwargs):
        return handler(stock, *first, *args, **kwargs)

    return update_wrapper(method, stock, assigned=())  # with its signature, which DeepSpeed's callers read
