"""Export of ZeRO checkpoints, without GPUs: one tensor at a time is read from the files of all ranks."""

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
from ds_fp8.config.fp8 import FP8Config, parse_fp8, section_of
from ds_fp8.config.presets import AXES
from ds_fp8.engine.plans import group_plan
from ds_fp8.export.folder import SHARD_BYTES, Progress, check_target, write_folder
from ds_fp8.export.plan import Entry, Plan, Tensors, adapters_refused, check_architecture, check_layout, make_plan
from ds_fp8.layers.experts.selection import experts_left, names_of_experts
from ds_fp8.layers.published import stored_buffers
from ds_fp8.layers.selection import unconverted
from ds_fp8.zero.deepspeed.checkpoints import tensors_only

_DEFAULT_THRESHOLD = 100_000  # DeepSpeed's default of stage3_param_persistence_threshold

MAPPED_BYTES = 256 << 20  # of master weights, read before the checkpoint's files are unmapped


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

    The FP32 master weights are quantized as in training: the same bytes. Memory holds one file of weights, one tensor
    in FP32 and MAPPED_BYTES of the checkpoint; from stages 1 and 2 the full model in FP32.

    Args:
        checkpoint: The folder with the ranks' files, such as checkpoints/step_100 or global_step100.
        folder: The folder to write.
        config: The model's configuration.
        fp8: The "fp8" section of the training.
        layout: "bf16", "fp8" or "compressed-tensors".
        deepspeed_config: Of the training, if the checkpoint lacks it; it tells which weights ZeRO-3 kept unsharded in
            BF16. Default: DeepSpeed's defaults.
        generation: Defaults for generate().
        tokenizer: Saves the tokenizer into a folder.
        force: Replace an existing export.
        source: The trained model, for the model card.
        shard_bytes: Size limit of a file of weights.

    Returns:
        The tensors in FP8, and the layers in BF16 with reasons.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    # Checks first: reading a checkpoint takes minutes.
    check_target(folder, force, checkpoint)
    check_architecture(config)
    check_writable(folder.resolve().parent)
    check_layout(layout, fp8.linear.weight)
    model = _meta_model(config)
    state = _state(checkpoint)
    _load_buffers(model, state, checkpoint)
    trained = section_of(state, "ds_fp8")
    named = AXES if isinstance(fp8.preset, str) else fp8.preset
    left_open = "preset" not in fp8.model_fields_set or "linear" not in named
    if fp8.enabled and "preset" in trained and left_open:
        # The preset that training chose by the weights.
        fp8 = parse_fp8({"fp8": {**fp8.model_dump(exclude_unset=True), "preset": trained["preset"]}})
        check_layout(layout, fp8.linear.weight)
    modules = dict(model.named_modules())
    left = unconverted(model, group_plan(fp8)) if fp8.enabled else dict.fromkeys(modules, "BF16 run")
    in_bf16 = dict.fromkeys(trained.get("layers_in_bf16", ()), "moved to BF16 in training")
    in_bf16 |= dict.fromkeys(trained.get("excluded_by_filter", ()), "excluded by the filter")
    for layer, reason in in_bf16.items():
        if layer not in modules:
            raise _another_model(checkpoint, f"it has a layer {layer}, and the configuration has none")
        left |= {name: reason for name, _ in modules[layer].named_modules(prefix=layer)}
        left |= {name: reason for name in names_of_experts(model) if name.startswith(f"{layer}.")}
    # As in training, each weight is quantized from its FP32 master or from BF16. The configuration in the checkpoint
    # comes first: Accelerate and Trainer replace "auto".
    configs = section_of(state, "ds_config"), deepspeed_config or {}
    zero = next(filter(None, (section_of(c, "zero_optimization") for c in configs)), {})
    rounds_first = _rounds_first(model, fp8, zero, trained.get("gathered_in_fp8"))
    experts = experts_left(model, group_plan(fp8)) if fp8.enabled else {}
    for name in names_of_experts(model):
        if name in experts or not fp8.enabled or rounds_first(name):
            left.setdefault(name, experts.get(name, "in BF16 in training"))
    plan = make_plan(model, left, fp8.linear, layout)
    _check_same_model(_masters(checkpoint), plan, model, checkpoint)
    progress = Progress(f"export {folder.name}", len(plan.entries))
    weights = _quantize(_read(checkpoint, plan, stored_buffers(model), progress), plan, rounds_first)
    config.architectures = [type(model).__name__]
    generation = generation or model.generation_config
    write_folder(folder, plan, weights, config, generation, tokenizer, source, shard_bytes)
    return plan


