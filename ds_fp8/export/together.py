"""Work that every rank does and any of them may fail at, without leaving the others in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError, as_user_error

T = TypeVar("T")


def together(call: Callable[[], T], words: Callable[[Exception], UserError] | None = None) -> list[T]:
    """Call on every rank and return what each returned; raise on all what failed on one. Collective at its end.

    Args:
        call: What to do.
        words: Makes a UserError of what failed; without it a rank raises its own error as it is.
    """
    result = own = told = None
    try:
        result = call()
    except Exception as error:
        own = error if words is None or isinstance(error, UserError) else words(error)
        told = _words(own)
    answers: list[Any] = [(result, told)]
    if dist.get_world_size() > 1:
        answers = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(answers, (None if own else result, told))
    if own is not None:
        raise own
    for _, told in answers:
        if told is not None:
            raise UserError(told[0], remedy=told[1], key=told[2])
    return [result for result, _ in answers]


def _words(error: Exception) -> tuple[str, str, str]:
    known = as_user_error(error)
    if known is not None:
        return f"{known.problem} ({known.file})" if known.file else known.problem, known.remedy, known.key
    return f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}", "see its traceback", ""
