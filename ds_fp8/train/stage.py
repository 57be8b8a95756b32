"""A stage: one JSON file, the command line's changes to it, and every check that needs no data and no processes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ds_fp8.config.deepspeed_json import Configuration, known_keys
from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import apply_override, check_writable, read_json
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import DEFAULT, FOR_TRAINED, leaves_preset_open, with_preset
from ds_fp8.config.schema import Section, Seed, nearest, parse_section, shown
from ds_fp8.data import DataConfig
from ds_fp8.engine import preflight
from ds_fp8.engine.sequence_parallel import KEY, check_ranks, sequence_parallel_size
from ds_fp8.optim.from_config import needs_own_optimizer
from ds_fp8.train.deepspeed_config import check_sections, resolve_batch
from ds_fp8.train.schedules import Schedule

MAX_STEPS = 1 << 38
"""More steps than a run can have; times the largest batch they still count rows in 64 bits."""
MAX_RANKS = 1 << 20
OWN_SECTIONS = ("fp8", "model", "data", "train")


class ModelConfig(Section):
    """The model: exactly one of `path` and `config`, or neither when `train.init_from` is given."""

    path: str | None = None
    """A Hugging Face folder or model name."""
    revision: str | None = None
    """Branch, tag or commit of a model name; null: its main branch."""
    config: dict[str, Any] | None = None
    """A Hugging Face configuration to start untrained, `model_type` included. Without a `vocab_size` it takes the
    tokenizer's."""
    attn_implementation: Literal["packed", "sdpa", "eager", "flex_attention"] = "packed"
    """packed: variable-length attention within each document. The others are transformers' own, which build a mask of
    sequence_length x sequence_length for packed rows."""
    activation_checkpointing: bool | Literal["offload"] = False
    """Recompute each decoder layer in backward. offload: and keep the layers' inputs in pinned host memory until then
    (2 bytes x tokens x hidden size x layers), which ends CUDA graphs; for [long rows](long_context.md#memory)."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _known_word(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "offload":
            raise UserError(
                f"model.activation_checkpointing is {shown(value)}",
                key="model.activation_checkpointing",
                remedy='true, false or "offload"',
            )
        return value


class TrainConfig(Section):
    """Length of the training, its starting point, and the files it writes."""

    run_dir: str
    """Folder of checkpoints, metrics, result and final model. On many nodes it must be shared."""
    init_from: str | None = None
    """Weights to start from, and nothing else: the run_dir of a finished run, or a Hugging Face folder."""
    resume: str | None = None
    """Another run to continue with all of its state (weights, optimizer, position in the data), but with this stage's
    steps, schedule and optimizer settings: a run_dir, for its newest checkpoint, or run_dir/checkpoints/step_N. To
    resume the same run, start the same command again."""
    steps: int | None = Field(None, gt=0)
    """Optimizer steps of this stage."""
    epochs: float | None = Field(None, gt=0)
    """Passes through the training data, in place of `steps`."""
    seed: Seed = 1236
    """Seed of untrained weights, of dropout and of the order of the data."""
    schedule: Schedule = Schedule()
    log_every: int = Field(1, gt=0)
    """Steps between lines of metrics.jsonl. In between losses are read, and spikes and signals noticed, at the latest
    after about 2 s; with `spike` "rollback" at every step."""
    eval_every: int | None = Field(None, gt=0)
    """Steps between validations; there is always one before the first step and one after the last."""
    eval_batches: int = Field(8, gt=0)
    """Batches of a validation, each as large as that of a training step."""
    save_every: int | None = Field(None, gt=0)
    """Steps between checkpoints; there is always one after the last step."""
    keep_last: int = Field(2, gt=0)
    """Checkpoints to keep."""
    async_save: bool = False
    """Copy the state to host memory, as much as it takes, and write it while training goes on."""
    max_failed_saves: int = Field(3, gt=0)
    """Checkpoints in a row that may fail, as on a full disk, before the run ends."""
    compact_checkpoints: bool = False
    """Store compressed moments as they are, in a quarter of the bytes, rather than decoded to FP32. Such a checkpoint
    resumes the run, and cannot be converted to DeepSpeed's universal format. Without effect where FP8 is off."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss; `eval_every` must divide `save_every`."""
    exact_match_problems: int = Field(0, ge=0)
    """Held-out problems to answer before the first step and after the last, where the data has any."""
    max_new_tokens: int = Field(48, gt=0)
    """Length limit of an answer."""
    timeout: float = Field(300.0, ge=1)
    """Seconds without progress after which the job ends on all hosts; six times as many for preparing data and model,
    for the first step, for saving and for evaluation."""
    spike: Literal["off", "warn", "rollback"] = "warn"
    """Reaction to a loss above `spike_threshold`: warn, or return to the last checkpoint and skip the data of the steps
    since then."""
    spike_threshold: float = Field(10.0, gt=0)
    """Standard deviations, estimated by the median absolute deviation, above the median of the last losses."""
    spike_window: int = Field(100, gt=1)
    """Losses that a loss is compared with."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            both = "train.steps and train.epochs contradict each other" if self.steps else "the length is missing"
            raise UserError(both, key="train.steps", remedy="give one of train.steps and train.epochs")
        if self.steps is not None:
            self.schedule.check_lengths(self.steps)
        if self.spike == "rollback" and self.save_every is None:
            raise UserError(
                "there is no checkpoint to roll back to without train.save_every",
                key="train.spike",
                remedy='"save_every": 1000, or "spike": "warn"',
            )
        if self.keep_best and (not self.save_every or not self.eval_every or self.save_every % self.eval_every):
            raise UserError(
                "the best checkpoint is known only where every checkpoint is validated",
                key="train.keep_best",
                remedy="set train.save_every to a multiple of train.eval_every",
            )
        return self


@dataclass(frozen=True)
class Stage:
    """A checked stage."""

    configuration: Configuration
    """The whole JSON after the command line's changes."""
    file: Path
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    world: int
    shared_by: int
    """Ranks that share a sequence: "sequence_parallel_size"."""
    global_batch: int
    micro_batch: int
    accumulation: int

    @property
    def raw(self) -> dict[str, Any]:
        """Return the JSON itself."""
        return dict(self.configuration.values)

    @property
    def fp8(self) -> FP8Config:
        """Return the "fp8" section."""
        return self.configuration.fp8

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
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
        """Return this stage with `train.steps`, from `train.epochs` where it is not given.

        Raises UserError if it is short.
        """
        if self.train.steps is not None:
            return self
        length = self.train.epochs * training_rows / self.global_batch
        if length >= MAX_STEPS:
            raise UserError(
                f"{self.train.epochs:g} epochs of {training_rows:,} rows are more steps than a run can have",
                key="train.epochs",
                remedy='"epochs": 3, say',
            )
        steps = max(1, math.ceil(length))
        try:
            self.train.schedule.check_lengths(steps)
        except ValueError as error:
            raise UserError(
                str(error), key="train.schedule", remedy="give lengths as fractions, or more epochs"
            ) from None
        return replace(self, train=self.train.model_copy(update={"steps": steps}))


