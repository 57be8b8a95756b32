"""ZeRO-3 leaf modules: modules whose parameters are unsharded together, as those of all fused layers are.

Three properties of DeepSpeed's leaf modules that FP8 layers need help with:

    gradients   A leaf module's gradients are reduced by a torch full backward hook, which runs once the gradient of the
                module's input is complete. If no input requires a gradient, torch runs the hook before the module's
                backward: DeepSpeed then reduces zeros and, if this was the last module, releases all parameters.
                Inputs that are passed by name torch does not look at.
    calls       The hook runs for each call of the module, although the gradients are complete after the last one.
    weights     ZeRO-3 detects a module that reads another module's weight (an external parameter) because that weight
                is sharded at the time. Inside a leaf module no weight is, and one unsharded in FP8 reads as NaN.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_fp8.layers.decoder.decoder import Fused
from ds_fp8.layers.linear.adapters import is_lora
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import BEFORE_BACKWARD
from ds_fp8.monitor.routing import in_backward
from ds_fp8.zero.deepspeed.optimizer import fetch_for_backward, reduce_gradient
from ds_fp8.zero.deepspeed.parameters import full_shape, is_gathered, is_trained, leaf_module_of, order
from ds_fp8.zero.deepspeed.patches import on_destroy, replace


class _Call:
    """One call of a leaf module in training. It lives as long as the autograd graph that the call has made."""

    arrived = False  # whether a gradient has reached its output
    ended = False


class _Entrance(torch.autograd.Function):
    """Identity around a leaf module's input: its backward is the last of the module's, through whatever output."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, call: _Call, end: Callable[[_Call], None]) -> torch.Tensor:
        ctx.call, ctx.end = call, end
        return x.detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.end(ctx.call)
        return gradient, None, None


