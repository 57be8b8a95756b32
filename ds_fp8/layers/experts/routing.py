"""Routing of mixtures of experts, recorded and replayed, and its balancing loss counted without a wait of the host.

    with record(model) as routes:            # layer -> experts [tokens, top_k]
        model(**batch)
    with replay(trained, routes):
        trained(**batch).loss.backward()

A layer of transformers finds the experts of its tokens by one torch.topk over scores [tokens, experts]. That call is
observed (record) or answered with the given experts and the router's scores for them (replay). The layer's own code
does the rest: its normalisation, groups and scaling make weights of the scores, and gradients flow to its router.
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

Routes = dict[str, torch.Tensor]
"""Experts of each token [tokens, top_k] by layer, the name of its module of experts."""


def mixtures(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name that are of transformers' interface of experts."""
    needed = *INTERFACE, "num_experts"
    return {name: part for name, part in model.named_modules() if all(hasattr(part, attribute) for attribute in needed)}


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Routes]:
    """Record which experts the tokens of a model's forwards go to.

    The mapping is filled when the context ends: by layer, int64 [tokens, top_k] on the model's device. Tokens of
    several forwards follow each other in their order; what gradient checkpointing computes again is not among them.

    Args:
        model: A Hugging Face model with experts, in FP8 or not, or its DeepSpeed engine.

    Raises:
        UserError: The model has no experts, or a layer finds them without torch.topk.
    """
    layers = _layers(model)
    calls: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    routes: Routes = {}

    def observe(chosen: torch.Tensor, name: str) -> None:
        if not in_backward():
            calls[name].append(chosen.detach().clone())

    with _routed(
        {name: _Choices(name, *layer, functools.partial(observe, name=name)) for name, layer in layers.items()}
    ):
        yield routes
    routes.update({name: torch.cat(chosen) for name, chosen in calls.items() if chosen})


