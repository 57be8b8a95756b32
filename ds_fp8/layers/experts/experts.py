"""FP8Experts: experts stored as 3-D parameters whose weights ZeRO-3 all-gathers in FP8.

The experts of a Hugging Face layer are one module with parameters [E, N, K]. As rows [E*N, K] they are quantized in
128x128 blocks, which lie inside an expert where N and K are multiples of 128, and sharded like any other weight. An
unsharded weight carries `weight.fp8_gathered`, the QuantizedTensor [E*N, K].

The module's original forward reads temporary dequantized weights:

    forward    original forward( dequantize(weight) )
    backward   saved views of dequantized weights are dequantized again when its operations read them
    gradient   of the dequantized weight [E, N, K], taken as the parameter's

With fp8.linear.expert_products "fp8" the quantized weights are multiplied (products.py), if the experts have the
structure: weights [E, 2F, H] and [E, H, F] by the flags of transformers' ExpertsInterface, gate's rows before up's, and
a gating that equals act(gate) · up in trials up to ±1000. Weights in high precision (without ZeRO-3, or of a layer that
went back to BF16) are read as they are. The module's class is replaced, as FP8Linear's is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.experts.adapters import FP8ParamWrapper, LowRank, active_low_ranks, wrappers_of, wraps_parameter
from ds_fp8.layers.experts.products import (
    ExpertAdapters,
    ExpertProducts,
    ExpertWeights,
    expert_products,
    unsupported,
)
from ds_fp8.layers.experts.selection import expert_weights, recipe_of_experts, shape_of
from ds_fp8.layers.linear.gated_activation import ACTIVATIONS, gating_of
from ds_fp8.layers.linear.linear import Swapped, runs_eagerly, swapped_class
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED

# Attributes of a module of experts
PRODUCTS = "expert_products"  # its ExpertProducts
WRAPPERS = "expert_wrappers"  # PEFT's modules around it, the innermost first

CHUNK_ELEMENTS = 1 << 25  # dequantized at once

# Flags of transformers' ExpertsInterface for [E, 2F, H] and [E, H, F]
FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


def products_of(module: nn.Module, recipes: Mapping[str, LinearRecipe]) -> ExpertProducts | str:
    """Return the FP8 products of experts of transformers' ExpertsInterface, or the reason why they have none.

    recipes: by name of the parameters that are all-gathered in FP8.
    """
    missing = [name for name in ("gate_up_proj", "down_proj") if name not in recipes]
    if missing:
        return f"{' and '.join(missing)} not gathered in FP8"
    for flag, value in FLAGS.items():
        if getattr(module, flag, None) is not value:
            return f"{type(module).__name__} has {flag} = {getattr(module, flag, 'not set')}"
    gate_up, down = recipes["gate_up_proj"], recipes["down_proj"]
    reason = unsupported(gate_up) or unsupported(down)
    stacked, (experts, hidden, features) = shape_of(module.gate_up_proj), shape_of(module.down_proj)
    if reason is None and tuple(stacked) != (experts, 2 * features, hidden):
        reason = f"gate_up {tuple(stacked)} is not [E, 2F, H] with [E, H, F] of down"
    activation = gating_of(lambda gate, up: module._apply_gate(torch.cat([gate, up])[None])[0])
    if reason is None and activation is None:
        reason = f"its gating is not act(gate) · up with act one of {', '.join(ACTIVATIONS)}"
    return reason or ExpertProducts(activation, gate_up, down)


@dataclass(frozen=True)
class ExpertsConversion:
    """Result of `convert_experts`: names of 3-D parameters in FP8, and of the others with the reason (`left`)."""

    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    multiplied: list[str] = field(default_factory=list)  # modules with products in FP8
    dequantized: dict[str, str] = field(default_factory=dict)  # modules without, and why
    adapted: list[str] = field(default_factory=list)  # modules with adapters
    # Of the converted modules, which must be ZeRO-3 leaf modules: their forward may call a submodule once per expert
    # with tokens, and ZeRO-3's prefetch must not depend on the tokens
    classes: set[type] = field(default_factory=set)


class FP8Experts(Swapped):
    """Experts whose weights are all-gathered in FP8."""

    # by name of the parameter; recipe.weight is how it is quantized
    expert_recipes: dict[str, LinearRecipe]

    @runs_eagerly
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the experts on FP8 weights; weights of experts without tokens get zero gradients, on every rank."""
        weights = [self._parameters[name] for name in self.expert_recipes]
        adapters = active_low_ranks(self)
        if hidden_states.shape[0]:
            output = self._routed_forward(adapters, hidden_states, *args, **kwargs)
            if output.requires_grad or not torch.is_grad_enabled():
                return output
        else:
            output = torch.empty_like(hidden_states)
        # No expert was called: ZeRO-3's reduce-scatter still needs a gradient of every weight on this rank.
        weights += (part for adapter in adapters.values() for part in adapter)
        return _NoTokens.apply(output, hidden_states, *weights)

    def recipes_of_weights(self) -> list[tuple[nn.Parameter, LinearRecipe]]:
        return [(self._parameters[name], recipe) for name, recipe in self.expert_recipes.items()]

    def _routed_forward(self, adapters: Mapping[str, LowRank], *args: Any, **kwargs: Any) -> torch.Tensor:
        if PRODUCTS in vars(self):
            weights = ExpertWeights(self.gate_up_proj, self.down_proj)
            adapters = ExpertAdapters(adapters.get("gate_up_proj"), adapters.get("down_proj"))
            products = getattr(self, PRODUCTS)
            return expert_products(*args, **kwargs, weights=weights, products=products, adapters=adapters)
        sources = {name: (self._parameters[name], adapters.get(name)) for name in self.expert_recipes}
        sources = {name: source for name, source in sources.items() if source[1] or _quantized(source[0]) is not None}
        if not sources:
            return super().forward(*args, **kwargs)
        weights = {name: _Dequantize.apply(weight, *(adapter or ())) for name, (weight, adapter) in sources.items()}
        storages = {weights[name].untyped_storage()._cdata: sources[name] for name in weights}
        with _attributes_set(self, weights), _dequantize_in_backward(storages):
            return super().forward(*args, **kwargs)


