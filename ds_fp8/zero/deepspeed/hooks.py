"""Every method of DeepSpeed that is replaced, and the method of zero/lifecycle.py that is called in its place.

The replacement gets DeepSpeed's own method before the arguments: it decides when that runs, and whether it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from ds_fp8.zero.deepspeed.methods import LIFECYCLE, has_optimizer, on_destroy, replace

Lifecycle = Any  # of zero/lifecycle.py, which imports this file

_AVERAGE_GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_engines_alive = 0  # engines whose parameters' lists are handed to them


def install(engine: deepspeed.DeepSpeedEngine, life: Lifecycle) -> None:
    """Replace the methods of an engine of any ZeRO stage until it is destroyed."""
    replace(engine, engine, LIFECYCLE, life)
    hook(engine, engine, "save_checkpoint", life.save_checkpoint)
    hook(engine, engine, "load_checkpoint", life.load_checkpoint)
    if has_optimizer(engine):
        _install_on_optimizer(engine, life)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            replace(engine, parameter, LIFECYCLE, life)
            # A closure that DeepSpeed puts on every parameter of ZeRO-3; fetches of one engine call it.
            hook(engine, parameter, "all_gather_coalesced", life.unshard)
    if engine.zero_optimization_partition_weights():
        _hand_out_lists(engine)


def _install_on_optimizer(engine: deepspeed.DeepSpeedEngine, life: Lifecycle) -> None:
    optimizer = engine.optimizer
    hook(engine, optimizer, "step", life.step)
    hook(engine, optimizer, "set_full_hp_param", life.write_state)
    hook(engine, optimizer, "set_local_hp_param", life.write_local_state)
    if engine.zero_optimization_stage() != 3:
        hook(engine, optimizer, "_link_all_hp_params", life.link_state)
        return
    zero = engine.optimizer
    # Gradients, in the order of their way to the shards.
    hook(engine, zero, "reduce_ready_partitions_and_remove_grads", life.gradient_ready)
    hook(engine, zero, _AVERAGE_GRADIENTS, life.reduce_grad)
    hook(engine, zero, "partition_grads", life.accumulate)
    hook(engine, zero, "independent_gradient_partition_epilogue", life.end_backward)
    hook(engine, zero, "set_fp32_grad_for_param", life.write_gradients)
    hook(engine, zero, "set_local_grad_for_param", life.write_gradients)
    hook(engine, zero, "update_fp32_grad_for_param_vectorized", life.write_gradients)
    # Masters and moments.
    hook(engine, zero, "get_full_hp_param", life.read_state)
    hook(engine, zero, "get_local_fp32_param", life.read_state)
    hook(engine, zero, "state_dict", life.read_masters)
    hook(engine, zero, "load_state_dict", life.write_masters)
    hook(engine, zero, "_restore_from_bit16_weights", life.refresh_masters)
    hook(engine, zero, "offload_states", life.offload)
    hook(engine, zero, "reload_states", life.reload)


def hook(engine: deepspeed.DeepSpeedEngine, owner: object, name: str, handler: Callable[..., Any]) -> None:
    """Call `handler` in place of a method, with that method first, until the engine is destroyed."""
    if not hasattr(owner, name):  # below stage 3 not all are there
        return
    stock = getattr(owner, name)

    def method(*args, **kwargs):
        return handler(stock, *args, **kwargs)

    # With its signature, which DeepSpeed's callers read.
    replace(engine, owner, name, functools.update_wrapper(method, stock, assigned=()))


def _hand_out_lists(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let every engine take the lists of its parameters, until the last such engine is destroyed.

    GatheredParameters hands the parameters of several engines to the closure of the first, which may be of an engine
    without FP8. So the methods of the class are replaced that all closures call: without effect on parameters that no
    engine with FP8 owns.
    """
    global _engines_alive
    if _engines_alive == 0:
        Init._all_gather = _handed_out(Init._all_gather, lambda life: life.unshard_bf16)
        Init._partition = _handed_out(Init._partition, lambda life: life.reshard)
    _engines_alive += 1

    def forget() -> None:
        global _engines_alive
        _engines_alive -= 1
        if _engines_alive == 0:
            Init._all_gather, Init._partition = Init._all_gather.__wrapped__, Init._partition.__wrapped__

    on_destroy(engine, forget)


def _handed_out(stock: Callable[..., Any], handler: Callable[[Lifecycle], Callable[..., Any]]) -> Callable[..., Any]:
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
        results = [handler(owner)(own, some, *args, **kwargs) for owner, some in by_owner.values()]
        if stock_parameters:
            results.append(own(stock_parameters, *args, **kwargs))
        handles = [handle for result in results if result is not None for handle in result]
        return handles if any(result is not None for result in results) else None

    return functools.wraps(stock)(method)
