"""The "fp8" section of a DeepSpeed JSON and its presets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from ds_fp8.errors import UserError
from ds_fp8.formats import FormatName, Granularity, ScaleType
from ds_fp8.schema import Section, nearest, parse_section
from ds_fp8.state_precision import AUTO, CodecName, MasterName, StateGranularity, StatePart, StatePrecision


class Cast(Section):
    """How one kind of tensor is cast."""

    format: FormatName = "e4m3"
    granularity: Granularity = "1x128"
    """Groups lie along the contraction of the product the cast feeds."""
    scale: ScaleType = "pow2"


class WeightCast(Cast):
    """How weights are cast: one cast serves fprop and, transposed, dgrad, which groups of 1x128 do not survive.

    row: one scale per output channel; dgrad contracts over that dimension, so there the scales are folded into dy.
    """

    granularity: Literal["128x128", "row", "tensor"] = "128x128"


class WgradConfig(Section):
    """Granularities of wgrad's operands, both cast along the tokens; null: as `input` and `grad_output` have it."""

    input: Granularity | None = None
    grad_output: Granularity | None = None


class LinearConfig(Section):
    """The linear layers: their casts, who multiplies and how it sums, and which layers stay in high precision."""

    backend: Literal["auto", "deep_gemm", "cublas", "transformer_engine", "reference"] = "auto"
    accumulation: Literal["fp32", "fast"] = "fp32"
    """fast: Hopper's tensor cores sum tensor- and row-wise products in fewer bits and finish earlier: relative
    error about 1e-3 at K = 4096, 3e-3 at 16384. Block-scaled products are summed in FP32 either way."""
    input: Cast = Cast()
    weight: WeightCast = WeightCast()
    grad_output: Cast = Cast()
    wgrad: WgradConfig = WgradConfig()
    skip: tuple[str, ...] = ("lm_head",)
    """Names, parts of dotted names, or glob patterns of linears that stay BF16."""


class ActivationsConfig(Section):
    """What is kept for backward of the FP8 linears and of the gated MLPs between them."""

    save: Literal["fp8", "bf16"] = "fp8"
    """fp8: a linear keeps the cast along tokens that wgrad reads, and a gated MLP its gate and up in FP8. bf16: the
    input itself, cast in backward, and gate and up as they are."""
    recompute: Literal["none", "mlp"] = "none"
    """mlp: gated MLPs keep nothing of gate and up and compute their product again in backward. (Recomputing whole
    layers is the model's own gradient_checkpointing.)"""


class ParameterGatherConfig(Section):
    """What ZeRO-3's parameter all-gather carries for the weights of FP8 linears."""

    format: Literal["e4m3", "e5m2", "bf16"] = "e4m3"


