"""FP8Experts: experts stored as 3-D parameters whose weights ZeRO-3 gathers in FP8, one byte an element.

The experts of a Hugging Face layer are one module with parameters [E, N, K]. As rows [E*N, K] they are cast in 128x128
blocks, which lie inside an expert where N and K are multiples of 128, and gathered like any other weight; while ZeRO-3
has them available they carry `weight.fp8_gathered`, codes [E*N, K].

The module's own forward computes, and what it reads are those weights decoded to BF16 for the moment:

    forward    own forward( decode(weight) )
    backward   its operations find decode(weight) again, made when they ask for it: no decoded copy is kept between
    gradient   that of the decoded weight, [E, N, K], is the parameter's

With fp8.linear.expert_products "fp8" the codes themselves are multiplied (products.py), where the experts have the
structure for it: weights [E, 2F, H] and [E, H, F] by the flags of transformers' ExpertsInterface, the rows of gate
before those of up, and a gating that, tried up to ±1000, is act(gate) · up. Weights that are not gathered in FP8 at the
time (without ZeRO-3, or where the layer went back to BF16) are read as they are. The class is swapped in under the live
module, as FP8Linear is.
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
    unsupported_shapes,
)
from ds_fp8.layers.experts.selection import expert_weights, recipe_of_experts, shape_of
from ds_fp8.layers.linear.gated_activation import ACTIVATIONS, gating_of
from ds_fp8.layers.linear.linear import Swapped, runs_eagerly, swapped_class
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import GATHERED

PRODUCTS = "expert_products"
"""Attribute of a module of experts that holds its ExpertProducts."""

WRAPPERS = "expert_wrappers"
"""Attribute of a module of experts that holds PEFT's modules around it, the innermost first."""

FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""By flag of transformers' interface: the value of the experts whose products are known."""


def products_of(module: nn.Module, recipes: Mapping[str, LinearRecipe]) -> ExpertProducts | str:
    """Return the FP8 products of experts of transformers' ExpertsInterface, or the reason why they can have none.

    `recipes`: by the name of each parameter that can be gathered in FP8.
    """
    missing = [name for name in ("gate_up_proj", "down_proj") if name not in recipes]
    if missing:
        return f"{' and '.join(missing)} not gathered in FP8"
    for flag, value in FLAGS.items():
        if getattr(module, flag, None) is not value:
            return f"{type(module).__name__} has {flag} = {getattr(module, flag, 'not set')}"
    gate_up, down = recipes["gate_up_proj"], recipes["down_proj"]
    reason = unsupported(gate_up) or unsupported(down)
    reason = reason or unsupported_shapes(shape_of(module.gate_up_proj), shape_of(module.down_proj))
    activation = gating_of(lambda gate, up: module._apply_gate(torch.cat([gate, up])[None])[0])
    if reason is None and activation is None:
        reason = f"its gating is not act(gate) · up with act one of {', '.join(ACTIVATIONS)}"
    return reason or ExpertProducts(activation, gate_up, down)


PIECE = 1 << 25
"""Elements that are decoded at once."""


@dataclass(frozen=True)
class ExpertsConversion:
    """Result of `convert_experts`: names of 3-D parameters, in FP8 or with the reason why not."""

    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    multiplied: list[str] = field(default_factory=list)
    """Names of modules whose products are in FP8."""
    decoded: dict[str, str] = field(default_factory=dict)
    """Names of modules whose products were to be in FP8 and are in BF16, with the reason."""
    adapted: list[str] = field(default_factory=list)
    """Names of modules that carry adapters."""
    classes: set[type] = field(default_factory=set)
    """Classes of the converted modules, which must be ZeRO-3 leaf modules: their own forward may call a part of theirs
    once for every expert that has tokens, and what ZeRO-3 fetches next must not depend on that."""


