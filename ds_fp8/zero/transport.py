"""Transports of FP8 shards between ranks: collectives, or copies from each other's memory.

All keep one promise: what `gather` delivers was written, on every rank, before the last `written` that lies before the
gather, and no `write` lies in between. Ranks may be late at any point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_fp8.zero import grouped, streams
from ds_fp8.zero.peer_memory import Copies, PeerMemory, share

Work = grouped.Work | Copies
"""Gathers in flight."""


class Transport(Protocol):
    """Carries the shards of one list of weights; every method is called on all ranks, in one order."""

    local: torch.Tensor
    """This rank's shards, uint8 [n], zeros at first."""
    description: str
    """Description for the start report."""

    def allocate(self, numel: int) -> torch.Tensor:
        """Return memory for outputs of `gather`, uint8 [numel], uninitialised, on the current stream."""

    def write(self) -> None:
        """Let the current stream wait until no rank reads shards that were gathered so far."""

    def written(self) -> None:
        """Let the current stream wait until all ranks have written what they were writing."""

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Work:
        """Begin to gather every input into its output, behind what the current stream holds.

        Args:
            outputs: uint8 [ranks * n_i], where the shards land in the order of the ranks.
            inputs: uint8 [n_i], views of `local`.
            group: Process group of the weights.
        """


class Collectives:
    """NCCL or gloo: a gather is a collective, which no rank can run ahead of."""

    def __init__(self, numel: int, device: torch.device, why: str | None = None):
        """Allocate the shards.

        Args:
            numel: Bytes of them.
            device: Where they lie.
            why: Why nothing faster carries them.
        """
        self.local = torch.zeros(numel, dtype=torch.uint8, device=device)
        self.description = "by collectives" + (f": {why}" if why else "")
        self._readers: list[object] = []
        """Streams that gathers have begun on."""

    def allocate(self, numel: int) -> torch.Tensor:
        """Return memory for outputs of `gather`."""
        return self.local.new_empty(numel)

    def write(self) -> None:
        """Wait for this rank's own gathers, those too that were fetched ahead and that no product has waited for.

        The other ranks have read from a gather's input once it has ended here: it is a collective.
        """
        # A gather runs on NCCL's own stream. But every handle is waited for on the stream that it began on, that of a
        # prefetch which nobody used by DeepSpeed: behind that stream all of them have ended.
        for stream in self._readers:
            streams.wait_stream(stream)

    def written(self) -> None:
        """Return: a gather of another rank reads nothing here before it begins here, behind the writing."""

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Work:
        """Begin to gather every input into its output, as Transport says."""
        stream = streams.current_stream()
        if stream not in self._readers:
            self._readers.append(stream)
        return grouped.all_gather(outputs, inputs, group)


def choose(numel: int, device: torch.device, groups: Sequence[object]) -> Transport:
    """Return what carries shards: copy engines if the ranks can share memory, otherwise collectives. Collective.

    Args:
        numel: Bytes of this rank's shards, the same on all ranks.
        device: Where they lie.
        groups: Process groups of the weights.
    """
    # Memory is mapped for one group; weights of experts with groups of their own would need one buffer each.
    shared = share(numel, device, groups[0]) if len(groups) == 1 else "the weights are sharded over several groups"
    return shared if isinstance(shared, PeerMemory) else Collectives(numel, device, shared)
