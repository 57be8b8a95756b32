"""Account for every parameter of a model: in FP8, or in BF16 and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ds_fp8.layers.experts.selection import expert_weights
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.selection import ROUTERS
from ds_fp8.zero import seams

EXPERTS = "experts"
"""Beginning of the reasons of experts that stay in BF16."""
NOT_GATHERED = "which only ZeRO-3 gathers in FP8, and not those below its persistence threshold"
LITTLE = 1 / 3
"""Share of the parameters in FP8 below which the start report warns."""


@dataclass
class Kept:
    """Parameters that stay in BF16 for one reason."""

    reason: str
    parameters: int = 0
    names: list[str] = field(default_factory=list)
    """Names of the tensors."""


@dataclass(frozen=True)
class Coverage:
    """Counts of a model's parameters, in FP8 and kept in BF16; shared ones are counted once."""

    total: int
    in_fp8: int
    """Weights of FP8 linears."""
    gathered: int
    """Experts gathered in FP8, and decoded to BF16 where they are multiplied."""
    kept: list[Kept]
    """Experts first, then the most parameters."""

    def as_json(self) -> dict[str, Any]:
        """Return the entries of the start report."""
        return {
            "parameters": self.total,
            "fp8_parameters": self.in_fp8,
            "fp8_gathered_experts": self.gathered,
            "kept_in_bf16": [asdict(kept) for kept in self.kept],
        }

    def warning(self) -> str | None:
        """Return a warning if most of the model is not in FP8, or None."""
        in_fp8 = self.in_fp8 + self.gathered
        if in_fp8 >= LITTLE * self.total:
            return None
        return f"only {in_fp8 / self.total:.0%} of the parameters are in FP8: expect little gain"


def coverage(
    model: nn.Module, left: Mapping[str, str], gathers: Callable[[nn.Parameter], bool] = lambda parameter: False
) -> Coverage:
    """Count the parameters of a converted model.

    Args:
        model: the module of an engine, partitioned or not.
        left: name of each linear layer and of each weight of experts that was not converted -> the reason.
        gathers: whether a parameter is gathered in FP8.
    """
    kept: dict[str, Kept] = {}
    seen: set[int] = set()
    total = in_fp8 = gathered = 0
    for owner_name, owner in model.named_modules():
        for own_name, parameter in owner.named_parameters(recurse=False):
            # Tied weights appear under every owner's name.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            shape = seams.full_shape(parameter)
            total += math.prod(shape)
            if isinstance(owner, FP8Linear) and own_name == "weight":
                in_fp8 += math.prod(shape)
                continue
            name = f"{owner_name}.{own_name}".lstrip(".")
            if own_name in expert_weights(owner_name, owner):
                if gathers(parameter):
                    gathered += math.prod(shape)
                    continue
                reason = f"{EXPERTS}, {left.get(name, NOT_GATHERED)}"
            else:
                reason = _reason(owner_name, owner, shape, left)
            part = kept.setdefault(reason, Kept(reason))
            part.parameters += math.prod(shape)
            part.names.append(name)
    # Experts first, whatever their size: they are the reason a report of a mixture of experts is read for.
    order = sorted(kept.values(), key=lambda part: (not part.reason.startswith(EXPERTS), -part.parameters))
    return Coverage(total, in_fp8, gathered, order)


def _reason(name: str, owner: nn.Module, shape: torch.Size, left: Mapping[str, str]) -> str:
    if len(shape) < 2:
        return "norms, biases and other vectors"
    if name in left:
        return left[name]
    if isinstance(owner, nn.Embedding):
        return "embeddings"
    kind = type(owner).__name__
    if "Router" in kind or ROUTERS & set(name.split(".")[-2:]):
        return "a router or gate"
    return "parameters of other layers"
