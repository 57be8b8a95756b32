"""Folders, and weights one by one, from a live engine."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from transformers import PreTrainedModel

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError, as_user_error
from ds_fp8.export.folder import SHARD_BYTES, NamedWeight, check_target, write_folder
from ds_fp8.export.layouts import SCALE_SUFFIX
from ds_fp8.export.plan import Plan, make_plan, plan_to_serve
from ds_fp8.layers.experts.selection import names_of_experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.selection import linear_layers
from ds_fp8.zero.seams import full_shape


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

    Args:
        engine: An engine of ds_fp8.initialize around a model of transformers.
        folder: Where to write.
        layout: "bf16", "fp8" or "compressed-tensors".
        tokenizer: Saves the tokenizer into a folder.
        force: Replace an existing folder.
        source: What was trained, for the model card.
        shard_bytes: Size limit of a file of weights.

    Returns:
        What was written: the tensors in FP8, and the layers in BF16 with reasons.

    Raises:
        UserError: the model is not a PreTrainedModel or has adapters, the layout cannot hold its weights, or the folder
            exists or cannot be written. On all ranks, whichever of them finds it.
    """
    folder, model = Path(folder), engine.module
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} has no configuration to write",
            remedy="export a model of transformers; merge adapters first",
        )
    with _alike():
        check_target(folder, force)
        plan = make_plan(model, _left(engine), engine.fp8.config.linear, layout, full_shape)
    weights = _gathered(engine, plan)
    # No rank goes on, or reads the folder, before rank 0 has renamed it.
    with _alike():
        if dist.get_rank() == 0:
            model.config.architectures = [type(model).__name__]
            try:
                write_folder(
                    folder,
                    plan,
                    weights,
                    model.config,
                    generation=model.generation_config,
                    tokenizer=tokenizer,
                    source=source,
                    shard_bytes=shard_bytes,
                )
            except Exception:
                # The other ranks wait in the gathers that are left.
                deque(weights, maxlen=0)
                raise
        else:
            # Other ranks take part in every gather and keep nothing.
            deque(weights, maxlen=0)
    return plan


@contextlib.contextmanager
def _alike() -> Iterator[None]:
    """Raise on every rank what fails on one. Collective at its end: no rank waits for one that has failed."""
    own = None
    try:
        yield
    except Exception as error:
        own = error
    told: list[tuple[str, str, str] | None] = [None] * dist.get_world_size()
    if dist.get_world_size() > 1:
        torch.distributed.all_gather_object(told, None if own is None else _words(own))
    if own is not None:
        raise own
    found = next((words for words in told if words is not None), None)
    if found is not None:
        raise UserError(found[0], remedy=found[1], key=found[2])


def _words(error: Exception) -> tuple[str, str, str]:
    """Return problem, remedy and key of what failed on this rank, for the others."""
    known = as_user_error(error)
    if known is not None:
        return f"{known.problem} ({known.file})" if known.file else known.problem, known.remedy, known.key
    return f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}", "see its traceback", ""


def served_weights(
    engine: deepspeed.DeepSpeedEngine,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Iterate over the weights of a live engine as servers load them, for rollouts in reinforcement learning.

    Collective: all ranks iterate to the end, between two steps. Weights of FP8 layers are gathered as the codes that
    training computes with, half the bytes of BF16.

    Yields:
        (name, codes, scales): float8_e4m3fn codes [R, C] and FP32 scales to multiply by, of 128x128 blocks, rows or the
        tensor as training cast; or (name, BF16 tensor, None). Of experts each matrix by itself, by its name. All are in
        BF16 where servers have no layout for FP8 weights of this cast, or for any layer of this model.
    """
    return _served(engine, served_plan(engine))


def _served(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    entries = {entry.name: entry for entry in plan.entries}
    for name, whole in _gathered(engine, plan):
        for stored, numbers in entries[name].stored(whole).items():
            quantized = isinstance(numbers, QuantizedTensor)
            yield (stored, numbers.data, numbers.scale) if quantized else (stored, numbers, None)


def served_plan(engine: deepspeed.DeepSpeedEngine) -> Plan:
    """Return the contents of `served_weights`: names, types and shapes, without numbers."""
    return plan_to_serve(engine.module, _left(engine), engine.fp8.config.linear, full_shape)


def served_tensors(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the same tensor by tensor, scales under the names of a folder. Collective."""
    for name, numbers, scales in _served(engine, plan):
        yield name, numbers
        if scales is not None:
            yield name + SCALE_SUFFIX[plan.layout], scales.contiguous()


def _left(engine: deepspeed.DeepSpeedEngine) -> dict[str, str]:
    """Return the linear layers and weights of experts that are in BF16 in training, with the reason."""
    state = engine.fp8
    left = {} if state.conversion is None else dict(state.conversion.left)
    for name, linear in linear_layers(engine.module).items():
        if not isinstance(linear, FP8Linear):
            left.setdefault(name, "in BF16 in training")
    gather, parameters = state.parameter_gather, dict(engine.module.named_parameters())
    for name in names_of_experts(engine.module):
        if gather is None or not gather.gathers(parameters[name]):
            left.setdefault(name, "in BF16 in training")
    return left


def _gathered(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[NamedWeight]:
    parameters = dict(engine.module.named_parameters())
    owners = {name: linear for name, linear in linear_layers(engine.module).items() if isinstance(linear, FP8Linear)}
    gather = engine.fp8.parameter_gather
    for entry in plan.entries:
        parameter = parameters[entry.name]
        # The very codes that training multiplies by, gathered in one byte a parameter; the others are cast from BF16,
        # as their layers do it.
        if entry.quantized and gather is not None and gather.gathers(parameter):
            yield entry.name, gather.whole(parameter)
            continue
        with deepspeed.zero.GatheredParameters([parameter]), torch.no_grad():
            # A copy: the gathered memory is freed on leaving the context.
            numbers = parameter.detach().to(torch.bfloat16, copy=True)
        if entry.quantized:
            numbers = owners[entry.name.removesuffix(".weight")].recipe.cast_weight(numbers)
        yield entry.name, numbers
