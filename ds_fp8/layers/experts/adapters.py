"""PEFT's LoRA on the weights of experts in FP8: y += s (x Aᵀ) Bᵀ of each expert.

PEFT puts a ParamWrapper around the module of experts for each of its weights [E, N, K], and lets forward read
W + s B A, a copy of all experts. FP8ParamWrapper hands A and B to the experts instead, and leaves the rest (active
adapters, merging, saving) to PEFT. For FP8 products the rows lie as in layout.py. The side of a weight with the hidden
size is multiplied per token, for all experts together, so that rows of that size are never written:

    gate_up   U [T, E r] = x [T, K] · A [E r, K]ᵀ    u [R, r]: U of each row's expert         y_e [.., N] += u_e · B_eᵀ
    down      u_e [.., r] = p_e [.., K] · A_eᵀ       U [T, E r]: u at its expert's columns    y [T, N] += U · B [E r, N]

Experts that are dequantized to BF16 read a temporary W + s B A.
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

# Attribute of a module of experts during a call: (wrapper, names of active adapters) by the name of the weight
ACTIVE = "fp8_active_adapters"
RANK_MULTIPLE = 8  # ranks are padded with zeros: grouped products read 16 bytes at a time


def wraps_parameter(module: nn.Module | None) -> bool:
    """Return whether a module is PEFT's LoRA on a parameter (ParamWrapper)."""
    return type(module).__module__ == "peft.tuners.lora.layer" and type(module).__qualname__ == "ParamWrapper"


def wrappers_of(name: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return PEFT's modules around the module `name`, the innermost first."""
    found = []
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        found.append(modules[name])
    return found


class LowRank(NamedTuple):
    """The active adapters of a weight [E, N, K] as one: W_e + b_e · a_e."""

    a: torch.Tensor  # [E, r, K]
    b: torch.Tensor  # [E, N, r], times the scales

    @property
    def a_of_all(self) -> torch.Tensor:
        return self.a.flatten(0, 1)

    @property
    def b_of_all(self) -> torch.Tensor:
        return self.b.transpose(1, 2).flatten(0, 1)

    def add_to_rows(self, y: torch.Tensor, x: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        """Add LoRA of the tokens x [T, K] to rows y [R, N] in place; return u [R, r]."""
        u = _rows_of(x @ self.a_of_all.t(), layout)
        y += _by_expert(u, self.b.transpose(1, 2), layout)
        return u

    def rows_backward(
        self, dy: torch.Tensor, dx: torch.Tensor, x: torch.Tensor, u: torch.Tensor, layout: ExpertLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add LoRA's part to dx [T, K] in place, from dy [R, N]; return da and db. x, u: of `add_to_rows`."""
        du = _tokens_of(_by_expert(dy, self.b, layout), layout)
        dx.addmm_(du, self.a_of_all)
        return (du.t() @ x).view_as(self.a), _over_rows(dy, u, layout)

    def add_to_tokens(self, y: torch.Tensor, p: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        """Add LoRA of the rows p [R, K] to tokens y [T, N] in place; return u [R, r]."""
        u = _by_expert(p, self.a.transpose(1, 2), layout)
        y.addmm_(_tokens_of(u, layout), self.b_of_all)
        return u

    def tokens_backward(
        self, dy: torch.Tensor, dp: torch.Tensor, u: torch.Tensor, layout: ExpertLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add LoRA's part to dp [R, K] in place, from dy [T, N]; return du [R, r], for `a_backward`, and db."""
        db = (_tokens_of(u, layout).t() @ dy).view(len(self.b), -1, dy.shape[1]).transpose(1, 2)
        du = _rows_of(dy @ self.b_of_all.t(), layout)
        dp += _by_expert(du, self.a, layout)
        return du, db

    @staticmethod
    def a_backward(du: torch.Tensor, p: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return _over_rows(du, p, layout)


def per_expert(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [E, r, K] and B [E, N, r] from PEFT's [E r, K] and [N, r E], whose columns alternate between experts."""
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def low_rank(weight: nn.Parameter, wrapper: nn.Module, names: list[str]) -> LowRank:
    """Return the adapters of a weight as one, in its dtype, differentiable."""
    parts = [(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight) for name in names]
    a, b = zip(*(per_expert(*part, wrapper.num_experts) for part in parts), strict=True)
    b = [part * wrapper.scaling[name] for part, name in zip(b, names, strict=True)]
    a, b = (torch.cat(parts, dim) if len(parts) > 1 else parts[0] for parts, dim in ((a, 1), (b, 2)))
    missing = -a.shape[1] % RANK_MULTIPLE
    if missing:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return LowRank(a.to(weight.dtype).contiguous(), b.to(weight.dtype).contiguous())


class FP8ParamWrapper(Swapped):
    """PEFT's LoRA on a weight of FP8Experts."""

    prefix = ""  # PEFT finds its wrappers by the name of their class

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
    """Return the adapters that are active in the current call, by the name of the weight."""
    active = vars(experts).get(ACTIVE, {})
    return {name: low_rank(experts._parameters[name], *adapters) for name, adapters in active.items()}


def _by_expert(rows: torch.Tensor, matrices: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    return F.grouped_mm(rows, matrices, offs=layout.ends)


def _over_rows(x: torch.Tensor, y: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    return F.grouped_mm(x.t(), y, offs=layout.ends).masked_fill_((layout.counts == 0)[:, None, None], 0)


def _rows_of(u: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return [R, r], the row's expert of its token's u [T, E r]; zeros in rows without a token."""
    token, expert = layout.source.clamp_min(0).long() // layout.choices, layout.expert_of_row
    return u.view(len(u), len(layout.counts), -1)[token, expert].masked_fill_(layout.source[:, None] < 0, 0)


def _tokens_of(u: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return [T, E r], the rows [R, r] at the columns of their experts, zeros elsewhere."""
    row = layout.place.clamp_min(0)
    values = u[row].masked_fill_(layout.place[..., None] < 0, 0)
    expert = layout.expert_of_row[row][..., None].expand_as(values)
    result = u.new_zeros(len(row), len(layout.counts), u.shape[1])
    return result.scatter_add_(1, expert, values).flatten(1)
