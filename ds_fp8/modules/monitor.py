"""Statistics of casts: how much saturates and how much is flushed to zero, on every N-th optimizer step."""

from __future__ import annotations

import torch

from ds_fp8.formats import FORMATS
from ds_fp8.quantize import QuantizedTensor
from ds_fp8.quantize.reference import per_element


class CastMonitor:
    """Collects statistics over one optimizer step out of `every`; costs nothing on the others.

    Counters stay on the device of the tensors; the host reads them once per measured step.
    """

    def __init__(self, every: int):
        self.every = every
        self.steps = 0
        self.last: dict[str, float] | None = None
        self._totals: dict[str, torch.Tensor] = {}

    @property
    def active(self) -> bool:
        return self.every > 0 and self.steps % self.every == 0

    def observe(self, tensor_class: str, x: torch.Tensor, quantized: QuantizedTensor) -> None:
        """Add one cast of `x` to the statistics of its class (input, weight, grad_output)."""
        if not self.active:
            return
        units = per_element(torch.div, x.detach().abs(), quantized.scale, quantized.granularity)
        saturated = units > FORMATS[quantized.format].max
        flushed = (units > 0) & (quantized.data.float() == 0)
        counts = torch.stack([torch.full((), float(x.numel()), device=x.device), saturated.sum(), flushed.sum()])
        previous = self._totals.get(tensor_class)
        self._totals[tensor_class] = counts if previous is None else previous + counts

    def end_step(self) -> None:
        """Close an optimizer step; after a measured one `last` holds its shares, over all classes together."""
        if self._totals:
            count, saturated, flushed = torch.stack(list(self._totals.values())).sum(0).tolist()
            self.last = {"saturated": saturated / max(count, 1), "underflow": flushed / max(count, 1)}
            self._totals.clear()
        self.steps += 1
