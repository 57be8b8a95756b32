"""The "fp8" section of a DeepSpeed JSON and its presets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ds_fp8.config import registry
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FormatName
from ds_fp8.config.linear import LinearConfig
from ds_fp8.config.plans import CodecName, StateGranularity, StatePrecision, StateScale
from ds_fp8.config.presets import (
    DEFAULT,
    Axis,
    as_section,
    leaves_preset_open,
    merge,
    preset_values,
    with_preset,
    without_words,
)
from ds_fp8.config.schema import Section, as_mapping, parse_section


class ActivationsConfig(Section):
    """Activations that FP8 linears and gated MLPs save for backward."""

    save: Literal["fp8", "bf16"] = "fp8"
    """Format in which inputs of linears, and gate and up of gated MLPs, are saved for backward."""
    recompute: Literal["none", "mlp"] = "none"
    """mlp: gated MLPs recompute gate and up in backward. For complete layers use the model's gradient_checkpointing."""
    keep_attention: bool = False
    """Layers recomputed by gradient_checkpointing save the output of attention and run its forward once, for [long
    rows](long_context.md#memory).

    2 bytes x tokens x hidden size per layer, 1 with attention in FP8."""
    mlp_tile_tokens: int | None = Field(None, gt=0)
    """Tokens per tile of gated MLPs in fused layers, a multiple of 128, for [long rows](long_context.md#memory).

    In forward and backward; gate and up are not saved. Weight gradients are summed in FP32 over the tiles. Needs scales
    per group of tokens (`infir2`, `hybrid_fast`, `precise`)."""


class AttentionConfig(Section):
    """The GEMMs of attention, forward and backward."""

    format: Literal["bf16", "e4m3", "auto"] = "bf16"
    """e4m3: causal attention of full rows and long documents in FP8 ([conditions](support.md#attention-in-fp8)). auto:
    likewise, but rows below 16384 tokens, where FP8 gains little or is slower, stay in BF16.

    Documents of at least 16384 tokens in packed rows; forward and backward (E4M3, gradients E5M2, scales per tensor),
    through Transformer Engine on a Hopper GPU, for heads of 128 features, with or without DeepSpeed's sequence
    parallelism. All other attention stays in BF16: padded rows, shorter documents, sliding windows, dropout,
    generation."""


class ParameterGatherConfig(Section):
    """Format of ZeRO-3's parameter all-gather, for the weights of FP8 linears."""

    format: Literal[FormatName, "bf16"] = "e4m3"
    """That of linear.weight, or bf16. Weights with an override use its format, or BF16 if that cannot be sharded."""
    frozen: Literal["sharded", "whole"] = "sharded"
    """Quantized frozen weights. whole: every GPU keeps them unsharded, a byte per parameter, without all-gathers.

    In addition to its shards. For [adapters](lora.md) on few GPUs with enough memory. Frozen weights other than of FP8
    linears (embedding, head, `linear.skip`) are all-gathered in BF16."""


class GradientReduceConfig(Section):
    """Format of ZeRO-3's gradient reduce-scatter, for every gradient of two or more dimensions."""

    format: Literal[FormatName, "bf16"] = "e4m3"
    """bf16: DeepSpeed's reduce-scatter. Others: a byte per element."""
    scale: Literal["group", "tensor"] = "group"
    """group: a scale per 128 elements. tensor: one per gradient, equal on all ranks and adapted over time (FP8-LM)."""


