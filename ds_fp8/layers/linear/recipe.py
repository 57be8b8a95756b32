"""LinearRecipe: the casts of a linear layer's operands, and the backend of its products.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x cast along K, w in one cast for both products
    dgrad  dx [T, K] = dy [T, N] · w             dy cast along N, w's cast transposed
    wgrad  dw [N, K] = dyᵀ       · x             both cast along the tokens T, each from high precision

T tokens, N output and K input features. Weights with one scale per row (output channel) contract over that dimension in
dgrad, where a product cannot apply it: the scales are multiplied into dy before its cast, dx = cast(dy ⊙ s) · codes.

research_recipe.py has recipes that rotate operands or cast them again; recipe_from_config.py chooses.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch

from ds_fp8.casts import (
    QuantizedTensor,
    apply_factors,
    quantize,
    quantize_both,
    quantize_columnwise,
    transpose,
)
from ds_fp8.casts.tensor import width_with_outliers
from ds_fp8.config.formats import BLOCK, CastSpec, Recast, Rotation
from ds_fp8.gemm import reads_transposed, scaled_matmul
from ds_fp8.layers.linear.outlier_channels import OutlierChannels
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
    mlp_tile_tokens: int | None = None
    """activations.mlp_tile_tokens."""
    smooth: bool = False
    """True if channels of x are divided by factors, and columns of w multiplied (smoothing.py)."""
    outlier_channels: int = 0
    """Channels of the input that fprop multiplies with the residuals of their casts."""
    outliers: OutlierChannels | None = field(default=None, compare=False)
    """The outlier channels found at this site."""
    site: str = field(default="", compare=False)
    """Name of what multiplies with this recipe, for statistics."""

    def at(self, site: str) -> LinearRecipe:
        """Return the same recipe at another site."""
        # One set of channels a site: recipes are shared by all layers, but every input has channels of its own.
        outliers = OutlierChannels(self.outlier_channels) if self.outlier_channels else None
        return replace(self, site=site, outliers=outliers)

    @property
    def emulated(self) -> list[CastSpec]:
        """Return the casts that only the reference multiplies."""
        return [cast for cast in (self.input, self.weight, self.grad_output) if cast.emulated]

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """Return the rotations of all operands."""
        return ()

    @property
    def recast(self) -> Recast | None:
        """Return how fprop's x and w are cast a second time, for wgrad and dgrad; None: they are not."""
        return None

    @property
    def casts_by_tile(self) -> bool:
        """Return whether all casts of backward find their scales inside a tile of 128 x 128 elements."""
        if self.input.by_torch or self.grad_output.by_torch:
            return False
        # Scales of rows or of a whole tensor need a pass over all of it before the first element is cast.
        return self.wgrad_input in ("1x128", "128x128") and self.grad_output.granularity == "1x128"

    def multiply(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
        """Multiply a [M, K] · b [N, K]ᵀ -> [M, N] on this recipe's backend."""
        return scaled_matmul(a, b, backend=self.backend, out_dtype=out_dtype, fast_accumulation=self.fast_accumulation)

    def transposed(self, q: QuantizedTensor) -> QuantizedTensor:
        """Return a matrix transposed: a view, or a copy where this recipe's backend needs one."""
        return q.t() if reads_transposed(self.backend) else transpose(q)

    def room_for_outliers(self, columns: int) -> int:
        """Return how many codes a cast of an input [T, columns] leaves free behind each row, for its outlier blocks.

        0 where the last block is ragged: with_outliers then copies the cast.
        """
        if self.outliers is None or columns % BLOCK:
            return 0
        return width_with_outliers(columns, min(self.outlier_channels, columns)) - columns

    def cast_weight(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        """Return the cast of a weight [N, K] that is present in high precision, times its factors."""
        quantized = cast_rowwise(weight, self.weight, None, column_factor)
        self.observe("weight", weight, quantized, None, column_factor)
        return quantized

    def cast_weight_columnwise(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        """Return the cast of a weight [N, K] that is present in high precision, as dgrad reads it: [K, N]."""
        return _cast_columnwise(weight, self.weight, self.weight.granularity, None, column_factor)

    def kept_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return x as wgrad reads it, from the codes and scales that were kept of it."""
        emulated = None if data.dtype is not torch.uint8 else self.input.format
        return QuantizedTensor(data, scale, self.wgrad_input, self.input.scale, emulated)

    def cast_input(self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as fprop reads it."""
        quantized = cast_rowwise(x, self.input, row_factor, column_factor, self.room_for_outliers(x.shape[-1]))
        self.observe("input", x, quantized, row_factor, column_factor)
        return quantized

    def cast_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as wgrad reads it: [K, T]."""
        return _cast_columnwise(x, self.input, self.wgrad_input, row_factor, column_factor)

    def cast_input_both(self, x: torch.Tensor, column_factor: Factor = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Cast x [T, K], times its factors, as fprop reads it, and as wgrad does, in one pass."""
        spec, room = self.input, self.room_for_outliers(x.shape[-1])
        arguments = spec.format, spec.granularity, self.wgrad_input, spec.scale
        both = quantize_both(x, *arguments, None, column_factor, spec.rounding, room=room)
        self.observe("input", x, both[0], None, column_factor)
        return both

    def cast_grad_output(
        self, dy: torch.Tensor, dgrad: bool = True, wgrad: bool = True, column_factor: Factor = None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Cast dy [T, N] as dgrad reads it, times `column_factor` [N], and [N, T] as wgrad reads it.

        In one pass, unless there is a factor: it belongs to one of the casts only.
        """
        spec = self.grad_output
        # Granularity 1x128 means groups along the contraction, hence along N for dgrad and along T for wgrad.
        row, column = (spec.granularity if wanted else None for wanted in (dgrad, wgrad))
        cast = self._grad_output_cast(dy)
        if row is None or column_factor is None:
            both = cast(row, column)
        else:
            # The factor stands for the weight's scales per row, which dgrad contracts over; wgrad does not see the
            # weight.
            both = cast(row, None, column_factor=column_factor)[0], cast(None, column)[1] if wgrad else None
        if both[0] is not None:
            self.observe("grad_output", dy, both[0], None, column_factor)
        return both

    def _grad_output_cast(self, dy: torch.Tensor) -> functools.partial:
        spec = self.grad_output
        return functools.partial(quantize_both, dy, spec.format, scale=spec.scale, rounding=spec.rounding)

    def clipped_input(self, x: torch.Tensor, cast: QuantizedTensor) -> torch.Tensor | None:
        """Return which elements of fprop's cast of x get no gradient, bool [T, K]; None if all of them do."""
        return None

    def dgrad_result(self, dx: torch.Tensor, tokens: int, clipped_input: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of the input, from dgrad's product and what clipped_input returned."""
        return dx

    def wgrad_result(self, dw: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight, from wgrad's product."""
        return dw

    def observe(
        self,
        tensor_class: str,
        x: torch.Tensor | Rows,
        quantized: QuantizedTensor,
        row_factor: Factor = None,
        column_factor: Factor = None,
    ) -> None:
        """Count what the cast of x, times its factors, lost; costs nothing outside measured steps."""
        if not self.monitor.active:
            return
        if row_factor is not None or column_factor is not None:
            # Statistics compare the codes with what was cast, and that is x times its factors.
            x = _factored(x, row_factor, column_factor)
        self.monitor.observe(tensor_class, x, quantized, self.site)


def cast_rowwise(
    x: torch.Tensor, spec: CastSpec, row_factor: Factor = None, column_factor: Factor = None, room: int = 0
) -> QuantizedTensor:
    """Return the cast of a matrix [M, K] along K, times its factors, with `room` for outlier blocks (quantize)."""
    arguments = spec.format, spec.granularity, spec.scale
    options = {"rounding": spec.rounding, "rotation": spec.rotation, "room": room}
    return quantize(x, *arguments, row_factor=row_factor, column_factor=column_factor, **options)


def _cast_columnwise(
    x: torch.Tensor, spec: CastSpec, granularity: str, row_factor: Factor, column_factor: Factor
) -> QuantizedTensor:
    factors = {"row_factor": row_factor, "column_factor": column_factor}
    return quantize_columnwise(x, spec.format, granularity, spec.scale, **factors, rounding=spec.rounding)


def _factored(x: torch.Tensor, row_factor: Factor, column_factor: Factor) -> Rows:
    """Return rows of x times its factors: the whole of it, in FP32, would be twice the size of x."""
    return lambda rows: apply_factors(x[rows], None if row_factor is None else row_factor[rows], column_factor)
