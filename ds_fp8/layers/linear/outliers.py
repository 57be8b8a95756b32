"""Selection of the outlier channels of a layer's input (casts/outliers.py has the maths of their blocks).

The first input of a layer selects the channels of largest energy, over all ranks; measured steps refresh the selection.
It hardly ever changes: most outliers come from the weights of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers import channel_energy, largest_channels

ENOUGH = 0.9  # selected channels stay while their energy is this share of the largest possible


class OutlierChannels:
    def __init__(self, count: int):
        self.count = count  # channels of every layer; inputs with fewer features have fewer
        # int32 [C], ascending; None before the first input. Changed in place: CUDA graphs read it.
        self.channels: torch.Tensor | None = None
        # FP32 [K], summed over this rank's inputs in the measured step; None outside measured steps
        self.energy: torch.Tensor | None = None
        self.fixed = False  # never refreshed: residuals of frozen weights are quantized once
        # In-place all-reduce SUM, bitwise equal on all ranks
        self.add_over_ranks: Callable[[torch.Tensor], None] = _alone
        # Called after the first selection, on all ranks
        self.on_found: Callable[[OutlierChannels], None] = _alone

    def __getstate__(self) -> dict:
        # A copied model has no engine.
        return {**vars(OutlierChannels(self.count)), "channels": self.channels}

    def observe(self, quantized: QuantizedTensor, measured: bool) -> torch.Tensor:
        """Return the channels of the quantized input [T, K], selected now if there are none. Collective the first time.

        measured: accumulate energy for `refresh_channels`.
        """
        found = self.channels is not None
        if found and (self.fixed or not measured):
            return self.channels
        # Not inference tensors, though forward may run in torch.inference_mode(): later forwards write them in place.
        with torch.inference_mode(False), torch.no_grad():
            energy = channel_energy(quantized)
            if measured:
                # Every rank has energy after a measured step, so that refresh_channels is collective.
                self.energy = energy.clone() if self.energy is None else self.energy.add_(energy)
            if not found:
                self.add_over_ranks(energy)
                self.channels = largest_channels(energy, self.count)
        if not found:
            self.on_found(self)
        return self.channels

    def load(self, channels: Sequence[int], width: int, device: torch.device) -> bool:
        """Load channels of an input [T, width] from a checkpoint. Return False, unchanged, if their number differs."""
        if len(channels) != min(self.count, width):
            return False
        if not all(0 <= channel < width for channel in channels):
            raise ValueError(f"outlier channels that an input of {width} features does not have")
        loaded = torch.tensor(channels, dtype=torch.int32, device=device)
        if self.channels is None:
            self.channels = loaded
        else:
            self.channels.copy_(loaded)
        return True


def refresh_channels(selections: Iterable[OutlierChannels], add_over_ranks: Callable[[torch.Tensor], None]) -> bool:
    """Replace selections whose energy is below ENOUGH of the largest; return whether any was measured. Collective.

    No host sync. `selections` are in the same order on all ranks, which decide alike.
    """
    measured = [selection for selection in selections if selection.energy is not None]
    if not measured:
        return False
    # One all-reduce for all layers.
    energies = torch.cat([selection.energy for selection in measured])
    add_over_ranks(energies)
    widths = [len(selection.energy) for selection in measured]
    for selection, energy in zip(measured, energies.split(widths), strict=True):
        best = largest_channels(energy, selection.count)
        # Decided and written on the device, in place: CUDA graphs read the channels.
        held = energy[selection.channels.long()].sum() >= ENOUGH * energy[best.long()].sum()
        selection.channels.copy_(torch.where(held, selection.channels, best))
        selection.energy = None
    return True


def outlier_channels_of(model: nn.Module) -> Iterator[tuple[str, int, OutlierChannels]]:
    """Yield (name, input features, outlier channels) of every layer with outlier channels, once."""
    seen = set()
    for module in model.modules():
        outliers = getattr(getattr(module, "recipe", None), "outliers", None)
        if outliers is not None and id(outliers) not in seen:
            seen.add(id(outliers))
            yield module.recipe.name, module.in_features, outliers


def _alone(_: object) -> None:
    """No-op without an engine."""
