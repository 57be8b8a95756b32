"""Record and replay of the routing of mixtures of experts, and a balancing loss without a device synchronization.

    with record(model) as routes:            # layer -> experts [tokens, top_k]
        model(**batch)
    with replay(trained, routes):
        trained(**batch).loss.backward()

A layer of transformers chooses experts by one torch.topk over scores [tokens, experts]. `record` observes that call;
`replay` returns the given experts and the router's scores for them. The layer's own code does the rest (normalisation,
groups, scaling), and gradients flow to its router.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ds_fp8.config.errors import UserError
from ds_fp8.layers.experts.selection import INTERFACE
from ds_fp8.monitor.routing import in_backward

Routes = dict[str, torch.Tensor]  # [tokens, top_k] by name of the module of experts


def mixtures(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name that follow transformers' ExpertsInterface."""
    needed = *INTERFACE, "num_experts"
    return {name: part for name, part in model.named_modules() if all(hasattr(part, attribute) for attribute in needed)}


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Routes]:
    """Record the experts of all tokens in a model's forwards.

    The mapping is filled when the context ends: by layer, int64 [tokens, top_k] on the model's device. Tokens of
    several forwards are concatenated, without the recomputation of gradient checkpointing.

    Args:
        model: A Hugging Face model with experts, in FP8 or not, or its DeepSpeed engine.

    Raises:
        UserError: The model has no experts, or a layer chooses them without torch.topk.
    """
    choices = [_TopK(name, *layer) for name, layer in _layers(model).items()]
    routes: Routes = {}
    with _routed(choices):
        yield routes
    routes.update({choice.name: torch.cat(choice.recorded) for choice in choices if choice.recorded})


