"""The "fp8.linear" section: casts of linear layers, overrides for some of them, and layers to skip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec, FormatName, Granularity, ScaleName
from ds_fp8.config.presets import merge
from ds_fp8.config.schema import Section, as_mapping, parse_section


class Cast(Section):
    """The cast of one tensor class."""

    format: FormatName = "e4m3"
    """Storage format of one element."""
    granularity: Granularity = "1x128"
    """Elements that share a scale: a tensor, a row (token, output channel), 128 along the contraction, or a 128x128
    block."""
    scale: ScaleName = "pow2"
    """pow2: powers of two. fp32: amax / largest number of the format.

    With pow2 quantizing again is exact. With fp32 the amax of a group is exact."""

    @property
    def spec(self) -> CastSpec:
        """Return the cast as a CastSpec."""
        return CastSpec(self.format, self.granularity, self.scale)

    def __str__(self) -> str:
        return str(self.spec)


class WeightCast(Cast):
    """The cast of weights, for fprop and, transposed, dgrad.

    row: one scale per output channel, the contraction of dgrad, for which scales are multiplied into dy.
    """

    granularity: Literal["128x128", "row", "tensor"] = "128x128"
    """Elements that share a scale: a square block, an output channel, or the tensor."""


class WgradConfig(Section):
    """Granularity of wgrad's columnwise input; dy has that of `grad_output`."""

    input: Granularity | None = None
    """Granularity of the input, columnwise (along the tokens); null: as linear.input."""


class LinearCasts(Section):
    """The casts of fprop, dgrad and wgrad of linear layers."""

    input: Cast = Cast()
    weight: WeightCast = WeightCast()
    grad_output: Cast = Cast()
    wgrad: WgradConfig = WgradConfig()
    outlier_channels: int = Field(0, ge=0, le=256)
    """Input channels whose quantization errors [fprop corrects](#outlier-channels); 64 or 128 are enough.

    The channels with the largest mean square; 64 of them cost as much as 128 input features. For inputs in 1x128 and
    weights in 128x128."""

    @property
    def why_not_served(self) -> str | None:
        """Return why servers do not support these casts, or None."""
        return None

    def __str__(self) -> str:
        casts = [f"{name} {getattr(self, name)}" for name in ("input", "weight", "grad_output")]
        wgrad = [f"wgrad input {self.wgrad.input}"] if self.wgrad.input else []
        outliers = [f"{self.outlier_channels} outlier channels"] if self.outlier_channels else []
        return ", ".join(casts + wgrad + outliers)


class LinearConfig(LinearCasts):
    """The linear layers: casts, GEMM backend, and the layers that stay in high precision."""

    casts_of_overrides: ClassVar[type[LinearCasts]] = LinearCasts

    backend: Literal["auto", "deep_gemm", "cublas", "reference"] = "auto"
    """auto: the first of the others that passes a trial product of each pair of casts. reference emulates FP8.

    auto selects reference for emulated formats, and without a GPU."""
    expert_products: Literal["auto", "bf16", "fp8"] = "auto"
    """Of experts all-gathered in FP8. fp8: [grouped GEMMs](mixture_of_experts.md#fp8-gemms). bf16: transformers' GEMMs
    with dequantized weights.

    fp8 supports some experts and casts; the start report names the others. auto is fp8 with backend cublas or
    deep_gemm, hence on Hopper, where this package's kernels have been measured, else bf16."""
    skip: tuple[str, ...] = ("lm_head",)
    """Linears in BF16: names, parts of dotted names, or glob patterns."""
    overrides: dict[str, LinearCasts | Literal["bf16"]] = Field(default_factory=dict)
    """Patterns as in `skip`, each with "bf16" or casts: {"*.down_proj": {"input": {"granularity": "tensor"}}}. The
    first match applies.

    Absent keys of an override are those above. A pattern without a match is an error. Exports store weights with other
    casts in BF16. {"*": "bf16"} keeps every layer in BF16, with this package's step and graphs. `ds-fp8
    sensitivity` proposes overrides."""

    def remarks(self, recipes: Iterable[Any]) -> dict[str, str]:
        """Return further lines of the start report on these casts, by title."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _overrides_change_the_casts_above(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("overrides"), Mapping):
            return values
        casts = cls.casts_of_overrides
        above = {name: as_mapping(values[name]) for name in casts.model_fields if name in values}
        overrides = {}
        for pattern, override in values["overrides"].items():
            key = f'fp8.linear.overrides["{pattern}"]'
            if isinstance(override, str) and override != "bf16":
                raise UserError(
                    f'fp8.linear.overrides has "{override}" for "{pattern}"',
                    key=key,
                    remedy='"bf16", or casts: {"input": {"format": "e5m2"}}',
                )
            if override != "bf16":
                changes = as_mapping(override)
                if isinstance(changes, Mapping):
                    changes = merge(above, changes)
                override = parse_section(casts, changes, key=key)
            overrides[pattern] = override
        return {**values, "overrides": overrides}
