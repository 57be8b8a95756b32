"""A stage: one JSON file, the command line's changes to it, and every check that needs no data and no processes."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ds_fp8.config.deepspeed_json import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, Configuration
from ds_fp8.config.errors import UserError, joined, results_of
from ds_fp8.config.files import apply_override, check_writable, read_json
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import with_assumed_preset
from ds_fp8.config.refusals import SHARED, refusals
from ds_fp8.config.schema import Section, Seed, clipped_repr, parse_section
from ds_fp8.config.sequence_parallel import check_ranks, sequence_parallel_size
from ds_fp8.data import DataConfig
from ds_fp8.engine import preflight
from ds_fp8.engine.optimizer import needs_own_optimizer

# ---------------------------------------------------------------- learning rate

SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Shapes of a decay from 1 at progress 0 to 0 at progress 1."""


class Schedule(Section):
    """The learning-rate schedule of a run. Lengths are steps, or below 1 a fraction of all steps."""

    type: Literal["wsd", "cosine", "constant"] = "cosine"
    """wsd: warmup, stable, decay at the end; cosine: decay right after warmup; constant: warmup only."""
    warmup: float = Field(0.05, ge=0)
    """Linear warmup: steps, or below 1 a fraction of all steps."""
    decay: float = Field(0.2, ge=0)
    """The last part of a wsd run, counted like `warmup`."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Of a wsd run: half a cosine wave, a line, or one minus the square root of the progress."""
    min_ratio: float = Field(0.1, ge=0, le=1)
    """The last step's share of the peak learning rate."""

    @property
    def parts(self) -> dict[str, float]:
        return {"warmup": self.warmup} | ({"decay": self.decay} if self.type == "wsd" else {})

    @property
    def shortest(self) -> int:
        """Return a number of steps into which the parts fit, if any do: at least 1."""
        long = sum(length for length in self.parts.values() if length >= 1)
        share = sum(length for length in self.parts.values() if length < 1)
        # One step more for each part, whose length is rounded.
        return math.ceil(long / (1 - share)) + len(self.parts) if long else 1

    def check_lengths(self, total: int) -> None:
        lengths = {name: _length(value, total) for name, value in self.parts.items()}
        if sum(lengths.values()) > total:
            listed = " + ".join(f"{name} {length}" for name, length in lengths.items())
            raise UserError(
                f"the schedule is longer than the run: {listed} steps > steps {total}",
                key="train.schedule",
                remedy="more steps, or lengths as fractions: "
                + " ".join(f"--set train.schedule.{name}={type(self).model_fields[name].default}" for name in lengths),
            )


def _length(steps_or_fraction: float, total: int) -> int:
    return round(steps_or_fraction * total if steps_or_fraction < 1 else steps_or_fraction)


def learning_rate_factor(step: int, total: int, schedule: Schedule) -> float:
    """Return the factor in [0, 1] on the peak learning rate of 0-based `step` in a run of `total` steps.

    The last warmup step has factor 1, the last step of a decaying run has `min_ratio`; steps after the end keep it. A
    wsd run that is all decay goes on as if the step before it had been at the peak: it is the end of a longer one.
    """
    warmup = min(_length(schedule.warmup, total), total)
    # From 1 / warmup, not from 0: the first step would change nothing.
    if step < warmup:
        return (step + 1) / warmup
    if schedule.type == "constant":
        return 1.0
    # The step that still has factor 1, after which the decay goes down to the last step.
    if schedule.type == "wsd":
        # From the end of the run: a longer run has a longer stable part and the same decay.
        peak, shape = max(warmup - 1, total - 1 - _length(schedule.decay, total)), SHAPES[schedule.decay_shape]
    else:
        peak, shape = max(warmup - 1, 0), SHAPES["cosine"]
    # Clamped at both ends: the stable part of wsd lies before 0, steps after the planned end beyond 1.
    progress = min(max((step - peak) / max(total - 1 - peak, 1), 0.0), 1.0)
    return schedule.min_ratio + (1 - schedule.min_ratio) * shape(progress)


# ---------------------------------------------------------------- sections


