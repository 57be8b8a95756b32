"""A DeepSpeed configuration, parsed once: the "fp8" section by this package, DeepSpeed's own sections by DeepSpeed.

DeepSpeed checks most of its sections with models of its own. Its plain values and the sections that it reads key by key
it takes as they are: `DeepSpeedValues` describes those.
"""

from __future__ import annotations

import copy
import os
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

from deepspeed.runtime.config import DeepSpeedConfig, get_bfloat16_config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ConfigDict, Field, ValidationError

from ds_fp8.config.errors import UserError, clipped, joined
from ds_fp8.config.files import read_config
from ds_fp8.config.fp8 import FP8Config, parse_fp8, section_of
from ds_fp8.config.presets import with_preset
from ds_fp8.config.schema import Section, clipped_repr, nearest, parse_section, wrong_value

TRAIN_BATCH, MICRO_BATCH, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
Dtype = Literal["fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16"]


@dataclass(frozen=True)
class Configuration:
    """A DeepSpeed configuration; sections are parsed on first use."""

    values: Mapping[str, Any]  # the JSON, as it was given
    file: str | None = None  # its file, for errors
    auto: frozenset[str] = frozenset()  # dotted keys with "auto", not in `values`

    @classmethod
    def read(cls, given: str | os.PathLike | Mapping[str, Any]) -> Configuration:
        """Read a configuration as deepspeed.initialize does: a mapping, a JSON file, or JSON in base64."""
        return cls(*read_config(given))

    @cached_property
    def fp8(self) -> FP8Config:
        """Return the "fp8" section, disabled if absent. Raises UserError for invalid ones."""
        return parse_fp8(self.values, self.file)

    def with_preset(self, name: str) -> Configuration:
        """Return this configuration with `name` as default preset."""
        return Configuration({**self.values, "fp8": with_preset(self.values["fp8"], name)}, self.file)

    @cached_property
    def deepspeed(self) -> DeepSpeedConfig:
        """Return DeepSpeed's own parse of everything but the batch sizes, all of which are 1 in it.

        Those must fit the number of ranks, which is not known before a process group exists.
        """
        # Copied: DeepSpeed modifies the dictionary.
        judged = copy.deepcopy(dict(self.values)) | {MICRO_BATCH: 1, ACCUMULATION: 1}
        judged.pop(TRAIN_BATCH, None)
        mistakes: list[UserError] = []
        try:
            parse_section(DeepSpeedValues, self.values, key="", file=self.file)
        except UserError as error:
            mistakes += error.all
        try:
            parsed = DeepSpeedConfig(judged)
        except Exception as whole:
            seen = {error.key.partition(".")[0] for error in mistakes}
            # Section by section: DeepSpeed's messages name a key, but not its section.
            for key in sorted(self.values.keys() & known_keys() - {TRAIN_BATCH, MICRO_BATCH, ACCUMULATION} - seen):
                try:
                    DeepSpeedConfig({MICRO_BATCH: 1, key: copy.deepcopy(self.values[key])})
                except Exception as error:
                    mistakes += self._explained(error, key)
            mistakes = mistakes or self._explained(whole, "")
        if mistakes:
            raise joined(mistakes)
        return parsed

    @cached_property
    def zero(self) -> DeepSpeedZeroConfig:
        """Return the "zero_optimization" section with DeepSpeed's defaults. Raises UserError where DeepSpeed does."""
        given = self.values.get("zero_optimization")
        section = {MICRO_BATCH: 1} if given is None else {MICRO_BATCH: 1, "zero_optimization": copy.deepcopy(given)}
        try:
            return DeepSpeedConfig(section).zero_config
        except Exception as error:
            raise joined(self._explained(error, "zero_optimization")) from None

    @cached_property
    def bf16(self) -> Any:
        try:
            return get_bfloat16_config(self.values)
        except Exception as error:
            raise joined(self._explained(error, "bf16")) from None

    def given(self, *keys: str) -> Any:
        *sections, last = keys
        inner = self.values
        for name in sections:
            inner = section_of(inner, name)
        return inner.get(last)

    def _explained(self, error: Exception, section: str) -> list[UserError]:
        """Return the mistakes that DeepSpeed found in a section, each with the key it is about; "" for several at once.

        DeepSpeed reports mistakes in a configuration with every kind of exception.
        """
        if isinstance(error, ValidationError):
            return [_explain(error, mistake, section).located(self.file) for mistake in error.errors()]
        words = clipped(str(error) or type(error).__name__)
        section = section or next((key for key in sorted(self.values) if key in words), "")
        # The key itself, where DeepSpeed names it: the first one in its sentence.
        named = [key for key in section_of(self.values, section) if key in words and key != "enabled"]
        key = ".".join(filter(None, [section, min(named, key=words.index, default="")]))
        if isinstance(error, (AttributeError, TypeError)) and section:  # Python's message alone says little
            words = f'"{section}" cannot be {clipped_repr(self.values.get(section))} ({words})'
        problem, remedy = f"DeepSpeed refuses the configuration: {words}", "change or remove the key that it names"
        return [UserError(problem, key=key, file=self.file, remedy=remedy)]

    @property
    def stage(self) -> int:
        return int(self.zero.stage)

    @property
    def optimizer_device(self) -> str:
        """Device of optimizer offload: "none", "cpu" or "nvme"."""
        return _device(self.zero.offload_optimizer)

    @property
    def parameter_device(self) -> str:
        """Device of parameter offload: "none", "cpu" or "nvme"."""
        return _device(self.zero.offload_param)

    @property
    def has_optimizer(self) -> bool:
        return "optimizer" in self.values

    @property
    def optimizer_type(self) -> str:
        """Name of the optimizer in lower case, "" without one."""
        return str(self.given("optimizer", "type") or "").lower()

    @property
    def optimizer_params(self) -> dict[str, Any]:
        params = self.given("optimizer", "params")
        return dict(params) if isinstance(params, Mapping) else {}


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


