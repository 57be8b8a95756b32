"""Keys of the "fp8" section for casts of papers: subclasses of core's sections, and refusals of their pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field

from ds_fp8.config.formats import NATIVE_FORMATS, FormatName, Granularity, ScaleName, is_of_groups
from ds_fp8.config.fp8 import CodecName, FP8Config, GradientReduceConfig, OptimizerStateConfig, ParameterGatherConfig
from ds_fp8.config.linear import Cast, LinearCasts, LinearConfig, WeightCast, WgradConfig
from ds_fp8.config.refusals import Row
from ds_fp8.config.schema import Section, Seed
from ds_fp8.layers.attention.hadamard import Rotation
from ds_fp8.research.formats import EmulatedFormat, ResearchSpec, static_scale_type

AnyFormat = Literal[FormatName, EmulatedFormat]
AnyGranularity = Literal[Granularity, "1x32", "32x32", "1x16", "16x16"]
AnyScale = Literal[ScaleName, "e4m3", "mse", "fitted", "static"]


class ResearchCast(Cast):
    """The cast of one tensor class."""

    format: AnyFormat = "e4m3"
    """Storage format of one element; all but e4m3 and e5m2 are emulated."""
    granularity: AnyGranularity = "1x128"
    """Elements that share a scale, as core's, or in groups and blocks of 32 and 16."""
    scale: AnyScale = "pow2"
    """As core's, and: e4m3: scales of groups are E4M3 numbers in units of one FP32 scale of the tensor, as in NVFP4.
    mse: the pow2 scale or half of it, by the smaller squared error of the group, as in Quartet. fitted: in groups of
    1x128, amax / one of the four largest codes, by the squared error; otherwise as fp32. static:
    2^static_exponent for a whole tensor ("granularity": "tensor"), without an amax; larger numbers saturate. For models
    whose tensors stay near variance 1."""
    static_exponent: int = Field(0, ge=-100, le=100)
    """Exponent of a static scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """stochastic: unbiased, with torch's random numbers."""

    @property
    def spec(self) -> ResearchSpec:
        scale = static_scale_type(self.static_exponent) if self.scale == "static" else self.scale
        return ResearchSpec(self.format, self.granularity, scale, self.rounding)


class ResearchWeightCast(ResearchCast, WeightCast):
    """The cast of weights: one serves fprop and, transposed, dgrad.

    1x32, 1x16: cast once for fprop and once, along the output channels, for dgrad, as MX formats are; both from high
    precision, so that such weights are gathered in BF16.
    """

    granularity: Literal["128x128", "row", "tensor", "32x32", "16x16", "1x32", "1x16"] = "128x128"
    """Elements that share a scale: a square block, an output channel, all of the weight, or a group along the
    contraction of the product."""


class ResearchWgrad(WgradConfig):
    """Granularity of wgrad's input, cast along the tokens; the output gradient has that of `grad_output`."""

    input: AnyGranularity | None = None
    """Granularity of the input, cast along the tokens; null: as linear.input."""


class RotationConfig(Section):
    """Hadamard transforms of the operands of products before their casts, which spread an outlier over its block.

    Along the contraction both operands are transformed, and it cancels. Along another dimension one operand is, and the
    result is transformed back. HALO's level 1 (arXiv 2501.02625) is fprop alone; level 2 has dgrad along tokens too.
    """

    fprop: Literal["in_features"] | None = None
    """Input and weight, which is all-gathered rotated; dgrad's result is transformed back; shards must not
    cut blocks."""
    dgrad: Literal["tokens", "out_features"] | None = None
    """tokens: output gradient, transformed back in the result. out_features: output gradient and weight, if that is in
    1x32 or 1x16.

    Such weights are cast for each product; a weight cast once serves both and cannot be."""
    wgrad: Literal["tokens", "in_features"] | None = None
    """tokens: output gradient and input, as in NVFP4. in_features: the input, transformed back in the result."""
    block: Literal[16, 32, 64, 128] = 128
    """Elements transformed together. Features must be multiples of it; tokens are padded."""
    random: bool = False
    """Random signs before, the same ones in all blocks, layers and steps."""
    seed: Seed = 0
    """Of the random signs."""

    @property
    def products(self) -> dict[str, str]:
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
    """fprop: dgrad and wgrad quantize fprop's quantized tensors again, as in Quartet; for weights in 1x32 or 1x16.

    The gradients are then of the function that forward computed (arXiv 2505.14669). high_precision: input and weight,
    cast as for fprop."""
    scale: Literal["fp32", "pow2", "e4m3"] = "pow2"
    """Of tensors that are quantized again."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Of tensors that are quantized again."""
    clipped: Literal["zero", "pass"] = "zero"
    """Gradient of elements that fprop's cast clipped (scale "mse"); zero keeps a byte an element of every input."""

    def __str__(self) -> str:
        return f"fprop's for the others, {self.scale} {self.rounding}, clipped elements: {self.clipped}"


