"""Checks of values in DeepSpeed's own sections that it would refuse, or accept and fail at later.

DeepSpeed checks most of its sections with models of its own, which judge here too. Its plain values and the sections
that it reads key by key it takes as they are: `DeepSpeedValues` describes those.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, KeysView, Mapping
from functools import cache
from typing import Any, Literal

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict, Field, ValidationError

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.fp8 import section_of
from ds_fp8.config.schema import Section, nearest, parse_section, shown

TRAIN_BATCH, MICRO_BATCH, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
MAX_BUCKET = 2**33
"""Elements: DeepSpeed allocates a bucket before the first step, and this is 16 GiB in BF16."""

_BF16 = (None, "bf16", "bfloat16")
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
Dtype = Literal["fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16"]


class _Values(Section):
    """Base of sections that DeepSpeed reads key by key; it ignores keys that it does not know."""

    model_config = ConfigDict(extra="ignore", strict=True)


class DataTypes(_Values):
    """The "data_types" section."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


class FlopsProfiler(_Values):
    """The "flops_profiler" section."""

    enabled: bool = False
    recompute_fwd_factor: float = Field(0.0, ge=0)
    profile_step: int = Field(1, ge=1)
    module_depth: int = Field(-1, ge=-1)
    top_modules: int = Field(1, ge=1)
    detailed: bool = True
    output_file: str | None = None


class ParallelWrite(_Values):
    """The "checkpoint.parallel_write" section."""

    pipeline_stage: bool = False


class Checkpoint(_Values):
    """The "checkpoint" section."""

    tag_validation: str = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWrite = ParallelWrite()


class DeepSpeedValues(_Values):
    """Plain values of a DeepSpeed configuration, and sections without a model of DeepSpeed's own."""

    gradient_clipping: float = Field(1.0, ge=0)
    prescale_gradients: bool = False
    gradient_predivide_factor: float = Field(1.0, gt=0)
    gradient_allreduce_op: str = "mean"
    steps_per_print: float | None = Field(None, gt=0, allow_inf_nan=True)
    """Accelerate gives infinity, for never."""
    communication_data_type: str | None = None
    seq_parallel_communication_data_type: str | None = None
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    vocabulary_size: int | None = Field(None, gt=0)
    managed_gradient_accumulation: bool = True
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_allgather: bool = False
    disable_python_gc: bool = False
    dataloader_drop_last: bool = False
    use_data_before_expert_parallelism: bool = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    data_types: DataTypes = DataTypes()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    checkpoint: Checkpoint = Checkpoint()


def check_values(raw: Mapping[str, Any], file: str | os.PathLike | None = None) -> None:
    """Check DeepSpeed's own sections of a configuration, but for its optimizer and its batch sizes.

    Raises:
        UserError: DeepSpeed refuses a value, or would fail at it later. It names file, key and remedy.
    """
    try:
        values = parse_section(DeepSpeedValues, raw, key="")
        _judge(raw)
        _check_combinations(values, raw)
    except UserError as error:
        raise error.located(file) from None


def _check_combinations(values: DeepSpeedValues, raw: Mapping[str, Any]) -> None:
    zero = section_of(raw, "zero_optimization")
    accumulation = values.data_types.grad_accum_dtype
    if not zero.get("stage", 0) and section_of(raw, "bf16").get("enabled") is True and accumulation not in _BF16:
        raise UserError(
            f"without ZeRO gradients of a BF16 model are summed in BF16, and grad_accum_dtype is {accumulation}",
            key="data_types.grad_accum_dtype",
            remedy='"bf16", or a "zero_optimization.stage" of at least 1',
        )
    if any(zero.get(key) for key in _QUANTIZED) and _is_missing("QuantizerBuilder"):
        key = next(key for key in _QUANTIZED if zero.get(key))
        raise UserError(
            f"DeepSpeed cannot quantise on {get_accelerator().device_name()}s",
            key=f"zero_optimization.{key}",
            remedy=f'"{key}": false',
        )
    if zero.get("stage", 0) and zero.get("reduce_scatter", True):
        for key in ("prescale_gradients", "gradient_predivide_factor"):
            if getattr(values, key) != DeepSpeedValues.model_fields[key].default:
                raise UserError(
                    f"{key} does not go with ZeRO's reduce-scatter, which divides by the number of ranks itself",
                    key=key,
                    remedy=f'remove "{key}"',
                )
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if isinstance(zero.get(key), int) and zero[key] > MAX_BUCKET:
            raise UserError(
                f"zero_optimization.{key} {zero[key]:,} is a buffer that no device holds",
                key=f"zero_optimization.{key}",
                remedy=f'"{key}": 500000000, DeepSpeed\'s default, or less',
            )
    if zero.get("sub_group_size") == 0:
        raise UserError(
            "zero_optimization.sub_group_size 0 leaves no room for a parameter",
            key="zero_optimization.sub_group_size",
            remedy='"sub_group_size": 1000000000, DeepSpeed\'s default',
        )
    for key in ("offload_optimizer", "offload_param"):
        offload = section_of(zero, key)
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            raise UserError(
                f"zero_optimization.{key} swaps to NVMe, and does not say where",
                key=f"zero_optimization.{key}.nvme_path",
                remedy='"nvme_path": "/local_nvme"',
            )


