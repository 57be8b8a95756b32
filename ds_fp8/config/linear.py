"""The "fp8.linear" section: casts of linear layers, overrides for some of them, and layers to skip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import (
    ALONG_CONTRACTION,
    NATIVE_FORMATS,
    CastSpec,
    FormatName,
    Granularity,
    Recast,
    Rotation,
    ScaleType,
    static_scale_type,
)
from ds_fp8.config.presets import merge
from ds_fp8.config.schema import Section, Seed, parse_section


class Cast(Section):
    """The cast of one tensor class."""

    format: FormatName = "e4m3"
    """Storage format of one element."""
    granularity: Granularity = "1x128"
    """Elements that share a scale: all of a tensor, a row (of a token or an output channel), 128 along the contraction
    of the product the cast feeds, or a 128x128 block."""
    scale: ScaleType = "pow2"
    """pow2: powers of two; a second cast of the result is exact. fp32: amax / largest code, so that the largest number
    of a group is exact. fitted: in groups of 1x128, amax / one of the four largest codes, by the smallest squared error
    of the group; otherwise as fp32. e4m3: scales of groups are E4M3 numbers in units of one FP32 scale of the tensor,
    as in NVFP4. mse: the pow2 scale or half of it, by the smaller squared error of the group, as in Quartet. static:
    2^static_exponent for a whole tensor ("granularity": "tensor"), without an amax; larger numbers saturate. For models
    whose tensors stay near variance 1."""
    static_exponent: int = Field(0, ge=-100, le=100)
    """Exponent of a static scale, which is 2^static_exponent."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """stochastic: unbiased, with torch's random numbers."""

    @property
    def spec(self) -> CastSpec:
        """Return the same without what only a section of the JSON needs."""
        scale = static_scale_type(self.static_exponent) if self.scale == "static" else self.scale
        return CastSpec(self.format, self.granularity, scale, self.rounding)

    @model_validator(mode="after")
    def _static_is_of_a_tensor(self) -> Cast:
        if self.scale == "static" and self.granularity != "tensor":
            raise UserError(
                f'scale "static" needs granularity "tensor", but granularity is "{self.granularity}"',
                key="fp8.linear",
                remedy='"scale": "static", "granularity": "tensor"',
            )
        if self.scale == "static" and self.format not in NATIVE_FORMATS:
            raise UserError(
                f'scale "static" needs a format with NaN, which shows overflow, but format is "{self.format}"',
                key="fp8.linear",
                remedy=f'"format": {" or ".join(NATIVE_FORMATS)}, or another scale',
            )
        if self.scale == "mse" and self.rounding == "stochastic":
            raise UserError(
                'scale "mse" saturates elements, so stochastic rounding would be biased',
                key="fp8.linear",
                remedy='"scale": "pow2", or "rounding": "nearest"',
            )
        if self.scale == "fitted" and self.format not in NATIVE_FORMATS:
            raise UserError(
                f'scale "fitted" is not available for format "{self.format}"',
                key="fp8.linear",
                remedy=f'"format": {" or ".join(NATIVE_FORMATS)}, or "scale": "mse"',
            )
        if self.scale != "static" and self.static_exponent:
            raise UserError(
                f'static_exponent {self.static_exponent} applies to scale "static" only, but scale is "{self.scale}"',
                key="fp8.linear",
                remedy='"scale": "static", or remove "static_exponent"',
            )
        return self

    def __str__(self) -> str:
        return str(self.spec)


class WeightCast(Cast):
    """The cast of weights: one serves fprop and, transposed, dgrad.

    row: one scale per output channel; dgrad contracts over that dimension, so there the scales are folded into dy.
    1x32, 1x16: cast once for fprop and once, along the output channels, for dgrad, as MX formats are; both from high
    precision, so that such weights are gathered in BF16.
    """

    granularity: Literal["128x128", "row", "tensor", "32x32", "16x16", "1x32", "1x16"] = "128x128"
    """Elements that share a scale: a square block, an output channel, all of the weight, or a group along the
    contraction of the product."""


class WgradConfig(Section):
    """Granularity of wgrad's input, cast along the tokens; the output gradient has that of `grad_output`."""

    input: Granularity | None = None
    """Granularity of the input, cast along the tokens; null: as linear.input."""