class GradientReduceConfig(Section):
    """What ZeRO-3's gradient reduce-scatter carries for every gradient of two or more dimensions."""

    format: Literal["e4m3", "e5m2", "bf16"] = "e4m3"
    group_size: Literal[128] = 128
    scale: Literal["group", "tensor"] = "group"
    """group: every 128 elements have their own. tensor: one for each gradient, agreed by all ranks and adapted over
    time, as in FP8-LM (arXiv 2310.18313); its state is not in checkpoints and starts afresh."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    """Of stochastic rounding: with the same seed and ranks a run repeats bit for bit."""
    error_feedback: Literal["off", "bf16", "fp32"] = "off"
    """Add what the cast of a gradient lost to the next gradient. Every rank keeps that for the whole model in this
    precision, 2 or 4 bytes a parameter that are not sharded; it is not in checkpoints and starts afresh."""
    hierarchy: Literal["auto", "flat"] = "auto"
    """auto: inside the node first, then between nodes, when there is more than one node. flat: one all-to-all."""

    @model_validator(mode="after")
    def _options_need_a_cast(self) -> GradientReduceConfig:
        if self.format == "bf16":
            for key in ("scale", "rounding", "error_feedback"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise UserError(
                        f'grad_reduce.{key} "{getattr(self, key)}" says how gradients are cast, and with format "bf16" '
                        "they are not",
                        key=f"fp8.grad_reduce.{key}",
                        remedy=f'remove "{key}", or "format": "e4m3"',
                    )
        return self


class OptimizerStateConfig(Section):
    """In what the optimizer keeps its state. Anything below FP32 makes it ds_fp8.optim.AdamW, with the parameters of
    DeepSpeed's own "optimizer" section."""

    master: MasterName = "fp32"
    """fp16_scaled: master weights of matrices are FP16 numbers in units of one power of two a tensor. ZeRO holds its
    shards of master weights in FP32, so there the values change and the memory does not. Compressed moments beside them
    have "granularity": "tensor"."""
    exp_avg: CodecName = "fp32"
    exp_avg_sq: CodecName = "fp32"
    granularity: StateGranularity = "1x128"
    """Which elements of a moment share a scale: 128 in a row of the flat shard, or a rank's part of a tensor."""
    scale: ScaleType = "fp32"
    """fp32: a group's largest magnitude is kept all but exactly, and decays while gradients are zero. pow2: it may get
    stuck. e4m3_expanded has FP32 scales whatever is said here."""
    stochastic_rounding: bool | Literal["auto"] | tuple[str, ...] = AUTO
    """What is rounded up or down at random, right on average: some of exp_avg, exp_avg_sq and master; true: all. auto:
    moments in FP8 (but not exp_avg in e4m3_expanded) and FP16 masters, for nearest rounding loses small changes."""
    seed: int = Field(0, ge=0)
    """Of stochastic rounding."""
    implementation: Literal["auto", "ds_fp8"] = "auto"
    """auto: DeepSpeed's own Adam while all state is FP32. ds_fp8: this package's, also then."""

    @field_validator("stochastic_rounding", mode="before")
    @classmethod
    def _names_parts(cls, value: Any) -> Any:
        if not isinstance(value, bool | list | tuple) and value != AUTO:
            raise ValueError(f"is auto, true, false, or a list of some of {', '.join(get_args(StatePart))}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> OptimizerStateConfig:
        self.precision().check_flattened()
        return self

    def precision(self) -> StatePrecision:
        """The same for ds_fp8.optim.AdamW. Raises UserError for words that do not go together."""
        return StatePrecision(**{field.name: getattr(self, field.name) for field in fields(StatePrecision)})


class MonitorConfig(Section):
    """The health of the casts, measured by layer and tensor class, and what is done about a layer that degrades."""

    every: int = Field(100, ge=0)
    """Optimizer steps between two measured ones; 0 never measures."""
    min_snr_db: float = 20.0
    """A layer degrades when the signal-to-noise ratio of one of its casts is lower. Rounding alone leaves about 31 dB
    in E4M3 and 25 dB in E5M2, whatever the tensor; 20 dB is an error of a tenth of the signal."""
    max_flushed: float = Field(0.5, ge=0, le=1)
    """A layer also degrades when more than this share of the elements of one of its casts is flushed to zero."""
    patience: int = Field(3, ge=1)
    """Measurements in a row that must say so."""
    fallback: bool = False
    """Whether a layer that degrades goes on in BF16. False: a warning names it."""


class FP8Config(Section):
    """The whole "fp8" section. Every key is optional; `preset` supplies what the user leaves out."""

    enabled: bool = True
    preset: str = "infir2"
    linear: LinearConfig = LinearConfig()
    activations: ActivationsConfig = ActivationsConfig()
    fuse: Literal["auto", "off"] = "auto"
    """auto: decoder layers of the usual structure run as a few fused operations instead of linear by linear. off: every
    layer keeps its own forward."""
    loss: Literal["auto", "fused", "off"] = "auto"
    """auto: the cross entropy is computed from the last hidden state without materialising logits, where the model's
    own loss allows it. fused: the same, with FP8 disabled too. off: the model's own loss."""
    param_gather: ParameterGatherConfig = ParameterGatherConfig()
    grad_reduce: GradientReduceConfig = GradientReduceConfig()
    optimizer: OptimizerStateConfig = OptimizerStateConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def fuses_loss(self) -> bool:
        """Whether the cross entropy is to be computed without logits."""
        return self.loss == "fused" or (self.enabled and self.loss == "auto")

    @model_validator(mode="after")
    def _gathers_what_is_multiplied(self) -> FP8Config:
        gathered, multiplied = self.param_gather.format, self.linear.weight.format
        if gathered not in ("bf16", multiplied):
            raise UserError(
                f'param_gather.format "{gathered}" differs from linear.weight.format "{multiplied}": '
                "the gathered bytes are what the GEMMs read, so both must be the same",
                key="fp8.param_gather.format",
                remedy=f'"param_gather": {{"format": "{multiplied}"}}, or "bf16" to gather without FP8',
            )
        return self


def _granularity(word: str) -> dict[str, str]:
    return {"granularity": word}


_TENSORWISE: dict[str, Any] = {
    "linear": {
        "input": _granularity("tensor"),
        "weight": _granularity("tensor"),
        "grad_output": {**_granularity("tensor"), "format": "e5m2"},
    }
}
_FP8LM: dict[str, Any] = {**_TENSORWISE, "grad_reduce": {"scale": "tensor"}}
_FP8LM_MOMENTS = {"exp_avg": "e4m3", "exp_avg_sq": "fp16", "granularity": "tensor", "scale": "pow2"}

# None says stochastic_rounding: "auto" rounds moments in FP8 and masters in FP16 stochastically. The sources do not;
# rounded to nearest the final loss moves by more than chance does (scripts/bench/LOG.md).
PRESETS: dict[str, dict[str, Any]] = {
    # InfiR2 (arXiv 2509.22536): E4M3 everywhere, 128x128 weights, 1x128 activations and gradients, power-of-two scales.
    "infir2": {},
    # As infir2, with wgrad's input in 128x128 blocks: on Hopper 1x128 times 128x128 is the faster block-scaled product.
    "hybrid_fast": {"linear": {"wgrad": {"input": "128x128"}}},
    # One scale per token and per output channel, E4M3.
    "rowwise": {"linear": {name: _granularity("row") for name in ("input", "weight", "grad_output")}},
    # One scale per tensor, E5M2 output gradients: the hybrid of Micikevicius et al. (arXiv 2209.05433), and the GEMMs
    # of FP8-LM (arXiv 2310.18313).
    "tensorwise": _TENSORWISE,
    # FP8-LM (arXiv 2310.18313): levels O1, O2 and O3. Weights are sharded in 16 bits before O3.
    "fp8lm_o1": {**_FP8LM, "param_gather": {"format": "bf16"}},
    "fp8lm_o2": {**_FP8LM, "param_gather": {"format": "bf16"}, "optimizer": _FP8LM_MOMENTS},
    "fp8lm_o3": {**_FP8LM, "optimizer": {**_FP8LM_MOMENTS, "master": "fp16_scaled"}},
    # COAT (arXiv 2410.19313): its linears and its optimizer, whose moments have their dynamic range expanded. It sends
    # gradients in BF16.
    "coat": {
        **_TENSORWISE,
        "grad_reduce": {"format": "bf16"},
        "optimizer": {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"},
    },
    # Fishman et al. (arXiv 2409.12517): its linears and its optimizer.
    "fishman": {
        **_TENSORWISE,
        "grad_reduce": {"format": "bf16"},
        "optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "e5m2", "granularity": "tensor"},
    },
}


def parse_fp8(raw: Mapping[str, Any], file: str | os.PathLike | None = None) -> FP8Config:
    """The FP8Config of a whole DeepSpeed configuration; disabled when it has no "fp8" section.

    Raises UserError naming file, key and remedy for anything the section may not contain.
    """
    if "fp8" not in raw:
        for key in raw:
            if key.lower().replace("_", "").replace("-", "") == "fp8":
                raise UserError(f'unknown key "{key}"', key=key, file=file, remedy='Did you mean "fp8"?')
        return FP8Config(enabled=False)
    section = raw["fp8"]
    if not isinstance(section, Mapping):
        raise UserError(f'"fp8" must be a JSON object, got {section!r}', key="fp8", file=file, remedy='"fp8": {...}')
    preset = section.get("preset", "infir2")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise UserError(
            f"unknown preset {preset!r}",
            key="fp8.preset",
            file=file,
            remedy=nearest(str(preset), PRESETS).replace("Known keys", "Known presets"),
        )
    return parse_section(FP8Config, merge(PRESETS[preset], section), key="fp8", file=file)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if nested else value
    return result


def section_of(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The sub-section `name`, empty where it is absent or null."""
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}
