"""Folders, and weights one by one, from a live engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from transformers import PreTrainedModel

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.export.folder import SHARD_BYTES, NamedWeight, Progress, check_target, write_folder
from ds_fp8.export.plan import Plan, adapters_refused, make_plan, named_tensors, plan_to_serve
from ds_fp8.export.together import gathered, together
from ds_fp8.layers.experts.selection import names_of_experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.selection import linear_layers
from ds_fp8.zero.deepspeed.parameters import full_shape


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
    if hasattr(model, "peft_config"):
        # A PeftModel stays one when its adapters are merged.
        raise adapters_refused()
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} has no configuration to write", remedy="train and export a model of transformers"
        )

    plan = None

    def check() -> None:
        nonlocal plan
        check_target(folder, force)
        plan = make_plan(model, _left(engine), engine.fp8.config.linear, layout, full_shape)

    together(check)
    progress = Progress(f"export {folder.name}", len(plan.entries))
    failures: list[Exception] = []
    weights = _weights(engine, plan, failures, progress)

    def write() -> None:
        if dist.get_rank() != 0:
            deque(weights, maxlen=0)  # takes part in every gather and keeps nothing
            return
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
        except Exception as error:
            failures.append(error)
            deque(weights, maxlen=0)  # the other ranks wait in the gathers that are left
            raise

    # No rank goes on, or reads the folder, before rank 0 has renamed it.
    together(write)
    return plan


def _weights(
    engine: deepspeed.DeepSpeedEngine, plan: Plan, failures: list[Exception], progress: Progress
) -> Iterator[NamedWeight]:
    """Yield the weights of a plan. Collective; at the end all ranks raise what failed on one, before it is kept."""
    for entry, numbers in gathered(engine, plan):
        if isinstance(numbers, Exception):
            failures.append(numbers)
        else:
            yield entry.name, numbers
        progress.add(1)
    together(lambda: _raise_first(failures))


def _raise_first(failures: list[Exception]) -> None:
    if failures:
        raise failures[0]


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

    Raises:
        UserError: on all ranks and at the end, what failed on one.
    """
    for name, numbers in _served(engine, served_plan(engine)):
        quantized = isinstance(numbers, QuantizedTensor)
        yield (name, numbers.data, numbers.scale) if quantized else (name, numbers, None)


def served_tensors(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the same tensor by tensor, scales under the names of a folder. Collective."""
    for name, numbers in _served(engine, plan):
        yield from named_tensors(name, numbers, plan.layout).items()


def _served(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> Iterator[NamedWeight]:
    failures: list[Exception] = []
    for entry, whole in gathered(engine, plan):
        if isinstance(whole, Exception):
            failures.append(whole)
        else:
            yield from entry.stored(whole).items()
    together(lambda: _raise_first(failures))


def served_plan(engine: deepspeed.DeepSpeedEngine) -> Plan:
    """Return the contents of `served_weights`: names, types and shapes, without numbers."""
    return plan_to_serve(engine.module, _left(engine), engine.fp8.config.linear, full_shape)


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
