"""Plain LoRA of PEFT added to FP8 linears: y += s u Bᵀ with u = n Aᵀ, in place, by BF16 GEMMs.

    forward   u  [T, R]  = n Aᵀ               one GEMM for all adapters of the same n, R the sum of their ranks
              y_i       += s_i u_i B_iᵀ       y_i: columns of y of the adapter's linear
    backward  du_i       = s_i dy_i B_i
              dB_i       = s_i dy_iᵀ u_i
              dA         = duᵀ n
              dn        += du A

One GEMM per B: a block-diagonal B would move as many bytes of y and multiply zeros. n is x or RMSNorm(x) = x · rstd ·
w, which is not saved: u = rstd ∘ (x (A ∘ w)ᵀ) and dA = ((du ∘ rstd)ᵀ x) ∘ w, both from x in BF16. dA from quantized n
has an error of 2.6% of its norm, compared with 0.3% (tests/layers/test_adapters.py).

With dropout every adapter draws its own mask, as PEFT does: n_i = n ∘ mask_i / (1 - p).

T tokens, K input and N output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

# Saved for backward: u [T, R] and each adapter's mask or None; empty without adapters
SavedAdapters = tuple[torch.Tensor | None, ...]


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA of an nn.Linear, in any variant."""
    # By name: PEFT need not be installed, and takes seconds to import.
    return type(module).__module__ == "peft.tuners.lora.layer" and type(module).__qualname__ == "Linear"


def why_not_plain(module: nn.Module) -> str | None:
    """Return why a module with a base_layer is not plain LoRA, or None."""
    if not is_lora(module):
        return type(module).__name__
    variants = getattr(module, "lora_variant", {}).values()
    found = {
        **{type(variant).__name__: True for variant in variants},
        "LoRA with a bias": any(part.bias is not None for part in module.lora_B.values()),
        "LoRA of a transposed weight": module.fan_in_fan_out,
        "LoRA with a custom dropout": any(
            not isinstance(part, (nn.Dropout, nn.Identity)) for part in module.lora_dropout.values()
        ),
    }
    return next((what for what, applies in found.items() if applies), None)


class Adapter(NamedTuple):
    a: nn.Parameter  # [r, K]
    b: nn.Parameter  # [N_i, r]
    scale: float
    dropout: float
    columns: slice  # of y