class FP8Experts(Swapped):
    """Forward of experts whose weights are gathered in FP8."""

    expert_recipes: dict[str, LinearRecipe]
    """By the name of each parameter that can be gathered in FP8; `weight` of the recipe is its cast."""

    @runs_eagerly
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the experts' own forward. Of experts without tokens the gradients are zero, on every rank."""
        weights = [self._parameters[name] for name in self.expert_recipes]
        adapters = active_low_ranks(self)
        if hidden_states.shape[0]:
            output = self._own_forward(adapters, hidden_states, *args, **kwargs)
            if output.requires_grad or not torch.is_grad_enabled():
                return output
        else:
            output = torch.empty_like(hidden_states)
        # No expert was called. What ZeRO-3 does after the gradient of a weight is complete it must do here too.
        weights += (part for adapter in adapters.values() for part in adapter)
        return _Untouched.apply(output, hidden_states, *weights)

    def recipes_of_weights(self) -> list[tuple[nn.Parameter, LinearRecipe]]:
        return [(self._parameters[name], recipe) for name, recipe in self.expert_recipes.items()]

    def _own_forward(self, adapters: Mapping[str, LowRank], *args: Any, **kwargs: Any) -> torch.Tensor:
        if PRODUCTS in vars(self):
            weights = ExpertWeights(self.gate_up_proj, self.down_proj)
            adapters = ExpertAdapters(adapters.get("gate_up_proj"), adapters.get("down_proj"))
            products = getattr(self, PRODUCTS)
            return expert_products(*args, **kwargs, weights=weights, products=products, adapters=adapters)
        sources = {name: (self._parameters[name], adapters.get(name)) for name in self.expert_recipes}
        sources = {name: source for name, source in sources.items() if source[1] or _gathered(source[0]) is not None}
        if not sources:
            return super().forward(*args, **kwargs)
        decoded = {name: _Decoded.apply(weight, *(adapter or ())) for name, (weight, adapter) in sources.items()}
        places = {decoded[name].untyped_storage()._cdata: sources[name] for name in decoded}
        with _shown(self, decoded), _decoded_again(places):
            return super().forward(*args, **kwargs)


def _gathered(weight: nn.Parameter) -> QuantizedTensor | None:
    return getattr(weight, GATHERED, None)


@torch.no_grad()
def decode(
    weight: nn.Parameter, first: int = 0, rows: int | None = None, adapter: LowRank | None = None
) -> torch.Tensor:
    """Return [rows, K] of a weight [E, N, K], from the `first` of all experts' rows, in its dtype, plus an adapter.

    The weight is gathered in FP8, or has an adapter and is there in its dtype.
    """
    if adapter is None:
        return _decoded_rows(weight, first, rows)
    N, (E, _, K) = adapter.b.shape[1], adapter.a.shape
    rows = E * N if rows is None else rows
    begin, end = first // N, math.ceil((first + rows) / N)
    if _gathered(weight) is None:
        matrices = weight[begin:end].clone()
    else:
        matrices = _decoded_rows(weight, begin * N, (end - begin) * N).view(-1, N, K)
    matrices.baddbmm_(adapter.b[begin:end], adapter.a[begin:end])
    return matrices.flatten(0, 1)[first - begin * N :][:rows]


