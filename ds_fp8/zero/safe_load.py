"""Checkpoint loading that never runs code from the files.

A file of torch.save is a pickle, which can name any function to be called. torch's own reader of tensors and plain
values (`weights_only`) refuses that; of DeepSpeed's classes it is told those that its checkpoints contain.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_fp8.config.errors import UserError
from ds_fp8.zero.seams import CHECKPOINT_CLASSES

# For good: torch.serialization.safe_globals would take them from other threads on leaving.
torch.serialization.add_safe_globals(CHECKPOINT_CLASSES)

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_READ_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError)


@contextmanager
def tensors_only(source: Path) -> Iterator[None]:
    """Let every torch.load within read tensors and plain values alone, also where the caller asks for more.

    Args:
        source: the file or folder that is read, for the message.

    Raises:
        UserError: a file holds anything else.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{source} is not read, because it holds more than tensors and plain values: {_reason(error)}",
            remedy="use a checkpoint from a source that you trust",
        ) from None
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def load_tensors(file: Path) -> Any:
    """Return the tensors and plain values in a file of torch.save, mapped into CPU memory rather than read.

    Raises:
        ValueError: the file holds anything else, or is not whole; nothing in it was called.
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
    return " ".join(str(error).split())[:200] or type(error).__name__
