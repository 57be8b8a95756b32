"""The gated activation of an MLP, act(gate) · up, fused with the casts of its input and output.

    forward   p = act(g) · u                        quantized rowwise for down_proj; g and u saved in FP8 (or BF16)
    backward  dg = dp · u · act'(g),  du = dp · act(g)   quantized rowwise for dgrad, columnwise for wgrad
              p  = act(g) · u                       recomputed, quantized columnwise for down_proj's wgrad

With a factor r per row, such as the router's weight of an expert:

    forward   p = r · act(g) · u
    backward  dg, du, p times r,   dr = sum over the features of dp · act(g) · u

gate and up are the halves of one matrix gate_up [T, 2F]. Backward reads g and u as saved, quantized or in BF16;
everything else is computed in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers import extend_input_reference
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.linear.recipe import LinearRecipe

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

Saved = QuantizedTensor | torch.Tensor  # gate_up [T, 2F] saved for backward


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) in gate's dtype; activation is one of ACTIVATIONS."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


@torch.no_grad()
def gating_of(gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str | None:
    """Return the activation for which gated(gate, up) equals act(gate) · up on test points, or None."""
    # Compared by value, since models wrap activations in many ways: near zero to tell the activations from each other,
    # far from it to find clamps (swiglu_limit).
    values = torch.cat([torch.linspace(-limit, limit, 62, device="cpu", dtype=torch.float32) for limit in (6, 1000)])
    gate, up = values.repeat_interleave(len(values)), values.repeat(len(values))
    found = gated(gate, up)
    for activation in ACTIVATIONS:
        expected = activate(gate, activation) * up
        if found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5):
            return activation
    return None


def tensors_of(saved: Saved | None) -> tuple[torch.Tensor, ...]:
    """Return the tensors of `saved` for save_for_backward; inverse of `saved_from`."""
    if saved is None:
        return ()
    return (saved.data, saved.scale) if isinstance(saved, QuantizedTensor) else (saved,)


def saved_from(tensors: Sequence[torch.Tensor], down: LinearRecipe) -> Saved | None:
    if len(tensors) == 2:
        return down.saved_gate_up(*tensors)
    return tensors[0] if tensors else None


class GatedCast(NamedTuple):
    product: QuantizedTensor  # [T, F] for fprop; wider with an outlier block
    saved: Saved | None  # gate and up, saved for backward
    uncast: torch.Tensor | None = None  # the product [T, F] in gate_up's dtype, if requested


class GatedGradients(NamedTuple):
    dgate_up: QuantizedTensor  # [T, 2F], for dgrad
    # [2F, T], for wgrad of gate_proj and up_proj; None without wgrad
    dgate_up_columnwise: QuantizedTensor | None
    product_columnwise: QuantizedTensor | None  # [F, T], for wgrad of down_proj; None without wgrad
    drow_factor: torch.Tensor | None = None  # FP32 [T], gradient of row_factor, if given
    # In dproduct's dtype, if requested: [T, 2F] and [T, F]
    dgate_up_uncast: torch.Tensor | None = None
    product_uncast: torch.Tensor | None = None


def gated_product_reference(
    gate_up: torch.Tensor, activation: str, row_factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return act(gate) · up, times row_factor [T], in FP32, [T, F]."""
    gate, up = gate_up.float().chunk(2, -1)
    product = activate(gate, activation) * up
    return product if row_factor is None else product * row_factor[:, None]


