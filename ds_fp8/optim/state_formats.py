"""Storage of each parameter's optimizer state: codec, granularity, scale type, and the tensors in a flat shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_fp8.config.optimizer_state import MOMENTS, StatePrecision
from ds_fp8.optim.checkpoints import MASTER
from ds_fp8.optim.codecs import CODECS, Codec
from ds_fp8.optim.moment import Layout, Moment, is_kept_as


class StateFormats:
    """The formats that one optimizer keeps the state of its parameters in."""

    def __init__(self, precision: StatePrecision):
        self._precision = precision
        self._segments: dict[torch.Tensor, tuple[int, ...]] = {}
        self._vectors: dict[torch.Tensor, tuple[int, ...]] = {}

    def set_segments(self, p: torch.Tensor, sizes: Sequence[int], vectors: Sequence[int]) -> None:
        """Register the tensors that the flat parameter p is made of; arguments and errors as `AdamW.set_segments`."""
        if self._precision.master == "fp16_scaled" and vectors and p.dtype is not torch.float32:
            raise ValueError("a flat 16-bit parameter of vectors and matrices has no FP16 masters: flatten them apart")
        self._segments[p], self._vectors[p] = tuple(sizes), tuple(vectors)

    def vectors(self, p: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the tensors in the flat parameter p that are vectors."""
        return self._vectors.get(p, ())

    def has_scaled_master(self, p: torch.Tensor) -> bool:
        """Return whether the master weights of p, or of some of the tensors that p is made of, are FP16 numbers."""
        return self._precision.master == "fp16_scaled" and (p.dim() > 1 or p in self._segments)

    def layout(self, p: torch.Tensor, granularity: str, scale: str) -> Layout:
        """Return the groups of a state of p."""
        return Layout(p.numel(), granularity, scale, self._segments.get(p, ()) if granularity == "tensor" else ())

    def complete(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        """Bring the state of p into the form that AdamW.step() works on: create missing state, encode other formats."""
        # Loading may leave it as a number or move it; on the GPU every step would wait for it.
        if not isinstance(state.get("step"), torch.Tensor) or state["step"].device.type != "cpu":
            state["step"] = torch.tensor(float(state.get("step", 0.0)))
        for key in MOMENTS:
            value = state.get(key)
            if not is_kept_as(value, getattr(self._precision, key), p.device):
                state[key] = self.encoded(p, key, value)
        # The first master is the parameter itself; from then on the parameter is its copy.
        if p.dtype is not torch.float32 and state.get(MASTER) is None:
            state[MASTER] = self.encoded(p, MASTER, p.detach().float())

    def encoded(
        self, p: torch.Tensor, key: str, numbers: torch.Tensor | Moment | None, exponent: torch.Tensor | None = None
    ) -> torch.Tensor | Moment:
        """Return the state `key` of p as it is kept, from its numbers in any form; zeros from None."""
        codec, granularity, scale = self._format(p, key)
        if isinstance(numbers, Moment):
            numbers, exponent = numbers.decode(), numbers.exponent
        if codec.max is None:
            if numbers is None:
                return torch.zeros(p.shape, dtype=codec.dtype, device=p.device)
            return numbers.detach().to(p.device, codec.dtype, copy=True).reshape(p.shape).contiguous()
        moment = Moment(codec, self.layout(p, granularity, scale), p.device, never_zero=key == "exp_avg_sq")
        if numbers is not None:
            moment.encode(numbers, exponent)
        return moment

    def _format(self, p: torch.Tensor, key: str) -> tuple[Codec, str, str]:
        """Return (codec, granularity, scale type) of a state of p."""
        if key == MASTER:
            return CODECS["fp16" if self.has_scaled_master(p) else "fp32"], "tensor", "pow2"
        return CODECS[getattr(self._precision, key)], self._precision.granularity, self._precision.scale