def load_stage(path: str | os.PathLike, overrides: list[str] | tuple[str, ...] = (), world: int | None = None) -> Stage:
    """Read the stage at `path`, apply `a.b.c=value` overrides, and check what can be checked before data is read.

    The number of ranks is `world`, by default the environment's WORLD_SIZE. Raises UserError with file, key and remedy.
    """
    file = Path(path)
    try:
        raw = read_json(file)
        for override in overrides:
            apply_override(raw, override)
        return _check(raw, file, world or _world_size())
    except UserError as error:
        raise error.located(file) from None


def _check(raw: dict[str, Any], file: Path, world: int) -> Stage:
    # DeepSpeed ignores keys that it does not know; here a misspelt one is an error.
    known = known_keys() | {*OWN_SECTIONS, KEY}  # which DeepSpeed looks up among running ranks alone
    for key in raw:
        if key not in known:
            raise UserError(f"unknown key {shown(key)}", key=clipped(key), remedy=nearest(key, known))
    for section in ("data", "train"):
        if section not in raw:
            raise UserError(f'the section "{section}" is missing', key=section, remedy=f'add "{section}": {{...}}')
    if leaves_preset_open(raw.get("fp8")):
        # Named here, so that every command and later resumes have the same.
        loaded = not (isinstance(raw.get("model"), dict) and "config" in raw["model"])
        raw["fp8"] = with_preset(raw["fp8"], FOR_TRAINED if loaded else DEFAULT)
    configuration = Configuration(raw, os.fspath(file))
    fp8 = configuration.fp8
    model = parse_section(ModelConfig, raw.get("model", {}), key="model", file=file)
    data = parse_section(DataConfig, raw["data"], key="data", file=file)
    train = parse_section(TrainConfig, raw["train"], key="train", file=file)
    shared_by = sequence_parallel_size(raw)
    check_ranks(shared_by, world)
    _check_shared(configuration, model, data, shared_by)
    global_batch, micro_batch, accumulation = resolve_batch(raw, world // shared_by)
    check_sections(configuration)
    preflight.check(configuration)
    preflight.check_trains(configuration, None, ())
    if train.compact_checkpoints and fp8.enabled and not needs_own_optimizer(fp8):
        raise UserError(
            "compact checkpoints store compressed moments, but the optimizer's are FP32",
            key="train.compact_checkpoints",
            remedy='remove the key, or compress: "fp8": {"optimizer": {"exp_avg": "e4m3_expanded", ...}}',
        )
    _check_model_source(model, train)
    if not train.run_dir.strip():
        raise UserError("train.run_dir is empty", key="train.run_dir", remedy='"run_dir": "runs/first"')
    # Resolved: "runs/../.." and links may end at the root, too.
    if Path(os.path.realpath(train.run_dir)).name == "":
        raise UserError(
            "train.run_dir is the root folder", key="train.run_dir", remedy='give it its own: "run_dir": "runs/first"'
        )
    check_writable(Path(train.run_dir), "train.run_dir")
    if data.tokens_per_gpu is not None and micro_batch != 1:
        raise UserError(
            "data.tokens_per_gpu sizes micro-batches by tokens, but a number of rows is given as well",
            key="train_micro_batch_size_per_gpu",
            remedy='"train_micro_batch_size_per_gpu": 1, with "train_batch_size" as the examples of a step',
        )
    return Stage(configuration, file, model, data, train, world, shared_by, global_batch, micro_batch, accumulation)


def _check_shared(configuration: Configuration, model: ModelConfig, data: DataConfig, shared_by: int) -> None:
    """Raise UserError where ranks cannot share the sequences of a stage."""
    data.check_budget(shared_by)
    if shared_by == 1:
        return
    if model.attn_implementation != "packed":
        raise UserError(
            f'attention "{model.attn_implementation}" loses the mask of packed rows where ranks share sequences',
            key="model.attn_implementation",
            remedy='"packed"',
        )
    if data.sequence_length % shared_by:
        raise UserError(
            f"{shared_by} ranks cannot share rows of {data.sequence_length} tokens evenly",
            key="data.sequence_length",
            remedy=f"a multiple of {shared_by}",
        )
    if configuration.stage != 3 or "data_parallel_size" in configuration.values:
        raise UserError(
            "a stage whose ranks share sequences trains in ZeRO stage 3, without a device mesh",
            key=KEY,
            remedy='"zero_optimization": {"stage": 3}, and no "data_parallel_size"',
        )


def _world_size() -> int:
    """Return the number of ranks, which launchers leave in the environment."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or not 1 <= int(size[:10]) <= MAX_RANKS:
        raise UserError(
            f"the environment variable WORLD_SIZE is {shown(size)}, which is not a number of ranks",
            remedy="leave it to the launcher: unset WORLD_SIZE",
        )
    return int(size)


def _check_model_source(model: ModelConfig, train: TrainConfig) -> None:
    given = {"model.path": model.path, "model.config": model.config, "train.init_from": train.init_from}
    present = [key for key, value in given.items() if value is not None]
    if len(present) == 1:
        return
    if not present:
        raise UserError(
            "no model is given",
            key="model",
            remedy="give one of model.path (a Hugging Face folder or name), model.config (an untrained model) and "
            "train.init_from (an earlier run)",
        )
    raise UserError(
        f"{' and '.join(present)} contradict each other: the weights can come from one place only",
        key=present[0],
        remedy=f"keep one of {', '.join(present)}",
    )
