"""LinearRecipe: the casts of a linear layer's operands, and the backend of its products.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x cast along K                    w in one cast for both
    dgrad  dx [T, K] = dy [T, N] · w             dy cast along N                   (transposed here)
    wgrad  dw [N, K] = dyᵀ       · x             both cast along the tokens T, each from high precision

T tokens, N output and K input features. Weights with one scale per row (output channel) contract over that dimension in
dgrad, where a product cannot apply it: the scales are multiplied into dy before its cast, dx = cast(dy ⊙ s) · codes.

Rotations R (casts/rotation.py) come after the factors, and are named by the dimension they go along:

    fprop  in_features   y  = (x R)(w R)ᵀ            one weight w R for both products, so that dx = (dy · w R) Rᵀ
    dgrad  tokens        dx = R (Rᵀ dy · w)
           out_features  dx = (dy R)(Rᵀ w)           weights that are cast for each product only
    wgrad  tokens        dw = (Rᵀ dy)ᵀ (Rᵀ x)
           in_features   dw = (dyᵀ · x R) Rᵀ

Quartet (arXiv 2505.14669) casts what fprop multiplied again (`recast`), so that dx and dw, rounded
stochastically, are on average the gradients of the function that fprop computed; F is fprop's rotation, R the others':

    X = cast(x F)   W = cast(w F)   M = where that cast clips nothing, of X and of W
    dx = ((cast(dy R) · cast(Rᵀ W)) ⊙ M) Fᵀ        dw = ((cast(Rᵀ dy)ᵀ · cast(Rᵀ X)) ⊙ M) Fᵀ
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch

from ds_fp8.casts import (
    QuantizedTensor,
    apply_factors,
    clipped,
    quantize,
    quantize_both,
    quantize_columnwise,
    rotate,
    transpose,
    unrotate,
)
from ds_fp8.config.formats import ALONG_CONTRACTION, CastSpec, Recast, Rotation
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.linear import LinearCasts
from ds_fp8.gemm import reads_transposed, scaled_matmul, select_backend
from ds_fp8.layers.outlier_channels import OutlierChannels
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.statistics import Rows

Factor = torch.Tensor | None


@dataclass(frozen=True)
class LinearRecipe:
    """Casts and products of a linear layer, shared by FP8 linears and fused parts; only `site` differs."""

    input: CastSpec
    """Cast of x as fprop's operand, rotation included."""
    weight: CastSpec
    grad_output: CastSpec
    """Cast of dy as dgrad's operand; wgrad's, cast along the tokens, has the same but for the rotation."""
    wgrad_input: str
    """Granularity of x as wgrad's operand, cast along the tokens."""
    backend: str
    fast_accumulation: bool
    save: str
    """activations.save: "fp8" or "bf16"."""
    recompute: str
    """activations.recompute: "none" or "mlp"."""
    monitor: CastMonitor = field(compare=False)
    wgrad_input_rotation: Rotation | None = None
    """Rotation of x [T, K], or with `recast` of its cast, as wgrad's operand."""
    wgrad_grad_output_rotation: Rotation | None = None
    recast: Recast | None = None
    """Second casts of fprop's x and w, for wgrad and dgrad. None: those are casts of high precision."""
    smooth: bool = False
    """Whether channels of x are divided by factors, and columns of w multiplied (smoothing.py)."""
    outlier_channels: int = 0
    """Channels of the input that fprop multiplies with the residuals of their casts."""
    outliers: OutlierChannels | None = field(default=None, compare=False)
    """Which they are, of one site."""
    site: str = field(default="", compare=False)
    """Name of what multiplies with this recipe, for statistics."""

    @classmethod
    def from_config(
        cls, config: FP8Config, monitor: CastMonitor | None = None, casts: LinearCasts | None = None
    ) -> LinearRecipe:
        """Return the recipe of a configuration, resolved on this machine.

        Args:
            config: the whole "fp8" section.
            monitor: counts what casts lose; by default one that `config.monitor` describes.
            casts: of the layers that an override means; by default those of `config.linear` itself.

        Raises:
            UserError: the configured backend cannot run these casts.
        """
        linear, casts = config.linear, casts or config.linear
        #     fprop  y  [T, N] = x [T, K] w [N, K]'       contraction K
        #     dgrad  dx [T, K] = dy [T, N] w'[K, N]'      contraction N
        #     wgrad  dw [N, K] = dy'[N, T] x'[K, T]'      contraction T, the tokens
        # Each operand is cast along its product's contraction: x and dy twice, w once unless its groups lie along it.
        wgrad_input = casts.wgrad.input or casts.input.granularity
        x, w, dy = casts.input.spec, casts.weight.spec, casts.grad_output.spec
        dgrad_weight = "tensor" if w.granularity == "row" else w.granularity
        products = [
            (x, w),
            (dy, replace(w, granularity=dgrad_weight)),
            (dy, replace(x, granularity=wgrad_input)),
        ]
        rotation = casts.rotation
        along_k = rotation.along(rotation.fprop, "tokens")
        return cls(
            replace(x, rotation=along_k),
            replace(w, rotation=along_k),
            replace(dy, rotation=rotation.along(rotation.dgrad, "tokens")),
            wgrad_input,
            select_backend(linear.backend, products),
            linear.accumulation == "fast",
            config.activations.save,
            config.activations.recompute,
            monitor or CastMonitor(config.monitor.every),
            rotation.along(rotation.wgrad, "tokens"),
            rotation.along(rotation.wgrad, "tokens") if rotation.wgrad == "tokens" else None,
            casts.recast.spec,
            outlier_channels=casts.outlier_channels,
        )

    def at(self, site: str) -> LinearRecipe:
        """Return the same recipe at another site."""
        outliers = OutlierChannels(self.outlier_channels) if self.outlier_channels else None
        return replace(self, site=site, outliers=outliers)

    @property
    def emulated(self) -> list[CastSpec]:
        """Return the casts that only the reference multiplies."""
        return [cast for cast in (self.input, self.weight, self.grad_output) if cast.emulated]

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """Return the rotations of all operands."""
        every = self.input.rotation, self.grad_output.rotation, self.wgrad_input_rotation
        return tuple(rotation for rotation in every if rotation is not None)

    @property
    def casts_by_tile(self) -> bool:
        """Return whether all casts of backward find their scales inside a tile of 128 x 128 elements."""
        if self.input.by_torch or self.grad_output.by_torch:
            return False
        return self.wgrad_input in ("1x128", "128x128") and self.grad_output.granularity == "1x128"

    def multiply(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
        """Multiply a [M, K] · b [N, K]ᵀ -> [M, N] on this recipe's backend."""
        return scaled_matmul(a, b, backend=self.backend, out_dtype=out_dtype, fast_accumulation=self.fast_accumulation)

    def transposed(self, q: QuantizedTensor) -> QuantizedTensor:
        """Return a matrix transposed: a view, or a copy where this recipe's backend needs one."""
        return q.t() if reads_transposed(self.backend) else transpose(q)

    def cast_weight(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        """Return the cast of a weight [N, K] that is present in high precision, times its factors."""
        quantized = _cast(weight, self.weight, None, column_factor)
        self.observe("weight", weight, quantized, None, column_factor, self.weight.rotation)
        return quantized

    def cast_weight_columnwise(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        """Return the cast of a weight [N, K] that is present in high precision, as dgrad reads it: [K, N]."""
        spec = self.weight
        words = spec.format, spec.granularity, spec.scale
        of_dy = self.grad_output.rotation
        rotation = None if of_dy is None or of_dy.axis == 0 else replace(of_dy, axis=0)
        if self.recast is not None:
            return self._cast_again(_cast(weight, spec, None, column_factor), spec.granularity, rotation)
        return quantize_columnwise(
            weight, *words, column_factor=column_factor, rounding=spec.rounding, rotation=rotation
        )

    def kept_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return x as wgrad reads it, from the codes and scales that were kept of it."""
        emulated = None if data.dtype is not torch.uint8 else self.input.format
        scale_type = self.input.scale if self.recast is None else self.recast.scale
        return QuantizedTensor(data, scale, self.wgrad_input, scale_type, emulated)

    def cast_input(self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as fprop reads it."""
        quantized = _cast(x, self.input, row_factor, column_factor)
        self.observe("input", x, quantized, row_factor, column_factor, self.input.rotation)
        return quantized

    def cast_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as wgrad reads it: [K, T]."""
        spec = self.input
        if self.recast is not None:
            cast = _cast(x, spec, row_factor, column_factor)
            return self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        return quantize_columnwise(
            x,
            spec.format,
            self.wgrad_input,
            spec.scale,
            row_factor=row_factor,
            column_factor=column_factor,
            rounding=spec.rounding,
            rotation=self.wgrad_input_rotation,
        )

    def cast_input_both(self, x: torch.Tensor, column_factor: Factor = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Cast x [T, K], times its factors, as fprop reads it, and as wgrad does, in one pass."""
        spec = self.input
        if self.recast is not None:
            cast = self.cast_input(x, column_factor=column_factor)
            return cast, self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        words = spec.format, spec.granularity, self.wgrad_input, spec.scale
        rotations = spec.rotation, self.wgrad_input_rotation
        both = quantize_both(x, *words, None, column_factor, spec.rounding, *rotations)
        self.observe("input", x, both[0], None, column_factor, spec.rotation)
        return both

    def cast_grad_output(
        self, dy: torch.Tensor, dgrad: bool = True, wgrad: bool = True, column_factor: Factor = None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Cast dy [T, N] as dgrad reads it, times `column_factor` [N], and [N, T] as wgrad reads it.

        In one pass, unless there is a factor: it belongs to one of the casts only.
        """
        spec = self.grad_output
        row = spec.granularity if dgrad else None
        column = spec.granularity if wgrad else None
        cast = functools.partial(
            quantize_both,
            dy,
            spec.format,
            scale=spec.scale,
            rounding=spec.rounding,
            row_rotation=spec.rotation,
            column_rotation=self.wgrad_grad_output_rotation,
        )
        if row is None or column_factor is None:
            both = cast(row, column)
        else:
            both = cast(row, None, column_factor=column_factor)[0], cast(None, column)[1] if wgrad else None
        if both[0] is not None:
            self.observe("grad_output", dy, both[0], None, column_factor, spec.rotation)
        return both

    def clipped_input(self, x: torch.Tensor, cast: QuantizedTensor) -> torch.Tensor | None:
        """Return which elements of fprop's cast of x get no gradient, bool [T, K]; None if all of them do."""
        return self._clipped(x, self.input, cast)

    def _clipped(self, x: torch.Tensor, spec: CastSpec, cast: QuantizedTensor) -> torch.Tensor | None:
        wanted = self.recast is not None and self.recast.zero_clipped
        return clipped(rotate(x, spec.rotation), cast) if wanted else None

    def _cast_again(self, cast: QuantizedTensor, granularity: str, rotation: Rotation | None) -> QuantizedTensor:
        """Return what fprop multiplied [M, K] as dgrad or wgrad reads it: [K, M]."""
        words = cast.format, granularity, self.recast.scale
        # FP32: a number times its scale, and rotated, is in general no number of BF16.
        numbers = cast.dequantize(torch.float32)
        return quantize_columnwise(numbers, *words, rounding=self.recast.rounding, rotation=rotation)

    def dgrad_result(self, dx: torch.Tensor, tokens: int, clipped_input: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of the input as it is without rotations.

        Args:
            dx: [tokens, K], dgrad's product.
            tokens: Number of its rows.
            clipped_input: What the method of this name returned for the input.
        """
        of_dy = self.grad_output.rotation
        if of_dy is not None and of_dy.axis == 0:
            dx = unrotate(dx, of_dy, tokens)
        if clipped_input is not None:
            dx = dx.masked_fill(clipped_input, 0)
        if self.weight.granularity in ALONG_CONTRACTION and self.recast is None:
            return dx
        return unrotate(dx, self.weight.rotation)

    def wgrad_result(self, dw: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight as it is without rotations.

        Args:
            dw: [N, K], wgrad's product.
            weight: [N, K]; read only where there is a `recast`, in high precision.
        """
        if self.recast is not None:
            beyond = self._clipped(weight, self.weight, _cast(weight, self.weight))
            return unrotate(dw if beyond is None else dw.masked_fill(beyond, 0), self.input.rotation)
        of_x = self.wgrad_input_rotation
        return dw if of_x is None or of_x.axis == 0 else unrotate(dw, of_x)

    def observe(
        self,
        tensor_class: str,
        x: torch.Tensor | Rows,
        quantized: QuantizedTensor,
        row_factor: Factor = None,
        column_factor: Factor = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Count what the cast of x, times its factors and rotated, lost; costs nothing outside measured steps."""
        if not self.monitor.active:
            return
        if rotation is not None:
            x = rotate(apply_factors(x, row_factor, column_factor), rotation)
        elif row_factor is not None or column_factor is not None:
            x = _factored(x, row_factor, column_factor)
        self.monitor.observe(tensor_class, x, quantized, self.site)


def _cast(x: torch.Tensor, spec: CastSpec, row_factor: Factor = None, column_factor: Factor = None) -> QuantizedTensor:
    """Return the cast of a matrix, times its factors."""
    words = spec.format, spec.granularity, spec.scale
    options = {"rounding": spec.rounding, "rotation": spec.rotation}
    return quantize(x, *words, row_factor=row_factor, column_factor=column_factor, **options)


def _factored(x: torch.Tensor, row_factor: Factor, column_factor: Factor) -> Rows:
    """Return rows of x times its factors: the whole of it, in FP32, would be twice the size of x."""
    return lambda rows: apply_factors(x[rows], None if row_factor is None else row_factor[rows], column_factor)