def _is_missing(operation: str) -> bool:
    """Return whether DeepSpeed has no such operation for this accelerator."""
    return get_accelerator().get_op_builder(operation).__name__ == "NotImplementedBuilder"


class _KeyRecorder(dict):
    """A config that notes which top-level keys are asked for."""

    def __init__(self, values: dict, asked: set[str]):
        super().__init__(values)
        self.asked = asked

    def __contains__(self, key) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return KeysView(self)

    def __copy__(self):
        return _KeyRecorder(self, self.asked)


@cache
def known_keys() -> frozenset[str]:
    """Return the top-level keys the installed DeepSpeed reads, found by letting it read a config."""
    asked: set[str] = set()
    DeepSpeedConfig(_KeyRecorder({MICRO_BATCH: 1}, asked))
    return frozenset(asked)


def _judge(raw: Mapping[str, Any]) -> None:
    """Let DeepSpeed's models judge `raw`; what they refuse becomes a UserError with the key it is about."""
    judged = copy.deepcopy(dict(raw)) | {MICRO_BATCH: 1, ACCUMULATION: 1}
    # The batch sizes must fit the number of ranks, which is not known before a process group exists.
    judged.pop(TRAIN_BATCH, None)
    try:
        DeepSpeedConfig(judged)
    except ValidationError as error:
        raise _explain(error, raw) from None
    except Exception as error:  # DeepSpeed reports mistakes in a config with every kind of exception
        words = clipped(str(error) or type(error).__name__)
        key = _section_at_fault(raw) or next((key for key in sorted(raw) if key in words), "")
        raise UserError(
            f"DeepSpeed refuses the configuration: {words}", key=key, remedy="change what DeepSpeed names"
        ) from None


def _explain(error: ValidationError, raw: Mapping[str, Any]) -> UserError:
    """Return the first mistake of a validation by one of DeepSpeed's models, with its full dotted key."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    section = _section_at_fault(raw)
    dotted = ".".join(path if path[:1] == [section] else [section, *path]).strip(".")
    got = "" if first["type"] == "missing" else f" (got {shown(first.get('input'))})"
    if first["type"] == "extra_forbidden":
        model = next((model for model in _subclasses(DeepSpeedConfigModel) if model.__name__ == error.title), None)
        known = {field.alias or name for name, field in model.model_fields.items()} if model and len(path) == 1 else ()
        return UserError(
            f"DeepSpeed does not know the key {shown(dotted)}",
            key=clipped(dotted),
            remedy=nearest(path[-1], known) or "remove it",
        )
    message = first["msg"].removeprefix("Value error, ")
    return UserError(f"{dotted}: {message}{got}", key=dotted, remedy=f'change the value of "{dotted}"')


def _section_at_fault(raw: Mapping[str, Any]) -> str:
    """Return the first top-level key that DeepSpeed refuses by itself, "" when only several together are wrong.

    DeepSpeed's messages name the key inside a section, not the section.
    """
    for key in sorted(raw.keys() & known_keys() - {TRAIN_BATCH, MICRO_BATCH, ACCUMULATION}):
        try:
            DeepSpeedConfig({MICRO_BATCH: 1, key: copy.deepcopy(raw[key])})
        except Exception:
            return key
    return ""


def _subclasses(model: type) -> Iterator[Any]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)
