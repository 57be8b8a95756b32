"""Export of a live engine, as a folder or weight by weight; an error of one rank is raised on all."""

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
from ds_fp8.export.on_all_ranks import on_all_ranks
from ds_fp8.export.plan import Entry, Plan, Tensors, make_plan, named_tensors, plan_to_serve
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
    """Write a Hugging Face folder of an engine's model, between two steps. Collective.

    Rank 0 writes. One weight at a time is unsharded, FP8 weights as the quantized weights of training.

    The arguments are those of `export_checkpoint`. Raises UserError on all ranks, whichever of them fails.
    """
    folder, model = Path(folder), engine.module
    plan = None

    def check() -> None:
        nonlocal plan
        check_target(folder, force)
        plan = make_plan(model, _in_bf16(engine), engine.fp8.config.linear, layout)

    on_all_ranks(check)
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} has no configuration to write", remedy="train and export a model of transformers"
        )
    progress = Progress(f"export {folder.name}", len(plan.entries))
    weights = _unsharded(engine, plan, progress)

    def write() -> None:
        if dist.get_rank() != 0:
            deque(weights, maxlen=0)  # joins every all-gather
            return
        model.config.architectures = [type(model).__name__]
        try:
            write_folder(folder, plan, weights, model.config, model.generation_config, tokenizer, source, shard_bytes)
        except Exception:
            deque(weights, maxlen=0)  # the other ranks wait in the remaining all-gathers
            raise

    on_all_ranks(write)  # no rank reads the folder before rank 0 has renamed it
    return plan


def _unsharded(
    engine: deepspeed.DeepSpeedEngine, plan: Plan, progress: Progress | None = None
) -> Iterator[tuple[Entry, Tensors]]:
    """Yield the unsharded tensors of a plan. Collective; at the end all ranks raise the error of one."""
    failures = []
    for entry, tensors in unsharded_entries(engine, plan):
        if isinstance(tensors, Exception):
            failures.append(tensors)
        else:
            yield entry, tensors
        if progress is not None:
            progress.add(1)

    def raise_first() -> None:
        if failures:
            raise failures[0]

    on_all_ranks(raise_first)


def served_weights(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Iterate over the weights of a live engine as servers load them, for rollouts in reinforcement learning.

    Collective: all ranks iterate to the end, between two steps. FP8 weights are unsharded as the quantized weights of
    training, half the bytes of BF16. All weights are BF16 if no layout of servers holds FP8 weights of this granularity
    and scale, or any layer of this model.

    Yields:
        (name, data, scales): float8_e4m3fn [R, C] and FP32 scales to multiply by, of 128x128 blocks, rows or the
        tensor; or (name, BF16 tensor, None), a stored buffer in its own type. Names are those of a folder, with one
        matrix an expert.

    Raises:
        UserError: on all ranks, at the end, for the error of one.
    """
    for entry, tensors in _unsharded(engine, served_plan(engine)):
        for name, tensor in entry.stored(tensors).items():
            quantized = isinstance(tensor, QuantizedTensor)
            yield (name, tensor.data, tensor.scale) if quantized else (name, tensor, None)


def served_tensors(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of a plan by the names of a folder, scales among them. Collective."""
    for entry, tensors in _unsharded(engine, plan):
        for name, tensor in entry.stored(tensors).items():
            yield from named_tensors(name, tensor, plan.layout).items()


def served_plan(engine: deepspeed.DeepSpeedEngine) -> Plan:
    """Return the plan of `served_weights`: names, types and shapes."""
    return plan_to_serve(engine.module, _in_bf16(engine), engine.fp8.config.linear)


def plan_in_fp8(engine: deepspeed.DeepSpeedEngine) -> Plan | None:
    """Return the plan of the FP8 folder that `ds-fp8 export` writes of a model, or None where it refuses to."""
    linear = engine.fp8.config.linear
    layout = "fp8" if linear.weight.granularity == "128x128" else "compressed-tensors"
    try:
        return make_plan(engine.module, _in_bf16(engine), linear, layout)
    except UserError:
        return None


def _in_bf16(engine: deepspeed.DeepSpeedEngine) -> dict[str, str]:
    """Return the linear layers and weights of experts in BF16 in training, with the reason."""
    state = engine.fp8
    left = {} if state.conversion is None else dict(state.conversion.left)
    for name, linear in linear_layers(engine.module).items():
        if not isinstance(linear, FP8Linear):
            left.setdefault(name, "in BF16 in training")
    group, parameters = state.weights, dict(engine.module.named_parameters())
    for name in names_of_experts(engine.module):
        if group is None or not group.in_fp8(parameters[name]):
            left.setdefault(name, "in BF16 in training")
    return left


def unsharded_entries(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[Entry, Any]]:
    """Unshard the parameters of a plan one by one. Collective: all ranks iterate to the end.

    Yields:
        An entry and its tensors by name, as training computes with them; or this rank's error, to be raised by
        `on_all_ranks` when no rank is in an all-gather.
    """
    parameters = stored_buffers(engine.module) | dict(engine.module.named_parameters())
    owners = {name: linear for name, linear in linear_layers(engine.module).items() if isinstance(linear, FP8Linear)}
    group = engine.fp8.weights

    def unshard(entry: Entry, name: str, in_fp8: bool) -> Any:
        if in_fp8:
            return group.unsharded(parameters[name])
        with deepspeed.zero.GatheredParameters([parameters[name]]), torch.no_grad():
            # A copy: the unsharded memory is freed at the end of the context.
            weight = parameters[name].detach().to(entry.form.dtype, copy=True)
        return owners[name.removesuffix(".weight")].recipe.quantize_weight(weight) if entry.quantized else weight

    for entry in plan.entries:
        # All-gathered as the quantized weights of training; others from BF16, quantized as their FP8 layers do.
        in_fp8 = entry.quantized and group is not None and group.in_fp8(parameters[entry.name])
        tensors = {n: _joined(partial(unshard, entry, n, in_fp8), parameters[n]) for n in entry.form.shapes}
        error = next((tensor for tensor in tensors.values() if isinstance(tensor, Exception)), None)
        yield entry, error or tensors


def _joined(unshard: Callable[[], T], parameter: torch.nn.Parameter) -> T | Exception:
    """Return the result of `unshard`, or its error; this rank takes part in the collective with either.

    An error before the collective (out of memory) would leave the other ranks waiting: this rank frees memory and
    joins. If that fails, too, the process ends, and its launcher ends the others.
    """
    # Neither changes for an error before the collective; an unsharded weight has none, and is a shard afterwards.
    before = _collectives(), parameter.shape
    try:
        return unshard()
    except Exception as error:
        if (_collectives(), parameter.shape) == before:
            traceback.clear_frames(error.__traceback__)  # frames hold allocated tensors
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            unshard()
        return error


def _collectives() -> int:
    groups = distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group is not None)
