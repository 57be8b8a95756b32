"""Replace attributes of an engine, its optimizer, modules and parameters, and undo it at engine.destroy().

DeepSpeed's methods are replaced in hooks.py, those of zero.Init too. Undone earlier: what masters.py replaces while an
engine is made, micro_step.py and graphs/capture.py for a capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import deepspeed
from deepspeed.accelerator import get_accelerator

_UNDO = "_ds_fp8_undo"
_MISSING = object()


def on_destroy(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` when the engine is destroyed, after DeepSpeed's destroy(); the one added last is called first."""
    if _UNDO not in vars(engine):
        setattr(engine, _UNDO, ExitStack())
        destroy = engine.destroy

        def destroy_and_restore() -> None:
            try:
                destroy()
            finally:
                vars(engine)[_UNDO].close()

        replace(engine, engine, "destroy", destroy_and_restore)
    # ExitStack unwinds in reverse: the last replacement of an attribute is undone first.
    vars(engine)[_UNDO].callback(callback)


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


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable until the end."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def disable_shm_build() -> None:
    """Keep DeepSpeed, on a CPU, from compiling its shared-memory all-reduce when ranks meet.

    That takes a C++ compiler and a minute, and only inference calls it. Call before deepspeed.init_distributed.
    """
    if get_accelerator().device_name() == "cpu":
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
