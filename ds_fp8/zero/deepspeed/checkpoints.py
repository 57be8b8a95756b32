"""Files of an engine's checkpoints, and whole state dicts.

What is read never runs code from the files: a file of torch.save is a pickle, which can name any function to be called.
torch's own reader of tensors and plain values (`weights_only`) refuses that. It knows the classes of DeepSpeed
that its checkpoints contain, and of those of values that are usual in client states.
"""

from __future__ import annotations

import copyreg
import pickle
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_fp8.config.errors import UserError
from ds_fp8.zero.deepspeed.patches import environment

# Classes that DeepSpeed puts into checkpoints beside tensors and plain values: holders of numbers. For good:
# torch.serialization.safe_globals would take them from other threads on leaving.
torch.serialization.add_safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address])
# What programs put there: arguments, paths, numbers, arrays and random states of numpy (1 and 2 name them differently).
torch.serialization.add_safe_globals([Namespace, SimpleNamespace, PosixPath, np.ndarray, np.dtype])
torch.serialization.add_safe_globals([type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + "efdgFDG"])
for _make in (np.float64(0).__reduce__()[0], np.array(0).__reduce__()[0]):
    names = [f"numpy.{core}.multiarray.{_make.__name__}" for core in ("core", "_core")]
    torch.serialization.add_safe_globals([(_make, name) for name in names])

# Python 3.11.0 to 3.11.3 pickle members of an enumeration through getattr, which no reader of plain values may call.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))


_READ_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError)


class _Collector(CheckpointEngine):
    """Takes what DeepSpeed would write into files, by file name."""

    def __init__(self, stock: CheckpointEngine) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.files: dict[str, Any] = {}
        self._stock = stock

    def create(self, info: object) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._stock.load(path, map_location)

    def commit(self, info: object) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return self._stock.is_data_parallel_writer(dp_rank)


def checkpoint_files(
    engine: deepspeed.DeepSpeedEngine, tag: str, client_state: dict[str, Any], without_frozen: bool = False
) -> dict[str, Any]:
    """Return the contents of engine.save_checkpoint's files on this rank, by name. Nothing is written. Collective.

    Tensors are those in use: copy or write them before the next step.
    """
    stock = engine.checkpoint_engine
    engine.checkpoint_engine = _Collector(stock)
    # It would write a file into a folder that does not exist.
    engine._copy_recovery_script = lambda folder: None
    try:
        engine.save_checkpoint(
            "checkpoint", tag, client_state, save_latest=False, exclude_frozen_parameters=without_frozen
        )
        return engine.checkpoint_engine.files
    finally:
        engine.checkpoint_engine = stock
        del engine._copy_recovery_script


def copy_recovery_scripts(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Put the scripts beside the checkpoints with which DeepSpeed turns one into a state dict without an engine."""
    for script in folder.glob("*.py"):
        if script.is_symlink():  # whose target would be written to
            script.unlink()
    engine._copy_recovery_script(str(folder))


def gathers_of_files(engine: deepspeed.DeepSpeedEngine, over_all: bool) -> list[tuple[Any, str]]:
    """Return the methods of ZeRO-3 that gather from ranks between files, with their owners.

    `over_all`: whether the engine spans all ranks, which consolidate weights together then.
    """
    # Between the files of a checkpoint and DeepSpeed's barrier.
    found = [(engine.optimizer, "checkpoint_event_epilogue")]
    found += [(engine, "_zero3_consolidated_16bit_state_dict")] if over_all else []
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def consolidated_state_dict(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
    """Return the whole BF16 state dict on rank 0's CPU, None on the other ranks. Collective in ZeRO stage 3."""
    if engine.zero_optimization_partition_weights():
        return engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() != 0:
        return None
    return {name: tensor.cpu() for name, tensor in engine.module.state_dict().items()}


@contextmanager
def tensors_only(source: str | Path, key: str = "", allow: str = "") -> Iterator[None]:
    """Let every torch.load within read tensors and plain values alone, also where the caller asks for more.

    UserError names `source`, the file or folder, where it holds anything else.
    """
    try:
        with environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{source} is not read, because it holds more than tensors and plain values: {_reason(error)}",
            key=key,
            remedy=f"use a checkpoint from a source that you trust{allow}",
        ) from None


def load_tensors(file: Path) -> Any:
    """Return what a file of torch.save holds, mapped into CPU memory.

    ValueError if it is damaged, or holds more than tensors and plain values; nothing in it was called.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"holds more than tensors and plain values: {_reason(error)}") from None
    except _READ_ERRORS as error:
        raise ValueError(f"is not a file of tensors: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return one line on why torch refused a pickle, without its advice to allow more."""
    name = re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error))
    if name:
        return f"it names {name[1]}"
    # Behind torch's advice, where it gives any.
    return " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split())[:200] or type(error).__name__