class RotationConfig(Section):
    """Hadamard transforms of the operands of products before their casts, which spread an outlier over its block.

    Along the contraction both operands are transformed, and it cancels. Along another dimension one operand is, and the
    result is transformed back. HALO's level 1 (arXiv 2501.02625) is fprop alone; level 2 has dgrad along tokens too.
    """

    fprop: Literal["in_features"] | None = None
    """Transforms input and weight. The weight is gathered so, and dgrad's result transformed back; ZeRO-3's shards must
    be whole blocks for that."""
    dgrad: Literal["tokens", "out_features"] | None = None
    """tokens: the output gradient, transformed back in the result. out_features: output gradient and weight, for
    weights in 1x32 or 1x16, which are cast for each product; a weight cast once serves both and cannot be."""
    wgrad: Literal["tokens", "in_features"] | None = None
    """tokens: output gradient and input, as in NVFP4. in_features: the input, transformed back in the result."""
    block: Literal[16, 32, 64, 128] = 128
    """Elements that are transformed together. in_features and out_features must be multiples of it; tokens are padded
    with zeros."""
    random: bool = False
    """Change random signs in a block before, the same ones in all blocks, layers and steps."""
    seed: Seed = 0
    """Seed of the random signs."""

    @property
    def products(self) -> dict[str, str]:
        """Return the dimension that each rotated product is rotated along."""
        return {name: along for name in ("fprop", "dgrad", "wgrad") if (along := getattr(self, name)) is not None}

    def along(self, dimension: str | None, first: str) -> Rotation | None:
        """Return the rotation of a matrix [first, ...] along one of its dimensions, None for no dimension."""
        if dimension is None:
            return None
        return Rotation(self.block, self.seed if self.random else None, 0 if dimension == first else 1)

    def __str__(self) -> str:
        products = ", ".join(f"{name} along {dimension}" for name, dimension in self.products.items())
        return f"{products}, {'random ' if self.random else ''}Hadamard transforms of {self.block}"


class RecastConfig(Section):
    """Sources of the second casts of input and weight, for wgrad and dgrad, which contract over other dimensions."""

    of: Literal["high_precision", "fprop"] = "high_precision"
    """fprop: what fprop multiplied is cast again, as in Quartet (arXiv 2505.14669), so that the gradients are of the
    function that forward computed; for weights in 1x32 or 1x16. high_precision: input and weight, cast as for fprop."""
    scale: Literal["fp32", "pow2", "e4m3"] = "pow2"
    """Scales of operands that are cast again."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Rounding of operands that are cast again; stochastic: right on average."""
    clipped: Literal["zero", "pass"] = "zero"
    """Gradient of elements that fprop's cast clipped (scale "mse"); zero keeps a byte an element of every input."""

    @property
    def spec(self) -> Recast | None:
        """Return the same for casts, None where they are of high precision."""
        return Recast(self.scale, self.rounding, self.clipped == "zero") if self.of == "fprop" else None

    def __str__(self) -> str:
        return f"fprop's for the others, {self.scale} {self.rounding}, clipped elements: {self.clipped}"


class LinearCasts(Section):
    """The casts of the operands of a linear layer's three products."""

    input: Cast = Cast()
    weight: WeightCast = WeightCast()
    grad_output: Cast = Cast()
    wgrad: WgradConfig = WgradConfig()
    rotation: RotationConfig = RotationConfig()
    recast: RecastConfig = RecastConfig()
    outlier_channels: int = Field(0, ge=0, le=256)
    """Number of input channels, those with the largest mean square, in which fprop also multiplies the cast errors of
    input and weight. Every 64 of them take the time of 128 more input features. For inputs in 1x128 and weights in
    128x128; 64 or 128 are enough for all models tried."""

    @model_validator(mode="after")
    def _outliers_are_of_blocks(self) -> LinearCasts:
        x, w = self.input, self.weight
        fits = (x.granularity, w.granularity, x.format, w.format) == ("1x128", "128x128", "e4m3", "e4m3")
        fits &= x.scale in ("pow2", "fp32", "fitted") and w.scale in ("pow2", "fp32")
        fits &= {x.rounding, w.rounding} == {"nearest"}
        if self.outlier_channels and not (fits and not self.rotation.fprop and self.recast.of != "fprop"):
            raise UserError(
                f"outlier channels need E4M3 casts in blocks, but input is {x}, weight {w}"
                + (", rotated" if self.rotation.fprop else "")
                + (", cast again" if self.recast.of == "fprop" else ""),
                key="fp8.linear.outlier_channels",
                remedy='"outlier_channels": 0, or "input": {"granularity": "1x128"}, "weight": {"granularity": '
                '"128x128"}, both "e4m3", rounded to nearest, with scale "pow2" or "fp32" (input: or "fitted")',
            )
        return self

    @model_validator(mode="after")
    def _only_what_is_cast_twice_is_cast_again(self) -> LinearCasts:
        key = "fp8.linear.recast"
        if self.recast.of != "fprop":
            if self.recast != RecastConfig():
                raise UserError(
                    "these keys apply only if fprop's operands are cast again in backward",
                    key=key,
                    remedy='"recast": {"of": "fprop"}',
                )
            return self
        if self.weight.granularity not in ALONG_CONTRACTION:
            raise UserError(
                f"weights cast as {self.weight} are cast once for fprop and dgrad",
                key=key,
                remedy='"weight": {"granularity": "1x32"}, or remove "recast"',
            )
        if "stochastic" in (self.input.rounding, self.weight.rounding):
            raise UserError(
                "fprop's operands are cast again in backward, and stochastic rounding would change their values",
                key=key,
                remedy='"rounding": "nearest" of input and weight',
            )
        if self.rotation.wgrad == "in_features":
            raise UserError(
                "with recast, rotation.fprop already rotates wgrad's input along in_features",
                key=f"{key}, fp8.linear.rotation.wgrad",
                remedy='"wgrad": "tokens"',
            )
        return self

    @model_validator(mode="after")
    def _one_weight_is_rotated_one_way(self) -> LinearCasts:
        if self.rotation.dgrad == "out_features" and self.weight.granularity not in ALONG_CONTRACTION:
            raise UserError(
                f"weights cast as {self.weight} are cast once for fprop and dgrad, which contract over different "
                "dimensions of them",
                key="fp8.linear.rotation.dgrad",
                remedy='"dgrad": "tokens"',
            )
        return self

    @model_validator(mode="after")
    def _static_along_the_tokens_too(self) -> LinearCasts:
        if self.input.scale == "static" and self.wgrad.input not in (None, "tensor"):
            raise UserError(
                f'wgrad.input "{self.wgrad.input}" needs scales of groups, but input has one static scale',
                key="fp8.linear.wgrad.input",
                remedy='remove "wgrad"',
            )
        return self

    def __str__(self) -> str:
        casts = [f"{name} {getattr(self, name)}" for name in ("input", "weight", "grad_output")]
        wgrad = [f"wgrad input {self.wgrad.input}"] if self.wgrad.input else []
        rotation = [f"rotated: {self.rotation}"] if self.rotation.products else []
        recast = [f"recast: {self.recast}"] if self.recast.of == "fprop" else []
        outliers = [f"{self.outlier_channels} outlier channels"] if self.outlier_channels else []
        return ", ".join(casts + wgrad + rotation + recast + outliers)