class OptimizerStateConfig(Section):
    """Storage formats of optimizer state.

    Anything below FP32 makes it ds_fp8.optim.AdamW, with the parameters of DeepSpeed's own "optimizer" section.
    """

    exp_avg: CodecName = "fp32"
    """First moment. e4m3_expanded (COAT) expands the dynamic range of each group to that of E4M3.

    Moments of one byte are rounded stochastically, except exp_avg in e4m3_expanded. Research formats are emulated by
    torch, a byte per element."""
    exp_avg_sq: CodecName = "fp32"
    """Second moment."""
    granularity: StateGranularity = "1x128"
    """Elements of a moment that share a scale: 128 of the flat shard, or a rank's part of a tensor."""
    scale: StateScale = "fp32"
    """fp32: the amax of a group is almost exact, and decays while gradients are zero. pow2: it may get stuck.
    e4m3_expanded always uses fp32."""
    master: Literal["fp32", "fp8_plus16"] = "fp32"
    """Master weights. fp8_plus16: the quantized weight and a 16-bit correction, 20 significant bits in 2 more bytes; of
    other parameters BF16 and 17 bits, exactly FP32."""
    implementation: Literal["auto", "ds_fp8"] = "auto"
    """auto: this package's AdamW for compressed state, and in ZeRO-3 without optimizer offload; otherwise DeepSpeed's.
    ds_fp8: always."""

    @model_validator(mode="after")
    def _fits(self) -> OptimizerStateConfig:
        self.precision()
        return self

    def precision(self) -> StatePrecision:
        """Return the precision for ds_fp8.optim.AdamW. Raises UserError for incompatible options."""
        return StatePrecision(self.exp_avg, self.exp_avg_sq, self.granularity, self.scale)


class LossConfig(Section):
    """The language-model head and its cross entropy. "loss": "off" is short for its mode."""

    mode: Literal["auto", "fused", "off"] = "auto"
    """auto: cross entropy without logits in memory, if the model's loss allows it. fused: also with FP8 disabled. off:
    the model's loss."""
    head: Literal["bf16", "fp8"] = "bf16"
    """fp8: fprop, dgrad and wgrad of the head in FP8, with the casts of `linear`.

    If FP8 is enabled. Its effect on the loss was measured in one short run only."""


class MonitorConfig(Section):
    """Quantization errors, measured by layer and tensor class, and the reaction to a degraded layer."""

    every: int = Field(100, ge=0)
    """Optimizer steps between two measurements of quantization errors; 0: never."""
    min_snr_db: float = 20.0
    """A layer degrades if a signal-to-noise ratio is lower in 3 measurements in a row, or if half of the elements are
    flushed to zero.

    Rounding alone gives about 31 dB in E4M3 and 25 dB in E5M2; 20 dB is an error of a tenth of the signal."""
    fallback: bool = False
    """true: a degraded layer runs in BF16 from then on. false: a warning only."""


