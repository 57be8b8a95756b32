"""LinearRecipe: how a linear layer quantizes the operands of fprop, dgrad and wgrad, and which backend multiplies.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x quantized along K, w once for fprop and dgrad
    dgrad  dx [T, K] = dy [T, N] · w             dy quantized along N, quantized w transposed
    wgrad  dw [N, K] = dyᵀ       · x             both quantized along the tokens T, from high precision

T tokens, N output and K input features. With one scale per row (output channel) of w, dgrad contracts over the scaled
dimension, which no GEMM supports: the scales are multiplied into dy first, dx = quantize(dy ⊙ scale) · data.

engine/plans.py builds the recipe from the configuration. ds_fp8.research subclasses it, with its layers in LAYERS
(linear.py).
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
# (rowwise, columnwise) of one operand; None if not requested
Casts = tuple[QuantizedTensor | None, QuantizedTensor | None]


@dataclass(frozen=True)
class LinearRecipe:
    """Casts and GEMM backend of a linear layer or fused layers; `name` and `outliers` differ by layer."""

    input: CastSpec  # x, rowwise, for fprop
    weight: CastSpec
    grad_output: CastSpec  # dy: rowwise for dgrad, columnwise for wgrad
    wgrad_input: str  # granularity of x, columnwise, for wgrad
    backend: str
    save: str  # activations.save: "fp8" or "bf16"
    recompute: str  # activations.recompute: "none" or "mlp"
    monitor: CastMonitor = field(compare=False)
    mlp_tile_tokens: int | None = None
    outlier_channels: int = 0  # input channels whose residuals fprop multiplies too
    outliers: OutlierChannels | None = field(default=None, compare=False)  # outlier channels of this layer
    name: str = field(default="", compare=False)  # of the layer or fused layers, for statistics

    @property
    def quantizes_weight_twice(self) -> bool:
        """Return whether dgrad needs w quantized again, along N: its groups do not transpose."""
        return is_of_groups(self.weight.granularity)

    def at(self, name: str) -> LinearRecipe:
        # The recipe is shared by all layers; outlier channels are of one layer's input.
        outliers = OutlierChannels(self.outlier_channels) if self.outlier_channels else None
        return replace(self, name=name, outliers=outliers)

    @property
    def emulated(self) -> list[CastSpec]:
        return [cast for cast in (self.input, self.weight, self.grad_output) if cast.emulated]

    @property
    def fuses_casts(self) -> bool:
        """Return whether kernels that compute a layer's input may quantize it, too."""
        return not self.input.by_torch

    @property
    def quantizes_by_tile(self) -> bool:
        """Return whether a tile of 128 x 128 elements holds full groups of all casts in backward."""
        if self.input.by_torch or self.grad_output.by_torch:
            return False
        # Scales per row or per tensor need the amax of all of it before the first element is quantized.
        return self.wgrad_input in ("1x128", "128x128") and self.grad_output.granularity == "1x128"

    def multiply(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
        return scaled_matmul(a, b, backend=self.backend, out_dtype=out_dtype)

    def transposed(self, q: QuantizedTensor) -> QuantizedTensor:
        """Return the transpose: a view, or a copy if the backend needs one."""
        return q.t() if reads_transposed(self.backend) else transpose(q)

    def room_for_outliers(self, columns: int) -> int:
        """Return the padding in bytes after each row of a quantized input [T, columns], for its outlier block.

        0 if columns is no multiple of 128: with_outliers copies the input then.
        """
        if self.outliers is None or columns % BLOCK:
            return 0
        return width_with_outliers(columns, min(self.outlier_channels, columns)) - columns

    def quantize_weight(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize an unsharded high-precision weight [N, K] for fprop."""
        quantized = quantize(weight, self.weight.format, self.weight.granularity, self.weight.scale)
        self.observe("weight", weight, quantized)
        return quantized

    def quantize_weight_columnwise(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize an unsharded high-precision weight [N, K] for dgrad: [K, N]."""
        return quantize_columnwise(weight, self.weight.format, self.weight.granularity, self.weight.scale)

    def quantize_input(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Quantize x [T, K] · factors for fprop."""
        spec, factors = self.input, {"row_factor": row_factor, "column_factor": column_factor}
        room = self.room_for_outliers(x.shape[-1])
        quantized = quantize(x, spec.format, spec.granularity, spec.scale, **factors, room=room)
        self.observe("input", x, quantized, row_factor, column_factor)
        return quantized

    def with_outliers(
        self, quantized: QuantizedTensor, source: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Append the outlier block, if any, to `quantized`, the quantized `source` [T, K] · factors."""
        if self.outliers is None:
            return quantized
        channels = self.outliers.observe(quantized, self.monitor.active)
        return extend_input(quantized, source, channels, row_factor, column_factor)

    def quantize_input_with_outliers(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Quantize x [T, K] · factors for fprop, and append the outlier block if there is one."""
        return self.with_outliers(self.quantize_input(x, row_factor, column_factor), x, row_factor, column_factor)

    def quantize_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Quantize x [T, K] · factors for wgrad: [K, T]."""
        spec, factors = self.input, {"row_factor": row_factor, "column_factor": column_factor}
        return quantize_columnwise(x, spec.format, self.wgrad_input, spec.scale, **factors)

    def quantize_input_both(self, x: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Quantize x [T, K] for fprop and for wgrad in one pass."""
        spec, room = self.input, self.room_for_outliers(x.shape[-1])
        both = quantize_both(x, spec.format, spec.granularity, self.wgrad_input, spec.scale, room=room)
        self.observe("input", x, both[0])
        return both

    def saved_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return x quantized for wgrad, from its data and scale saved for backward."""
        name = None if data.dtype is not torch.uint8 else self.input.format
        return QuantizedTensor(data, scale, self.wgrad_input, self.input.scale, name)

    @property
    def _of_gate_up(self) -> tuple[str, str]:
        fixed = not SCALE_TYPES[self.input.scale].needs_amax
        return ("tensor", self.input.scale) if fixed else ("1x128", "pow2")

    def quantize_gate_up(self, gate_up: torch.Tensor) -> QuantizedTensor:
        """Quantize gate and up [T, 2F], to be saved for backward; self is the recipe of down_proj."""
        return quantize(gate_up, "e4m3", *self._of_gate_up)

    def saved_gate_up(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return `quantize_gate_up`'s result from its data and scale."""
        return QuantizedTensor(data, scale, *self._of_gate_up)

    def quantize_grad_output(
        self, dy: torch.Tensor, dgrad: bool = True, wgrad: bool = True, column_factor: Factor = None
    ) -> Casts:
        """Quantize dy [T, N] · column_factor [N] for dgrad, and dy for wgrad: [N, T].

        One pass, or two with a factor, which applies to dgrad alone.
        """
        # Granularity 1x128 means groups along the contraction, hence along N for dgrad and along T for wgrad.
        row, column = (self.grad_output.granularity if wanted else None for wanted in (dgrad, wgrad))
        if row is None or column_factor is None:
            both = self.quantize_gradient(dy, row, column)
        else:
            # column_factor is the weight's scale per row, which dgrad contracts over; wgrad does not read the weight.
            rowwise, _ = self.quantize_gradient(dy, row, None, column_factor)
            both = rowwise, self.quantize_gradient(dy, None, column)[1] if wgrad else None
        if both[0] is not None:
            self.observe("grad_output", dy, both[0], None, column_factor)
        return both

    def quantize_gradient(
        self, dy: torch.Tensor, rowwise: str | None, columnwise: str | None, column_factor: Factor = None
    ) -> Casts:
        """Quantize dy [T, N] in the given granularities; None: not requested."""
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
        """Measure the error of quantized x · factors; no cost outside measured steps."""

        def product(rows: slice) -> torch.Tensor:
            return apply_factors(x[rows], None if row_factor is None else row_factor[rows], column_factor)

        has_factors = row_factor is not None or column_factor is not None
        self.monitor.observe(tensor_class, product if has_factors else x, quantized, self.name)
