"""Frozen plans of weights (GroupPlan) and steps (StepPlan), made of a configuration by engine/plans.py.

The plan of layers is LayersPlan (layers/convert.py). Packages below engine/ read plans, and no section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS, CastSpec
from ds_fp8.config.refusals import refusals

CodecName = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2", "e4m3_expanded"]
StateGranularity = Literal["1x128", "tensor"]
StateScale = Literal["fp32", "pow2"]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StatePrecision:
    """Formats of the moments. Raises UserError for incompatible options."""

    exp_avg: CodecName = "fp32"
    exp_avg_sq: CodecName = "fp32"
    granularity: StateGranularity = "1x128"  # tensor: a rank's part of a tensor
    scale: StateScale = "fp32"
    stochastic_rounding: bool = True  # of moments of one byte, which rounding to nearest would bias
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"exp_avg": CodecName, "exp_avg_sq": CodecName, "granularity": StateGranularity, "scale": StateScale}
        for name, words in choices.items():
            known = get_args(words)
            emulated = name in MOMENTS and getattr(self, name) in FORMATS
            if getattr(self, name) not in known and not emulated:
                raise UserError(
                    f"{name} {getattr(self, name)!r} is unknown",
                    key=f"fp8.optimizer.{name}",
                    remedy=f"one of {', '.join(known)}",
                )
        for refusal in refusals(self):
            raise refusal

    @property
    def stochastic_parts(self) -> tuple[str, ...]:
        """Return the moments with stochastic rounding, which an expanded exp_avg does not need."""
        in_bytes = {"exp_avg": tuple(FORMATS), "exp_avg_sq": (*FORMATS, "e4m3_expanded")}
        return tuple(
            name for name, formats in in_bytes.items() if self.stochastic_rounding and getattr(self, name) in formats
        )

    @property
    def compressed(self) -> bool:
        return (self.exp_avg, self.exp_avg_sq) != ("fp32", "fp32")


@dataclass(frozen=True)
class GroupPlan:
    """The choice of weights in FP8, and how ZeRO-3 shards and all-gathers them."""

    weight: CastSpec
    overrides: Mapping[str, CastSpec | None]  # by pattern, the first match applies; None: BF16
    skip: tuple[str, ...]
    skip_is_given: bool  # whether the user wrote the patterns
    gathers: bool  # whether the all-gather is in FP8
    frozen_unsharded: bool  # whether every rank keeps frozen weights unsharded
    coded_masters: bool  # whether masters are data with corrections


@dataclass(frozen=True)
class GradientReduction:
    """The reduce-scatter of gradients in FP8."""

    format: str
    scale: str  # "group" of 128 elements, or "tensor"


@dataclass(frozen=True)
class StepPlan:
    """Micro-batches and optimizer steps."""

    moments: StatePrecision
    own_optimizer: bool  # whether the configuration requires this package's AdamW
    reduction: GradientReduction | None  # None: DeepSpeed's, in BF16
    graph: str  # "off", "auto" or "on"
    min_snr_db: float  # a layer below it degrades
    falls_back: bool  # whether a degraded layer moves to BF16
