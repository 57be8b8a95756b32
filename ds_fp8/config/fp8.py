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
    """Activations kept for backward by FP8 linears and by the gated MLPs between them."""

    save: Literal["fp8", "bf16"] = "fp8"
    """Inputs of linears, gate and up of gated MLPs, kept for backward: cast, or in BF16 and cast in backward."""
    recompute: Literal["none", "mlp"] = "none"
    """mlp: gated MLPs compute gate and up again in backward. For whole layers use the model's
    gradient_checkpointing."""
    keep_attention: bool = False
    """Layers recomputed by gradient_checkpointing keep what attention returns, and run its forward once, for [long
    rows](long_context.md#memory).

    2 bytes x tokens x hidden size a layer, 1 with attention in FP8."""
    mlp_tile_tokens: int | None = Field(None, gt=0)
    """A multiple of 128: gated MLPs of fused layers compute so many tokens at a time, for [long
    rows](long_context.md#memory).

    Forward and backward; neither gate nor up is kept. Gradients of their weights are summed in FP32 over the tiles.
    Needs scales of groups of tokens, as `infir2`, `hybrid_fast` and `precise` have them."""


class AttentionConfig(Section):
    """The products of attention: of queries and keys, of probabilities and values, and those of their gradients."""

    format: Literal["bf16", "e4m3", "auto"] = "bf16"
    """e4m3: causal attention of whole rows and long documents runs in FP8 ([conditions](support.md#attention-in-fp8)).
    auto: likewise, but rows below 16384 tokens stay in BF16: there FP8 gains little, or is slower.

    Documents of at least 16384 tokens in packed rows; forward and backward (E4M3, gradients E5M2, one scale a tensor),
    through Transformer Engine on a Hopper GPU, for heads of 128 features, with DeepSpeed's sequence parallelism or
    without. All other attention stays BF16: of padded rows and shorter documents, with a sliding window or dropout, and
    of generation."""


class ParameterGatherConfig(Section):
    """Format of ZeRO-3's parameter all-gather, for the weights of FP8 linears."""

    format: Literal[FormatName, "bf16"] = "e4m3"
    """That of linear.weight, or bf16. Weights with an override travel in its cast, or in BF16 where that cannot be
    sharded."""
    frozen: Literal["sharded", "whole"] = "sharded"
    """Codes of frozen weights. whole: every GPU keeps those of whole weights, a byte a parameter, and gathers none.

    Beside its shards. For [adapters](lora.md) on a few GPUs with room for it. Frozen weights that are no FP8 linears
    (embedding, head, `linear.skip`) are gathered in BF16 as before."""


class GradientReduceConfig(Section):
    """Format of ZeRO-3's gradient reduce-scatter, for every gradient of two or more dimensions."""

    format: Literal[FormatName, "bf16"] = "e4m3"
    """bf16: DeepSpeed's reduce-scatter. Others: a byte an element."""
    scale: Literal["group", "tensor"] = "group"
    """group: one for every 128 elements. tensor: one a gradient, agreed by all ranks and adapted over time (FP8-LM)."""


class OptimizerStateConfig(Section):
    """Storage formats of optimizer state.

    Anything below FP32 makes it ds_fp8.optim.AdamW, with the parameters of DeepSpeed's own "optimizer" section.
    """

    exp_avg: CodecName = "fp32"
    """First moment. e4m3_expanded (COAT) stretches the range of each group over E4M3's.

    Moments in a byte are rounded stochastically, but not exp_avg in e4m3_expanded. Research formats are emulated by
    torch, a byte an element."""
    exp_avg_sq: CodecName = "fp32"
    """Second moment."""
    granularity: StateGranularity = "1x128"
    """Elements of a moment that share a scale: 128 in a row of the flat shard, or a rank's part of a tensor."""
    scale: StateScale = "fp32"
    """fp32: the largest number of a group is almost exact, and decays while gradients are zero. pow2: it may get stuck.
    e4m3_expanded always has fp32."""
    master: Literal["fp32", "fp8_plus16"] = "fp32"
    """Masters. fp8_plus16: of weights gathered in FP8 the code and a 16-bit correction, 20 significant bits in 2 bytes
    more; elsewhere BF16 and 17 bits, which is FP32."""
    implementation: Literal["auto", "ds_fp8"] = "auto"
    """auto: this package's AdamW for compressed state, and in ZeRO-3 without optimizer offload. ds_fp8: always.

    Otherwise DeepSpeed's."""

    @model_validator(mode="after")
    def _fits(self) -> OptimizerStateConfig:
        self.precision()
        return self

    def precision(self) -> StatePrecision:
        """Return the same as ds_fp8.optim.AdamW takes it. Raises UserError for options that do not go together."""
        return StatePrecision(self.exp_avg, self.exp_avg_sq, self.granularity, self.scale)