def _quantized(weight: nn.Parameter) -> QuantizedTensor | None:
    return getattr(weight, UNSHARDED, None)


@torch.no_grad()
def dequantize_rows(
    weight: nn.Parameter, first: int = 0, rows: int | None = None, adapter: LowRank | None = None
) -> torch.Tensor:
    """Return rows [rows, K] of a weight [E, N, K] from row `first` of all E * N, in its dtype, plus an adapter.

    The weight is unsharded in FP8; one with an adapter may be in its dtype.
    """
    if adapter is None:
        return _dequantize_blocks(weight, first, rows)
    N, (E, _, K) = adapter.b.shape[1], adapter.a.shape
    rows = E * N if rows is None else rows
    begin, end = first // N, math.ceil((first + rows) / N)
    if _quantized(weight) is None:
        matrices = weight[begin:end].clone()
    else:
        matrices = _dequantize_blocks(weight, begin * N, (end - begin) * N).view(-1, N, K)
    matrices.baddbmm_(adapter.b[begin:end], adapter.a[begin:end])
    return matrices.flatten(0, 1)[first - begin * N :][:rows]


def _dequantize_blocks(weight: nn.Parameter, first: int, rows: int | None) -> torch.Tensor:
    quantized: QuantizedTensor = getattr(weight, UNSHARDED)
    rows = quantized.shape[0] if rows is None else rows
    # all blocks of the rows: a scale is a block's
    begin, end = first // BLOCK * BLOCK, math.ceil((first + rows) / BLOCK) * BLOCK
    result = torch.empty(end - begin, quantized.shape[1], dtype=weight.dtype, device=quantized.data.device)
    # in chunks, which bound the temporary memory
    at_once = max(CHUNK_ELEMENTS // quantized.shape[1] // BLOCK, 1) * BLOCK
    for start in range(begin, end, at_once):
        stop = min(start + at_once, end)
        scale = quantized.scale[start // BLOCK : math.ceil(stop / BLOCK)]
        chunk = replace(quantized, data=quantized.data[start:stop], scale=scale)
        result[start - begin : stop - begin] = chunk.dequantize(weight.dtype)
    return result[first - begin : first - begin + rows]


class _Dequantize(torch.autograd.Function):
    """A dequantized weight [E, N, K], plus b · a of an adapter; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx, weight: nn.Parameter, a: torch.Tensor | None = None, b: torch.Tensor | None = None):
        ctx.save_for_backward(a, b)
        return dequantize_rows(weight, adapter=None if a is None else LowRank(a, b)).view(weight.shape)

    @staticmethod
    def backward(ctx, dw: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = dw if ctx.needs_input_grad[0] else None
        a, b = ctx.saved_tensors
        if a is None:
            return wanted, None, None
        return wanted, b.transpose(1, 2) @ dw, dw @ a.transpose(1, 2)


class _NoTokens(torch.autograd.Function):
    """The output of experts without tokens: zero gradients for their input and all weights."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, hidden_states: torch.Tensor, *weights: nn.Parameter) -> torch.Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in (hidden_states, *weights)]
        # Gradient checkpointing recomputes at the first read of a saved tensor, up to the last one: a saved tensor here
        # makes this rank call the same modules at the same time as ranks whose experts have tokens.
        ctx.save_for_backward(hidden_states)
        return output.clone()

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        _ = ctx.saved_tensors
        return None, *(
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        )


class _SavedView(NamedTuple):
    """A view of a dequantized weight that an operation saves for its backward."""

    weight: nn.Parameter
    adapter: LowRank | None
    first: int
    rows: int
    view: tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride and offset in these rows


def _dequantize_in_backward(
    sources: Mapping[int, tuple[nn.Parameter, LowRank | None]],
) -> contextlib.AbstractContextManager:
    """Return saved-tensor hooks that save a _SavedView of dequantized weights, and dequantize again in backward.

    Other tensors go to the outer hooks (gradient checkpointing). sources: (weight, adapter) by storage.
    """
    # torch calls the innermost hooks alone, and has no public name for the outer ones
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer if outer is not None else (lambda value: value,) * 2

    def save(tensor: torch.Tensor) -> Any:
        source = sources.get(tensor.untyped_storage()._cdata) if tensor.numel() else None
        if source is None:
            return pack(tensor)
        weight, adapter = source
        columns, start = weight.shape[-1], tensor.storage_offset()
        last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = start // columns
        rows = last // columns - first + 1
        return _SavedView(weight, adapter, first, rows, (tensor.shape, tensor.stride(), start - first * columns))

    def restore(saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            return unpack(saved)
        return dequantize_rows(saved.weight, saved.first, saved.rows, saved.adapter).as_strided(*saved.view)

    return torch.autograd.graph.saved_tensors_hooks(save, restore)


@contextlib.contextmanager
def _attributes_set(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    # an instance attribute hides the registered parameter of its name
    vars(module).update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            vars(module).pop(name, None)


def convert_experts(
    model: nn.Module, left: Mapping[str, str], recipe_of: Callable[[str], LinearRecipe], multiply: bool = False
) -> ExpertsConversion:
    """Convert the experts of a model to FP8Experts in place.

    left: weights that stay in BF16, with the reason. multiply: whether products are in FP8 too.
    """
    result, modules = ExpertsConversion(left=dict(left)), dict(model.named_modules())
    for name, module in modules.items():
        recipes = {}
        for own_name in expert_weights(name, module):
            full_name = f"{name}.{own_name}".lstrip(".")
            if full_name not in left:
                recipes[own_name] = recipe_of_experts(recipe_of(full_name), name)
                result.converted.append(full_name)
        if recipes:
            module.expert_recipes = recipes
            products = products_of(module, recipes) if multiply else None
            if isinstance(products, str):
                result.dequantized[name] = products
            elif multiply:
                setattr(module, PRODUCTS, products)
                result.multiplied.append(name)
            module.__class__ = swapped_class(FP8Experts, type(module))
            result.classes.add(type(module))
            wrappers = vars(module)[WRAPPERS] = tuple(wrappers_of(name, modules))
            for wrapper in wrappers:
                wrapper.__class__ = swapped_class(FP8ParamWrapper, type(wrapper))
                result.classes.add(type(wrapper))
            if wrappers:
                result.adapted.append(name)
    # PEFT reads the parameters of a module (a router, say) before it calls the module, when ZeRO-3 would unshard them.
    result.classes.update(type(module) for module in modules.values() if wraps_parameter(module))
    return result


def restore_experts(module: nn.Module) -> list[nn.Parameter]:
    """Undo `convert_experts` for a module; return its FP8 weights."""
    weights = [module._parameters[name] for name in module.expert_recipes]
    del module.expert_recipes
    vars(module).pop(PRODUCTS, None)
    for wrapper in vars(module).pop(WRAPPERS, ()):
        _, wrapper.__class__ = type(wrapper).__bases__
    _, module.__class__ = type(module).__bases__
    return weights
