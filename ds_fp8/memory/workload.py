"""A training step as the estimates see it: the model's shape, the tokens of a micro-batch and DeepSpeed's settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig, PretrainedConfig

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, section_of
from ds_fp8.config.schema import parse_section
from ds_fp8.data import DataConfig
from ds_fp8.engine.compatibility import check_deepspeed
from ds_fp8.engine.sequence_parallel import (
    check_heads,
    check_layers,
    check_ranks,
    check_rotation,
    sequence_parallel_size,
)
from ds_fp8.memory.model_shape import ModelShape, model_shape
from ds_fp8.optim.from_config import uses_own_optimizer
from ds_fp8.train.deepspeed_config import resolve_batch
from ds_fp8.train.stage import ModelConfig
from ds_fp8.train.stored_model import stored_config, stored_model

BF16, FP32 = 2, 4
"""Bytes of an element."""

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Workload:
    """Everything that memory depends on, per GPU."""

    model: ModelShape
    fp8: FP8Config
    gpus: int
    rows: int
    """Rows of a micro-batch."""
    sequence_length: int
    """Tokens of a row, all of them where GPUs share it."""
    zero: DeepSpeedZeroConfig
    accumulation_bytes: int
    """Bytes of an element of the gradient shards."""
    torch_adam: bool
    """True if DeepSpeed was told to use torch's AdamW, which needs a second copy of exp_avg_sq while it steps."""
    activation_checkpointing: bool | Literal["offload"]
    attention: str
    """attn_implementation"""
    own_optimizer: bool
    """True where the optimizer is this package's AdamW."""
    device: Device = "cuda"
    shared_by: int = 1
    """GPUs that share a sequence."""

    @property
    def own_step(self) -> bool:
        """Return whether ZeRO's step is this package's, which reduces gradients from where autograd left them."""
        return self.stage == 3 and self.own_optimizer and not self.offloads_optimizer and not self.offloads_parameters

    @property
    def tokens(self) -> int:
        """Return T, the tokens of a micro-batch on one GPU."""
        return self.rows * self.sequence_length // self.shared_by

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return int(self.zero.stage)

    @property
    def gathers_in_fp8(self) -> bool:
        """Return whether weights are gathered in FP8."""
        return self.fp8.enabled and self.fp8.param_gather.format != "bf16"

    @property
    def reduces_in_fp8(self) -> bool:
        """Return whether gradients travel in FP8."""
        return self.fp8.enabled and self.fp8.grad_reduce.format != "bf16"

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether masters and moments lie outside the GPU."""
        return self.zero.offload_optimizer is not None and self.zero.offload_optimizer.device != "none"

    @property
    def offloads_parameters(self) -> bool:
        """Return whether shards of weights lie outside the GPU."""
        return self.zero.offload_param is not None and self.zero.offload_param.device != "none"

    @property
    def offloads_activations(self) -> bool:
        """Return whether inputs of recomputed layers lie outside the GPU; on a CPU they go nowhere else."""
        return self.activation_checkpointing == "offload" and self.device == "cuda"

    def resized(self, what: Literal["micro_batch", "sequence_length"], value: int) -> Workload:
        """Return the same with another number of rows in a micro-batch, or of tokens in a row."""
        return replace(self, rows=value) if what == "micro_batch" else replace(self, sequence_length=value)


def read_workload(
    config: str | os.PathLike | Mapping[str, Any],
    *,
    gpus: int | None = None,
    model: PretrainedConfig | None = None,
    sequence_length: int | None = None,
    device: Device = "cuda",
) -> Workload:
    """Return the workload of a stage's JSON.

    Any DeepSpeed configuration will do when `model` and `sequence_length` are given.

    Args:
        config: DeepSpeed configuration, in any form that `Configuration.read` takes.
        gpus: The data-parallel ranks; without it WORLD_SIZE, or 1.
        model: Configuration of the model, in place of the stage's.
        sequence_length: Tokens of a row, in place of the stage's.
        device: What the ranks compute on.

    Raises:
        UserError: The stage is wrong or says too little; with file, key and remedy.
    """
    configuration = Configuration.read(config)
    try:
        return _read(configuration, gpus or int(os.environ.get("WORLD_SIZE", "1")), model, sequence_length, device)
    except UserError as error:
        raise error.located(configuration.file) from None


def bf16_twin(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same stage with FP8 off."""
    return {**raw, "fp8": {"enabled": False}}


