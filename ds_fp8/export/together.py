"""Work that every rank does and any of them may fail at, without leaving the others in a collective."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d

from ds_fp8.config.errors import UserError, as_user_error
from ds_fp8.export.plan import Entry, Plan
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.selection import linear_layers

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
    """Return problem, remedy and key of what failed on this rank, for the others."""
    known = as_user_error(error)
    if known is not None:
        return f"{known.problem} ({known.file})" if known.file else known.problem, known.remedy, known.key
    return f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}", "see its traceback", ""


def gathered(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[Entry, Any]]:
    """Gather the parameters of a plan one by one. Collective: all ranks iterate to the end.

    Yields:
        An entry, and its numbers as training computes with them, a QuantizedTensor for FP8; or the error that this rank
        met at it, to be raised by `together` once no rank is in a gather.
    """
    parameters = dict(engine.module.named_parameters())
    owners = {name: linear for name, linear in linear_layers(engine.module).items() if isinstance(linear, FP8Linear)}
    gather = engine.fp8.weights

    def numbers_of(entry: Entry, parameter: torch.nn.Parameter, in_fp8: bool) -> Any:
        if in_fp8:
            return gather.whole(parameter)
        with deepspeed.zero.GatheredParameters([parameter]), torch.no_grad():
            # A copy: the gathered memory is freed on leaving the context.
            numbers = parameter.detach().to(torch.bfloat16, copy=True)
        return owners[entry.name.removesuffix(".weight")].recipe.cast_weight(numbers) if entry.quantized else numbers

    for entry in plan.entries:
        parameter = parameters[entry.name]
        # The very codes that training multiplies by, gathered in one byte a parameter; the others are cast from BF16,
        # as their layers do it.
        in_fp8 = entry.quantized and gather is not None and gather.in_fp8(parameter)
        yield entry, _joined(partial(numbers_of, entry, parameter, in_fp8), parameter)


def _joined(gather: Callable[[], T], parameter: torch.nn.Parameter) -> T | Exception:
    """Return what is gathered, or the error this rank met; it takes part in the collective in either case.

    An error from before the collective began, out of memory say, leaves the other ranks waiting: memory is made, and
    the collective joined for their sake. Should that fail, too, the process has to end, and its launcher the others.
    """
    # A weight that is whole on all ranks is not gathered, and is a shard afterwards.
    before = _collectives(), parameter.shape
    try:
        return gather()
    except Exception as error:
        if (_collectives(), parameter.shape) == before:
            traceback.clear_frames(error.__traceback__)  # they hold what it had allocated
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            gather()
        return error


def _collectives() -> int:
    """Return how many collectives this process has begun, in all its groups."""
    groups = distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group is not None)
