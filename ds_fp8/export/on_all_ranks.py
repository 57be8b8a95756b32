"""Calls on all ranks: the error of one rank is raised on all, and no rank waits in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError, as_user_error

T = TypeVar("T")


def on_all_ranks(
    call: Callable[[], T], words: Callable[[Exception], UserError] | None = None, group: Any = None
) -> list[T]:
    """Return the results of `call` of all ranks, or raise the error of one on all. Collective after the call.

    words: makes a UserError of an error; without it a rank raises its own error unchanged.
    """
    result = own = report = None
    try:
        result = call()
    except Exception as error:
        own = error if words is None or isinstance(error, UserError) else words(error)
        report = _report(own)
    answers: list[Any] = [(result, report)]
    if dist.get_world_size() > 1:
        answers = [None] * dist.get_world_size()
        if group is None:  # another one has a timeout for what it is used for
            watchdog.wait_for_all()
        torch.distributed.all_gather_object(answers, (None if own else result, report), group=group)
    if own is not None:
        raise own
    for _, report in answers:
        if report is not None:
            raise UserError(report[0], remedy=report[1], key=report[2])
    return [result for result, _ in answers]


def _report(error: Exception) -> tuple[str, str, str]:
    known = as_user_error(error)
    if known is not None:
        return f"{known.problem} ({known.file})" if known.file else known.problem, known.remedy, known.key
    return f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}", "see its traceback", ""
