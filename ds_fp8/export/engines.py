"""Folders, and weights one by one, from a live engine; what one rank cannot do ends all of them with its reason."""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.export.folder import SHARD_BYTES, Progress, check_target, write_folder
from ds_fp8.export.plan import Entry, Numbers, Plan, make_plan, named_tensors, plan_to_serve
from ds_fp8.export.together import together
from ds_fp8.layers.experts.selection import names_of_experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.published import stored_buffers
from ds_fp8.layers.selection import linear_layers

T = TypeVar("T")


def export_engine(
    engine: deepspeed.DeepSpeedEngine,
    folder: Path | str,
    *,
    layout: str = "fp8",
    tokenizer: Callable[[Path], object] | None = None,
    force: bool = False,
    source: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Write a Hugging Face folder of the model an engine trains, as it is between two steps. Collective.

    Rank 0 writes; one weight at a time is gathered, those in FP8 as the codes that training computes with.

    The arguments are those of `export_checkpoint`. Raises UserError on all ranks, whichever of them fails.
    """
    folder, model = Path(folder), engine.module
    plan = None

    def check() -> None:
        nonlocal plan
        check_target(folder, force)
        plan = make_plan(model, _left(engine), engine.fp8.config.linear, layout)

    together(check)
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} has no configuration to write", remedy="train and export a model of transformers"
        )
    progress = Progress(f"export {folder.name}", len(plan.entries))
    failures: list[Exception] = []
    weights = _gathered(engine, plan, failures, progress)

    def write() -> None:
        if dist.get_rank() != 0:
            deque(weights, maxlen=0)  # takes part in every gather and keeps nothing
            return
        model.config.architectures = [type(model).__name__]
        try:
            write_folder(folder, plan, weights, model.config, model.generation_config, tokenizer, source, shard_bytes)
        except Exception as error:
            failures.append(error)
            deque(weights, maxlen=0)  # the other ranks wait in the gathers that are left
            raise

    # No rank goes on, or reads the folder, before rank 0 has renamed it.
    together(write)
    return plan


def _gathered(
    engine: deepspeed.DeepSpeedEngine,
    plan: Plan,
    failures: list[Exception] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Entry, Numbers]]:
    """Yield the numbers of a plan. Collective; at the end all ranks raise what failed on one, before it is kept."""
    failures = [] if failures is None else failures
    for entry, numbers in gathered(engine, plan):
        if isinstance(numbers, Exception):
            failures.append(numbers)
        else:
            yield entry, numbers
        if progress is not None:
            progress.add(1)

    def raise_first() -> None:
        if failures:
            raise failures[0]

    together(raise_first)


def served_weights(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Iterate over the weights of a live engine as servers load them, for rollouts in reinforcement learning.

    Collective: all ranks iterate to the end, between two steps. Weights of FP8 layers are gathered as the codes that
    training computes with, half the bytes of BF16.

    Yields:
        (name, codes, scales): float8_e4m3fn codes [R, C] and FP32 scales to multiply by, of 128x128 blocks, rows or the
        tensor as training cast; or (name, BF16 tensor, None); stored buffers in their own type. All by the names of a
        folder, of experts each matrix by itself. All weights are in BF16 where servers have no layout for FP8 weights
        of this cast, or for any layer of this model.

    Raises:
        UserError: on all ranks and at the end, what failed on one.
    """
    for entry, whole in _gathered(engine, served_plan(engine)):
        for name, numbers in entry.stored(whole).items():
            quantized = isinstance(numbers, QuantizedTensor)
            yield (name, numbers.data, numbers.scale) if quantized else (name, numbers, None)


def served_tensors(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the same tensor by tensor, scales under the names of a folder. Collective."""
    for entry, whole in _gathered(engine, plan):
        for name, numbers in entry.stored(whole).items():
            yield from named_tensors(name, numbers, plan.layout).items()


def served_plan(engine: deepspeed.DeepSpeedEngine) -> Plan:
    """Return the contents of `served_weights`: names, types and shapes, without numbers."""
    return plan_to_serve(engine.module, _left(engine), engine.fp8.config.linear)


def _left(engine: deepspeed.DeepSpeedEngine) -> dict[str, str]:
    """Return the linear layers and weights of experts that are in BF16 in training, with the reason."""
    state = engine.fp8
    left = {} if state.conversion is None else dict(state.conversion.left)
    for name, linear in linear_layers(engine.module).items():
        if not isinstance(linear, FP8Linear):
            left.setdefault(name, "in BF16 in training")
    gather, parameters = state.weights, dict(engine.module.named_parameters())
    for name in names_of_experts(engine.module):
        if gather is None or not gather.in_fp8(parameters[name]):
            left.setdefault(name, "in BF16 in training")
    return left


def gathered(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[Entry, Any]]:
    """Gather the parameters of a plan one by one. Collective: all ranks iterate to the end.

    Yields:
        An entry, and its numbers as training computes with them, by name; or the error that this rank met at it, to be
        raised by `together` once no rank is in a gather.
    """
    parameters = stored_buffers(engine.module) | dict(engine.module.named_parameters())
    owners = {name: linear for name, linear in linear_layers(engine.module).items() if isinstance(linear, FP8Linear)}
    gather = engine.fp8.weights

    def numbers_of(entry: Entry, name: str, in_fp8: bool) -> Any:
        if in_fp8:
            return gather.unsharded(parameters[name])
        with deepspeed.zero.GatheredParameters([parameters[name]]), torch.no_grad():
            # A copy: the gathered memory is freed on leaving the context.
            numbers = parameters[name].detach().to(entry.form.dtype, copy=True)
        return owners[name.removesuffix(".weight")].recipe.cast_weight(numbers) if entry.quantized else numbers

    for entry in plan.entries:
        # The very codes that training multiplies by, gathered in one byte a parameter; the others are cast from BF16,
        # as their layers do it.
        in_fp8 = entry.quantized and gather is not None and gather.in_fp8(parameters[entry.name])
        found = {n: _joined(partial(numbers_of, entry, n, in_fp8), parameters[n]) for n in entry.form.shapes}
        error = next((numbers for numbers in found.values() if isinstance(numbers, Exception)), None)
        yield entry, error or found


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
    groups = distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group is not None)
