"""The experts of a mixture one by one, in plain torch: in high precision, and with the casts of FP8 products.

Each expert casts its own tokens alone: nothing is laid out, padded or grouped here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_fp8.casts import QuantizedTensor, quantize, quantize_columnwise
from ds_fp8.layers.experts.products import ExpertProducts
from ds_fp8.layers.linear.gated_activation import activate


class Gradients(NamedTuple):
    x: torch.Tensor
    router_weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def high_precision(x, index, router_weights, gate_up, down, activation, dy) -> tuple[torch.Tensor, Gradients]:
    """Return (y, gradients) in FP32 without any cast."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in (x, router_weights, gate_up, down)]
    x, router_weights, gate_up, down = leaves
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, choice = torch.where(index == expert)
        gate, up = (x[token] @ gate_up[expert].t()).chunk(2, -1)
        output = (activate(gate, activation) * up) @ down[expert].t()
        y = y.index_add(0, token, output * router_weights[token, choice][:, None])
    return y.detach(), Gradients(*torch.autograd.grad(y, leaves, dy.float()))


def _numbers(cast: QuantizedTensor) -> torch.Tensor:
    return cast.dequantize(torch.float64)


def with_casts(x, index, router_weights, gate_up, down, products: ExpertProducts, dy) -> tuple[torch.Tensor, Gradients]:
    """Return (y, gradients), in FP64 but for the casts, rounded to x's dtype where a product's result is stored."""
    recipe, of_down, dtype = products.gate_up, products.down, x.dtype
    spec, down_spec = recipe.input, of_down.input
    y, dx = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    dweights = torch.zeros(router_weights.shape, dtype=torch.float64)
    of_gate_up, of_down_proj = torch.zeros(gate_up.shape), torch.zeros(down.shape)
    for expert in range(len(gate_up)):
        token, choice = torch.where(index == expert)
        if not len(token):
            continue
        factor = router_weights[token, choice].double()[:, None]
        first = _numbers(quantize(gate_up[expert], recipe.weight.format, "128x128", recipe.weight.scale))
        second = _numbers(quantize(down[expert], of_down.weight.format, "128x128", of_down.weight.scale))

        rows = _numbers(quantize(x[token], spec.format, "1x128", spec.scale))
        hidden = (rows @ first.t()).to(dtype)
        gate, up = hidden.float().chunk(2, -1)
        product = (activate(gate, products.activation) * up).double() * factor
        product = _numbers(quantize(product.float(), down_spec.format, "1x128", down_spec.scale))
        y.index_add_(0, token, (product @ second.t()).to(dtype).double())

        # backward
        dy_spec = of_down.grad_output
        of_rows = dy[token]
        dproduct = (_numbers(quantize(of_rows, dy_spec.format, "1x128", dy_spec.scale)) @ second).to(dtype).float()
        kept = quantize(hidden, "e4m3", "1x128", "pow2").dequantize() if of_down.save == "fp8" else hidden.float()
        kept.requires_grad_()
        gate, up = kept.chunk(2, -1)
        product = activate(gate, products.activation) * up
        (dhidden,) = torch.autograd.grad(product, kept, dproduct)
        product = product.detach()
        dweights[token, choice] = (dproduct * product).double().sum(1)
        dhidden, product = ((tensor.double() * factor).float() for tensor in (dhidden, product))
        dy_spec = recipe.grad_output
        row = _numbers(quantize(dhidden, dy_spec.format, "1x128", dy_spec.scale))
        dx.index_add_(0, token, (row @ first).to(dtype).double())

        def along_tokens(tensor: torch.Tensor, cast, granularity: str) -> torch.Tensor:
            return _numbers(quantize_columnwise(tensor, cast.format, granularity, cast.scale))

        of_gate_up[expert] = (
            along_tokens(dhidden, recipe.grad_output, "1x128") @ along_tokens(x[token], spec, recipe.wgrad_input).t()
        )
        of_down_proj[expert] = (
            along_tokens(of_rows, of_down.grad_output, "1x128")
            @ along_tokens(product, down_spec, of_down.wgrad_input).t()
        )
    return y, Gradients(dx, dweights, of_gate_up, of_down_proj)