class ResearchCasts(LinearCasts):
    """The casts of the operands of a linear layer's three products, rotated, or cast a second time."""

    input: ResearchCast = ResearchCast()
    weight: ResearchWeightCast = ResearchWeightCast()
    grad_output: ResearchCast = ResearchCast()
    wgrad: ResearchWgrad = ResearchWgrad()
    rotation: RotationConfig = RotationConfig()
    recast: RecastConfig = RecastConfig()

    @property
    def why_not_served(self) -> str | None:
        return self.rotation.fprop and "trained with its weight rotated, and servers rotate no activations"

    def __str__(self) -> str:
        rotation = [f"rotated: {self.rotation}"] if self.rotation.products else []
        recast = [f"recast: {self.recast}"] if self.recast.of == "fprop" else []
        return ", ".join([super().__str__(), *rotation, *recast])


class ResearchLinear(ResearchCasts, LinearConfig):
    """The linear layers, with casts of papers."""

    casts_of_overrides: ClassVar[type[LinearCasts]] = ResearchCasts
    overrides: dict[str, ResearchCasts | Literal["bf16"]] = Field(default_factory=dict)
    backend: Literal["auto", "deep_gemm", "cublas", "mxfp8", "reference"] = "auto"
    """As core's, and mxfp8: products of Blackwell through Transformer Engine, for block scales that are powers of two;
    never run on such a GPU. auto takes it last."""
    smooth_swiglu: bool = False
    """Powers of two move outlier channels of act(gate) · up in gated MLPs into the weight of down_proj. The function is
    unchanged.

    Every channel is divided before the cast, and the input channels of down_proj are multiplied before theirs."""

    def remarks(self, recipes: Iterable[Any]) -> dict[str, str]:
        found = {"rotation": str(self.rotation)} if self.rotation.products else {}
        if self.smooth_swiglu:
            count = sum(getattr(recipe, "smooth", False) for recipe in recipes)
            found["Smooth-SwiGLU"] = f"{count} gated MLPs" if count else "none: the model has no gated MLP in FP8"
        return found


class ResearchGather(ParameterGatherConfig):
    """Format of ZeRO-3's parameter all-gather, for the weights of FP8 linears."""

    format: Literal[AnyFormat, "bf16"] = "e4m3"
    """The format of linear.weight, or bf16."""


class ResearchReduce(GradientReduceConfig):
    """Format of ZeRO-3's gradient reduce-scatter, for every gradient of two or more dimensions."""

    format: Literal[AnyFormat, "bf16"] = "e4m3"
    """bf16: DeepSpeed's reduce-scatter. All others take a byte an element; all but e4m3 and e5m2 are emulated."""


class ResearchOptimizerState(OptimizerStateConfig):
    """Storage formats of optimizer state, emulated ones too."""

    exp_avg: Literal[CodecName, EmulatedFormat] = "fp32"
    """Format of the first moment."""
    exp_avg_sq: Literal[CodecName, EmulatedFormat] = "fp32"
    """Format of the second moment."""


class ResearchConfig(FP8Config):
    """The whole "fp8" section, with the keys of papers."""

    linear: ResearchLinear = ResearchLinear()
    param_gather: ResearchGather = ResearchGather()
    grad_reduce: ResearchReduce = ResearchReduce()
    optimizer: ResearchOptimizerState = ResearchOptimizerState()


