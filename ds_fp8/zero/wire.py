"""Bytes on the wire, counted for one engine by all senders, for FP8 and BF16 alike."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from deepspeed import comm as dist

from ds_fp8.layers.attention import shared as exchanges

GATHER, GRADIENT, EXCHANGE = "all_gather_bytes", "grad_bytes", "exchange_bytes"

Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]

# Share of a collective's input that one rank sends to the others, as a function of the group's size (an all-reduce is a
# reduce-scatter and an all-gather).
_SHARES = {
    "all_gather": lambda world: world - 1,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_to_all": lambda world: (world - 1) / world,
    "all_reduce": lambda world: 2 * (world - 1) / world,
}


class WireMeter:
    """Counts the bytes this rank sends to other ranks for the parameters and gradients of one ZeRO-3 engine.

    Parameter gathers come with the amax all-reduce that FP8 adds to them. What attention exchanges where ranks share
    sequences is counted as well, of all engines of the process, if it is in FP8 or keeps to documents. What else a
    model sends by itself (a loss over all ranks) is not.
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._exchanged_before = exchanges.bytes_sent()

    def count(self, purpose: str, collective: Collective, nbytes: int, group: object) -> None:
        """Count one collective.

        Args:
            purpose: GATHER or GRADIENT.
            collective: what it does with its input.
            nbytes: size of this rank's input, in bytes.
            group: process group, None for all ranks.
        """
        self._sent[purpose] += round(nbytes * _SHARES[collective](dist.get_world_size(group)))

    def sent(self) -> Counter[str]:
        """Return the bytes sent since the last `take`, by purpose."""
        return Counter({**self._sent, EXCHANGE: exchanges.bytes_sent() - self._exchanged_before})

    def add(self, sent: Counter[str]) -> None:
        """Count what a CUDA graph sends, of which Python sees nothing."""
        self._sent.update({purpose: sent[purpose] for purpose in (GATHER, GRADIENT)})
        exchanges.count_sent(sent[EXCHANGE])

    def subtract(self, sent: Counter[str]) -> None:
        """Take back what was counted and not sent."""
        self.add(Counter({purpose: -nbytes for purpose, nbytes in sent.items()}))

    def take(self) -> dict[str, int]:
        """Return the bytes sent since the last call, by purpose."""
        sent = {purpose: self._sent[purpose] for purpose in (GATHER, GRADIENT)}
        self._sent.clear()
        exchanged, self._exchanged_before = self._exchanged_before, exchanges.bytes_sent()
        return {**sent, EXCHANGE: self._exchanged_before - exchanged}
