"""Outlier channels of a layer's input: which they are (casts/outliers.py has the maths of their blocks).

The channels of the largest energy are found on the first input that a layer sees, on all ranks together, and looked for
again on the steps that are measured anyway. They hardly ever change: most stand out because of the weights before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers import channel_energy, largest_channels

ENOUGH = 0.9  # channels stay while they hold this share of the energy of those that hold the most


class OutlierChannels:
    def __init__(self, count: int):
        self.count = count  # number of channels, of all products alike; narrower inputs have fewer
        # int32 [C], ascending; None before the first input. Changed in place: CUDA graphs read it.
        self.channels: torch.Tensor | None = None
        # FP32 [K], of the inputs of the step that is being measured on this rank; None outside measured steps
        self.energy: torch.Tensor | None = None
        self.fixed = False  # whether no others are looked for: those of frozen weights are the first input's
        # Adds a tensor up over all ranks, in place, with the same bits on each
        self.add_over_ranks: Callable[[torch.Tensor], None] = _alone
        # Called when channels were found for the first time, on all ranks
        self.on_found: Callable[[OutlierChannels], None] = _alone

    def __getstate__(self) -> dict:
        # A copy of a model under training belongs to no engine.
        return {**vars(OutlierChannels(self.count)), "channels": self.channels}

    def observe(self, cast: QuantizedTensor, measured: bool) -> torch.Tensor:
        """Return the channels for a cast input [T, K], found now if there were none. Collective the first time.

        `measured`: whether this step is one to look for other channels.
        """
        found = self.channels is not None
        if found and (self.fixed or not measured):
            return self.channels
        # Later forwards write in place what this one finds, which may run in torch.inference_mode().
        with torch.inference_mode(False), torch.no_grad():
            energy = channel_energy(cast)
            if measured:
                # A rank that has no other input in this step counts in `refresh_channels` like those that have more.
                self.energy = energy.clone() if self.energy is None else self.energy.add_(energy)
            if not found:
                self.add_over_ranks(energy)
                self.channels = largest_channels(energy, self.count)
        if not found:
            self.on_found(self)
        return self.channels

    def load(self, channels: Sequence[int], width: int, device: torch.device) -> bool:
        """Load channels of an input [T, width] from a checkpoint. Returns False, unchanged, if their number differs."""
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
    """Change the channels of which others now hold much more energy; return whether any were looked at. Collective.

    The host waits for nothing, and all ranks decide alike. `selections` come in the same order on all ranks.
    """
    measured = [selection for selection in selections if selection.energy is not None]
    if not measured:
        return False
    # One collective for all products.
    energies = torch.cat([selection.energy for selection in measured])
    add_over_ranks(energies)
    widths = [len(selection.energy) for selection in measured]
    for selection, energy in zip(measured, energies.split(widths), strict=True):
        best = largest_channels(energy, selection.count)
        # On the device, like the choice below: channels change without the host, and graphs read them where they are.
        held = energy[selection.channels.long()].sum() >= ENOUGH * energy[best.long()].sum()
        selection.channels.copy_(torch.where(held, selection.channels, best))
        selection.energy = None
    return True


def outlier_channels_of(model: nn.Module) -> Iterator[tuple[str, int, OutlierChannels]]:
    """Yield (name, width of the input, outlier channels) of every product of a converted model that has some, once."""
    seen = set()
    for module in model.modules():
        outliers = getattr(getattr(module, "recipe", None), "outliers", None)
        if outliers is not None and id(outliers) not in seen:
            seen.add(id(outliers))
            yield module.recipe.name, module.in_features, outliers


def _alone(_: object) -> None:
    """Do nothing: there are no other ranks, and no shards."""