class ModelConfig(Section):
    """The model: exactly one of `path` and `config`, or neither when `train.init_from` is given."""

    path: str | None = None
    """A Hugging Face folder or model name."""
    revision: str | None = None
    """Branch, tag or commit; null: its main branch."""
    config: dict[str, Any] | None = None
    """A Hugging Face configuration to start untrained, with `model_type`. A missing `vocab_size` is the tokenizer's."""
    attn_implementation: Literal["packed", "sdpa", "eager", "flex_attention"] = "packed"
    """packed: attention within each document, of variable lengths. Others are transformers' own, which build a mask of
    row x row."""
    activation_checkpointing: bool | Literal["offload"] = False
    """Recompute each decoder layer in backward. offload: and keep the layers' inputs in host memory, for [long
    rows](long_context.md#memory).

    Pinned memory, 2 bytes x tokens x hidden size x layers; ends CUDA graphs."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _known_word(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "offload":
            problem = f"model.activation_checkpointing is {clipped_repr(value)}"
            raise UserError(problem, key="model.activation_checkpointing", remedy='true, false or "offload"')
        return value


class Lora(Section):
    """Adapters (PEFT's LoRA) that are trained in place of the model's weights."""

    r: int = Field(16, gt=0)
    """Rank of every adapter. Without the section `lora` all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """An adapter's product is multiplied by alpha / r."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linears that get adapters, such as ["q_proj"], and weights of experts, such as ["gate_up_proj"]; all-linear: all
    but the head.

    PEFT counts experts among them, at twice the rank for gate and up as one, and routers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's input that is dropped in training.

    Every adapter has a mask of its own, of which a byte an element is kept."""
    rslora: bool = False
    """Multiply by alpha / sqrt(r) instead (arXiv 2312.03732)."""


class TrainConfig(Section):
    """Length of the training, its starting point, and the files it writes."""

    run_dir: str
    """Folder of checkpoints, metrics, result and final model; shared by all hosts."""
    init_from: str | None = None
    """Weights to start from: the run_dir of a finished run, or a Hugging Face folder."""
    resume: str | None = None
    """Another run (or its checkpoints/step_N) to continue with its state, but this stage's steps, schedule and
    optimizer settings.

    The state is weights, optimizer and position in the data. A run_dir stands for its newest checkpoint. To resume the
    same run, start the same command again."""
    lora: Lora | None = None
    """Train adapters beside frozen weights; model/ then holds the sum of both, adapter/ what PEFT loads."""
    steps: int | None = Field(None, gt=0)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Passes through the training data, in place of `steps`."""
    seed: Seed = 1236
    """Of untrained weights, dropout and the order of the data."""
    schedule: Schedule = Schedule()
    log_every: int = Field(1, gt=0)
    """Steps between lines of metrics.jsonl.

    In between losses are read, and spikes and signals noticed, at the latest after about 2 s; with `spike` "rollback"
    at every step."""
    eval_every: int | None = Field(None, gt=0)
    """Steps between validations; there are also one before the first step and one after the last."""
    eval_batches: int = Field(8, gt=0)
    """Batches of a validation, as large as training's."""
    eval_bf16: bool = False
    """Also validate the weights in BF16, without quantization, along the run: each rank then holds all of them.

    Without effect where nothing is quantized."""
    save_every: int | None = Field(None, gt=0)
    """Steps between checkpoints; another is saved after the last step."""
    keep_last: int = Field(2, gt=0)
    """Checkpoints to keep."""
    async_save: bool = False
    """Copy the state to host memory, and write it while training goes on."""
    max_failed_saves: int = Field(3, gt=0)
    """Failed checkpoints in a row, as on a full disk, that end the run."""
    compact_checkpoints: bool = False
    """Store compressed moments as they are, in a quarter of the bytes, not dequantized to FP32.

    Such a checkpoint resumes the run, on other numbers of ranks, too; DeepSpeed's ds_to_universal does not read it.
    Without effect where FP8 is off."""
    keep_best: bool = False
    """Also keep the checkpoint of the lowest validation loss; `eval_every` must divide `save_every`."""
    exact_match_problems: int = Field(0, ge=0)
    """Held-out problems to answer before and after training, of all sources in turn."""
    max_new_tokens: int = Field(48, gt=0)
    """Length limit of an answer."""
    timeout: float = Field(300.0, ge=1)
    """Seconds without progress until the job ends on all hosts; six times as many for preparing, the first step,
    saving, evaluation."""
    spike: Literal["off", "warn", "rollback"] = "warn"
    """Reaction to a loss above `spike_threshold`; rollback: to the last checkpoint, skipping the data since then."""
    spike_threshold: float = Field(10.0, gt=0)
    """Standard deviations (by median absolute deviation) above the median of the last losses."""
    spike_window: int = Field(100, gt=1)
    """Losses that a loss is compared with."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.steps is not None:
            self.schedule.check_lengths(self.steps)
        return self


# ---------------------------------------------------------------- the stage


@dataclass(frozen=True)
class Stage:
    """A checked stage."""

    configuration: Configuration  # The JSON after the command line's changes
    file: Path
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    world: int
    shared_by: int  # Ranks that share a sequence: "sequence_parallel_size"
    global_batch: int
    micro_batch: int
    accumulation: int
    # Hashes of the files of frozen weights, by name: checkpoints hold none of these weights
    base: Mapping[str, str] = field(default_factory=dict)

    @property
    def raw(self) -> dict[str, Any]:
        return dict(self.configuration.values)

    @property
    def fp8(self) -> FP8Config:
        return self.configuration.fp8

    @property
    def needs_own_optimizer(self) -> bool:
        return needs_own_optimizer(self.fp8)

    @property
    def run_dir(self) -> Path:
        return Path(self.train.run_dir)

    def paths(self) -> dict[str, str]:
        """Return the values that may name local files or folders that the stage reads, by configuration key."""
        sources = {f"data.sources[{n}].path": source.path for n, source in enumerate(self.data.sources or ())}
        others = {
            "data.path": None if sources else self.data.path,
            "data.tokenizer": self.data.tokenizer,
            "data.chat_template": self.data.chat_template,
            "model.path": self.model.path,
            "train.init_from": self.train.init_from,
            "train.resume": self.train.resume,
        }
        return sources | {key: path for key, path in others.items() if path}

    def unshared(self) -> Stage:
        """Return this stage for ranks that have sequences to themselves: the same rows in a step."""
        data = self.data
        if data.tokens_per_gpu is not None:
            # What the ranks of a group hold together.
            data = data.model_copy(update={"tokens_per_gpu": data.tokens_per_gpu * self.shared_by})
        return replace(self, data=data, shared_by=1)

    def with_length(self, training_rows: int) -> Stage:
        """Return this stage with `train.steps`, from `train.epochs` where it is not given."""
        if self.train.steps is not None:
            return self
        steps = max(1, math.ceil(self.train.epochs * training_rows / self.global_batch))
        self.train.schedule.check_lengths(steps)
        return replace(self, train=self.train.model_copy(update={"steps": steps}))


def load_stage(path: str | os.PathLike, overrides: list[str] | tuple[str, ...] = (), world: int | None = None) -> Stage:
    """Read the stage at `path`, apply `a.b.c=value` overrides, and check what can be checked before data is read.

    `world` is the number of ranks, by default the environment's WORLD_SIZE.
    """
    file = Path(path)
    try:
        raw = read_json(file)
        for override in overrides:
            apply_override(raw, override)
        return checked_stage(raw, file, world or int(os.environ.get("WORLD_SIZE", "1")))
    except UserError as error:
        raise error.located(file) from None


def checked_stage(raw: dict[str, Any], file: Path, world: int) -> Stage:
    """Return the stage that `raw` describes for so many ranks, as `load_stage` does; errors name `file`."""
    raw = with_assumed_preset(raw)  # named before the run, so that later resumes have the same
    configuration = Configuration(raw, os.fspath(file))

    def section(kind: type[Section], name: str) -> Any:
        if name not in raw:
            raise UserError(f'the section "{name}" is missing', key=name, remedy=f'add "{name}": {{...}}')
        return parse_section(kind, raw[name], key=name, file=file)

    _, model, data, train = results_of(
        functools.partial(preflight.check, configuration),
        lambda: parse_section(ModelConfig, raw.get("model", {}), key="model", file=file),
        functools.partial(section, DataConfig, "data"),
        functools.partial(section, TrainConfig, "train"),
    )
    data.check_named()
    shared_by = sequence_parallel_size(raw)
    check_ranks(shared_by, world)
    data.check_budget(shared_by)
    batch = resolve_batch(raw, world // shared_by)
    preflight.check_trains(configuration, None, ())
    stage = Stage(configuration, file, model, data, train, world, shared_by, *batch)
    if mistakes := list(refusals(stage, "Stage", *[SHARED] * (shared_by > 1))):
        raise joined(mistakes)
    check_writable(Path(train.run_dir), "train.run_dir")
    for key in ("tensorboard", "csv_monitor"):
        monitor = getattr(configuration.deepspeed.monitor_config, key)
        if monitor.enabled:
            check_writable(Path(monitor.output_path, monitor.job_name), f"{key}.output_path")
    return stage


# ---------------------------------------------------------------- DeepSpeed's own sections


def resolve_batch(raw: dict, world: int) -> tuple[int, int, int]:
    """Return (global batch, micro-batch, accumulation) in rows, from the two or three that `raw` gives."""
    given = {key: raw.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
    for key, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(
                f"{key} must be a whole number of at least 1, got {clipped_repr(value)}",
                key=key,
                remedy=f'"{key}": 8, say',
            )
    total, micro, accumulation = given.values()
    if micro is None and total is None:
        raise UserError(
            "the batch size is missing", key=MICRO_BATCH, remedy=f'give "{MICRO_BATCH}", and "{ACCUMULATION}" if not 1'
        )
    if micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world) or 1
    elif accumulation is None:
        accumulation = 1 if total is None else total // (micro * world) or 1
    product = micro * accumulation * world
    if total is not None and total != product:
        raise UserError(
            f"the batch does not divide: {TRAIN_BATCH} {total} is not {micro} ({MICRO_BATCH}) x {accumulation} "
            f"({ACCUMULATION}) x {world} (ranks) = {product}",
            key=TRAIN_BATCH,
            remedy=f'set "{TRAIN_BATCH}" to {product} or leave it out, or change the number of ranks',
        )
    return product, micro, accumulation


def ranks_of_batch(raw: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that the three sizes of a batch fix together, if they do."""
    sizes = [raw.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return None
    total, micro, accumulation = sizes
    ranks, rest = divmod(total, micro * accumulation)
    return None if rest else ranks