class FP8Config(Section):
    """The "fp8" section. `preset` supplies absent keys."""

    enabled: bool = True
    """false: plain BF16, for a reference run with the same file."""
    preset: str | dict[Axis, str] = DEFAULT
    """A name of the table above, or one per section: {"linear": "infir2", "optimizer": "coat"}. Default: `precise` for
    fine-tuning, `infir2` for pre-training from random weights.

    Supplies absent keys. The start report names it. With custom casts in `linear` the default is `infir2`."""
    linear: LinearConfig = LinearConfig()
    activations: ActivationsConfig = ActivationsConfig()
    fuse: Literal["auto", "off"] = "auto"
    """auto: decoder layers of known structure run as a few fused operations. off: unfused."""
    attention: AttentionConfig = AttentionConfig()
    graph: Literal["off", "auto", "on"] = "auto"
    """auto: micro-batches run as [CUDA graphs](cuda_graphs.md) from the third of a shape on. on: also with unknown
    hooks and forwards that change attributes.

    Needs equal shapes on all ranks, rows without padding (packed attention if rows hold several documents), no hooks of
    unknown packages, and a forward that does not change attributes of its modules. Replays are compared with eager runs
    at intervals, and graphs end at a difference. on: also with such hooks and forwards. off: never. The start report or
    the log gives the reason if there are none."""
    loss: LossConfig = LossConfig()
    param_gather: ParameterGatherConfig = ParameterGatherConfig()
    grad_reduce: GradientReduceConfig = GradientReduceConfig()
    optimizer: OptimizerStateConfig = OptimizerStateConfig()
    monitor: MonitorConfig = MonitorConfig()
    report: Literal["short", "full"] = "short"
    """The start report: ten lines, or complete."""
    trust_checkpoints: bool = False
    """true: engine.load_checkpoint unpickles objects of any class, which can run code. false: it refuses a checkpoint
    with objects other than tensors, numpy numbers and arrays, and plain values.

    For client states with custom objects. `ds-fp8 train` and the exports refuse such checkpoints in any case."""

    @classmethod
    def from_preset(cls, preset: str | Mapping[str, str] = DEFAULT, **changes: Any) -> FP8Config:
        """Return the configuration of a preset with some sections or keys changed.

        FP8Config.from_preset("infir2", optimizer="coat", monitor={"every": 0})

        Args:
            preset: A name, or a mapping from sections to names.
            changes: By key of the "fp8" section. A mapping changes some keys of a section; a section object replaces
                it; the name of another preset (for linear, param_gather, grad_reduce, optimizer) takes it from there.
        """
        return _parse({**changes, "preset": preset})

    def __new__(cls, **values: Any) -> FP8Config:
        # With keys or values of papers research's class, as from a file. pydantic itself calls this without values.
        return super().__new__(type(_parse(values)) if cls is FP8Config and values else cls)

    @model_validator(mode="before")
    @classmethod
    def _with_its_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = without_words(values)
        if cls is not FP8Config:  # whose sections core's objects are none of
            values = {key: as_mapping(value) for key, value in values.items()}
        # Before validation: values of the preset are checked like the user's, with the same keys in errors.
        return merge(preset_values(values.get("preset", DEFAULT)), values)

    @property
    def leaves_preset_open(self) -> bool:
        """Return whether the preset of the linears depends on the model: pre-training or fine-tuning."""
        return leaves_preset_open(self._as_given)

    def with_preset(self, name: str) -> FP8Config:
        """Return this configuration with `name` as default preset."""
        return type(self)(**with_preset(self._as_given, name))

    @property
    def _as_given(self) -> dict[str, Any]:
        given = self.model_dump(exclude_unset=True)
        return {key: value for key, value in given.items() if value != {}}

    @property
    def preset_name(self) -> str:
        if isinstance(self.preset, str):
            return self.preset
        return ", ".join(f"{axis} of {name}" for axis, name in self.preset.items())

    @field_validator("loss", mode="before")
    @classmethod
    def _word_is_its_mode(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @property
    def fuses_loss(self) -> bool:
        return self.loss.mode == "fused" or (self.enabled and self.loss.mode == "auto")

    @property
    def multiplies_head_in_fp8(self) -> bool:
        return self.enabled and self.loss.head == "fp8"


def parse_fp8(raw: Mapping[str, Any], file: str | os.PathLike | None = None) -> FP8Config:
    """Return the FP8Config of a DeepSpeed configuration; `enabled` is false without an "fp8" section."""
    if "fp8" not in raw:
        for key in raw:
            # DeepSpeed ignores unknown sections: a misspelt one would train in BF16 silently.
            if key.lower().replace("_", "").replace("-", "") == "fp8":
                raise UserError(f'unknown key "{key}"', key=key, file=file, remedy='Did you mean "fp8"?')
        return FP8Config(enabled=False)
    return _parse(as_section(raw["fp8"]), file)


def _parse(values: Any, file: str | os.PathLike | None = None) -> FP8Config:
    try:
        return parse_section(FP8Config, values, key="fp8", file=file)
    except UserError:  # maybe a key or value of research
        if not isinstance(values, Mapping):
            raise
        return parse_section(registry.load().FP8Config, values, key="fp8", file=file)


def section_of(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the sub-section `name`, empty if absent or null."""
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}