class LinearConfig(LinearCasts):
    """The linear layers: casts, GEMM backend and accumulation, and the layers that stay in high precision."""

    backend: Literal["auto", "deep_gemm", "cublas", "mxfp8", "transformer_engine", "reference"] = "auto"
    """Library that multiplies. auto: the first of the others that computes a small product of each pair of casts on
    this machine. reference emulates FP8 on any device; auto takes it for emulated formats, and without a GPU."""
    accumulation: Literal["fp32", "fast"] = "fp32"
    """fast: tensor- and row-wise products are summed in fewer bits on Hopper and finish earlier; relative error about
    1e-3 at K = 4096, 3e-3 at 16384. Block-scaled products are summed in FP32 either way."""
    expert_products: Literal["auto", "bf16", "fp8"] = "auto"
    """Products of experts that are gathered in FP8. bf16: transformers' own, with decoded weights. fp8: this package's
    grouped products, where experts and casts have a form that they know; the start report names the others. auto: fp8
    beside cublas and deep_gemm, hence on Hopper, where this package's own kernels have been measured, and bf16 beside
    the others; fp8 beside deep_gemm takes its products of groups."""
    smooth_swiglu: bool = False
    """Divide every channel of act(gate) · up in gated MLPs by a power of two before the cast, and multiply the input
    channels of down_proj by it before theirs. The function is unchanged, and outlier channels are gone."""
    skip: tuple[str, ...] = ("lm_head",)
    """Names, parts of dotted names, or glob patterns of linears that stay BF16."""
    overrides: dict[str, LinearCasts | Literal["bf16"]] = Field(default_factory=dict)
    """Pattern as in `skip` -> "bf16", or casts for the layers that match: {"*.down_proj": {"input": {"granularity":
    "tensor"}}}. Keys that an override leaves out are as above. The first matching pattern applies; one that matches no
    layer is an error. Exports store weights with other casts in BF16. {"*": "bf16"} keeps every layer in BF16, with
    this package's step and graphs. `ds-fp8 sensitivity` proposes overrides."""

    @model_validator(mode="before")
    @classmethod
    def _overrides_change_the_casts_above(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("overrides"), Mapping):
            return values
        above = {name: _as_mapping(values[name]) for name in LinearCasts.model_fields if name in values}
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
                changes = _as_mapping(override)
                if isinstance(changes, Mapping):
                    changes = merge(above, changes)
                override = parse_section(LinearCasts, changes, key=key)
            overrides[pattern] = override
        return {**values, "overrides": overrides}


def _as_mapping(value: Any) -> Any:
    """Return a section as the mapping it was made of, anything else as it is."""
    return value.model_dump() if isinstance(value, Section) else value
