"""Replacement of DeepSpeed's methods, each once, by the handler that gets its calls.

A handler is called with DeepSpeed's own method before the arguments: it decides when that runs, and whether it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import deepspeed

from ds_fp8.zero.deepspeed_versions import AVERAGE_GRADIENTS, GRADIENT_WRITES
from ds_fp8.zero.seams.installation import LIFECYCLE, replace
from ds_fp8.zero.seams.parameters import is_zero_parameter

OF_ENGINE = {"save_checkpoint": "save_checkpoint", "load_checkpoint": "load_checkpoint"}
OF_OPTIMIZER = {"step": "step", "set_full_hp_param": "write_state", "set_local_hp_param": "write_local_state"}
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
OF_PARAMETERS = {"all_gather_coalesced": "gather", "all_gather": "gather_bf16", "partition": "release"}
"""Closures that DeepSpeed puts on every parameter of ZeRO-3; their handlers get the parameter, too."""


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
        names = OF_ZERO3 if engine.zero_optimization_stage() == 3 else OF_OPTIMIZER
        for name, handler in names.items():
            if hasattr(engine.optimizer, name):  # below stage 3 not all are there
                handled = _handled(getattr(handlers, handler), getattr(engine.optimizer, name))
                replace(engine, engine.optimizer, name, handled)
    for parameter in filter(is_zero_parameter, engine.module.parameters()):
        for name, handler in OF_PARAMETERS.items():
            handled = _handled(getattr(handlers, handler), getattr(parameter, name), parameter)
            replace(engine, parameter, name, handled)


def _handled(handler: Callable[..., Any], stock: Callable[..., Any], *first: object) -> Callable[..., Any]:
    def method(*args, **kwargs):
        return handler(stock, *first, *args, **kwargs)

    return update_wrapper(method, stock, assigned=())  # with its signature, which DeepSpeed's callers read