def _beside_outliers(c: ResearchCasts) -> str:
    """Return what of these casts outlier channels do not go with."""
    found = {
        "rounded stochastically": "stochastic" in (c.input.rounding, c.weight.rounding),
        "rotated": c.rotation.fprop is not None,
        "cast again": c.recast.of == "fprop",
    }
    return ", ".join(what for what, has in found.items() if has and c.outlier_channels)


def _cast_once(c: ResearchCasts) -> bool:
    return not is_of_groups(c.weight.granularity)


_NATIVE = f'"format": {" or ".join(NATIVE_FORMATS)}'
_CAST, _CASTS, _RECAST = "ResearchCast", "ResearchCasts", "fp8.linear.recast"
# fmt: off
REFUSALS = [Row(*row) for row in (
    (_CAST, lambda c: c.scale == "static" and c.granularity != "tensor", "fp8.linear",
     'scale "static" needs granularity "tensor", but granularity is "{c.granularity}"',
     '"scale": "static", "granularity": "tensor"'),
    (_CAST, lambda c: c.scale == "static" and c.format not in NATIVE_FORMATS, "fp8.linear",
     'scale "static" needs a format with NaN, which shows overflow, but format is "{c.format}"',
     f"{_NATIVE}, or another scale"),
    (_CAST, lambda c: c.scale == "mse" and c.rounding == "stochastic", "fp8.linear",
     'scale "mse" saturates elements, so stochastic rounding would be biased',
     '"scale": "pow2", or "rounding": "nearest"'),
    (_CAST, lambda c: c.scale == "fitted" and c.format not in NATIVE_FORMATS, "fp8.linear",
     'scale "fitted" is not available for format "{c.format}"', f'{_NATIVE}, or "scale": "mse"'),
    (_CAST, lambda c: c.scale != "static" and c.static_exponent != 0, "fp8.linear",
     'static_exponent {c.static_exponent} applies to scale "static" only, but scale is "{c.scale}"',
     '"scale": "static", or remove "static_exponent"'),
    (_CASTS, _beside_outliers, "fp8.linear.outlier_channels",
     "outlier channels need E4M3 casts in blocks, but input is {c.input}, weight {c.weight}, {found}",
     '"outlier_channels": 0, or input and weight rounded to nearest, neither rotated nor cast again'),
    (_CASTS, lambda c: c.recast.of != "fprop" and c.recast != RecastConfig(), _RECAST,
     "these keys apply only if fprop's operands are cast again in backward", '"recast": {{"of": "fprop"}}'),
    (_CASTS, lambda c: c.recast.of == "fprop" and _cast_once(c), _RECAST,
     "weights cast as {c.weight} are cast once for fprop and dgrad",
     '"weight": {{"granularity": "1x32"}}, or remove "recast"'),
    (_CASTS, lambda c: c.recast.of == "fprop" and "stochastic" in (c.input.rounding, c.weight.rounding), _RECAST,
     "fprop's operands are cast again in backward, and stochastic rounding would change their values",
     '"rounding": "nearest" of input and weight'),
    (_CASTS, lambda c: c.recast.of == "fprop" and c.rotation.wgrad == "in_features",
     f"{_RECAST}, fp8.linear.rotation.wgrad",
     "with recast, rotation.fprop already rotates wgrad's input along in_features", '"wgrad": "tokens"'),
    (_CASTS, lambda c: c.rotation.dgrad == "out_features" and _cast_once(c), "fp8.linear.rotation.dgrad",
     "weights cast as {c.weight} are cast once for fprop and dgrad, which contract over different dimensions of them",
     '"dgrad": "tokens"'),
    (_CASTS, lambda c: c.input.scale == "static" and c.wgrad.input not in (None, "tensor"), "fp8.linear.wgrad.input",
     'wgrad.input "{c.wgrad.input}" needs scales of groups, but input has one static scale', 'remove "wgrad"'),
    ("ResearchConfig", lambda c: c.loss.head == "fp8" and c.linear.rotation.products, "fp8.loss.head",
     'loss.head "fp8" does not support fp8.linear.rotation',
     '"head": "bf16", or fp8.linear.rotation in linear.overrides only'),
)]
