"""What is installed on an engine, its optimizer, modules and parameters; engine.destroy() takes it off again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import deepspeed
from deepspeed.accelerator import get_accelerator

HOOKS = "_ds_fp8_hooks"  # attribute of an engine and its parameters
_INSTALLED = "_ds_fp8_installed"
_MISSING = object()


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
    vars(engine)[HOOKS].after_step.append(callback)


def before_load(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` on all ranks before the engine loads a checkpoint."""
    vars(engine)[HOOKS].before_load.append(callback)


def disable_shm_build() -> None:
    """Keep DeepSpeed, on a CPU, from compiling its shared-memory all-reduce when ranks meet.

    That takes a C++ compiler and a minute, and only inference calls it. Call before deepspeed.init_distributed.
    """
    if get_accelerator().device_name() == "cpu":
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")
