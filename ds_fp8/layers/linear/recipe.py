"""LinearRecipe: the casts of a linear layer's operands, and the backend of its products.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x cast along K, w in one cast for both products
    dgrad  dx [T, K] = dy [T, N] · w             dy cast along N, w's cast transposed
    wgrad  dw [N, K] = dyᵀ       · x             both cast along the tokens T, each from high precision

T tokens, N output and K input features. Weights with one scale per row (output channel) contract over that dimension in
dgrad, where a product cannot apply it: the scales are multiplied into dy before its cast, dx = cast(dy ⊙ s) · codes.

engine/plans.py makes it of a configuration. ds_fp8.research has a subclass, and layers for it in LAYERS (linear.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ds_fp8.casts import QuantizedTensor, apply_factors, quantize, quantize_both, quantize_columnwise, transpose
from ds_fp8.casts.outliers import extend_input
from ds_fp8.casts.quantization import width_with_outliers
from ds_fp8.config.formats import BLOCK, SCALE_TYPES, CastSpec, is_of_groups
from ds_fp8.gemm import reads_transposed, scaled_matmul
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.statistics import Rows

Factor = torch.Tensor | None
# One operand cast as dgrad or fprop reads it, and as wgrad does; None where it is not wanted
Casts = tuple[QuantizedTensor | None, QuantizedTensor | None]


@dataclass(frozen=True)
class LinearRecipe:
    """Casts and products of a linear layer, shared by FP8 linears and fused parts; only `site` differs."""

    input: CastSpec  # cast of x as fprop's operand
    weight: CastSpec
    grad_output: CastSpec  # cast of dy as dgrad's operand, and, along the tokens, as wgrad's
    wgrad_input: str  # granularity of x as wgrad's operand, cast along the tokens
    backend: str
    save: str  # activations.save: "fp8" or "bf16"
    recompute: str  # activations.recompute: "none" or "mlp"
    monitor: CastMonitor = field(compare=False)
    mlp_tile_tokens: int | None = None
    outlier_channels: int = 0  # channels of the input that fprop multiplies with the residuals of their casts
    outliers: OutlierChannels | None = field(default=None, compare=False)  # the outlier channels found at this site
    name: str = field(default="", compare=False)  # name of what multiplies with this recipe, for statistics

    @property
    def quantizes_weight_twice(self) -> bool:
        """Return whether dgrad reads another cast of a weight than fprop: quantize_weight_columnwise."""
        return is_of_groups(self.weight.granularity)

    def at(self, name: str) -> LinearRecipe:
        # One set of channels a site: recipes are shared by all layers, but every input has channels of its own.
        outliers = OutlierChannels(self.outlier_channels) if self.outlier_channels else None
        return replace(self, name=name, outliers=outliers)

    @property
    def emulated(self) -> list[CastSpec]:
        return [cast for cast in (self.input, self.weight, self.grad_output) if cast.emulated]

    @property
    def fuses_casts(self) -> bool:
        """Return whether kernels that compute a layer's input may cast it too."""
        return not self.input.by_torch

    @property
    def quantizes_by_tile(self) -> bool:
        """Return whether all casts of backward find their scales inside a tile of 128 x 128 elements."""
        if self.input.by_torch or self.grad_output.by_torch:
            return False
        # Scales of rows or of a whole tensor need a pass over all of it before the first element is cast.
        return self.wgrad_input in ("1x128", "128x128") and self.grad_output.granularity == "1x128"

    def multiply(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
        return scaled_matmul(a, b, backend=self.backend, out_dtype=out_dtype)

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

    def quantize_weight(self, weight: torch.Tensor) -> QuantizedTensor:
        """Cast a weight [N, K] that is present in high precision."""
        quantized = quantize(weight, self.weight.format, self.weight.granularity, self.weight.scale)
        self.observe("weight", weight, quantized)
        return quantized

    def quantize_weight_columnwise(self, weight: torch.Tensor) -> QuantizedTensor:
        """Cast a weight [N, K] that is present in high precision as dgrad reads it: [K, N]."""
        return quantize_columnwise(weight, self.weight.format, self.weight.granularity, self.weight.scale)

    def quantize_input(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as fprop reads it."""
        spec, factors = self.input, {"row_factor": row_factor, "column_factor": column_factor}
        room = self.room_for_outliers(x.shape[-1])
        quantized = quantize(x, spec.format, spec.granularity, spec.scale, **factors, room=room)
        self.observe("input", x, quantized, row_factor, column_factor)
        return quantized

    def with_outliers(
        self, cast: QuantizedTensor, source: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Return fprop's input, the cast of `source` [T, K] times its factors, with its outlier block if it has one."""
        if self.outliers is None:
            return cast
        channels = self.outliers.observe(cast, self.monitor.active)
        return extend_input(cast, source, channels, row_factor, column_factor)

    def quantize_input_with_outliers(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as fprop reads it, and add its outlier block if it has one."""
        return self.with_outliers(self.quantize_input(x, row_factor, column_factor), x, row_factor, column_factor)

    def quantize_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as wgrad reads it: [K, T]."""
        spec, factors = self.input, {"row_factor": row_factor, "column_factor": column_factor}
        return quantize_columnwise(x, spec.format, self.wgrad_input, spec.scale, **factors)

    def quantize_input_both(self, x: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Cast x [T, K] as fprop reads it, and as wgrad does, in one pass."""
        spec, room = self.input, self.room_for_outliers(x.shape[-1])
        both = quantize_both(x, spec.format, spec.granularity, self.wgrad_input, spec.scale, room=room)
        self.observe("input", x, both[0])
        return both

    def saved_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return x as wgrad reads it, from the codes and scales that were kept of it."""
        name = None if data.dtype is not torch.uint8 else self.input.format
        return QuantizedTensor(data, scale, self.wgrad_input, self.input.scale, name)

    @property
    def _of_gate_up(self) -> tuple[str, str]:
        fixed = not SCALE_TYPES[self.input.scale].needs_amax
        return ("tensor", self.input.scale) if fixed else ("1x128", "pow2")

    def quantize_gate_up(self, gate_up: torch.Tensor) -> QuantizedTensor:
        """Cast gate and up [T, 2F], as the backward of a gated MLP reads them; self is the recipe of down_proj."""
        return quantize(gate_up, "e4m3", *self._of_gate_up)

    def saved_gate_up(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return what quantize_gate_up returned, from its codes and scales."""
        return QuantizedTensor(data, scale, *self._of_gate_up)

    def quantize_grad_output(
        self, dy: torch.Tensor, dgrad: bool = True, wgrad: bool = True, column_factor: Factor = None
    ) -> Casts:
        """Cast dy [T, N] as dgrad reads it, times `column_factor` [N], and [N, T] as wgrad reads it.

        In one pass, unless there is a factor: it belongs to one of the casts only.
        """
        # Granularity 1x128 means groups along the contraction, hence along N for dgrad and along T for wgrad.
        row, column = (self.grad_output.granularity if wanted else None for wanted in (dgrad, wgrad))
        if row is None or column_factor is None:
            both = self.quantize_gradient(dy, row, column)
        else:
            # The factor stands for the weight's scales per row, which dgrad contracts over; wgrad does not see the
            # weight.
            dgrad_operand, _ = self.quantize_gradient(dy, row, None, column_factor)
            both = dgrad_operand, self.quantize_gradient(dy, None, column)[1] if wgrad else None
        if both[0] is not None:
            self.observe("grad_output", dy, both[0], None, column_factor)
        return both

    def quantize_gradient(
        self, dy: torch.Tensor, rowwise: str | None, columnwise: str | None, column_factor: Factor = None
    ) -> Casts:
        """Cast dy [T, N] in these granularities, None for a cast that is not wanted."""
        spec = self.grad_output
        return quantize_both(dy, spec.format, rowwise, columnwise, spec.scale, column_factor=column_factor)

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
        self.monitor.observe(tensor_class, x, quantized, self.name)


def _factored(x: torch.Tensor, row_factor: Factor, column_factor: Factor) -> Rows:
    return lambda rows: apply_factors(x[rows], None if row_factor is None else row_factor[rows], column_factor)