class Adapters(tuple[Adapter, ...]):
    """Currently active adapters of linears that are multiplied as one, in the order of their columns of y."""

    def __new__(cls, linears: Sequence[nn.Module]) -> Adapters:
        adapters, first = [], 0
        for linear in linears:
            columns = slice(first, first := first + linear.out_features)
            adapters += (Adapter(*of_linear, columns) for of_linear in _active(linear))
        return super().__new__(cls, adapters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn: inputs of the autograd function, in the order of its gradients."""
        return [parameter for adapter in self for parameter in adapter[:2]]

    @property
    def saved_count(self) -> int:
        """Number of tensors that `project` returns."""
        return 1 + len(self) if self else 0

    def project(
        self, x: torch.Tensor, rstd: torch.Tensor | None = None, norm: torch.Tensor | None = None
    ) -> SavedAdapters:
        """Return (u, *masks) from n = x [T, K] or n = x · rstd · norm."""
        if not self:
            return ()
        masks = [None] * len(self)
        if self._drops:
            parts = []
            for index, adapter in enumerate(self):
                dropped = x
                if adapter.dropout:
                    dropped, masks[index] = torch.ops.aten.native_dropout(x, adapter.dropout, True)
                parts.append(dropped @ self._a(x.dtype, norm, [adapter]).t())
            u = torch.cat(parts, 1)
        else:
            u = x @ self._a(x.dtype, norm).t()
        return (u if rstd is None else u.mul_(rstd[:, None]), *masks)

    def add(self, y: torch.Tensor, saved: SavedAdapters) -> torch.Tensor:
        """Add s u Bᵀ of every adapter to y [T, N] in place, and return y."""
        for adapter, u in self._slices(saved):
            y[:, adapter.columns].addmm_(u, adapter.b.to(u.dtype).t(), alpha=adapter.scale)
        return y

    def output_backward(
        self, dy: torch.Tensor, saved: SavedAdapters
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Return (du [T, R], dB of every adapter) from dy [T, N]."""
        if not self:
            return None, []
        du, gradients = torch.empty_like(saved[0]), []
        for (adapter, u), own in zip(self._slices(saved), du.split(self._ranks, 1), strict=True):
            dy_i, b, s = dy[:, adapter.columns], adapter.b, adapter.scale
            torch.addmm(own, dy_i, b.to(dy.dtype), beta=0, alpha=s, out=own)
            # beta 0: nothing is read of the scalar
            db = torch.addmm(dy.new_empty(()), dy_i.t(), u, beta=0, alpha=s) if b.requires_grad else None
            gradients.append(db if db is None else db.to(b.dtype))
        return du, gradients

    def add_to_input(self, dn: torch.Tensor | None, du: torch.Tensor | None, saved: SavedAdapters) -> None:
        """Add du A to dn [T, K] in place; nothing without dn."""
        if not self or dn is None:
            return
        if not self._drops:
            dn.addmm_(du, self._a(dn.dtype))
            return
        for adapter, own, mask in zip(self, du.split(self._ranks, 1), saved[1:], strict=True):
            a = adapter.a.to(dn.dtype)
            if mask is None:
                dn.addmm_(own, a)
            else:
                dn.add_(torch.ops.aten.native_dropout_backward(own @ a, mask, _factor(adapter.dropout)))

    def a_backward(
        self,
        du: torch.Tensor | None,
        x: torch.Tensor,
        saved: SavedAdapters,
        rstd: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Return dA of every adapter; x, rstd and norm as given to `project`."""
        if not any(adapter.a.requires_grad for adapter in self):
            return [None] * len(self)
        du = du if rstd is None else du * rstd[:, None]
        du = du.to(x.dtype)
        if self._drops:
            drop = torch.ops.aten.native_dropout_backward  # dropout's forward, given the mask
            found = [
                own.t() @ (x if mask is None else drop(x, mask, _factor(adapter.dropout)))
                for adapter, own, mask in zip(self, du.split(self._ranks, 1), saved[1:], strict=True)
            ]
        else:
            found = (du.t() @ x).split(self._ranks)
        found = [da if norm is None else da * norm.to(da.dtype) for da in found]
        return [da.to(a.dtype) if a.requires_grad else None for da, (a, *_) in zip(found, self, strict=True)]

    def backward(
        self,
        dy: torch.Tensor,
        dn: torch.Tensor | None,
        saved: SavedAdapters,
        x: torch.Tensor | None,
        rstd: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Add the adapters' dn in place, if there is a dn; return the gradients of `parameters`."""
        du, db = self.output_backward(dy, saved)
        self.add_to_input(dn, du, saved)
        return self.in_order(self.a_backward(du, x, saved, rstd, norm), db)

    @staticmethod
    def in_order(da: Sequence[torch.Tensor | None], db: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [gradient for both in zip(da, db, strict=True) for gradient in both]

    @property
    def _ranks(self) -> list[int]:
        return [len(adapter.a) for adapter in self]

    @property
    def _drops(self) -> bool:
        return any(adapter.dropout for adapter in self)

    def _slices(self, saved: SavedAdapters) -> Iterator[tuple[Adapter, torch.Tensor]]:
        return zip(self, saved[0].split(self._ranks, 1), strict=True) if self else iter(())

    def _a(
        self, dtype: torch.dtype, norm: torch.Tensor | None = None, some: Sequence[Adapter] | None = None
    ) -> torch.Tensor:
        """Return A [R, K] of `some` adapters (default: all) stacked, columns scaled by the norm's weight."""
        stacked = [adapter.a for adapter in some or self]
        stacked = (torch.cat(stacked) if len(stacked) > 1 else stacked[0]).to(dtype)
        return stacked if norm is None else (stacked * norm).to(dtype)


def _active(linear: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, float, float]]:
    if not is_lora(linear) or linear.disable_adapters:
        return
    for name in linear.active_adapters:
        if name in linear.lora_A:
            dropout = linear.lora_dropout[name]
            share = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
            yield linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name], share


def _factor(share: float) -> float:
    return 1 / (1 - share) if share < 1 else 0.0