@contextlib.contextmanager
def replay(model: nn.Module, routes: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the tokens of a model's forwards go to given experts, with weights from the router's own current scores.

    Every forward in the context takes all rows of `routes`: one micro-batch a context, its backward pass inside, for
    gradient checkpointing routes again. In it micro-steps run without CUDA graphs. The auxiliary loss of transformers
    stays that of the router's own choice.

    Args:
        model: As for `record`.
        routes: Experts of each token, [tokens, top_k] integers on any device: by layer as of `record`, or in the order
            of the layers.

    Raises:
        UserError: The routes do not fit the model or its batch, a layer finds experts without torch.topk, no forward
            ran in the context, or activations are recomputed after it.
    """
    layers, root = _layers(model), getattr(model, "module", model)
    given = _checked(routes, {name: experts for name, (_, experts) in layers.items()})
    choices = {name: _Choices(name, *layer, replayed=given[name]) for name, layer in layers.items()}
    ended = False

    def check_inside(gradient: torch.Tensor) -> None:
        if ended:
            raise UserError(
                "gradient checkpointing computes layers with experts again, outside the context that replayed their "
                "routing",
                remedy="call backward inside the context",
            )

    def watch(module: nn.Module, args: tuple, output: Any) -> None:
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(check_inside)

    hooks = []
    if any(vars(part).get("gradient_checkpointing") for part in model.modules()):
        # A layer that is computed again after the context would choose by itself, unnoticed. One in a reentrant
        # checkpoint has no output that takes hooks: those of the modules around it do.
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
    unused = next((name for name, choice in choices.items() if not choice.calls), None)
    if unused is not None:
        raise UserError(
            f"routing was replayed, and no forward of {unused} ran", remedy="call the model inside the context"
        )


def changed_tokens(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return by layer the share, 0 to 1, of the tokens whose sets of experts differ between two models' routes.

    Raises:
        UserError: The two are not of the same layers and tokens.
    """
    if first.keys() != second.keys():
        lacking = min(first.keys() ^ second.keys())
        raise UserError(f"only one of the two routings has {lacking}", remedy="record both from the same model")
    shares = {}
    for name, ours in first.items():
        theirs = second[name].to(ours.device)
        if ours.shape != theirs.shape:
            raise UserError(
                f"routes of {name} are {_size(ours)} and {_size(theirs)}", remedy="record both from the same tokens"
            )
        differ = (ours.sort(1).values != theirs.sort(1).values).any(1)
        shares[name] = differ.double().mean().item()
    return shares


def is_routed(module: nn.Module) -> bool:
    """Return whether the routing of this very module is being recorded or replayed."""
    return hasattr(vars(module).get("forward"), "records_or_replays")


class _Choices(TorchFunctionMode):
    """Observes or answers the torch.topk by which one layer chooses experts."""

    def __init__(
        self,
        name: str,
        around: nn.Module,
        experts: int,
        observe: Callable[[torch.Tensor], None] | None = None,
        replayed: torch.Tensor | None = None,
    ):
        super().__init__()
        self.name, self.around, self.calls = name, around, 0
        self._experts, self._observe, self._replayed = experts, observe, replayed

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or not self._chooses_experts(*args, **kwargs):
            return func(*args, **kwargs)
        self.calls += 1
        if self._replayed is None:
            result = func(*args, **kwargs)
            self._observe(result.indices)
            return result
        return self._answer(*args, **kwargs)

    def _chooses_experts(self, input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> bool:
        # Groups of experts are chosen from scores of another shape.
        return input.dim() == 2 and input.shape[1] == self._experts and dim in (-1, 1)

    def _answer(self, input: torch.Tensor, k: int, *_: Any, **__: Any) -> Any:
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
def _routed(choices: Mapping[str, _Choices]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for choice in choices.values():
            around = choice.around
            if is_routed(around):
                raise UserError(
                    "routing is being recorded or replayed already", remedy="end that context before the next"
                )
            # Back to the forward of the instance, if it had one, or of the class.
            if "forward" in vars(around):
                stack.callback(setattr, around, "forward", around.forward)
            else:
                stack.callback(delattr, around, "forward")
            around.forward = choice.routed_forward(around.forward)
        yield


def _layers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return by layer the module around its experts, which routes, and their number."""
    module = getattr(model, "module", model)  # of an engine: names are those of the model in it
    found = mixtures(module)
    if not found:
        raise UserError(
            f"{type(model).__name__} has no experts of transformers' interface of experts",
            remedy="record and replay the routing of models such as Mixtral, Qwen3-MoE, OLMoE or DeepSeek-V3",
        )
    # Around PEFT's modules, if some are around the experts.
    routers = {name: name.replace(".base_layer", "").rpartition(".")[0] for name in found}
    return {name: (module.get_submodule(routers[name]), own.num_experts) for name, own in found.items()}


def _checked(routes: Mapping[str, torch.Tensor] | Sequence[torch.Tensor], experts: Mapping[str, int]) -> Routes:
    """Return routes by layer in int64, or raise."""
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
            raise UserError(f"routes of {name} are no tensor of integers, [tokens, top_k]", remedy=remedy)
        chosen = checked[name] = given.long()
        ordered = chosen.sort(1).values
        outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= experts[name])
        mistakes.append((outside | (ordered[:, 1:] == ordered[:, :-1]).any(1)).any())
    found = torch.stack([mistake.to(mistakes[0].device) for mistake in mistakes])  # read once for all layers
    for name, wrong in zip(checked, found.tolist(), strict=True):
        if wrong:
            raise UserError(
                f"routes of {name} give a token one expert twice, or one that is not among 0 to {experts[name] - 1}",
                remedy="give every token, padding too, top_k different experts",
            )
    return checked


def _size(routes: torch.Tensor) -> str:
    return " x ".join(map(str, routes.shape))


NAME = "load_balancing_loss_func"
"""Function of the files of transformers' mixtures."""
_MARK = "_ds_fp8_counts_without_waiting"


def count_without_waiting(model: nn.Module) -> None:
    """Let the load balancing losses of a model's classes count without a wait. No number changes.

    They count the tokens of each expert by torch.bincount, which waits for the GPU to learn how long its result is:
    once a layer, and never inside a CUDA graph. The length is known: it is the number of experts. A loss is a function
    of the file that holds the class, so that it counts so for all models of the class.
    """
    for name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        function = getattr(sys.modules.get(name), NAME, None)
        if callable(function) and not hasattr(function, _MARK):
            setattr(sys.modules[name], NAME, _counting(function))


def counts(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Return how often each of 0 to length - 1 occurs in integers [N], int64 [length], as torch.bincount does."""
    zeros = torch.zeros(length, dtype=torch.int64, device=indices.device)
    return zeros.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))


class _Counts(TorchFunctionMode):
    """Answers torch.bincount of a length that the caller gives."""

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