def _read(
    configuration: Configuration, gpus: int, model: PretrainedConfig | None, length: int | None, device: Device
) -> Workload:
    raw, fp8, zero = configuration.values, configuration.fp8, configuration.zero
    check_deepspeed(configuration)
    model_section = parse_section(ModelConfig, raw.get("model", {}), key="model")
    data = parse_section(DataConfig, raw.get("data", {}), key="data")
    if model is None:
        model = _model_config(model_section, data, section_of(raw, "train"))
    if configuration.stage == 0:
        raise UserError(
            "there is no estimate for ZeRO stage 0", key="zero_optimization.stage", remedy="stage 1, 2 or 3"
        )
    if model_section.attn_implementation == "eager":
        raise UserError(
            "there is no estimate for eager attention, whose scores take heads x length x length",
            key="model.attn_implementation",
            remedy='"packed"',
        )
    shared_by = sequence_parallel_size(raw)
    check_ranks(shared_by, gpus)
    check_layers(model, shared_by)
    check_rotation(model, shared_by)
    check_heads(model, shared_by)
    data.check_budget(shared_by)
    _, micro_batch, _ = resolve_batch(raw, gpus // shared_by)
    accumulation = configuration.deepspeed.grad_accum_dtype
    if accumulation is None:  # as initialize fills it in
        accumulation = "fp32" if fp8.enabled and fp8.grad_reduce.format != "bf16" else "bf16"
    recomputed = model_section.activation_checkpointing
    if recomputed and configuration.given("activation_checkpointing", "cpu_checkpointing"):
        recomputed = "offload"
    # Untrained and stored models alike are rows of so many tokens, unless micro-batches are made by tokens.
    rows, tokens = micro_batch, length or data.sequence_length
    if data.tokens_per_gpu is not None and length is None:
        rows, tokens = 1, data.tokens_per_gpu * shared_by
    return Workload(
        model=_cached_shape(model.to_json_string(use_diff=False), type(model), fp8.model_dump_json(), device),
        fp8=fp8,
        gpus=gpus,
        rows=rows,
        sequence_length=tokens,
        zero=zero,
        accumulation_bytes=FP32 if accumulation in ("fp32", "float32") else BF16,
        torch_adam=bool(configuration.optimizer_params.get("torch_adam", False)),
        own_optimizer=uses_own_optimizer(configuration),
        activation_checkpointing=recomputed,
        attention=model_section.attn_implementation,
        device=device,
        shared_by=shared_by,
    )


@lru_cache(maxsize=32)
def _cached_shape(model_json: str, kind: type[PretrainedConfig], fp8_json: str, device: Device) -> ModelShape:
    return model_shape(kind.from_dict(json.loads(model_json)), FP8Config.model_validate_json(fp8_json), device)


def _model_config(section: ModelConfig, data: DataConfig, train: Mapping[str, Any]) -> PretrainedConfig:
    """Return the Hugging Face configuration, without its weights or the tokenizer."""
    if section.config is not None:
        values = dict(section.config)
        kind = values.pop("model_type", None)
        values.setdefault("vocab_size", data.vocab_size if data.tokenizer == "synthetic" else None)
        if values["vocab_size"] is None:
            raise UserError(
                "the vocabulary of the model is the tokenizer's, which an estimate does not read",
                key="model.config.vocab_size",
                remedy='give "vocab_size" in model.config',
            )
        try:
            return AutoConfig.for_model(kind, **values)
        except Exception as error:  # each configuration class validates in its own way
            raise UserError(
                f"model.config is refused: {str(error).splitlines()[0]}",
                key="model.config",
                remedy="change what the message names",
            ) from None
    path, init_from = section.path, train.get("init_from")
    if path is None and init_from is None:
        raise UserError(
            "no model is given", key="model", remedy="give model.config or model.path, or pass model=... to estimate"
        )
    revision = section.revision if path is not None else None
    return stored_config(stored_model(path, init_from if path is None else None, revision))