def _decoded_rows(weight: nn.Parameter, first: int, rows: int | None) -> torch.Tensor:
    gathered: QuantizedTensor = getattr(weight, GATHERED)
    rows = gathered.shape[0] if rows is None else rows
    # Whole blocks around the rows, which have their scales.
    begin, end = first // BLOCK * BLOCK, math.ceil((first + rows) / BLOCK) * BLOCK
    result = torch.empty(end - begin, gathered.shape[1], dtype=weight.dtype, device=gathered.data.device)
    # In pieces: what a decoding needs besides its result is not of the size of all experts.
    at_once = max(PIECE // gathered.shape[1] // BLOCK, 1) * BLOCK
    for start in range(begin, end, at_once):
        stop = min(start + at_once, end)
        scale = gathered.scale[start // BLOCK : math.ceil(stop / BLOCK)]
        piece = replace(gathered, data=gathered.data[start:stop], scale=scale)
        result[start - begin : stop - begin] = piece.dequantize(weight.dtype)
    return result[first - begin : first - begin + rows]


class _Decoded(torch.autograd.Function):
    """A weight [E, N, K] from its gathered codes, plus b · a of an adapter; its gradient is that of the parameter."""

    @staticmethod
    def forward(ctx, weight: nn.Parameter, a: torch.Tensor | None = None, b: torch.Tensor | None = None):
        ctx.save_for_backward(a, b)
        return decode(weight, adapter=None if a is None else LowRank(a, b)).view(weight.shape)

    @staticmethod
    def backward(ctx, dw: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = dw if ctx.needs_input_grad[0] else None
        a, b = ctx.saved_tensors
        if a is None:
            return wanted, None, None
        return wanted, b.transpose(1, 2) @ dw, dw @ a.transpose(1, 2)


class _Untouched(torch.autograd.Function):
    """The output of experts that no token reached: zero gradients for their input and all weights."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, hidden_states: torch.Tensor, *weights: nn.Parameter) -> torch.Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in (hidden_states, *weights)]
        # Gradient checkpointing recomputes when the first saved tensor is asked for, and up to the last one: with one
        # here this rank calls the same modules at the same time as those whose experts have tokens.
        ctx.save_for_backward(hidden_states)
        return output.clone()

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        _ = ctx.saved_tensors
        return None, *(
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        )


class _Part(NamedTuple):
    """A view of a decoded weight that an operation saved for its backward."""

    weight: nn.Parameter
    adapter: LowRank | None
    first: int
    rows: int
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset in those rows."""


def _decoded_again(
    sources: Mapping[int, tuple[nn.Parameter, LowRank | None]],
) -> contextlib.AbstractContextManager:
    """Saved-tensor hooks: store (weight, view) instead of decoded data; decode again in backward.

    Everything else is left to the hooks that were there before (those of gradient checkpointing). `sources`: weights
    and their adapters by the storages that they were decoded to.
    """
    # torch calls the innermost hooks alone, and has no public name for those around them.
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
        return _Part(weight, adapter, first, rows, (tensor.shape, tensor.stride(), start - first * columns))

    def restore(saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Part):
            return unpack(saved)
        return decode(saved.weight, saved.first, saved.rows, saved.adapter).as_strided(*saved.view)

    return torch.autograd.graph.saved_tensors_hooks(save, restore)


@contextlib.contextmanager
def _shown(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let attributes of a module read as `tensors` instead of its parameters."""
    # An entry of the object comes before nn.Module's look-up of parameters, which stay registered as they are.
    vars(module).update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            vars(module).pop(name, None)


def convert_experts(
    model: nn.Module, left: Mapping[str, str], recipe_of: Callable[[str], LinearRecipe], multiply: bool = False
) -> ExpertsConversion:
    """Prepare the experts of a model for a gather in FP8, in place; none of them are FP8Experts yet.

    left: weights that stay in BF16. multiply: whether their products are to be in FP8 too.
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
                result.decoded[name] = products
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
    # PEFT reads the parameters before it calls what it wraps, a router say, which is when ZeRO-3 would gather them.
    result.classes.update(type(module) for module in modules.values() if wraps_parameter(module))
    return result


def restore_experts(module: nn.Module) -> list[nn.Parameter]:
    """Give experts their own class again; returns the weights that could be gathered in FP8."""
    weights = [module._parameters[name] for name in module.expert_recipes]
    del module.expert_recipes
    vars(module).pop(PRODUCTS, None)
    for wrapper in vars(module).pop(WRAPPERS, ()):
        _, wrapper.__class__ = type(wrapper).__bases__
    _, module.__class__ = type(module).__bases__
    return weights
