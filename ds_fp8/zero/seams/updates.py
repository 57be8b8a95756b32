"""Methods of the optimizer after which masters or moments may differ, and steps."""

from __future__ import annotations

from collections.abc import Callable

import deepspeed

from ds_fp8.zero import deepspeed_versions
from ds_fp8.zero.seams.installation import replace

_MOMENT_WRITES = ("set_full_hp_param", "set_local_hp_param")


def _around_method(
    engine: deepspeed.DeepSpeedEngine, name: str, before: Callable[[], None] | None, after: Callable[[], None]
) -> None:
    """Call `before` and `after` around a method of the engine's optimizer."""
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
    """Call `before` and `after` around a method of the engine's optimizer, until the engine is destroyed."""
    _around_method(engine, name, before, after or (lambda: None))


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")


def around_master_update(
    engine: deepspeed.DeepSpeedEngine, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Call `before` and `after` around everything that may change the FP32 master shards of a ZeRO-3 engine.

    `after` is not called for a step that DeepSpeed left out because of an overflow, on all ranks alike.
    """

    def after_step() -> None:
        if not engine.optimizer.overflow:
            after()

    if has_optimizer(engine):
        for name in deepspeed_versions.MASTER_UPDATES:
            _around_method(engine, name, before, after_step if name == "step" else after)


def on_step(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` after every optimizer step, of any ZeRO stage."""
    if has_optimizer(engine):
        _around_method(engine, "step", None, callback)


def before_moment_write(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` before the user overwrites a part of a moment of a ZeRO-3 optimizer (safe_set_..._state)."""

    def announced(method: Callable) -> Callable:
        def wrapped(value, param, optim_state_key=None):
            if optim_state_key is not None:
                callback()
            return method(value, param, optim_state_key)

        return wrapped

    for name in _MOMENT_WRITES:
        if hasattr(engine.optimizer, name):
            replace(engine, engine.optimizer, name, announced(getattr(engine.optimizer, name)))
