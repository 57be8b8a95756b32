"""Selection of the linear layers that run in FP8, with the reason for each that does not.

A layer runs in FP8 if all of this holds:

    it is not excluded                          by fp8.linear.skip, overrides, or the `filter` of ds_fp8.convert
    calling it computes x · wᵀ + bias           nn.Linear, and subclasses that pass a trial
    its weight is its own                       not tied, not parametrized, floating point
    it is not an adapter                        lora_A, lora_B, and other layers of PEFT
    it is not a router                          rounding errors would send tokens to other experts
    it is not a state-space projection          mixers read its weight without calling it
    neither side is narrow                      quantizing would cost more than the product saves
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ds_fp8.config.formats import BLOCK
from ds_fp8.config.plans import GroupPlan
from ds_fp8.layers.head.loss import FusedHead
from ds_fp8.layers.linear.linear import FP8Linear

Filter = Callable[[str, nn.Linear], bool]  # (dotted name, layer) -> whether it may run in FP8

EXCLUDED = "fp8_excluded"  # attribute set by a filter, for later conversions without it (`initialize`)

OVERRIDDEN = "named by fp8.linear.overrides"  # prefix of the reason

ROUTERS = {"gate", "router", "shared_expert_gate"}
STATE_SPACE = {"x_proj", "dt_proj"}
# children of PEFT's modules that are not adapters
WRAPPED_BY_PEFT = {"base_layer", "base_model", "model", "original_module"}


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern (a dotted name, consecutive parts of it, or a glob) matches a dotted name."""
    without_peft = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return f".{pattern}." in f".{name}." or any(fnmatchcase(known, pattern) for known in {name, without_peft})


def first_matches(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the first matching pattern by name, for the names that have one."""
    patterns = list(patterns)
    found = {name: next((p for p in patterns if matches(name, p)), None) for name in names}
    return {name: pattern for name, pattern in found.items() if pattern is not None}


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of `model` that a conversion decides about, by name: nn.Linear and GPT-2's Conv1D."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def in_expert_list(name: str) -> bool:
    """Return whether a linear belongs to one expert of a ModuleList, such as "mlp.experts.3.up_proj".

    Only ranks with tokens for its expert call it, and in no common order.
    """
    parts = name.split(".")
    return any(own == "experts" and any(map(str.isdigit, child)) for own, child in pairwise(parts))


def unconverted(model: nn.Module, plan: GroupPlan, filter: Filter | None = None) -> dict[str, str]:
    """Return the linear layers of a model, converted or not, that stay in BF16, by name with the reason.

    "lm_head" in `skip` also matches a head of another name. filter is called for layers that neither `skip` nor
    `overrides` keep in BF16.
    """
    layers, parents = linear_layers(model), dict(model.named_modules())
    by_user, narrow = named_by_user(layers, plan, _head(model)), _narrowest(layers)
    users: dict[int, set[str]] = defaultdict(set)
    for name, module in parents.items():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].add(name)
    reasons = {}
    for name, layer in layers.items():
        parent = parents[name.rpartition(".")[0]]
        reason = by_user.get(name)
        if reason is None and filter is not None:
            setattr(layer, EXCLUDED, not filter(name, layer))
        reason = reason or ("excluded by the filter" if is_excluded(layer) else _of_another_kind(layer))
        others = users[id(getattr(layer, "weight", None))] - {name}
        if reason is None and others:
            reason = f"shares its weight with {', '.join(sorted(others))}"
        reason = reason or _special(name, layer, parent, parents)
        if reason is None and min(layer.in_features, layer.out_features) < narrow:
            reason = f"narrower than {narrow} features"
        if reason is not None:
            reasons[name] = reason
    return reasons


def named_by_user(names: Iterable[str], plan: GroupPlan, head: str | None = None) -> dict[str, str]:
    """Return the names that `skip` or `overrides` keep in BF16, with the reason; "lm_head" also matches `head`."""
    overrides, reasons = first_matches(names, plan.overrides), {}
    for name in names:
        skips = (p for p in plan.skip if matches(name, p) or (name == head and p == "lm_head"))
        if (skip := next(skips, None)) is not None:
            reasons[name] = f'named by fp8.linear.skip "{skip}"'
        elif name in overrides and plan.overrides[overrides[name]] is None:
            reasons[name] = f'{OVERRIDDEN} "{overrides[name]}"'
    return reasons


def is_excluded(layer: nn.Module) -> bool:
    return getattr(layer, EXCLUDED, False)


def _of_another_kind(layer: nn.Module) -> str | None:
    kind = type(layer).__name__
    if isinstance(layer, Conv1D):
        return "a Conv1D, whose weight is stored transposed"
    if isinstance(layer, FusedHead):
        return "computes the loss without logits"
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if "forward" in vars(layer):
        return "has a forward set on the instance"
    if "weight" not in layer._parameters:
        return "its weight is computed from others (parametrization, weight norm)"
    if not layer.weight.is_floating_point():
        return f"its weight is stored as {str(layer.weight.dtype).removeprefix('torch.')}"
    if not isinstance(layer, FP8Linear) and not _computes_as_linear(layer):
        return f"is a {kind}, which overrides forward"
    return None


def _special(name: str, layer: nn.Linear, parent: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    own_name = name.rpartition(".")[2]
    if any(part.startswith("lora_") for part in name.split(".")) or _added_by_peft(name, modules):
        return "an adapter"
    # a router "gate" narrows, a gate projection of that name widens
    if ROUTERS & set(name.split(".")[-2:]) and layer.out_features < layer.in_features:
        return "a router or gate"
    if own_name in STATE_SPACE and hasattr(parent, "A_log"):
        return "a state-space projection, whose weight its mixer reads without calling it"
    return None


def _added_by_peft(name: str, modules: dict[str, nn.Module]) -> bool:
    owner = ""
    for child in name.split("."):  # each step from the root to the module
        if type(modules[owner]).__module__.startswith("peft.") and child not in WRAPPED_BY_PEFT:
            return True
        owner = f"{owner}.{child}".lstrip(".")
    return False


def _head(model: nn.Module) -> str | None:
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    head = None if inner is None else inner.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _narrowest(layers: dict[str, nn.Module]) -> int:
    """Return the smallest number of features of an FP8 layer: 128, or a quarter of a test model's width below 512."""
    # with less than a block quantizing takes more time than the product saves
    sides = [min(layer.in_features, layer.out_features) for layer in layers.values() if isinstance(layer, nn.Linear)]
    return min(BLOCK, max(max(sides, default=0) // 4, 1))


@torch.no_grad()
def _computes_as_linear(layer: nn.Linear) -> bool:
    """Compare the forward of a subclass with nn.Linear's, on small and large tokens, with a small FP32 weight."""
    if type(layer).forward is nn.Linear.forward:
        return True
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        small, x = nn.Linear(6, 5, bias=layer.bias is not None), torch.randn(2, 3, 6)
    trial = copy.copy(layer)  # with the settings of the layer
    trial.__dict__ = {**vars(layer), "_parameters": dict(small._parameters), "in_features": 6, "out_features": 5}
    for tokens in (x, 1e3 * x):  # large, where subclasses may clamp
        expected = F.linear(tokens, small.weight, small.bias)
        try:
            # not __call__: hooks belong to the layer itself
            error = type(layer).forward(trial, tokens) - expected
            if error.shape != expected.shape or not error.norm() <= 1e-5 * expected.norm():
                return False
        except Exception:  # a foreign forward fails in its own way
            return False
    return True
