"""Measure what a decoder layer saves for backward, and what its backward allocates, on the meta device.

The layer of transformers, converted as in training, runs forward and backward; tensors have shapes and no memory. Every
storage is counted from the operation that makes it until its last reference goes:

    forward                              backward of the layer above     backward
    x -> layer -> y                      dy                              dy -> layer -> dx
    kept: what is alive without y                                        peak: the most that is alive

The references of kernels run there. On a GPU their temporaries are registers: of a function that has a Triton kernel
the results alone are counted, and its inputs. Attention, whose kernels differ, is replaced by what they save and
allocate. Weights are unsharded before, and a gradient goes to its reduction when it arrives: states.py has both.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface

from ds_fp8 import gemm
from ds_fp8.casts import quantization
from ds_fp8.casts.quantization import QuantizedTensor, block_scales, width_with_outliers
from ds_fp8.config.formats import BLOCK, FORMATS, CastSpec, scale_shape
from ds_fp8.gemm import reference
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED, group_of

STAND_IN = "ds_fp8_estimate"  # The attention implementation of measured layers
META = torch.device("meta")


class Attention(NamedTuple):
    """Properties of an attention kernel that its memory depends on."""

    shared_by: int  # GPUs that share a sequence: each has all tokens of some heads
    grouped: bool  # Whether the kernel reads one k and v for several heads of q
    saves_output: bool  # Whether o_proj's input is what the kernel saves


class Measured(NamedTuple):
    """Bytes of one layer."""

    kept: int  # Alive between forward and backward, its input among them if a backward reads it
    input: int  # The input's share of `kept`
    arguments: int  # Of tensors that all layers are called with: cos and sin
    backward: int  # The most that is alive in backward beyond `kept`
    without_gradients: int  # The same without gradients of parameters


class Recording(NamedTuple):
    """A layer's forward and backward for a number of tokens."""

    kept: int
    input: int
    arguments: int
    changes: tuple[tuple[int, int], ...]  # In backward: number of a storage and bytes; number 0: what is there counts
    gradients: frozenset[int]  # Numbers of storages that are gradients of parameters

    @property
    def measured(self) -> Measured:
        return Measured(*self[:3], self._most(frozenset()), self._most(self.gradients))

    def _most(self, without: frozenset[int]) -> int:
        total = most = 0
        for number, size in self.changes:
            total += 0 if number in without else size
            most = most if number else max(most, total)
        return most

    def is_like(self, other: Recording) -> bool:
        """Return whether the same operations were recorded."""
        return [number for number, _ in self.changes] == [number for number, _ in other.changes]

    def continued(self, longer: Recording, times: int) -> Measured:
        """Return the bytes of rows that are longer by `times` as much as those of `longer`."""

        def at(one: int, other: int) -> int:
            return one + times * (other - one)

        if not self.is_like(longer):  # a loop over tokens
            return Measured(*map(at, self.measured, longer.measured))
        pairs = zip(self.changes, longer.changes, strict=True)
        changes = tuple((number, at(size, after)) for (number, size), (_, after) in pairs)
        return self._replace(changes=changes).measured._replace(
            kept=at(self.kept, longer.kept),
            input=at(self.input, longer.input),
            arguments=at(self.arguments, longer.arguments),
        )


