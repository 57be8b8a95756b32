"""One scale per gradient tensor that all ranks agree on, adapted over time (FP8-LM, arXiv 2310.18313, section 2.1).

    amax   = max over all ranks of |g|
    scale  = 1 / (mu * 2^floor(log2(largest / amax)))        codes are cast(g / scale), saturated

mu starts at 1. It halves after a reduction in which more than 0.001% of the tensor's elements saturated on any rank,
and otherwise grows so as to double in 1000 reductions (one a micro-batch): the small elements of a gradient gain range
as long as hardly any large one is lost. A tensor of zeros has scale 1, one that is not finite NaN; both leave mu alone.
"""

from __future__ import annotations

import torch
from deepspeed import comm as dist

from ds_fp8.formats import FORMATS

SATURATION_LIMIT = 1e-5
GROWTH = 2.0 ** (1 / 1000)
_SMALLEST_AMAX = 2.0**-100
"""Where the division by amax must not overflow; smaller gradients share its scale."""


class AutomaticScale:
    """The scales of gradients, known by keys, and what becomes of them. No step makes the host wait."""

    def __init__(self, format: str):
        self._largest = FORMATS[format].max
        self._slots: dict[int, int] = {}
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._mu = self._share = torch.empty(0)

    def scales(self, gradients: list[torch.Tensor], keys: list[int], group: object = None) -> torch.Tensor:
        """The scales of `gradients`, FP32 [T], equal on all ranks. Collective."""
        index = self._index(tuple(keys), gradients[0].device)
        amax = torch.stack([_amax(gradient) for gradient in gradients])
        agreed = torch.cat([amax, self._share[index]])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        amax, share = agreed.chunk(2)
        mu = self._mu[index]
        adapted = torch.where(share > SATURATION_LIMIT, mu / 2, mu * GROWTH)
        mu = torch.where((amax > 0) & amax.isfinite(), adapted, mu)
        self._mu[index] = mu
        _, exponent = torch.frexp(self._largest / amax.clamp_min(_SMALLEST_AMAX))  # 2^(exponent - 1) is the floor
        scale = torch.ldexp(torch.ones_like(mu), 1 - exponent) / mu
        return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))

    def saturated(self, counts: torch.Tensor, numels: list[int], keys: list[int]) -> None:
        """Tell how many elements of each gradient saturated on this rank, int32 [T]."""
        index = self._index(tuple(keys), counts.device)
        self._share[index] = torch.stack([count / numel for count, numel in zip(counts, numels, strict=True)])

    def mu(self, key: int) -> float:
        """The present mu of a gradient. The host waits for it."""
        return self._mu[self._slots[key]].item()

    def _index(self, keys: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """int64 [T], where the state of these gradients lies; room is made for those seen for the first time."""
        if keys not in self._indices:
            new = [key for key in keys if key not in self._slots]
            self._slots |= {key: len(self._slots) + i for i, key in enumerate(new)}
            self._mu = torch.cat([self._mu.to(device), torch.ones(len(new), device=device)])
            self._share = torch.cat([self._share.to(device), torch.zeros(len(new), device=device)])
            self._indices[keys] = torch.tensor([self._slots[key] for key in keys], device=device)
        return self._indices[keys]


def _amax(gradient: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, FP32 []; Inf for NaN or Inf."""
    low, high = gradient.aminmax()
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
