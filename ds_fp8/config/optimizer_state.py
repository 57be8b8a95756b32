"""Storage formats of optimizer state: the options of the "fp8.optimizer" section, for use outside DeepSpeed too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS

CodecName = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2", "e4m3_expanded"]
StateGranularity = Literal["1x128", "tensor"]
StateScale = Literal["fp32", "pow2"]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StatePrecision:
    """Formats of the moments. Raises UserError for incompatible options."""

    exp_avg: CodecName = "fp32"
    exp_avg_sq: CodecName = "fp32"
    granularity: StateGranularity = "1x128"
    """Elements of a moment that share a scale: 128 in a row, or all of a tensor (of a rank's part of it)."""
    scale: StateScale = "fp32"
    stochastic_rounding: bool = True
    """Round moments in a byte at random rather than to nearest, which loses much of their changes."""
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"exp_avg": CodecName, "exp_avg_sq": CodecName, "granularity": StateGranularity, "scale": StateScale}
        for name, words in choices.items():
            known = get_args(words)
            own = name in MOMENTS and getattr(self, name) not in known and FORMATS.knows(getattr(self, name))
            if getattr(self, name) not in known and not own:
                raise UserError(
                    f"{name} {getattr(self, name)!r} is unknown",
                    key=f"fp8.optimizer.{name}",
                    remedy=f"one of {', '.join(known)}",
                )
        if self.granularity == "tensor" and "e4m3_expanded" in (self.exp_avg, self.exp_avg_sq):
            raise UserError(
                'e4m3_expanded needs groups of 128 elements, but granularity is "tensor"',
                key="fp8.optimizer.granularity",
                remedy='"granularity": "1x128"',
            )

    @property
    def stochastic_parts(self) -> tuple[str, ...]:
        """Return the moments that are rounded at random: an expanded exp_avg is fine enough without."""
        in_bytes = {"exp_avg": tuple(FORMATS), "exp_avg_sq": (*FORMATS, "e4m3_expanded")}
        return tuple(
            name for name, formats in in_bytes.items() if self.stochastic_rounding and getattr(self, name) in formats
        )

    @property
    def compressed(self) -> bool:
        """Return whether anything is kept in less than FP32."""
        return (self.exp_avg, self.exp_avg_sq) != ("fp32", "fp32")