class Live(TorchDispatchMode):
    """Records when operations make storages, and when the last reference to one goes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        self._alive: dict[int, tuple[weakref.ref, int, int]] = {}  # by address: a reference, number and bytes
        self._made = self._kernels = 0

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self._alive.values())

    def number(self, tensor: torch.Tensor) -> int:
        return self._alive[tensor.untyped_storage()._cdata][1]

    def ignore(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._add(tensor, 0)

    def run(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a kernel's reference and return its results, which count; its temporaries do not."""
        self._kernels += 1
        try:
            return kernel(*args, **kwargs)
        finally:
            self._kernels -= 1
            self._count()

    def _count(self) -> None:
        if not self._kernels:
            self.changes.append((0, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value)
        self._count()
        return result

    def _add(self, tensor: torch.Tensor, size: int | None = None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            size = storage.nbytes() if size is None else size
            self._made += 1
            self._alive[key] = weakref.ref(storage, lambda _: self._freed(key)), self._made, size
            self.changes.append((self._made, size))

    def _freed(self, key: int) -> None:
        _, number, size = self._alive.pop(key)
        self.changes.append((number, -size))


@contextlib.contextmanager
def _on_meta(live: Live, on_gpu: bool) -> Iterator[None]:
    """Let `live` run the functions that are one kernel on a GPU: those that import a module of Triton's there.

    Products and casts are their shapes alone, which takes less time. PEFT's autocast is nothing on the meta device.
    """
    new: dict[Any, Any] = {torch.autocast: lambda *args, **kwargs: contextlib.nullcontext()}
    places = [(torch, "autocast", torch.autocast)]
    if on_gpu:
        new |= {quantization._reference: _quantized_as, reference.scaled_matmul: _multiplied}
        modules = [module for name, module in list(sys.modules.items()) if name.startswith("ds_fp8.")]
        functions = [(module, *item) for module in modules for item in vars(module).items()]
        places += [place for place in functions if isinstance(place[2], types.FunctionType) and _is_kernel(place[2])]
        places += [(quantization, "_reference", quantization._reference)]
        places += [(reference, "scaled_matmul", reference.scaled_matmul)]
    new = {value: functools.partial(live.run, value) for _, _, value in places} | new
    for module, name, value in places:
        setattr(module, name, new[value])
    try:
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)


@functools.cache
def _is_kernel(function: types.FunctionType) -> bool:
    of_rooms = function.__module__.startswith(("ds_fp8.casts.", "ds_fp8.gemm", "ds_fp8.layers."))
    imports = any(name.endswith("_triton") for name in function.__code__.co_names)
    return (of_rooms and imports) or function is gemm.scaled_matmul


def _quantized_as(x: torch.Tensor, format: str, granularity: str, scale: str) -> QuantizedTensor:
    return _quantized(x.new_empty(x.shape, dtype=FORMATS[format].dtype), CastSpec(format, granularity, scale))


def _multiplied(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=META)


def unshard(layer: nn.Module) -> None:
    """Give FP8 weights of a layer their quantized form, as an all-gather in FP8 leaves it."""
    for module in layer.modules():
        if isinstance(module, FP8Linear) and group_of(module.weight)[0] is module.weight:
            spec, channels, parts = module.recipe.weight, module.recipe.outlier_channels, group_of(module.weight)
            rows, columns = [len(part) for part in parts], parts[0].shape[1]
            # Side by side, as they arrive: a stack is a view. With room for the outlier block behind every row.
            width = width_with_outliers(columns, min(channels, columns)) if channels else columns
            data = torch.empty(sum(rows), width, dtype=FORMATS[spec.format].dtype, device=META)
            for part, own in zip(parts, data.split(rows), strict=True):
                setattr(part, UNSHARDED, _quantized(own[:, :columns], spec, width))
        elif isinstance(module, FP8Experts):
            for weight, recipe in module.recipes_of_weights():
                dtype = FORMATS[recipe.weight.format].dtype
                data = torch.empty(weight.shape[:-1].numel(), weight.shape[-1], dtype=dtype, device=META)
                setattr(weight, UNSHARDED, _quantized(data, recipe.weight))


def _quantized(data: torch.Tensor, spec: CastSpec, width: int | None = None) -> QuantizedTensor:
    shape = scale_shape(data.shape, spec.granularity)
    if spec.granularity == "128x128":
        scale = block_scales(shape[0], -(-(width or data.shape[1]) // BLOCK), META)[:, : shape[1]]
    else:
        scale = torch.empty(shape, device=META)
    format_name = None if FORMATS[spec.format].codec is None else spec.format
    return QuantizedTensor(data, scale, spec.granularity, spec.scale, format_name)


def _tensors_of_weights(layer: nn.Module) -> list[torch.Tensor]:
    quantized = [getattr(weight, UNSHARDED, None) for weight in layer.parameters()]
    parts = [part for q in quantized if q is not None for part in (q.data, q.scale)]
    return [*layer.parameters(), *layer.buffers(), *parts]


def measure(
    decoder: nn.Module, container: str, layer: nn.Module, tokens: int, attention: Attention, on_gpu: bool
) -> Recording:
    """Return a recording of a layer of `decoder`, whose layers are its attribute `container`, for a row of tokens."""
    AttentionInterface.register(STAND_IN, functools.partial(_attend, attention, on_gpu))
    decoder.config._attn_implementation = STAND_IN
    args, kwargs = _call_of(decoder, container, layer, tokens)
    hidden = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
    given = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x is not hidden}
    # Where layers return tuples, those before it have left less dimensions.
    live, leaf = Live(), hidden.new_empty(1, tokens, hidden.shape[-1]).requires_grad_()
    gradients: set[int] = set()

    def reduce(parameter: nn.Parameter) -> None:
        gradients.add(live.number(parameter.grad))
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(reduce) for p in layer.parameters() if p.requires_grad]
    try:
        with _on_meta(live, on_gpu), live, torch.enable_grad():
            live.ignore(leaf, *given.values(), *_tensors_of_weights(layer))
            x = leaf + 0  # the output of the layer before
            of_input = weakref.ref(x.untyped_storage())
            y = layer(*_with(x, hidden, args), **_with(x, hidden, kwargs))
            y = y if isinstance(y, torch.Tensor) else y[0]
            del x
            # The layer above: its backward makes dy, and reads no y.
            root = (y * 1).sum()
            del y
            kept, size = live.bytes, 0 if of_input() is None else of_input().nbytes()
            live.changes.clear()
            root.backward()
            changes, leaf.grad = tuple(live.changes), None
            kept -= live.bytes  # of the root, and of what a first call made for good
    finally:
        for hook in hooks:
            hook.remove()
    arguments = sum(x.untyped_storage().nbytes() for x in given.values())
    return Recording(kept, size, arguments, changes, frozenset(gradients))


def _with(x: torch.Tensor, hidden: torch.Tensor, values: Any) -> Any:
    return tree_map(lambda value: x if value is hidden else value, values)


class _CalledError(Exception):
    """Ends a forward of the decoder at the layer in question: (args, kwargs)."""


def _call_of(decoder: nn.Module, container: str, layer: nn.Module, tokens: int) -> tuple[tuple, dict[str, Any]]:
    """Return what the decoder calls the layer with, for a row of tokens; those before it do nothing."""

    def called(*args: Any, **kwargs: Any) -> None:
        raise _CalledError(args, kwargs)

    ids = torch.empty(1, tokens, dtype=torch.long, device=META)
    options = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    takes = inspect.signature(decoder.forward).parameters
    layers = list(getattr(decoder, container))
    for each in layers:
        each.forward = called if each is layer else lambda hidden_states, *args, **kwargs: hidden_states
    try:
        with torch.no_grad():
            decoder(**{name: value for name, value in options.items() if name in takes or "kwargs" in takes})
    except _CalledError as call:
        return call.args
    finally:
        for each in layers:
            del each.forward
    raise ValueError("the decoder does not call its layers")


class _StandIn(torch.autograd.Function):
    """Saves what attention kernels save: q [B, heads, S, D], k and v [B, kv_heads, S, D], output, a number a head.

    Without grouped attention in the kernel, k and v are repeated for every head of q. GPUs that share sequences have
    all tokens of some heads, as many bytes, but at least one head of k and v each. Attention in FP8 saves half of it,
    but the bytes of rows of several documents, which it computes in BF16, must be there.
    """

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, on_gpu: bool):
        batch, heads, length, _ = q.shape
        ctx.shapes, ctx.how, ctx.on_gpu = (q.shape, k.shape, v.shape), how, on_gpu
        kept_heads = max(k.shape[1], how.shared_by) if how.grouped else heads
        if kept_heads != k.shape[1] or how.shared_by > 1:
            k, v = (x.new_empty(batch, kept_heads, length, x.shape[-1]) for x in (k, v))
        output = q.new_empty(batch, length, heads, v.shape[-1])
        saved = output if how.saves_output else torch.empty_like(output)
        q = q if how.shared_by == 1 else torch.empty_like(q)
        ctx.save_for_backward(q, k, v, saved, q.new_empty(batch, heads, length, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        q, k, v, *_ = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        if ctx.on_gpu:
            sums = torch.empty_like(q, dtype=torch.float32)  # of q's gradient over blocks of keys
            del sums
        if ctx.how.shared_by > 1:
            # As attention leaves them, laid out, and received: DeepSpeed exchanges one after the other and lets none
            # go before all have come.
            exchanged = [[torch.empty_like(x) for x in gradients] for _ in range(2)]
            del exchanged
        pairs = zip(gradients, ctx.shapes, strict=True)
        return *(x if x.shape == shape else x.new_empty(shape) for x, shape in pairs), None, None


def _attend(how: Attention, on_gpu: bool, module: nn.Module, q, k, v, mask=None, **more) -> tuple[torch.Tensor, None]:
    return _StandIn.apply(q, k, v, how, on_gpu), None
