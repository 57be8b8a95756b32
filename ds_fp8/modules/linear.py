"""FP8Linear: nn.Linear whose three products run on FP8 operands.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x cast along K, w in 128x128 blocks
    dgrad  dx [T, K] = dy [T, N] · w             dy cast along N; w's blocks transpose without another cast
    wgrad  dw [N, K] = dyᵀ       · x             both cast along the tokens T, each from high precision

T tokens, N output and K input features. Groups of a cast lie along the contraction of the product it feeds, so x and
dy are each cast twice (row-wise and column-wise) and the weight once. Between forward and backward only the
column-wise copy of x is kept, one byte an element, and no copy of the weight: ZeRO-3 gathers it again.

The class is swapped in under a live module (`module.__class__ = FP8Linear`), so parameters, their names, hooks and
checkpoint keys stay what they were. Under FP8 parameter gather a weight carries its gathered FP8 bytes as
`weight.fp8_gathered`, and `weight.data` is a placeholder that nobody may read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.config import Cast, FP8Config
from ds_fp8.gemm import scaled_matmul, select_backend
from ds_fp8.modules.monitor import CastMonitor
from ds_fp8.quantize import QuantizedTensor, quantize

GATHERED = "fp8_gathered"
"""Attribute of a weight that holds its gathered QuantizedTensor [N, K] while ZeRO-3 has it available."""


@dataclass(frozen=True)
class LinearRecipe:
    """What every FP8Linear of a model shares."""

    input: Cast
    weight: Cast
    grad_output: Cast
    backend: str
    save_input: str
    monitor: CastMonitor = field(compare=False)

    @classmethod
    def from_config(cls, config: FP8Config, monitor: CastMonitor | None = None) -> LinearRecipe:
        """Resolve the configuration on this machine. Raises UserError for a backend it cannot run."""
        linear = config.linear
        return cls(
            linear.input,
            linear.weight,
            linear.grad_output,
            select_backend(linear.backend),
            config.activations.save,
            monitor or CastMonitor(config.monitor.every),
        )

    def cast(self, tensor_class: str, x: torch.Tensor) -> QuantizedTensor:
        """Cast the matrix `x` as tensors of `tensor_class` (input, weight, grad_output) are, and count the losses."""
        spec: Cast = getattr(self, tensor_class)
        quantized = quantize(x, spec.format, spec.granularity, spec.scale)
        self.monitor.observe(tensor_class, x, quantized)
        return quantized

    def cast_columnwise(self, tensor_class: str, x: torch.Tensor) -> QuantizedTensor:
        """Cast `x` [T, F] along its tokens, as the [F, T] operand of wgrad."""
        spec: Cast = getattr(self, tensor_class)
        return quantize(x.t().contiguous(), spec.format, spec.granularity, spec.scale)


def weight_operand(weight: torch.Tensor, recipe: LinearRecipe) -> QuantizedTensor:
    """The FP8 weight [N, K]: what the gather brought, or a cast of a weight that is present in high precision."""
    gathered = getattr(weight, GATHERED, None)
    return gathered if gathered is not None else recipe.cast("weight", weight)


class _FP8LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: nn.Parameter, recipe: LinearRecipe, training: bool) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN = scaled_matmul(
            recipe.cast("input", x_TK), weight_operand(weight, recipe), backend=recipe.backend, out_dtype=x.dtype
        )
        # The weight is kept as the parameter itself, not through save_for_backward: its storage is released after
        # forward, and backward finds whatever has been gathered by then.
        ctx.weight, ctx.recipe, ctx.input_shape, ctx.input_dtype = weight, recipe, x.shape, x.dtype
        ctx.saved_fp8 = recipe.save_input == "fp8"
        if training and weight.requires_grad:
            if ctx.saved_fp8:
                x_KT = recipe.cast_columnwise("input", x_TK)
                ctx.save_for_backward(x_KT.data, x_KT.scale)
            else:
                ctx.save_for_backward(x)
        return y_TN.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # a cast has no derivative: a gradient of gradients is an error, not silently zero
    def backward(ctx, dy: torch.Tensor):
        recipe, weight = ctx.recipe, ctx.weight
        dy_TN = dy.reshape(-1, dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w_KN = weight_operand(weight, recipe).t()
            dx_TK = scaled_matmul(
                recipe.cast("grad_output", dy_TN), w_KN, backend=recipe.backend, out_dtype=ctx.input_dtype
            )
            dx = dx_TK.view(ctx.input_shape)
        if ctx.needs_input_grad[1]:
            if ctx.saved_fp8:
                x_KT = QuantizedTensor(*ctx.saved_tensors, recipe.input.granularity, recipe.input.scale)
            else:
                (x,) = ctx.saved_tensors
                x_KT = recipe.cast_columnwise("input", x.reshape(-1, x.shape[-1]))
            dy_NT = recipe.cast_columnwise("grad_output", dy_TN)
            dw = scaled_matmul(dy_NT, x_KT, backend=recipe.backend, out_dtype=weight.dtype)
        return dx, dw, None, None


class FP8Linear(nn.Linear):
    """nn.Linear computed in FP8; input [..., K], output [..., N] in the input's dtype, bias added in that dtype.

    Made by `ds_fp8.convert`, which sets `recipe`.
    """

    recipe: LinearRecipe

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = _FP8LinearFunction.apply(input, self.weight, self.recipe, torch.is_grad_enabled())
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        recipe = self.recipe
        casts = ", ".join(
            f"{name}={spec.format}/{spec.granularity}"
            for name, spec in (("input", recipe.input), ("weight", recipe.weight), ("grad_output", recipe.grad_output))
        )
        return f"{super().extra_repr()}, {casts}, backend={recipe.backend}"