class LossConfig(Section):
    """The language-model head and its cross entropy. A word alone, "loss": "off", stands for its mode."""

    mode: Literal["auto", "fused", "off"] = "auto"
    """auto: cross entropy without logits in memory, where the model's own loss allows it. fused: even with FP8
    disabled. off: the model's own."""
    head: Literal["bf16", "fp8"] = "bf16"
    """fp8: the three products of the head in FP8, with the casts of `linear`.

    While FP8 is enabled. Its effect on the loss is known from one short run only."""


class MonitorConfig(Section):
    """The health of the casts, measured by layer and tensor class, and what is done about a layer that degrades."""

    every: int = Field(100, ge=0)
    """Optimizer steps between two measurements of the casts; 0: none."""
    min_snr_db: float = 20.0
    """A layer degrades when a cast's signal-to-noise ratio is lower in 3 measurements in a row, or half its elements
    flush to zero.

    Rounding alone leaves about 31 dB in E4M3 and 25 dB in E5M2 for any tensor; 20 dB is an error of a tenth of the
    signal."""
    fallback: bool = False
    """true: a layer that degrades runs in BF16 from then on. false: a warning names it."""


class FP8Config(Section):
    """The whole "fp8" section. `preset` supplies what the user leaves out."""

    enabled: bool = True
    """false: plain BF16, for a twin run from the same file."""
    preset: str | dict[Axis, str] = DEFAULT
    """A name of the table above, or one a section: {"linear": "infir2", "optimizer": "coat"}. Left out: `precise` where
    the model's weights are trained, `infir2` where they are random.

    Supplies the keys that you leave out. The start report says which it is. Beside casts of your own in `linear` it is
    `infir2`."""
    linear: LinearConfig = LinearConfig()
    activations: ActivationsConfig = ActivationsConfig()
    fuse: Literal["auto", "off"] = "auto"
    """auto: decoder layers of the usual structure run as a few fused operations. off: as they are."""
    attention: AttentionConfig = AttentionConfig()
    graph: Literal["off", "auto", "on"] = "auto"
    """auto: micro-batches run as [CUDA graphs](cuda_graphs.md) once their shape has come twice. on: unknown hooks and
    forwards that change attributes too.

    Needs equal shapes on all ranks, rows without padding (packed attention if rows hold several documents), no hooks of
    unknown packages, and a forward that does not change attributes of its modules. Graphs are compared with Python at
    intervals, and end at a difference. on: also with such hooks and forwards. off: never. The start report or a line in
    the log gives the reason if there are none."""
    loss: LossConfig = LossConfig()
    param_gather: ParameterGatherConfig = ParameterGatherConfig()
    grad_reduce: GradientReduceConfig = GradientReduceConfig()
    optimizer: OptimizerStateConfig = OptimizerStateConfig()
    monitor: MonitorConfig = MonitorConfig()
    report: Literal["short", "full"] = "short"
    """The start report: ten lines, or all that is known."""
    trust_checkpoints: bool = False
    """true: engine.load_checkpoint unpickles objects of any class, which can run code. false: it refuses a checkpoint
    with more than tensors, numpy's numbers and arrays, and plain values.

    For client states with objects of your own. `ds-fp8 train` and the exports refuse such checkpoints in any case."""

    @classmethod
    def from_preset(cls, preset: str | Mapping[str, str] = DEFAULT, **changes: Any) -> FP8Config:
        """Return the configuration of a preset with some sections or keys changed.

        FP8Config.from_preset("infir2", optimizer="coat", monitor={"every": 0})

        Args:
            preset: its name, or a mapping from sections to names.
            changes: by key of the "fp8" section. A mapping changes some keys of a section; a section object replaces
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
        # Before validation, so that the preset's values are checked like the user's and errors name the same keys.
        return merge(preset_values(values.get("preset", DEFAULT)), values)

    @property
    def leaves_preset_open(self) -> bool:
        """Return whether the weights of the model shall decide on the preset of the linears."""
        return leaves_preset_open(self._as_given)

    def with_preset(self, name: str) -> FP8Config:
        """Return this configuration with a preset for what it leaves open."""
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
    """Return the FP8Config of a whole DeepSpeed configuration.

    Returns:
        The parsed "fp8" section; without one, a configuration with `enabled` false.
    """
    if "fp8" not in raw:
        for key in raw:
            # DeepSpeed ignores sections that it does not know: a misspelt one would train in BF16 without a word.
            if key.lower().replace("_", "").replace("-", "") == "fp8":
                raise UserError(f'unknown key "{key}"', key=key, file=file, remedy='Did you mean "fp8"?')
        return FP8Config(enabled=False)
    return _parse(as_section(raw["fp8"]), file)


def _parse(values: Any, file: str | os.PathLike | None = None) -> FP8Config:
    try:
        return parse_section(FP8Config, values, key="fp8", file=file)
    except UserError:  # perhaps of a paper's key or value
        if not isinstance(values, Mapping):
            raise
        return parse_section(registry.load().FP8Config, values, key="fp8", file=file)


def section_of(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the sub-section `name`, empty where it is absent or null."""
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}
