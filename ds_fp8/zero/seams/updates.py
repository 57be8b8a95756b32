"""Methods of the optimizer after which masters or moments may differ, and steps."""

from __future__ import annotations

from collections.abc import Callable

import deepspeed
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.zero import deepspeed_versions
from ds_fp8.zero.seams.installation import replace

_MOMENT_WRITES = ("set_full_hp_param", "set_local_hp_param")


def _around_method(
    engine: deepspeed.DeepSpeedEngine, name: str, before: Callable[[], None] | None, after: Callable[[], None]
) -> None:
    """Call `before`, if there is one, and `after` around a method of the engine's optimizer."""
    method = getattr(engine.optimizer, name)

    def wrapped(*args, **kwargs):
        if before is not None:
            before()
        result = method(*args, **kwargs)
        after()
        return result

    replace(engine, engine.optimizer, name, wrapped)


def call_around(
    engine: deepspeed.DeepSpeedEngine,
    name: str,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Call `before` and `after` around a method of the engine's optimizer, until the engine is destroyed.

    Args:
        engine: Engine with an optimizer.
        name: Name of the method.
        before: Called before the method, if given.
        after: Called after the method has returned, if given; not if it raised.
    """
    _around_method(engine, name, before, after or (lambda: None))


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")


def around_master_update(
    engine: deepspeed.DeepSpeedEngine,
    before: Callable[[], None],
    after_step: Callable[[], None],
    after: Callable[[], None],
    after_one: Callable[[torch.nn.Parameter], None],
) -> None:
    """Call functions around everything that may change the FP32 master shards of a ZeRO-3 engine.

    Args:
        engine: ZeRO-3 engine; nothing is installed on one without an optimizer.
        before: Called before the masters may change.
        after_step: Called after a step, but not after one that was left out because of an overflow, on all ranks alike.
        after: Called after anything else that may change all of them.
        after_one: Called with the parameter whose masters the user overwrote
            (safe_set_full_fp32_param and its kin).
    """

    def one(method: Callable) -> Callable:
        def wrapped(value, param, optim_state_key=None):
            if optim_state_key is None:
                before()
            result = method(value, param, optim_state_key)
            if optim_state_key is None:
                after_one(param)
            return result

        return wrapped

    def after_taken_step() -> None:
        if not engine.optimizer.overflow:
            after_step()

    if has_optimizer(engine):
        for name in deepspeed_versions.MASTER_UPDATES:
            if name in _MOMENT_WRITES:
                replace(engine, engine.optimizer, name, one(getattr(engine.optimizer, name)))
            else:
                _around_method(engine, name, before, after_taken_step if name == "step" else after)


def on_step(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` after every optimizer step.

    Args:
        engine: Engine of any ZeRO stage; nothing is installed on one without an optimizer.
        callback: Called without arguments, also after a step that DeepSpeed left out because of an overflow.
    """
    if has_optimizer(engine):
        _around_method(engine, "step", None, callback)


def refuse_state_offload(engine: deepspeed.DeepSpeedEngine) -> None:
    """Make engine.offload_states say what to exclude: DeepSpeed moves masters and moments of its FusedAdam alone."""
    method = engine.optimizer.offload_states

    def offload_states(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except AssertionError as error:
            raise UserError(
                f"engine.offload_states cannot move the masters and moments of ds_fp8.optim.AdamW ({error})",
                key="optimizer",
                remedy="leave optim_states and hp_params out: include=[OffloadStateTypeEnum.lp_params, "
                "OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer]",
            ) from error

    replace(engine, engine.optimizer, "offload_states", offload_states)


def before_moment_write(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` before the user overwrites a part of a moment (safe_set_..._state).

    Args:
        engine: ZeRO-3 engine with an optimizer.
        callback: Called without arguments.
    """

    def announced(method: Callable) -> Callable:
        def wrapped(value, param, optim_state_key=None):
            if optim_state_key is not None:
                callback()
            return method(value, param, optim_state_key)

        return wrapped

    for name in _MOMENT_WRITES:
        if hasattr(engine.optimizer, name):
            replace(engine, engine.optimizer, name, announced(getattr(engine.optimizer, name)))