def gated_backward_reference(
    dproduct: torch.Tensor, gate_up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dgate_up [T, 2F], product [T, F]) in FP32."""
    with torch.enable_grad():
        leaf = gate_up.detach().float().requires_grad_()
        product = gated_product_reference(leaf, activation)
    (dgate_up,) = torch.autograd.grad(product, leaf, dproduct.float())
    return dgate_up, product.detach()


def gated_activation_forward(
    gate_up: torch.Tensor,
    activation: str,
    recipe: LinearRecipe,
    save: bool = True,
    row_factor: torch.Tensor | None = None,
    product: bool = False,
) -> GatedCast:
    """Compute act(gate) · up of gate_up [T, 2F] and quantize it with down_proj's recipe.

    Args:
        save: Whether gate and up are saved for backward.
        row_factor: FP32 [T], multiplied into the product; only without outlier channels.
        product: Whether to return the product in high precision, too.
    """
    in_fp8 = save and recipe.save == "fp8"
    if gate_up.device.type == "cuda":
        from ds_fp8.layers.linear.gated_activation_triton import gated_forward

        uncast, quantized, saved = gated_forward(
            gate_up,
            activation,
            recipe.input,
            in_fp8 and recipe.fuses_casts,
            fuse_cast=recipe.fuses_casts,
            room=recipe.room_for_outliers(gate_up.shape[1] // 2),
            row_factor=row_factor,
            product=product,
        )
    else:
        uncast, quantized, saved = gated_product_reference(gate_up, activation, row_factor), None, None
    if in_fp8 and saved is None:
        saved = recipe.quantize_gate_up(gate_up)
    if quantized is None:
        quantized = recipe.quantize_input(uncast)
    elif recipe.monitor.active:
        factor = (lambda rows: None) if row_factor is None else row_factor.__getitem__
        recipe.observe(
            "input", lambda rows: gated_product_reference(gate_up[rows], activation, factor(rows)), quantized
        )
    if recipe.outliers is not None:
        quantized = _with_outliers(
            quantized, gate_up, activation, recipe.outliers.observe(quantized, recipe.monitor.active)
        )
    uncast = uncast.to(gate_up.dtype) if product else None
    return GatedCast(quantized, gate_up if save and not in_fp8 else saved, uncast)


def _with_outliers(
    quantized: QuantizedTensor, gate_up: torch.Tensor, activation: str, channels: torch.Tensor
) -> QuantizedTensor:
    """Append the outlier block to the quantized act(gate) · up, recomputing its channels from gate_up."""
    if quantized.data.device.type == "cuda":
        from ds_fp8.layers.linear.gated_activation_triton import extend_product_tiles

        return extend_product_tiles(quantized, gate_up, activation, channels)
    gate, up = (half[:, channels.long()].float() for half in gate_up.chunk(2, -1))
    return extend_input_reference(quantized, activate(gate, activation) * up, channels)


def gated_activation_backward(
    dproduct: torch.Tensor,
    saved: Saved,
    activation: str,
    recipe: LinearRecipe,
    down: LinearRecipe,
    dgrad_factor: torch.Tensor | None = None,
    row_factor: torch.Tensor | None = None,
    wgrad: bool = True,
    uncast: tuple[bool, bool] = (False, False),
) -> GatedGradients:
    """Return the quantized gradients and product of backward from the gradient of the product [T, F].

    Args:
        recipe: Of gate_proj and up_proj.
        down: Of down_proj.
        dgrad_factor: [2F], multiplied into dgate_up for dgrad.
        row_factor: FP32 [T], as in forward.
        wgrad: Whether any of the three weights requires a gradient.
        uncast: Whether to return dgate_up, and the product, in high precision, too.
    """
    if dproduct.device.type == "cuda":
        from ds_fp8.layers.linear.gated_activation_triton import gated_backward, gated_backward_quantized

        # The fused kernels have no masks.
        full_tiles = all(length % BLOCK == 0 for length in dproduct.shape)
        by_tile = recipe.quantizes_by_tile and not down.input.by_torch and down.wgrad_input in ("1x128", "128x128")
        if dgrad_factor is None and by_tile and full_tiles:
            casts = GatedGradients(
                *gated_backward_quantized(dproduct, saved, activation, recipe, down, row_factor, wgrad, uncast)
            )
            if recipe.monitor.active:
                dgate_up, _ = gated_backward(dproduct, saved, activation)
                recipe.observe("grad_output", dgate_up, casts.dgate_up, row_factor)
            return casts
        dgate_up, product = gated_backward(dproduct, saved, activation)
    else:
        gate_up = saved.dequantize() if isinstance(saved, QuantizedTensor) else saved
        dgate_up, product = gated_backward_reference(dproduct, gate_up, activation)
    drow_factor = None
    if row_factor is not None:
        # Before the factor is applied: its gradient is dp times the product without it.
        drow_factor = (dproduct.float() * product).sum(1)
        dgate_up, product = (x * row_factor[:, None] for x in (dgate_up, product))
    row, column = recipe.quantize_grad_output(dgate_up, wgrad=wgrad, column_factor=dgrad_factor)
    columns = down.quantize_input_columnwise(product) if wgrad else None
    high = (x.to(dproduct.dtype) if wanted else None for x, wanted in zip((dgate_up, product), uncast, strict=True))
    return GatedGradients(row, column, columns, drow_factor, *high)