@contextlib.contextmanager
def replay(model: nn.Module, routes: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Iterator[None]:
    """Send the tokens of a model's forwards to given experts, weighted by the router's current scores.

    Every forward takes all rows of `routes`: one context per micro-batch, backward included, because gradient
    checkpointing routes again. Micro-steps in the context run without CUDA graphs. transformers' auxiliary loss stays
    that of the router's own choice.

    Args:
        model: As for `record`.
        routes: Experts of each token, [tokens, top_k] integers on any device: by layer as of `record`, or in the order
            of the layers.

    Raises:
        UserError: The routes do not fit the model or its batch, a layer chooses experts without torch.topk, no forward
            ran in the context, or activations are recomputed after it.
    """
    layers, root = _layers(model), getattr(model, "module", model)
    given = _checked(routes, {name: experts for name, (_, experts) in layers.items()})
    choices = [_TopK(name, *layer, given[name]) for name, layer in layers.items()]
    ended = False

    def check_inside(gradient: torch.Tensor) -> None:
        if ended:
            raise UserError(
                "gradient checkpointing recomputes layers with experts outside the context that replays their routing",
                remedy="call backward inside the context",
            )

    def watch(module: nn.Module, args: tuple, output: Any) -> None:
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(check_inside)

    hooks = []
    if any(vars(part).get("gradient_checkpointing") for part in model.modules()):
        # A layer recomputed after the context would choose its own experts, unnoticed. Outputs in a reentrant
        # checkpoint take no hooks: those of the modules around it do.
        parts = [name.split(".") for name in layers]
        around = {".".join(each[:end]) for each in parts for end in range(len(each) - 1)}
        hooks = [root.get_submodule(name).register_forward_hook(watch) for name in around]
    try:
        with _routed(choices):
            yield
    finally:
        ended = True
        for hook in hooks:
            hook.remove()
    unused = next((choice.name for choice in choices if not choice.calls), None)
    if unused is not None:
        raise UserError(
            f"no forward of {unused} ran while its routing was replayed", remedy="call the model inside the context"
        )


def is_routed(module: nn.Module) -> bool:
    """Return whether the routing of this module is being recorded or replayed."""
    return hasattr(vars(module).get("forward"), "records_or_replays")


class _TopK(TorchFunctionMode):
    """Records or replaces the torch.topk by which a layer chooses experts."""

    def __init__(self, name: str, around: nn.Module, experts: int, replayed: torch.Tensor | None = None):
        super().__init__()
        self.name, self.around, self.calls = name, around, 0
        self.recorded: list[torch.Tensor] = []
        self._experts, self._replayed = experts, replayed

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chooses = func in (torch.topk, torch.Tensor.topk) and self._chooses_experts(*args, **kwargs)
        self.calls += chooses
        if chooses and self._replayed is not None:
            return self._replay(*args, **kwargs)
        result = func(*args, **kwargs)
        if chooses and not in_backward():  # no recomputation
            self.recorded.append(result.indices.detach().clone())
        return result

    def _chooses_experts(self, input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> bool:
        # groups of experts are chosen from scores of another shape
        return input.dim() == 2 and input.shape[1] == self._experts and dim in (-1, 1)

    def _replay(self, input: torch.Tensor, k: int, *_: Any, **__: Any) -> Any:
        if self._replayed.shape != (input.shape[0], k):
            raise UserError(
                f"routes of {self.name} are {_size(self._replayed)}, and its router chooses {k} experts for each of "
                f"{input.shape[0]} tokens",
                remedy="replay what was recorded from this batch, in one context for each micro-batch",
            )
        self._replayed = self._replayed.to(input.device)
        return torch.return_types.topk((input.gather(1, self._replayed), self._replayed))

    def routed_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*args: Any, **kwargs: Any) -> Any:
            before = self.calls
            with self:
                output = forward(*args, **kwargs)
            if self.calls == before:
                raise UserError(
                    f"the layer around {self.name} chooses experts without torch.topk",
                    remedy="record or replay its routing in the model's own code",
                )
            return output

        routed.records_or_replays = True
        return routed


@contextlib.contextmanager
def _routed(choices: Sequence[_TopK]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for choice in choices:
            around = choice.around
            if is_routed(around):
                raise UserError(
                    "routing is being recorded or replayed already", remedy="end that context before the next"
                )
            # afterwards the forward is that of the instance again, if it had one, or of the class
            if "forward" in vars(around):
                stack.callback(setattr, around, "forward", around.forward)
            else:
                stack.callback(delattr, around, "forward")
            around.forward = choice.routed_forward(around.forward)
        yield


def _layers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return (module around the experts, which routes, number of experts) by layer."""
    module = getattr(model, "module", model)  # an engine's
    found = mixtures(module)
    if not found:
        raise UserError(
            f"{type(model).__name__} has no experts of transformers' ExpertsInterface",
            remedy="record and replay the routing of models such as Mixtral, Qwen3-MoE, OLMoE or DeepSeek-V3",
        )
    # outside of PEFT's wrappers of the experts
    routers = {name: name.replace(".base_layer", "").rpartition(".")[0] for name in found}
    return {name: (module.get_submodule(routers[name]), own.num_experts) for name, own in found.items()}


def _checked(routes: Mapping[str, torch.Tensor] | Sequence[torch.Tensor], experts: Mapping[str, int]) -> Routes:
    """Return routes by layer in int64. Raises UserError if they do not fit the model."""
    remedy = "give routes that were recorded from this model, or a list of them in its layers' order"
    if not isinstance(routes, Mapping):
        if len(routes) != len(experts):
            problem = f"there are routes of {len(routes)} layers, and the model has {len(experts)} with experts"
            raise UserError(problem, remedy=remedy)
        routes = dict(zip(experts, routes, strict=True))
    if routes.keys() != experts.keys():
        name = min(routes.keys() ^ experts.keys())
        problem = f"the routes of {name} are missing" if name in experts else f"the model has no experts {name}"
        raise UserError(problem, remedy=remedy)
    checked, mistakes = {}, []
    for name, given in routes.items():
        if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.is_floating_point():
            raise UserError(f"routes of {name} are not an integer tensor [tokens, top_k]", remedy=remedy)
        chosen = checked[name] = given.long()
        ordered = chosen.sort(1).values
        outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= experts[name])
        mistakes.append((outside | (ordered[:, 1:] == ordered[:, :-1]).any(1)).any())
    found = torch.stack([mistake.to(mistakes[0].device) for mistake in mistakes])  # one synchronization for all layers
    for name, wrong in zip(checked, found.tolist(), strict=True):
        if wrong:
            raise UserError(
                f"routes of {name} give a token one expert twice, or one outside 0 to {experts[name] - 1}",
                remedy="give every token, padding too, top_k different experts",
            )
    return checked


def _size(routes: torch.Tensor) -> str:
    return " x ".join(map(str, routes.shape))


LOSS = "load_balancing_loss_func"  # of the modules of transformers' mixtures
_MARK = "_ds_fp8_counts_without_sync"


def count_without_sync(model: nn.Module) -> None:
    """Replace torch.bincount in the load balancing losses of a model's classes. No number changes.

    torch.bincount synchronizes to learn the length of its result, once a layer, and cannot run in a CUDA graph; the
    length here is the number of experts. The loss is a function of the class's Python module: all its models change.
    """
    for name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        function = getattr(sys.modules.get(name), LOSS, None)
        if callable(function) and not hasattr(function, _MARK):
            setattr(sys.modules[name], LOSS, _counting(function))


def counts(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Return torch.bincount of integers [N] below `length`, int64 [length], without a synchronization."""
    zeros = torch.zeros(length, dtype=torch.int64, device=indices.device)
    return zeros.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))


class _Counts(TorchFunctionMode):
    """Replaces torch.bincount with a given length by `counts`."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.bincount and len(args) == 1 and set(kwargs) == {"minlength"}:
            return counts(args[0], kwargs["minlength"])
        return function(*args, **kwargs)


def _counting(function: Callable) -> Callable:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _Counts():
            return function(*args, **kwargs)

    setattr(counted, _MARK, True)
    return counted