class _Values(Section):
    """Base of sections that DeepSpeed reads key by key; it ignores keys that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DataTypes(_Values):
    """The "data_types" section."""

    keep_in_fp32_modules: str | list[str] | None = None

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


class ActivationCheckpointing(_Values):
    """The "activation_checkpointing" section."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = Field(None, gt=0)
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class DeepSpeedValues(_Values):
    """Values of a DeepSpeed configuration, and sections for which DeepSpeed has no model."""

    model_config = ConfigDict(extra="ignore", strict=True)

    train_batch_size: int | None = Field(None, gt=0)
    train_micro_batch_size_per_gpu: int | None = Field(None, gt=0)
    gradient_accumulation_steps: int | None = Field(None, gt=0)
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
    timers: dict[str, Any] = Field(default_factory=dict)
    data_types: DataTypes = DataTypes()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()


class _KeyRecorder(UserDict, dict):
    """A dict that records which keys are read; UserDict looks all of them up here."""

    def __init__(self, values: dict, asked: set[str]):
        self.asked = asked
        super().__init__(values)

    def __contains__(self, key) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)


@cache
def known_keys() -> frozenset[str]:
    """Return the top-level keys the installed DeepSpeed reads, found by letting it read a config."""
    asked: set[str] = set()
    # From the installed version: keys differ between versions.
    DeepSpeedConfig(_KeyRecorder({MICRO_BATCH: 1}, asked))
    return frozenset(asked)


def _explain(error: ValidationError, mistake: Any, section: str) -> UserError:
    path = [str(part) for part in mistake["loc"]]
    dotted = ".".join(path if path[:1] == [section] else [section, *path]).strip(".")
    if mistake["type"] == "extra_forbidden":
        model = next((model for model in _subclasses(DeepSpeedConfigModel) if model.__name__ == error.title), None)
        # Only for keys at the top of a section: the nested model's fields are not looked up, and a wrong suggestion is
        # worse than none.
        known = {field.alias or name for name, field in model.model_fields.items()} if model and len(path) == 1 else ()
        return UserError(
            f"DeepSpeed does not know the key {clipped_repr(dotted)}",
            key=clipped(dotted),
            remedy=nearest(path[-1], known) or "remove it",
        )
    return wrong_value(mistake, dotted)


def _subclasses(model: type) -> Iterator[Any]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)