class LeafCalls:
    """Calls of trainable leaf modules, and the gradients that wait for the backward of the last of them.

    Several calls of one module may precede a backward: of two forwards, or of a model that repeats a layer. Autograd
    then has the module's gradients after the last backward of them, but DeepSpeed's hook reduces at each.

    A gradient may enter a layer other than by its output: by the keys and values that a cache of an earlier forward
    holds. Neither DeepSpeed's hook nor torch's runs then: the attention asks for its weights (layers/linear/weights.py,
    `BEFORE_BACKWARD`), and what it leaves is reduced when the gradient reaches the layer's input.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        """Watch the leaf modules, and make their inputs require gradients, until the engine is destroyed.

        Without this the input of the first such module does not, if everything before it is frozen, nor does that of a
        module which is called with its input by name.
        """
        self._engine = engine
        # Calls whose backward may come. A forward whose output was dropped, as of an evaluation with gradients enabled,
        # leaves none. The same on all ranks: every call gathers weights, which is collective.
        self._calls: dict[nn.Module, list[weakref.ref[_Call]]] = {}
        self._open: dict[nn.Module, _Call] = {}
        # Parameters, by id, without a gradient at the end of the present backward of their module.
        self._absent: set[int] = set()
        # Parameters, by id, that were to be reduced before the last backward of their module.
        self._delayed: dict[int, nn.Parameter] = {}
        for module in _leaf_modules(parameter for parameter in engine.module.parameters() if parameter.requires_grad):
            handles = [
                # Before DeepSpeed's hooks, which test whether the input requires a gradient, and reduce.
                module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._called),
                module.register_full_backward_hook(self._end, prepend=True),
            ]
            for handle in handles:
                on_destroy(engine, handle.remove)
            for parameter in module.parameters():
                replace(engine, parameter, BEFORE_BACKWARD, functools.partial(self._fetch, module))

    def delays(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient that is to be reduced now is not complete yet."""
        if not self._pending(leaf_module_of(parameter)):
            self._delayed.pop(id(parameter), None)
            return False
        if id(parameter) in self._absent:
            parameter.grad = None  # DeepSpeed's zeros: of all layers they would take the memory of all gradients
        self._delayed[id(parameter)] = parameter
        return True

    def take_delayed(self) -> list[nn.Parameter]:
        """Return the parameters that are still to be reduced, with gradients, as a backward is over; forget all calls.

        These are of calls that had no backward in it.
        """
        found = sorted(self._delayed.values(), key=order)
        self._calls.clear()
        self._delayed.clear()
        for parameter in found:
            _complete(parameter)
        return found

    def _pending(self, module: nn.Module | None) -> list[_Call]:
        """Return the calls of a module whose backward may still come, the oldest first."""
        calls = [call for reference in self._calls.get(module, ()) if (call := reference()) and not call.ended]
        if module in self._calls:
            self._calls[module] = [weakref.ref(call) for call in calls]
        return calls

    def _begin(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs, named = _with_gradient(module, inputs, named)
        # Not of recomputation: its call has been counted, or has no backward of its own (reentrant checkpointing).
        if torch.is_grad_enabled() and not in_backward():
            call = self._open[module] = _Call()
            self._calls.setdefault(module, []).append(weakref.ref(call))
            index = next((i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad), None)
            if index is not None:
                inside = _Entrance.apply(inputs[index], call, functools.partial(self._leave, module))
                inputs = (*inputs[:index], inside, *inputs[index + 1 :])
        return inputs, named

    def _called(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        call = self._open.pop(module, None)
        if call is None:
            return

        def arrives(gradient: torch.Tensor) -> None:  # the graph holds it, and by it the call
            call.arrived = True

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(arrives)

    def _end(self, module: nn.Module, *gradients: Any) -> None:
        """End a call whose output had a gradient, before DeepSpeed's hook reduces."""
        call = next((call for call in self._pending(module) if call.arrived), None)
        if call is not None:
            call.ended = True
        self._absent = {id(parameter) for parameter in module.parameters() if parameter.grad is None}

    def _leave(self, module: nn.Module, call: _Call) -> None:
        """End a call that a gradient entered other than by its output: torch runs no backward hook of the module."""
        if call.arrived:
            return
        call.ended = True
        self._absent.clear()
        for parameter in filter(is_trained, module.parameters()):
            if self._pending(module):
                self._delayed[id(parameter)] = parameter
            else:
                _complete(parameter)
                reduce_gradient(self._engine, parameter)

    def _fetch(self, module: nn.Module) -> None:
        """Gather a module's weights for a backward that DeepSpeed does not see coming. Collective where they are not.

        DeepSpeed releases them when the gradient reaches the module's input.
        """
        if not all(map(is_gathered, module.parameters())):
            fetch_for_backward(self._engine, module)


def _complete(parameter: nn.Parameter) -> None:
    """Give a parameter without a gradient one of zeros, as DeepSpeed does: a module may be used on some ranks alone."""
    if parameter.grad is None:  # the parameter may be partitioned by now
        shape = full_shape(parameter)
        parameter.grad = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


def weights_read_in_leaf_modules(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of FP8 linears inside leaf modules that a module around the linear may read itself.

    A module may read the weights below it if its forward, or a method that this calls, accesses an attribute `weight`.
    Of fused layers and of LoRA, whose forwards are known, none.
    """
    found: dict[int, nn.Parameter] = {}
    for leaf in _leaf_modules(model.parameters()):
        for module in leaf.modules():
            if not isinstance(module, (Fused, FP8Linear)) and not is_lora(module) and _reads_a_weight(module):
                linears = (part for part in module.modules() if isinstance(part, FP8Linear))
                found.update((id(linear.weight), linear.weight) for linear in linears)
    return list(found.values())


def _leaf_modules(parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Return the leaf modules that some of these parameters belong to; of nested ones the outermost, each once."""
    leaves = (leaf_module_of(parameter) for parameter in parameters)
    return list(dict.fromkeys(leaf for leaf in leaves if leaf is not None))


def _with_gradient(
    module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a first tensor that requires a gradient, where none does, by position."""
    inputs, named = _by_position(module, inputs, named)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return inputs, named
    if not tensors or tensors[0] is not inputs[0] or not tensors[0].is_floating_point():
        return inputs, named
    # Detached: nothing before it is trained, and a leaf that requires a gradient may be made of any tensor then.
    return (inputs[0].detach().requires_grad_(), *inputs[1:]), named


def _by_position(
    module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the first floating point tensor by position, where it and all before it have names."""
    if any(map(_has_gradients, inputs)) or not any(map(_has_gradients, named.values())):
        return inputs, named
    for parameter in list(inspect.signature(module.forward).parameters.values())[len(inputs) :]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in named:
            break
        inputs = *inputs, named[parameter.name]
        named = {name: value for name, value in named.items() if name != parameter.name}
        if _has_gradients(inputs[-1]):
            break
    return inputs, named


def _has_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _reads_a_weight(module: nn.Module) -> bool:
    seen: set[str] = set()
    names = {"forward"}
    while names:
        seen |= names
        # Names that its methods use, and the methods by these names in turn, until nothing new turns up.
        names = {used for name in names for function in _definitions(module, name) for used in _names_in(function)}
        names -= seen
    return "weight" in seen


def _definitions(module: nn.Module, name: str) -> Iterator[CodeType]:
    """Yield the code of a module's own method of this name, and of those that it calls by `super`."""
    owners = [module, *(kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__)]
    for owner in owners:
        code = getattr(inspect.unwrap(vars(owner).get(name)), "__code__", None)
        if code is not None:
            yield code
            if "super" not in _names_in(code):
                return


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code and in that of its nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
