"""Table of incompatible values: condition, key to change, message and remedy.

Rows of a section are checked when it is created, those of a complete configuration before a model is converted
(engine/preflight.py), those of a stage when it is loaded (train/stage.py). ds_fp8.research adds rows of its sections.
Does not import torch, which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from ds_fp8.config.errors import UserError


class Row(NamedTuple):
    of: str  # class name of the section, or of a stage; DEEPSPEED, OPTIMIZER, FP8 or STAGE_3 for a configuration
    found: Callable[[Any], Any]
    """Condition on the section or configuration; a true result is {found} in the message."""
    key: str
    problem: str  # with {c} for the section or configuration, as is the remedy
    remedy: str


def refusals(c: Any, *of: str, file: str | os.PathLike | None = None) -> Iterator[UserError]:
    """Yield the refusals of a section, or of a configuration by the rows `of`."""
    of = of or tuple(kind.__name__ for kind in type(c).__mro__)
    for row in TABLE:
        if row.of in of and (found := row.found(c)):
            problem, remedy = (words.format(c=c, found=found) for words in (row.problem, row.remedy))
            yield UserError(problem, key=row.key, file=file, remedy=remedy)


DEEPSPEED, FP8, STAGE_3 = "DeepSpeed's own values", "FP8 enabled", "FP8 enabled in stage 3"
OPTIMIZER = "DeepSpeed's optimizer section"
NAMED_DATA, SHARED = "Data that are read", "Stage of ranks that share sequences"
_OFF = 'or "fp8": {{"enabled": false}}'
_FP32 = 'or "fp8": {{"optimizer": {{"exp_avg": "fp32", "exp_avg_sq": "fp32"}}}}'
_MASTERS = 'or "fp8": {{"optimizer": {{"master": "fp32"}}}}'
_ACCUMULATION, _GRAD_ACCUM = "gradient_accumulation_steps", "data_types.grad_accum_dtype"
_IN_BF16, _IN_FP32 = ("bf16", "bfloat16"), ("fp32", "float32")
_ZERO = "zero_optimization"
_OFFLOAD, _RECOMPUTED = f"{_ZERO}.offload_optimizer", "activation_checkpointing"


def _without_blocks(c: Any) -> bool:
    x, w = c.input, c.weight
    fits = (x.granularity, w.granularity, x.format, w.format) == ("1x128", "128x128", "e4m3", "e4m3")
    scales = x.scale in ("fp32", "pow2", "fitted") and w.scale in ("fp32", "pow2")
    return c.outlier_channels > 0 and not (fits and scales)


def _why_no_split_masters(c: Any) -> str | None:
    """Return why masters cannot be quantized weights with corrections, or None."""
    if not c.enabled or c.optimizer.master == "fp32":
        return None
    if c.param_gather.format == "bf16":
        return "param_gather.format is bf16"
    w = c.linear.weight
    fits = (w.format, w.granularity) == ("e4m3", "128x128") and not w.spec.by_torch
    return None if fits else f"weights are quantized as {w.spec}"


def _only_in_stage_3(c: Any) -> tuple[str, str] | None:
    """Return (FP8 collectives outside stage 3, keys that set them to BF16) or None."""
    parts = {"param_gather": "parameter all-gather", "grad_reduce": "gradient reduce-scatter"}
    keys = [key for key in parts if c.stage != 3 and getattr(c.fp8, key).format != "bf16"]
    bf16 = ", ".join(f'"{key}": {{"format": "bf16"}}' for key in keys)
    return (" and ".join(parts[key] for key in keys), bf16) if keys else None


def _offloads_compressed(c: Any) -> Any:
    return c.fp8.optimizer.precision().compressed and c.zero.offload_optimizer


# Sections of DeepSpeed's that a stage has no use for
_NOT_IN_A_STAGE = (
    *("fp16", "torch_autocast", "weight_quantization"),  # it trains in the precision of its "fp8" section
    *("data_efficiency", "hybrid_engine", "autotuning", "datastates_ckpt"),
    *("tensor_parallel", "expert_parallel", "pipeline"),  # it shards by ZeRO alone
)
_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # and their packages


def _models_of(c: Any) -> list[str]:
    """Return the keys of a stage that name its model."""
    given = {"model.path": c.model.path, "model.config": c.model.config, "train.init_from": c.train.init_from}
    return [key for key, value in given.items() if value is not None]


def _is_on(section: Any) -> bool:
    return not (isinstance(section, Mapping) and section.get("enabled") is False)


# fmt: off
TABLE: list[Row] = [Row(*row) for row in (
    ("ActivationsConfig",
     lambda c: (c.mlp_tile_tokens or 0) % 128 and max(1, round(c.mlp_tile_tokens / 128)) * 128,
     "fp8.activations.mlp_tile_tokens",
     "tiles of {c.mlp_tile_tokens} tokens would cut groups of 128 tokens that share a scale",
     '"mlp_tile_tokens": {found}'),
    ("ParameterGatherConfig", lambda c: c.format == "bf16" and c.frozen == "whole", "fp8.param_gather.frozen",
     'param_gather.frozen "whole" keeps FP8 weights, but param_gather.format is "bf16"',
     'remove "frozen", or "format": "e4m3"'),
    ("GradientReduceConfig", lambda c: c.format == "bf16" and c.scale != "group", "fp8.grad_reduce.scale",
     'grad_reduce.scale "{c.scale}" needs FP8, but grad_reduce.format is "bf16"',
     'remove "scale", or "format": "e4m3"'),
    ("StatePrecision", lambda c: c.granularity == "tensor" and "e4m3_expanded" in (c.exp_avg, c.exp_avg_sq),
     "fp8.optimizer.granularity",
     'e4m3_expanded needs groups of 128 elements, but granularity is "tensor"', '"granularity": "1x128"'),
    ("LossConfig", lambda c: c.head == "fp8" and c.mode == "off", "fp8.loss.head",
     'loss.head "fp8" needs the fused loss, which loss.mode "off" disables',
     'remove "mode": "off", or "head": "bf16"'),
    ("LinearCasts", _without_blocks, "fp8.linear.outlier_channels",
     "outlier channels need E4M3 casts in blocks, but input is {c.input}, weight {c.weight}",
     '"outlier_channels": 0, or "input": {{"granularity": "1x128"}}, "weight": {{"granularity": "128x128"}}, both '
     '"e4m3", rounded to nearest, with scale "pow2" or "fp32"'),
    ("FP8Config", _why_no_split_masters, "fp8.optimizer.master",
     "masters are weights in E4M3 128x128 with corrections, but {found}",
     '"master": "fp32", or a preset such as "infir2"'),
    ("FP8Config", lambda c: c.param_gather.format != "bf16" and c.linear.weight.spec.why_not_gathered,
     "fp8.param_gather.format",
     'param_gather.format "{c.param_gather.format}" cannot all-gather weights quantized as {c.linear.weight}: {found}',
     '"param_gather": {{"format": "bf16"}}'),
    ("FP8Config", lambda c: c.param_gather.format not in ("bf16", c.linear.weight.format), "fp8.param_gather.format",
     'param_gather.format "{c.param_gather.format}" differs from linear.weight.format "{c.linear.weight.format}": '
     "GEMMs read the all-gathered weights, so both must be equal",
     '"param_gather": {{"format": "{c.linear.weight.format}"}}, or "bf16" to gather without FP8'),
    # Accepted by DeepSpeed, but fails later.
    (DEEPSPEED, lambda c: {"bf16", "bfloat16"} <= c.values.keys(), "bfloat16",
     '"bfloat16" is another name of "bf16", and both are given', 'remove "bfloat16"'),
    (DEEPSPEED, lambda c: c.bf16.enabled and not c.stage and c.deepspeed.grad_accum_dtype not in (None, *_IN_BF16),
     _GRAD_ACCUM,
     "without ZeRO gradients of a BF16 model are summed in BF16, but grad_accum_dtype is "
     "{c.deepspeed.grad_accum_dtype}",
     f'"bf16", or a "{_ZERO}.stage" of at least 1'),
    (DEEPSPEED, lambda c: c.bf16.enabled and c.stage == 1 and c.optimizer_device == "none"
     and c.deepspeed.grad_accum_dtype in _IN_FP32, _GRAD_ACCUM,
     "DeepSpeed's stage 1 with grad_accum_dtype fp32 writes checkpoints that neither its own tools nor an export can "
     "read",
     f'"{_ZERO}": {{{{"stage": 2}}}}, which takes less memory, or '
     '"data_types": {{"grad_accum_dtype": "bf16"}}'),
    *((DEEPSPEED, lambda c, key=key, default=default: c.stage and c.zero.reduce_scatter
       and getattr(c.deepspeed, key) != default, key,
       f"{key} does not go with ZeRO's reduce-scatter, which divides by the number of ranks itself", f'remove "{key}"')
      for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0))),
    # What DeepSpeed would refuse after the model has been converted, as exceptions of Python.
    (OPTIMIZER, lambda c: not isinstance(c.given("optimizer", "type"), str), "optimizer",
     "the optimizer has no type", '"optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}}'),
    (OPTIMIZER, lambda c: c.optimizer_type in ("muadam", "muadamw", "musgd") and find_spec("mup") is None,
     "optimizer.type", "{c.optimizer_type} is in the package mup, which is not installed", "pip install mup"),
    (OPTIMIZER, lambda c: c.stage == 3 and c.optimizer_type == "muon" and c.zero.reduce_scatter,
     f"{_ZERO}.reduce_scatter", "DeepSpeed's Muon needs whole gradients",
     '"reduce_scatter": false, and "fp8": {{"grad_reduce": {{"format": "bf16"}}}}'),
    # DeepSpeed's sections and "fp8". Accelerate fills in "auto" before training.
    (FP8, lambda c: not c.bf16.enabled and "bf16.enabled" not in c.auto, "bf16.enabled",
     "fp8 trains BF16 models, but bf16 is not enabled", '"bf16": {{"enabled": true}}'),
    (FP8, lambda c: c.zero.zenflow is not None, f"{_ZERO}.zenflow",
     "ZenFlow selects gradient columns before they are reduced", "remove it"),
    *((FP8, lambda c, key=key: getattr(c.bf16, key), f"bf16.{key}",
       f"{key} makes DeepSpeed keep state that fp8.optimizer keeps",
       f'"{key}": false; "fp8": {{{{"optimizer": ...}}}} has smaller moments (preset "coat")')
      for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")),
    (FP8, lambda c: _offloads_compressed(c) and c.optimizer_device == "nvme" and c.stage != 3, f"{_OFFLOAD}.device",
     "NVMe offload swaps FP32 moments, but fp8.optimizer compresses them", f'"device": "cpu", {_FP32}'),
    (FP8, lambda c: _offloads_compressed(c) and c.zero.offload_optimizer.ratio != 1.0, f"{_OFFLOAD}.ratio",
     "partial offload steps a part of the parameters with another Adam, whose state is FP32", f'"ratio": 1.0, {_FP32}'),
    (FP8, lambda c: _offloads_compressed(c) and c.zero.offload_optimizer.super_offload, f"{_OFFLOAD}.super_offload",
     "SuperOffload steps with its own Adam, whose state is FP32", f'"super_offload": false, {_FP32}'),
    (FP8, lambda c: c.fp8.optimizer.master != "fp32" and c.stage != 3, f"{_ZERO}.stage",
     "masters of quantized weights and corrections exist in ZeRO stage 3 only", f'"stage": 3, {_MASTERS}'),
    (FP8, lambda c: c.fp8.optimizer.master != "fp32" and c.zero.offload_optimizer, _OFFLOAD,
     "masters of quantized weights and corrections are not offloaded", f'remove "offload_optimizer", {_MASTERS}'),
    (FP8, lambda c: c.deepspeed.torch_autocast_enabled, "torch_autocast.enabled",
     "fp8 does not work with torch_autocast, which casts weights too", 'remove "torch_autocast"'),
    (FP8, lambda c: c.deepspeed.compile_config.deepcompile, "compile.deepcompile",
     "DeepCompile gathers parameters in its own graph and bypasses the FP8 all-gather",
     f'"deepcompile": false, {_OFF}'),
    (FP8, lambda c: c.deepspeed.tensor_parallel_config.autotp_size > 1, "tensor_parallel.autotp_size",
     "FP8 with linears that are split over ranks is untested", f'remove "tensor_parallel", {_OFF}'),
    (FP8, lambda c: c.deepspeed.expert_parallel_config.enabled, "expert_parallel.enabled",
     "FP8 with experts that are spread over ranks is untested", f'remove "expert_parallel", {_OFF}'),
    (FP8, _only_in_stage_3, f"{_ZERO}.stage",
     "FP8 {found[0]} exist in ZeRO stage 3 only, but the stage is {c.stage}",
     '"stage": 3, or "fp8": {{{found[1]}}} (linears stay in FP8)'),
    (STAGE_3, lambda c: c.zero.zero_hpz_partition_size != 1, f"{_ZERO}.zero_hpz_partition_size",
     "hpZ keeps a second BF16 copy of the weights inside each node, which FP8 gathers do not fill",
     "remove the key: the FP8 all-gather already halves the bytes"),
    *((STAGE_3, lambda c, key=key: getattr(c.zero, key), f"{_ZERO}.{key}",
       f"{key} quantises what fp8 already sends in FP8", f'"{key}": false')
      for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")),
    (STAGE_3, lambda c: c.fp8.param_gather.format != "bf16" and c.parameter_device != "none",
     f"{_ZERO}.offload_param.device",
     "parameter offload to {c.parameter_device} moves BF16 shards, and the FP8 gather keeps FP8 shards on the device",
     'remove "offload_param" (offload_optimizer works), or "fp8": {{"param_gather": {{"format": "bf16"}}}}'),
    (STAGE_3, lambda c: c.optimizer_device == "nvme", f"{_OFFLOAD}.device",
     "the FP8 shards are quantized from the FP32 master shards after every step, which NVMe offload swaps out",
     '"device": "cpu"'),
    (STAGE_3, lambda c: c.fp8.grad_reduce.format != "bf16" and not c.zero.reduce_scatter, f"{_ZERO}.reduce_scatter",
     "reduce_scatter false makes DeepSpeed all-reduce gradients and never reach the FP8 reduction",
     '"reduce_scatter": true, or "fp8": {{"grad_reduce": {{"format": "bf16"}}}}'),
    # The FP32 sum over ranks is rounded once, into the accumulator; a second micro-batch would be added in BF16.
    (STAGE_3, lambda c: c.deepspeed.grad_accum_dtype in _IN_BF16 and c.given(_ACCUMULATION) != 1, _GRAD_ACCUM,
     "gradients of several micro-batches are summed in FP32, but grad_accum_dtype is {c.deepspeed.grad_accum_dtype}",
     f'"{_ACCUMULATION}": 1, or "data_types": {{{{"grad_accum_dtype": "fp32"}}}}'),
    (STAGE_3, lambda c: c.deepspeed.grad_accum_dtype not in (None, *_IN_BF16, *_IN_FP32), _GRAD_ACCUM,
     "gradients are summed in FP32, but grad_accum_dtype is {c.deepspeed.grad_accum_dtype}",
     f'"data_types": {{{{"grad_accum_dtype": "fp32"}}}}, or "bf16" with "{_ACCUMULATION}": 1'),
    # A stage's sections, and the stage.
    ("TrainConfig", lambda c: c.steps is not None and c.epochs is not None, "train.steps",
     "train.steps and train.epochs contradict each other", "give one of train.steps and train.epochs"),
    ("TrainConfig", lambda c: c.steps is None and c.epochs is None, "train.steps",
     "the length is missing", "give one of train.steps and train.epochs"),
    ("TrainConfig", lambda c: c.spike == "rollback" and c.save_every is None, "train.spike",
     "there is no checkpoint to roll back to without train.save_every", '"save_every": 1000, or "spike": "warn"'),
    ("TrainConfig", lambda c: c.keep_best and not (c.save_every and c.eval_every and c.save_every % c.eval_every == 0),
     "train.keep_best", "the best checkpoint is known only where every checkpoint is validated",
     "set train.save_every to a multiple of train.eval_every"),
    ("DataConfig", lambda c: c.sources is not None and "path" in c.model_fields_set, "data.sources",
     "data.path and data.sources contradict each other", "keep one of them"),
    ("DataConfig", lambda c: c.sources == (), "data.sources",
     "data.sources is empty", '[{{"path": ..., "weight": 1.0}}, ...]'),
    ("DataConfig", lambda c: c.validation_fraction + c.test_fraction >= 1, "data.validation_fraction",
     "no examples are left to train on: validation_fraction {c.validation_fraction} and test_fraction "
     "{c.test_fraction} make up all examples", "0.05 each, say"),
    (NAMED_DATA, lambda c: c.path is None and c.sources is None, "data.path",
     "no data is named", "a file, a folder or a Hugging Face dataset"),
    (NAMED_DATA, lambda c: c.tokenizer is None, "data.tokenizer",
     "no tokenizer is named", "the model's folder or Hugging Face name"),
    (SHARED, lambda c: c.model.attn_implementation != "packed", "model.attn_implementation",
     'attention "{c.model.attn_implementation}" loses the mask of packed rows where ranks share sequences',
     '"packed"'),
    (SHARED, lambda c: c.data.sequence_length % c.shared_by, "data.sequence_length",
     "{c.shared_by} ranks cannot share rows of {c.data.sequence_length} tokens evenly", "a multiple of {c.shared_by}"),
    (SHARED, lambda c: c.configuration.stage != 3 or "data_parallel_size" in c.raw, "sequence_parallel_size",
     "a stage whose ranks share sequences trains in ZeRO stage 3, without a device mesh",
     f'"{_ZERO}": {{{{"stage": 3}}}}, and no "data_parallel_size"'),
    (SHARED, lambda c: c.train.eval_bf16, "train.eval_bf16",
     "a rank alone evaluates in BF16 along a run, and here ranks share sequences",
     "remove it"),
    ("Stage", lambda c: "scheduler" in c.raw, "scheduler",
     "the learning-rate schedule belongs to the stage", "set train.schedule"),
    *(("Stage", lambda c, key=key: key in c.raw and _is_on(c.raw[key]), key,
       f'"{key}" does not go with a stage', f'remove "{key}"') for key in _NOT_IN_A_STAGE),
    ("Stage", lambda c: isinstance(c.raw.get(_RECOMPUTED), Mapping) and any(c.raw[_RECOMPUTED].values()), _RECOMPUTED,
     '"activation_checkpointing" does not go with a stage: the model section says what is recomputed',
     '"model": {{"activation_checkpointing": "offload"}} keeps the inputs of layers on the host'),
    ("Stage", lambda c: c.raw.get("bf16", c.raw.get("bfloat16", {})).get("enabled") is not True, "bf16",
     "the stage runner trains in BF16", '"bf16": {{"enabled": true}}'),
    *(("Stage", lambda c, key=key, package=package: getattr(c.configuration.deepspeed.monitor_config, key).enabled
       and find_spec(package) is None, f"{key}.enabled",
       f"{key} is not installed", f"pip install {package}, or false") for key, package in _MONITORS.items()),
    ("Stage", lambda c: c.train.compact_checkpoints and c.fp8.enabled and not c.needs_own_optimizer,
     "train.compact_checkpoints", "compact checkpoints store compressed moments, but the optimizer's are FP32",
     'remove the key, or compress: "fp8": {{"optimizer": {{"exp_avg": "e4m3_expanded", ...}}}}'),
    ("Stage", lambda c: not _models_of(c), "model", "no model is given",
     "give one of model.path (a Hugging Face folder or name), model.config (an untrained model) and train.init_from "
     "(an earlier run)"),
    *(("Stage", lambda c, key=key: _models_of(c)[1:] and _models_of(c)[0] == key and " and ".join(_models_of(c)), key,
       "{found} contradict each other: the weights can come from one place only", "keep one of them")
      for key in ("model.path", "model.config")),
    ("Stage", lambda c: not c.train.run_dir.strip(), "train.run_dir",
     "train.run_dir is empty", '"run_dir": "runs/first"'),
    # Resolved: "runs/../.." and links may end at the root, too.
    ("Stage", lambda c: c.train.run_dir.strip() and os.path.realpath(c.train.run_dir).strip("/") == "",
     "train.run_dir", "train.run_dir is the root folder", '"run_dir": "runs/first"'),
    ("Stage", lambda c: c.data.tokens_per_gpu is not None and c.micro_batch != 1, "train_micro_batch_size_per_gpu",
     "data.tokens_per_gpu sizes micro-batches by tokens, but a number of rows is given as well",
     '"train_micro_batch_size_per_gpu": 1, with "train_batch_size" as the examples of a step'),
)]
