"""PEFT's LoRA on the weights of experts, beside weights that are gathered in FP8: y += s (x Aᵀ) Bᵀ of each expert.

PEFT puts a ParamWrapper around the module of experts for each of its weights [E, N, K], and lets forward read
W + s B A instead, a copy of all experts. Here the experts read A and B themselves (FP8ParamWrapper); everything else of
PEFT's wrapper stays: which adapters are active, merging, saving, disabling. Where experts are multiplied in FP8, rows
lie as in layout.py, and the side of a weight that has the hidden size is multiplied token by token, for all experts
together, so that rows of that size are never written:

    gate_up   U [T, E r] = x [T, K] · A [E r, K]ᵀ    u [R, r] = of each row's expert     y_e [.., N] += u_e · B_eᵀ
    down      u_e [.., r] = p_e [.., K] · A_eᵀ       U [T, E r] = each row's at its expert    y [T, N] += U · B [E r, N]

Backward takes the same ways back. Where experts are decoded, W + s B A is made as PEFT makes it, for the moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ds_fp8.layers.experts.layout import ExpertLayout
from ds_fp8.layers.linear.linear import Swapped, runs_eagerly

ACTIVE = "fp8_active_adapters"
"""Attribute of a module of experts: by the name of a weight its wrapper and the names of active adapters, in a call."""
RANKS = 8
"""Ranks are filled with zeros to multiples of this: grouped products read 16 bytes at a time."""


def wraps_parameter(module: nn.Module | None) -> bool:
    """Return whether a module is PEFT's LoRA around a parameter of another one."""
    return type(module).__module__ == "peft.tuners.lora.layer" and type(module).__qualname__ == "ParamWrapper"


def wrappers_of(name: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return PEFT's modules around the one of this name, the innermost first."""
    found = []
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        found.append(modules[name])
    return found


class LowRank(NamedTuple):
    """All active adapters of a weight [E, N, K] as one: W_e + b_e · a_e."""

    a: torch.Tensor
    """[E, r, K]"""
    b: torch.Tensor
    """[E, N, r], times the adapters' scales."""

    @property
    def a_of_all(self) -> torch.Tensor:
        return self.a.flatten(0, 1)

    @property
    def b_of_all(self) -> torch.Tensor:
        return self.b.transpose(1, 2).flatten(0, 1)

    def add_to_rows(self, y: torch.Tensor, x: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        """Add to rows y [R, N] in place the part of the tokens x [T, K]; return u [R, r]."""
        u = _rows_of(x @ self.a_of_all.t(), layout)
        y += _by_expert(u, self.b.transpose(1, 2), layout)
        return u

    def rows_backward(
        self, dy: torch.Tensor, dx: torch.Tensor, x: torch.Tensor, u: torch.Tensor, layout: ExpertLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to dx [T, K] in place from dy [R, N]; return da and db. x, u: as of `add_to_rows`."""
        du = _tokens_of(_by_expert(dy, self.b, layout), layout)
        dx.addmm_(du, self.a_of_all)
        return (du.t() @ x).view_as(self.a), _over_rows(dy, u, layout)

    def add_to_tokens(self, y: torch.Tensor, p: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        """Add to tokens y [T, N] in place the part of the rows p [R, K]; return u [R, r]."""
        u = _by_expert(p, self.a.transpose(1, 2), layout)
        y.addmm_(_tokens_of(u, layout), self.b_of_all)
        return u

    def tokens_backward(
        self, dy: torch.Tensor, dp: torch.Tensor, u: torch.Tensor, layout: ExpertLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to dp [R, K] in place from dy [T, N]; return du [R, r], for `a_backward`, and db."""
        db = (_tokens_of(u, layout).t() @ dy).view(len(self.b), -1, dy.shape[1]).transpose(1, 2)
        du = _rows_of(dy @ self.b_of_all.t(), layout)
        dp += _by_expert(du, self.a, layout)
        return du, db

    @staticmethod
    def a_backward(du: torch.Tensor, p: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return _over_rows(du, p, layout)


def of_experts(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [E, r, K] and B [E, N, r] from PEFT's [E r, K] and [N, r E], an expert's columns E apart."""
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def low_rank(weight: nn.Parameter, wrapper: nn.Module, names: list[str]) -> LowRank:
    """Return adapters of a weight as one, in its dtype; gradients reach their parameters."""
    parts = [(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight) for name in names]
    a, b = zip(*(of_experts(*part, wrapper.num_experts) for part in parts), strict=True)
    b = [part * wrapper.scaling[name] for part, name in zip(b, names, strict=True)]
    a, b = (torch.cat(parts, dim) if len(parts) > 1 else parts[0] for parts, dim in ((a, 1), (b, 2)))
    missing = -a.shape[1] % RANKS
    if missing:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return LowRank(a.to(weight.dtype).contiguous(), b.to(weight.dtype).contiguous())


class FP8ParamWrapper(Swapped):
    """PEFT's LoRA on a weight of FP8Experts."""

    prefix = ""
    """PEFT knows its wrappers by the name of their class."""

    @runs_eagerly
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, *args, **kwargs)

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts = self.get_base_layer()
        if self.parameter_name not in experts.expert_recipes:
            with super()._activate_lora(active_adapters):
                yield
            return
        names = [name for name in active_adapters if name in self.lora_A]
        if names:
            vars(experts).setdefault(ACTIVE, {})[self.parameter_name] = self, names
        try:
            yield
        finally:
            vars(experts).get(ACTIVE, {}).pop(self.parameter_name, None)


def active_low_ranks(experts: nn.Module) -> dict[str, LowRank]:
    """Return the adapters of a module's weights that are active in the present call, by the weight's name."""
    active = vars(experts).get(ACTIVE, {})
    return {name: low_rank(experts._parameters[name], *adapters) for name, adapters in active.items()}


def _by_expert(rows: torch.Tensor, matrices: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Multiply the rows [R, K] of each expert by its matrix of [E, K, N]: [R, N]."""
    return F.grouped_mm(rows, matrices, offs=layout.ends)


def _over_rows(x: torch.Tensor, y: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Multiply x [R, N] and y [R, K] over the rows of each expert: [E, N, K], zeros without rows."""
    return F.grouped_mm(x.t(), y, offs=layout.ends).masked_fill_((layout.counts == 0)[:, None, None], 0)


def _rows_of(u: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return what each row's token has for the row's expert, [R, r] of [T, E r]; zeros where a row has no token."""
    token, expert = layout.source.clamp_min(0).long() // layout.choices, layout.expert_of_row
    return u.view(len(u), len(layout.counts), -1)[token, expert].masked_fill_(layout.source[:, None] < 0, 0)


def _tokens_of(u: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return [T, E r] of rows [R, r]: what each has at its expert's place, zeros elsewhere."""
    row = layout.place.clamp_min(0)
    values = u[row].masked_fill_(layout.place[..., None] < 0, 0)
    at = layout.expert_of_row[row][..., None].expand_as(values)
    result = u.new_zeros(len(row), len(layout.counts), u.shape[1])
    return result.scatter_add_(1, at, values).flatten(1)
