"""Router statistics of mixtures of experts: how evenly tokens are spread over experts, in measured steps.

    p                        share of a layer's choices (top_k per token) of each expert, over all ranks' tokens
    entropy                  -sum p log p / log(experts): 1 if uniform
    largest_share            max p: 1 / experts if uniform
    experts_without_tokens   number of experts with p = 0

Counts are one buffer on the device, all-reduced and read once per measured step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch

from ds_fp8.monitor.cast_monitor import CastMonitor


@dataclass(frozen=True)
class RoutingFigures:
    """Statistics of one layer, or means over all layers."""

    entropy: float
    largest_share: float
    experts_without_tokens: float


@dataclass(frozen=True)
class RoutingMeasurement:
    """Router statistics of a measured step, the same on all ranks."""

    layers: dict[str, RoutingFigures]  # by name of the experts module
    # Load balancing loss before its coefficient (`aux_loss` of the model's output), mean over micro-batches and ranks;
    # None if the model returns none
    auxiliary_loss: float | None

    @property
    def mean(self) -> RoutingFigures:
        return RoutingFigures(*(fmean(getattr(layer, name) for layer in self.layers.values()) for name in FIGURES))


FIGURES = tuple(field.name for field in fields(RoutingFigures))


class RoutingMonitor:
    """Counts the tokens of every expert in the steps that a CastMonitor measures; no cost in the others."""

    def __init__(
        self,
        monitor: CastMonitor,
        experts: Mapping[str, int],
        device: torch.device,
        add_over_ranks: Callable[[torch.Tensor], None],
    ):
        # experts: number of experts by layer, in the same order on all ranks
        self.last: RoutingMeasurement | None = None  # of the last measured step
        self._monitor, self._experts, self._add_over_ranks = monitor, dict(experts), add_over_ranks
        # One extra column: transformers uses index `experts` for choices computed on other ranks.
        shape = len(self._experts), max(self._experts.values(), default=0) + 1
        self._buffer = torch.zeros(math.prod(shape) + 2, dtype=torch.float64, device=device)
        self._counts = self._buffer[:-2].view(shape)
        self._losses = self._buffer[-2:]  # sum and number of the auxiliary losses

    def __getstate__(self) -> dict:
        # A copied model has no engine.
        return vars(RoutingMonitor(CastMonitor(0), {}, torch.device("cpu"), _nothing))

    @torch.compiler.disable
    def observe(self, layer: int, module: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Count the router's choices: forward pre-hook of an experts module."""
        if not self._monitor.active or in_backward():
            return
        chosen = (args[1] if len(args) > 1 else kwargs["top_k_index"]).flatten().long()
        chosen = chosen.clamp(max=self._counts.shape[1] - 1)
        self._counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen, dtype=self._counts.dtype))

    @torch.compiler.disable
    def observe_output(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        """Sum the auxiliary loss, if any: forward hook of the model."""
        loss = getattr(output, "aux_loss", None)
        if torch.is_tensor(loss) and self._monitor.active and not in_backward():
            self._losses[0] += loss.detach().double()
            self._losses[1] += 1

    def take(self) -> RoutingMeasurement | None:
        """Return the statistics of a measured step and reset; None if no token was routed. Collective."""
        self._add_over_ranks(self._buffer)
        *_, loss, losses = self._buffer.tolist()
        counts = self._counts.tolist()
        self._buffer.zero_()
        layers = {
            name: _figures(row[:experts])
            for (name, experts), row in zip(self._experts.items(), counts, strict=True)
            if sum(row[:experts])
        }
        if not layers:
            return None
        self.last = RoutingMeasurement(layers, loss / losses if losses else None)
        return self.last


def in_backward() -> bool:
    """Return whether autograd runs backward now: a forward in it recomputes activations."""
    # As torch.utils.module_tracker; no public API.
    return torch._C._current_graph_task_id() != -1


def _figures(counts: list[float]) -> RoutingFigures:
    total = math.fsum(counts)
    shares = [count / total for count in counts]
    entropy = -math.fsum(share * math.log(share) for share in shares if share)
    return RoutingFigures(
        entropy / math.log(len(counts)) if len(counts) > 1 else 1.0, max(shares), sum(not count for count in counts)
    )


def _nothing(sums: torch.Tensor) -> None:
    pass