def export_model(
    model: PreTrainedModel, folder: Path, fp8: FP8Config, *, layout: str, tokenizer: Callable | None, force: bool
) -> Plan:
    """Write the folder of a model in BF16 on the CPU, quantized as training with this section would."""
    check_target(folder, force)
    group = group_plan(fp8)
    plan = make_plan(model, unconverted(model, group) | experts_left(model, group), fp8.linear, layout)
    plan = replace(plan, origin="The FP8 weights are quantized from weights in BF16")
    tensors = dict(model.named_parameters()) | stored_buffers(model)
    read = ({name: tensors[name].detach() for name in entry.form.shapes} for entry in plan.entries)
    model.config.architectures = [type(model).__name__]
    weights = _quantize(read, plan, lambda name: True)
    write_folder(folder, plan, weights, model.config, model.generation_config, tokenizer)
    return plan


def _meta_model(config: PretrainedConfig) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # of any type, by the wrong value
        raise UserError(
            f"transformers has no causal language model for this configuration: {first_line(error)}",
            remedy="give the folder of the model's configuration",
        ) from None
    model.tie_weights()  # tied weights are one parameter, planned and read once
    return model


def _load_buffers(model: torch.nn.Module, state: Mapping[str, Any], checkpoint: Path) -> None:
    names, saved = stored_buffers(model).keys(), state.get("module", {})
    if absent := [name for name in names if name not in saved]:
        raise _another_model(checkpoint, f"{absent[0]} is absent")
    model.load_state_dict({name: saved[name] for name in names}, strict=False, assign=True)


def _masters(checkpoint: Path) -> dict[str, Any]:
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with _reading(checkpoint), silent[0], silent[1]:
        return get_fp32_state_dict_from_zero_checkpoint(checkpoint.parent, tag=checkpoint.name, lazy_mode=True)


def _state(checkpoint: Path) -> Mapping[str, Any]:
    files = sorted(checkpoint.glob("*_model_states.pt"))
    with _reading(checkpoint):
        return torch.load(files[0], map_location="cpu", mmap=True) if files else {}


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
        raise UserError(
            f"{checkpoint} is not a complete ZeRO checkpoint: {first_line(error)}",
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
    # The other way round: layers that a smaller model lacks would be dropped.
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
    model: torch.nn.Module, fp8: FP8Config, zero: Mapping[str, Any], in_fp8: Collection[str] | None
) -> Callable[[str], bool]:
    """Return a function from a weight's name to whether training quantized it from BF16, not from its FP32 master.

    in_fp8: names of weights that were all-gathered in FP8; None in checkpoints of earlier versions.
    """
    threshold = zero.get("stage3_param_persistence_threshold", _DEFAULT_THRESHOLD)
    threshold = threshold if isinstance(threshold, (int, float)) else _DEFAULT_THRESHOLD
    if fp8.param_gather.format == "bf16" or zero.get("stage", 3) != 3:
        return lambda name: True
    if in_fp8 is not None:
        return lambda name: name not in in_fp8
    return lambda name: model.get_parameter(name).numel() <= threshold


def _read(checkpoint: Path, plan: Plan, buffers: Mapping[str, torch.Tensor], progress: Progress) -> Iterator[Tensors]:
    """Yield the FP32 masters or buffers of every entry of the plan, by name.

    Pages of a mapped file stay in memory until it is unmapped: files are opened again after MAPPED_BYTES.
    """
    masters, mapped = _masters(checkpoint), 0
    for entry in plan.entries:
        if mapped > MAPPED_BYTES:
            masters, mapped = _masters(checkpoint), 0
        tensors = {}
        for name in entry.form.shapes:
            master = masters.pop(name)  # frees its memory once it is written
            tensors[name] = buffers[name] if name in buffers else master.contiguous()
            mapped += 0 if tensors[name] is master else tensors[name].nbytes
        progress.add(1)
        yield tensors


def _quantize(
    read: Iterator[Tensors], plan: Plan, rounds_first: Callable[[str], bool]
) -> Iterator[tuple[Entry, Tensors]]:
    for tensors, entry in zip(read, plan.entries, strict=True):
        for name, tensor in tensors.items():
            if not entry.quantized or rounds_first(name):
                tensor = tensor.to(entry.form.dtype)
            if entry.quantized:
                # Stacked experts as one matrix of all rows, as in training.
                tensor = quantize(tensor.flatten(0, -2), plan.cast.format, plan.cast.granularity, plan.cast.scale)
            tensors[name] = tensor  # frees the FP32 tensor
        yield entry, tensors
