"""One scale per gradient that all ranks agree on, adapted over time (FP8-LM): "scale": "tensor" of "grad_reduce"."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist

from ds_fp8.config.formats import FORMATS

RECENT = 1024  # buckets whose indices are remembered: far fewer where all steps have the same, endless where they vary
SATURATION_LIMIT = 1e-5
GROWTH = 2.0 ** (1 / 1000)
# Lower bound of amax, by which a division does not overflow; smaller gradients share its scale.
_SMALLEST_AMAX = 2.0**-100


class AutomaticScale:
    """One scale per gradient that all ranks agree on, adapted over time (FP8-LM, arXiv 2310.18313, section 2.1).

        amax   = max over all ranks of |g|
        scale  = 1 / (mu * 2^floor(log2(largest / amax)))        data are round(g / scale), saturated

    mu starts at 1. It halves after a reduction in which more than 0.001% of the tensor's elements saturated on any
    rank, and otherwise grows so as to double in 1000 reductions (one a micro-batch): the small elements of a gradient
    gain range as long as hardly any large one is lost. A tensor of zeros has scale 1, one that is not finite NaN; both
    leave mu alone. No step makes the host wait.
    """

    def __init__(self, format: str):
        self._largest = FORMATS[format].max
        self._slots: dict[str, int] = {}
        self._index = functools.lru_cache(RECENT)(self._make_index)
        self._mu = self._share = torch.empty(0)
        self._group: object = None

    def scales(self, gradients: list[torch.Tensor], names: list[str], group: object = None) -> torch.Tensor:
        """Return the scales of `gradients`, FP32 [T], equal on all ranks. Collective."""
        index, self._group = self._index(tuple(names), gradients[0].device), group
        #     amax, share = max over ranks                           one all-reduce for all gradients of the message
        #     mu          = mu / 2 if share > limit else mu * 2^(1/1000)
        #     scale       = amax / largest rounded to a power of two, over mu
        # Saturation is that of the last reduction: this one's is known only after it is
        # quantized.
        amax = torch.stack([_amax(gradient) for gradient in gradients])
        agreed = torch.cat([amax, self._share[index]])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        amax, share = agreed.chunk(2)
        mu = self._mu[index]
        adapted = torch.where(share > SATURATION_LIMIT, mu / 2, mu * GROWTH)
        mu = torch.where((amax > 0) & amax.isfinite(), adapted, mu)
        self._mu[index] = mu
        # On the device: Python would have to wait for amax, at every bucket.
        _, exponent = torch.frexp(self._largest / amax.clamp_min(_SMALLEST_AMAX))  # 2^(exponent - 1) is the floor
        scale = torch.ldexp(torch.ones_like(mu), 1 - exponent) / mu
        return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))

    def saturated(self, counts: torch.Tensor, numels: list[int], names: list[str]) -> None:
        index = self._index(tuple(names), counts.device)
        self._share[index] = torch.stack([count / numel for count, numel in zip(counts, numels, strict=True)])

    def mu(self, name: str) -> float:
        return self._mu[self._slots[name]].item()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next scales depend on, alike on all ranks. Collective; the host waits."""
        share = self._share.clone()
        if self._slots:
            dist.all_reduce(share, op=dist.ReduceOp.MAX, group=self._group)
        return {"names": list(self._slots), "mu": self._mu.cpu(), "saturated": share.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, what state_dict() returned on any number of ranks; other gradients start afresh."""
        self._index.cache_clear()
        self._slots = {name: slot for slot, name in enumerate(state["names"])}
        self._mu, self._share = state["mu"].to(self._mu.device), state["saturated"].to(self._mu.device)

    def _make_index(self, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
        new = [name for name in names if name not in self._slots]
        self._slots |= {name: len(self._slots) + i for i, name in enumerate(new)}
        self._mu = torch.cat([self._mu.to(device), torch.ones(len(new), device=device)])
        self._share = torch.cat([self._share.to(device), torch.zeros(len(new), device=device)])
        return torch.tensor([self._slots[name] for name in names], device=device)


def _amax(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, FP32 []; Inf for NaN or Inf."""
    low, high = gradient.aminmax()
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
