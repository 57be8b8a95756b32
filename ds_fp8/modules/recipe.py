"""LinearRecipe: how every FP8 product of a model casts its operands and who multiplies them.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x cast along K                    w in one cast for both
    dgrad  dx [T, K] = dy [T, N] · w             dy cast along N                   (transposed here)
    wgrad  dw [N, K] = dyᵀ       · x             both cast along the tokens T, each from high precision

T tokens, N output and K input features. Weights with one scale per row (output channel) contract over that dimension in
dgrad, where a product cannot apply it: the scales are multiplied into dy before its cast, dx = cast(dy ⊙ s) · codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ds_fp8.config import Cast, FP8Config
from ds_fp8.gemm import Operand, scaled_matmul, select_backend
from ds_fp8.modules.cast_statistics import Rows
from ds_fp8.modules.monitor import CastMonitor
from ds_fp8.quantize import QuantizedTensor, apply_factors, quantize, quantize_both, quantize_columnwise

Factor = torch.Tensor | None


@dataclass(frozen=True)
class LinearRecipe:
    """What every FP8 linear and fused part of a model shares, but for the site that its casts are counted under."""

    input: Cast
    weight: Cast
    grad_output: Cast
    wgrad_input: str
    """Granularity of x as wgrad's operand, cast along the tokens."""
    wgrad_grad_output: str
    backend: str
    fast_accumulation: bool
    save: str
    """activations.save: "fp8" or "bf16"."""
    recompute: str
    """activations.recompute: "none" or "mlp"."""
    monitor: CastMonitor = field(compare=False)
    site: str = field(default="", compare=False)
    """Name of what multiplies with this recipe, for statistics."""

    @classmethod
    def from_config(cls, config: FP8Config, monitor: CastMonitor | None = None) -> LinearRecipe:
        """Resolve the configuration on this machine. Raises UserError for a backend that cannot run it."""
        linear = config.linear
        wgrad_input = linear.wgrad.input or linear.input.granularity
        wgrad_grad_output = linear.wgrad.grad_output or linear.grad_output.granularity
        x, w, dy = linear.input, linear.weight, linear.grad_output
        dgrad_weight = "tensor" if w.granularity == "row" else w.granularity
        products = [
            (Operand(x.format, x.granularity), Operand(w.format, w.granularity)),
            (Operand(dy.format, dy.granularity), Operand(w.format, dgrad_weight)),
            (Operand(dy.format, wgrad_grad_output), Operand(x.format, wgrad_input)),
        ]
        return cls(
            x,
            w,
            dy,
            wgrad_input,
            wgrad_grad_output,
            select_backend(linear.backend, products),
            linear.accumulation == "fast",
            config.activations.save,
            config.activations.recompute,
            monitor or CastMonitor(config.monitor.every),
        )

    def at(self, site: str) -> LinearRecipe:
        """The same recipe at another site."""
        return replace(self, site=site)

    @property
    def casts_by_tile(self) -> bool:
        """Whether all casts of backward find their scales inside a tile of 128 x 128 elements."""
        granularities = {self.wgrad_input, self.wgrad_grad_output, self.grad_output.granularity}
        return granularities <= {"1x128", "128x128"} and self.grad_output.granularity == "1x128"

    def multiply(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
        """a [M, K] · b [N, K]ᵀ -> [M, N], on this recipe's backend."""
        return scaled_matmul(a, b, backend=self.backend, out_dtype=out_dtype, fast_accumulation=self.fast_accumulation)

    def cast_weight(self, weight: torch.Tensor) -> QuantizedTensor:
        """A weight [N, K] that is present in high precision."""
        quantized = quantize(weight, self.weight.format, self.weight.granularity, self.weight.scale)
        self.observe("weight", weight, quantized)
        return quantized

    def cast_input(self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None) -> QuantizedTensor:
        """x [T, K], times its factors, as fprop reads it."""
        spec = self.input
        quantized = quantize(
            x, spec.format, spec.granularity, spec.scale, row_factor=row_factor, column_factor=column_factor
        )
        self.observe("input", x, quantized, row_factor, column_factor)
        return quantized

    def cast_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """x [T, K], times its factors, as wgrad reads it: [K, T]."""
        spec = self.input
        return quantize_columnwise(
            x, spec.format, self.wgrad_input, spec.scale, row_factor=row_factor, column_factor=column_factor
        )

    def cast_input_both(self, x: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
        """x [T, K] as fprop reads it, and as wgrad does, in one pass."""
        spec = self.input
        both = quantize_both(x, spec.format, spec.granularity, self.wgrad_input, spec.scale)
        self.observe("input", x, both[0])
        return both

    def cast_grad_output(
        self, dy: torch.Tensor, dgrad: bool = True, wgrad: bool = True, column_factor: Factor = None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """dy [T, N] as dgrad reads it, times `column_factor` [N], and [N, T] as wgrad reads it.

        In one pass, unless there is a factor: it belongs to one of the casts only.
        """
        spec = self.grad_output
        row = spec.granularity if dgrad else None
        column = self.wgrad_grad_output if wgrad else None
        if row is None or column_factor is None:
            both = quantize_both(dy, spec.format, row, column, spec.scale)
        else:
            both = (
                quantize(dy, spec.format, row, spec.scale, column_factor=column_factor),
                quantize_columnwise(dy, spec.format, column, spec.scale) if wgrad else None,
            )
        if both[0] is not None:
            self.observe("grad_output", dy, both[0], None, column_factor)
        return both

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
            x = _factored(x, row_factor, column_factor)
        self.monitor.observe(tensor_class, x, quantized, self.site)


def _factored(x: torch.Tensor, row_factor: Factor, column_factor: Factor) -> Rows:
    """Rows of x times its factors: the whole of it, in FP32, would be twice the size of x."""
    return lambda rows: apply_factors(x[rows], None if row_factor is None else row_factor[rows], column_factor)
