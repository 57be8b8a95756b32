"""What is installed on an engine, its optimizer, modules and parameters; engine.destroy() takes it off again.

Each method of DeepSpeed is replaced once, by the handler of zero/lifecycle.py that gets its calls, with DeepSpeed's own
method before the arguments: the handler decides when that runs, and whether it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

AVERAGE_GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
OF_ENGINE = {"save_checkpoint": "save_checkpoint", "load_checkpoint": "load_checkpoint"}
OF_OPTIMIZER = {"step": "step", "set_full_hp_param": "write_state", "set_local_hp_param": "write_local_state"}
BELOW_ZERO3 = OF_OPTIMIZER | {"_link_all_hp_params": "link_state"}
OF_ZERO3 = OF_OPTIMIZER | {
    "reduce_ready_partitions_and_remove_grads": "gradient_ready",
    AVERAGE_GRADIENTS: "reduce",
    "partition_grads": "accumulate",
    "independent_gradient_partition_epilogue": "end_backward",
    "set_fp32_grad_for_param": "write_gradients",
    "set_local_grad_for_param": "write_gradients",
    "update_fp32_grad_for_param_vectorized": "write_gradients",
    "load_state_dict": "write_masters",
    "state_dict": "read_masters",
    "get_full_hp_param": "read_state",
    "get_local_fp32_param": "read_state",
    "_restore_from_bit16_weights": "refresh_masters",
    "offload_states": "offload",
    "reload_states": "reload",
}
OF_PARAMETERS = {"all_gather_coalesced": "unshard"}
"""Closures that DeepSpeed puts on every parameter of ZeRO-3; fetches of one engine call them."""
OF_LISTS = {"_all_gather": "unshard_bf16", "_partition": "reshard"}
"""Methods of zero.Init behind the parameters' closures, which get lists of parameters of any engines."""

_LIFECYCLE = "_ds_fp8_lifecycle"
_INSTALLED = "_ds_fp8_installed"
_MISSING = object()
_engines_alive = 0
"""Engines whose parameters' lists are handed to them."""


def on_destroy(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` when the engine is destroyed, after DeepSpeed's destroy(); the one added last is called first."""
    if _INSTALLED not in vars(engine):
        setattr(engine, _INSTALLED, ExitStack())
        destroy = engine.destroy

        def destroy_and_uninstall() -> None:
            try:
                destroy()
            finally:
                vars(engine)[_INSTALLED].close()

        replace(engine, engine, "destroy", destroy_and_uninstall)
    # ExitStack unwinds in reverse: the last replacement of an attribute is undone first.
    vars(engine)[_INSTALLED].callback(callback)


def replace(engine: deepspeed.DeepSpeedEngine, owner: object, name: str, value: object) -> None:
    """Set an attribute of an engine, its optimizer, a module or a parameter until destroy() restores it."""
    before = vars(owner).get(name, _MISSING)

    def restore() -> None:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    on_destroy(engine, restore)
    setattr(owner, name, value)


def on_step(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` after every optimizer step, also after one that was left out because of an overflow."""
    vars(engine)[_LIFECYCLE].after_step.append(callback)


def before_load(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` on all ranks before the engine loads a checkpoint."""
    vars(engine)[_LIFECYCLE].before_load.append(callback)


def disable_shm_build() -> None:
    """Keep DeepSpeed, on a CPU, from compiling its shared-memory all-reduce when ranks meet.

    That takes a C++ compiler and a minute, and only inference calls it. Call before deepspeed.init_distributed.
    """
    if get_accelerator().device_name() == "cpu":
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")


def replace_methods(engine: deepspeed.DeepSpeedEngine, handlers: object) -> None:
    """Let methods of `handlers`, by the names of the tables above, take the calls until the engine is destroyed."""
    replace(engine, engine, _LIFECYCLE, handlers)
    tables: list[tuple[object, dict[str, str]]] = [(engine, OF_ENGINE)]
    if has_optimizer(engine):
        tables.append((engine.optimizer, OF_ZERO3 if engine.zero_optimization_stage() == 3 else BELOW_ZERO3))
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            tables.append((parameter, OF_PARAMETERS))
            replace(engine, parameter, _LIFECYCLE, handlers)
    for owner, table in tables:
        for name, handler in table.items():
            if hasattr(owner, name):  # below stage 3 not all are there
                replace(engine, owner, name, _handled(getattr(handlers, handler), getattr(owner, name)))
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
            owner = vars(parameter).get(_LIFECYCLE)
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


def _handled(handler: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args, **kwargs):
        return handler(stock, *args, **kwargs)

    return functools.update_wrapper(method, stock, assigned=())  # with its signature, which DeepSpeed's callers read
