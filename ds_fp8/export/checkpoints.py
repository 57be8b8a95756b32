"""Folders from ZeRO checkpoints, on a machine without GPUs: one tensor at a time is read from all ranks' files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.files import check_writable
from ds_fp8.config.fp8 import FP8Config, section_of
from ds_fp8.config.presets import AXES
from ds_fp8.export.folder import SHARD_BYTES, Progress, check_target, write_folder
from ds_fp8.export.plan import Entry, Numbers, Plan, adapters_refused, check_architecture, check_layout, make_plan
from ds_fp8.layers.experts.selection import experts_left, names_of_experts
from ds_fp8.layers.published import stored_buffers
from ds_fp8.layers.selection import unconverted
from ds_fp8.zero.deepspeed.checkpoints import tensors_only

_DEFAULT_THRESHOLD = 100_000  # Default of stage3_param_persistence_threshold in DeepSpeed

MAPPED_BYTES = 256 << 20  # Master weights that are read before the checkpoint's files are unmapped


def export_checkpoint(
    checkpoint: Path | str,
    folder: Path | str,
    config: PretrainedConfig,
    fp8: FP8Config,
    *,
    layout: str = "fp8",
    deepspeed_config: Mapping[str, Any] | None = None,
    generation: GenerationConfig | None = None,
    tokenizer: Callable[[Path], object] | None = None,
    force: bool = False,
    source: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Write a Hugging Face folder from a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3.

    FP8 codes are cast from the FP32 master weights, in the way training cast them: the same bytes. Memory holds one
    file of weights, one tensor in FP32 and MAPPED_BYTES of the checkpoint; from stages 1 and 2 the whole model in FP32.

    Args:
        checkpoint: The folder with the ranks' files, such as checkpoints/step_100 or global_step100.
        folder: Where to write.
        config: The model's configuration.
        fp8: The "fp8" section of the training.
        layout: "bf16", "fp8" or "compressed-tensors".
        deepspeed_config: The training's, for the weights that ZeRO-3 kept whole in BF16, where the checkpoint does not
            hold it; DeepSpeed's defaults without.
        generation: Defaults for generate().
        tokenizer: Saves the tokenizer into a folder.
        force: Replace an existing export.
        source: What was trained, for the model card.
        shard_bytes: Size limit of a file of weights.

    Returns:
        What was written: the tensors in FP8, and the layers in BF16 with reasons.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    # All checks before the checkpoint is read, which takes minutes.
    check_target(folder, force, checkpoint)
    check_architecture(config)
    check_writable(folder.resolve().parent)
    check_layout(layout, fp8.linear.weight)
    model = _model_without_data(config)
    state = _state(checkpoint)
    _take_buffers(model, state, checkpoint)
    trained = section_of(state, "ds_fp8")
    named = AXES if isinstance(fp8.preset, str) else fp8.preset
    left_open = "preset" not in fp8.model_fields_set or "linear" not in named
    if fp8.enabled and "preset" in trained and left_open:
        # Chosen by the weights when training began.
        fp8 = FP8Config(**{**fp8.model_dump(exclude_unset=True), "preset": trained["preset"]})
        check_layout(layout, fp8.linear.weight)
    left = unconverted(model, fp8.linear) if fp8.enabled else dict.fromkeys(dict(model.named_modules()), "BF16 run")
    modules = dict(model.named_modules())
    in_bf16 = dict.fromkeys(trained.get("layers_in_bf16", ()), "moved to BF16 in training")
    in_bf16 |= dict.fromkeys(trained.get("excluded_by_filter", ()), "excluded by the filter")
    for layer, reason in in_bf16.items():
        if layer not in modules:
            raise _another_model(checkpoint, f"it has a layer {layer}, and the configuration has none")
        left |= {name: reason for name, _ in modules[layer].named_modules(prefix=layer)}
        left |= {name: reason for name in names_of_experts(model) if name.startswith(f"{layer}.")}
    # Whether training cast a weight from its master or from the BF16 copy decides its codes: an export must do the
    # same. The checkpoint has the values that were trained with: Accelerate and Trainer replace "auto" by their own.
    configs = section_of(state, "ds_config"), deepspeed_config or {}
    zero = next(filter(None, (section_of(c, "zero_optimization") for c in configs)), {})
    rounds_first = _rounds_first(model, fp8, zero, trained.get("gathered_in_fp8"))
    kept = experts_left(model, fp8) if fp8.enabled else {}
    for name in names_of_experts(model):
        if name in kept or not fp8.enabled or rounds_first(name):
            left.setdefault(name, kept.get(name, "in BF16 in training"))
    plan = make_plan(model, left, fp8.linear, layout)
    _check_same_model(_masters(checkpoint), plan, model, checkpoint)
    progress = Progress(f"export {folder.name}", len(plan.entries))
    weights = _cast(_read(checkpoint, plan, stored_buffers(model), progress), plan, rounds_first)
    config.architectures = [type(model).__name__]
    generation = generation or model.generation_config
    write_folder(folder, plan, weights, config, generation, tokenizer, source, shard_bytes)
    return plan


def export_model(
    model: PreTrainedModel, folder: Path, fp8: FP8Config, *, layout: str, tokenizer: Callable | None, force: bool
) -> Plan:
    """Write the folder of a model in BF16 on the CPU, its weights cast as training with this section casts them."""
    check_target(folder, force)
    plan = make_plan(model, unconverted(model, fp8.linear) | experts_left(model, fp8), fp8.linear, layout)
    plan = replace(plan, origin="The codes are cast from weights in BF16")
    held = dict(model.named_parameters()) | stored_buffers(model)
    read = ({name: held[name].detach() for name in entry.form.shapes} for entry in plan.entries)
    model.config.architectures = [type(model).__name__]
    weights = _cast(read, plan, lambda name: True)
    write_folder(folder, plan, weights, model.config, model.generation_config, tokenizer)
    return plan


def _model_without_data(config: PretrainedConfig) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # transformers fails in its own way at each wrong value
        reason = first_line(error)
        raise UserError(
            f"transformers has no causal language model for this configuration: {reason}",
            remedy="give the folder of the model's configuration",
        ) from None
    # Tied weights are one parameter then, and are planned and read once.
    model.tie_weights()
    return model


def _take_buffers(model: torch.nn.Module, state: Mapping[str, Any], checkpoint: Path) -> None:
    """Give the model its stored buffers, in the types that training had them in."""
    names, saved = stored_buffers(model).keys(), state.get("module", {})
    if absent := [name for name in names if name not in saved]:
        raise _another_model(checkpoint, f"{absent[0]} is absent")
    model.load_state_dict({name: saved[name] for name in names}, strict=False, assign=True)


def _masters(checkpoint: Path) -> dict[str, Any]:
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with _reading(checkpoint), silent[0], silent[1]:
        return get_fp32_state_dict_from_zero_checkpoint(checkpoint.parent, tag=checkpoint.name, lazy_mode=True)


def _state(checkpoint: Path) -> Mapping[str, Any]:
    file = next(iter(sorted(checkpoint.glob("*_model_states.pt"))), None)
    if file is None:
        return {}
    with _reading(checkpoint):
        return torch.load(file, map_location="cpu", mmap=True)


@contextlib.contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        with tensors_only(checkpoint):
            yield
    except (OSError, ValueError, RuntimeError, KeyError, EOFError) as error:
        if "is not a zero checkpoint" in str(error) and any(checkpoint.glob("bf16_zero_*_optim_states.pt")):
            raise UserError(
                f"{checkpoint} was written by DeepSpeed's BF16_Optimizer (ZeRO stage 1 with FP32 gradient "
                "accumulation), which DeepSpeed itself cannot read back as weights",
                file=checkpoint,
                remedy='export_engine, or engine.save_16bit_model, in the training; or train with "zero_optimization": '
                '{"stage": 2}, or "data_types": {"grad_accum_dtype": "bf16"}',
            ) from None
        reason = first_line(error)
        raise UserError(
            f"{checkpoint} is not a complete ZeRO checkpoint: {reason}",
            file=checkpoint,
            remedy="give a folder with the *_model_states.pt and *_optim_states.pt of every rank",
        ) from None


def _check_same_model(masters: Mapping[str, Any], plan: Plan, model: torch.nn.Module, checkpoint: Path) -> None:
    shapes = {name: shape for entry in plan.entries for name, shape in entry.form.shapes.items()}
    wrong = [n for n, shape in shapes.items() if n not in masters or tuple(masters[n].shape) != tuple(shape)]
    if any(".lora_" in name or name.startswith("base_model.model.") for name in masters):
        raise UserError(f"{checkpoint} is of a model with adapters", file=checkpoint, remedy=adapters_refused().remedy)
    if wrong:
        found = tuple(masters[wrong[0]].shape) if wrong[0] in masters else "absent"
        raise _another_model(checkpoint, f"{wrong[0]} is {found}, but the configuration says {shapes[wrong[0]]}")
    # Under all names of a tied weight. What a smaller model lacks, such as its last layers, would be left out.
    known = model.state_dict().keys()
    unknown = next((name for name in masters if name not in known), None)
    if unknown is not None:
        raise _another_model(checkpoint, f"it has {unknown}, and the configuration has none")


def _another_model(checkpoint: Path, difference: str) -> UserError:
    return UserError(
        f"the checkpoint belongs to another model: {difference}",
        file=checkpoint,
        remedy="give the configuration of the model that was trained",
    )


def _rounds_first(
    model: torch.nn.Module, fp8: FP8Config, zero: Mapping[str, Any], gathered: Collection[str] | None
) -> Callable[[str], bool]:
    """Return whether training cast a weight from BF16 and not from its FP32 master.

    `gathered` are the weights that it did not; None where an earlier version wrote the checkpoint.
    """
    threshold = zero.get("stage3_param_persistence_threshold", _DEFAULT_THRESHOLD)
    threshold = threshold if isinstance(threshold, (int, float)) else _DEFAULT_THRESHOLD
    if fp8.param_gather.format == "bf16" or zero.get("stage", 3) != 3:
        return lambda name: True
    if gathered is not None:
        return lambda name: name not in gathered
    return lambda name: model.get_parameter(name).numel() <= threshold


def _read(checkpoint: Path, plan: Plan, buffers: Mapping[str, torch.Tensor], progress: Progress) -> Iterator[Numbers]:
    """Yield the FP32 numbers of every entry of the plan, or its buffer, by name.

    Files are mapped, and what has been read of them stays in the process's memory while they are: they are opened again
    after every MAPPED_BYTES.
    """
    masters, mapped = _masters(checkpoint), 0
    for entry in plan.entries:
        if mapped > MAPPED_BYTES:
            masters, mapped = _masters(checkpoint), 0
        found = {}
        for name in entry.form.shapes:
            # Popped, so that its memory is free once it has been written.
            master = masters.pop(name)
            found[name] = buffers[name] if name in buffers else master.contiguous()
            mapped += 0 if found[name] is master else found[name].nbytes
        progress.add(1)
        yield found


def _cast(read: Iterator[Numbers], plan: Plan, rounds_first: Callable[[str], bool]) -> Iterator[tuple[Entry, Numbers]]:
    for found, entry in zip(read, plan.entries, strict=True):
        for name, numbers in found.items():
            # Rounded to BF16 before the cast, where training cast what it had gathered in BF16.
            if not entry.quantized or rounds_first(name):
                numbers = numbers.to(entry.form.dtype)
            if entry.quantized:
                # Experts are stacks of matrices, cast as one matrix of all their rows, as training casts them.
                numbers = quantize(numbers.flatten(0, -2), plan.cast.format, plan.cast.granularity, plan.cast.scale)
            found[name] = numbers  # in place of those in FP32, whose memory is free then
        yield entry, found
