"""The FP8 shards of all weights that are gathered in FP8: cast from the masters after each change (cast_set.py).

Weights that the optimizer does not train are cast once, and again only when somebody has written to them. It happens on
a stream of its own, right after an optimizer step, beside whatever comes before the first gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.outlier_channels import OutlierChannels
from ds_fp8.zero import seams, streams
from ds_fp8.zero.cast_set import CastSet, in_runs
from ds_fp8.zero.peer_memory import PeerMemory, share
from ds_fp8.zero.shards import ShardedWeight, on_device, stacks_of
from ds_fp8.zero.wire import WireMeter


class FP8Shards:
    """This rank's FP8 shards, in one buffer, and the scales of whole weights, the same on all ranks."""

    def __init__(
        self,
        weights: Iterable[tuple[nn.Parameter, CastSpec, OutlierChannels | None]],
        wire: WireMeter,
        transport: str,
    ):
        """Allocate the shards.

        Args:
            weights: each with its cast, and the outlier channels of its input where those are multiplied exactly.
            wire: counts the bytes of amax.
            transport: as of fp8.param_gather; UserError for "copy_engine" where that cannot be.
        """
        self._wire = wire
        # Sorted, so that all ranks agree on the order.
        ordered = sorted(weights, key=lambda weight: seams.order(weight[0]))
        stacks = stacks_of(ShardedWeight(p, seams.shard_of(p), spec, outliers) for p, spec, outliers in ordered)
        trained = [stack for stack in stacks if any(seams.is_trained(weight.parameter) for weight in stack)]
        rest = [stack for stack in stacks if stack not in trained]
        self._sets = [CastSet(some) for some in (trained, rest) if some]
        self._trained = self._sets[0] if trained else None
        # Keyed by id: a Parameter compares element by element.
        self.weights = {id(weight.parameter): weight for some in self._sets for weight in some.weights}
        self._set_of = {id(weight.parameter): some for some in self._sets for weight in some.weights}
        # Shards that are fetched together lie side by side: what is sent is a view.
        numels = [weight.shard.numel for weight in self.weights.values()]
        device = stacks[0][0].parameter.device
        groups = list({id(weight.shard.group): weight.shard.group for weight in self.weights.values()}.values())
        self.peers, self.transport = _peer_memory(sum(numels), device, groups, transport)
        """How the bytes travel, and why not by copy engines where they do not: for the start report."""
        self.codes = self.peers.local if self.peers else torch.zeros(sum(numels), dtype=torch.uint8, device=device)
        for weight, data in zip(self.weights.values(), self.codes.split(numels), strict=True):
            weight.data = data
        for some in self._sets:
            some.place(self.codes)
        for weight in self.weights.values():
            if weight.outliers is not None:
                weight.outliers.on_found = self.write_residuals
        self._modified: set[int] = set()
        self._stream = streams.new_stream()
        self._gather_stream = self._changed = self._refreshed = None
        self._pinned = False
        self.before_cast: Callable[[], bool] = bool
        """Called before shards are written; returns whether it copied some of them on the current stream."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's FP8 shards, and of scales and outlier channels' residuals of all weights."""
        return self.codes.nbytes + sum(some.nbytes for some in self._sets)

    def observe(self, show: Callable[[nn.Parameter, torch.Tensor, QuantizedTensor, int], None]) -> None:
        """Call `show(weight, rows, cast, elements)` for every weight that this rank has a part of. Between steps.

        Args:
            show: Gets the weight, the rows that this rank's shard touches in high precision and as they are sent, and
                the number of elements of the shard: the rows have zeros beyond them.
        """
        self.wait_for_refresh()
        for weight in self.weights.values():
            if weight.shard.valid:
                numbers = weight.rotated(on_device(self._source(weight), self.codes.device))
                cast = QuantizedTensor.of_bytes(weight.cover(weight.data), weight.covered(weight.scale), weight.spec)
                show(weight.parameter, weight.cover(numbers), cast, weight.shard.valid)

    def wait_for_refresh(self) -> None:
        """Let the current stream wait for the last cast: it may still write shards and read masters."""
        streams.wait_event(self._refreshed)

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on: later casts write them in place, for CUDA graphs read them.

        Between steps. Until then every cast has scales of its own, so that whoever holds the earlier ones keeps them.
        """
        if not self._pinned:
            self.refresh_if_stale()
            self.wait_for_refresh()
            for some in self._sets:
                some.pin_scales()
            self._pinned = True

    def masters_updated(self) -> None:
        """Note that an optimizer step wrote masters on the current stream: those that are trained need another cast."""
        if self._trained is not None:
            self._trained.stale = True
            self._modified.difference_update(id(weight.parameter) for weight in self._trained.weights)
            self._changed = streams.record_event()

    def loaded(self) -> None:
        """Note that all masters and BF16 shards may have been written on the current stream."""
        for some in self._sets:
            some.stale = True
        self._modified.clear()
        self._changed = streams.record_event()

    def master_written(self, parameter: nn.Parameter) -> None:
        """Note that the user wrote a parameter's masters: what was written to its BF16 shard counts no longer."""
        if id(parameter) in self._set_of:
            self._set_of[id(parameter)].stale = True
            self._modified.discard(id(parameter))
            self._changed = streams.record_event()

    @torch.no_grad()
    def refresh_if_stale(self) -> None:
        """Cast again what masters or BF16 shards of were written since it was. Collective; the host waits for nothing.

        Begins behind `_changed`, an event on the stream that the masters were written on, which the products, readers
        of the scales, lie in too, and behind all gathers, which read the shards: also those that were prefetched and
        that no product has waited for. Gathers begin behind `_refreshed`.
        """
        stale = [some for some in self._sets if some.stale]
        if not stale:
            return
        if self.before_cast():
            self._changed = streams.record_event()
        with streams.on_stream(self._stream):
            streams.wait_event(self._changed)
            streams.wait_stream(self._gather_stream)
            if self.peers:
                self.peers.wait_for_reads()
                if not all(some.agrees for some in stale):
                    self.peers.barrier()  # no all-reduce of amax waits for the reads of the other ranks
            for some in stale:
                some.cast(self._source, self._wire)
            if self.peers:
                self.peers.barrier()
            self._refreshed = streams.record_event()

    @torch.no_grad()
    def write_residuals(self, only: OutlierChannels | None = None) -> None:
        """Cast residuals again after outlier channels have changed, of all products or of one. Collective."""
        self.wait_for_refresh()
        for some in self._sets:
            if not some.stale:  # or else its next cast writes them
                some.write_residuals(self._source, self._wire, only)

    def _source(self, weight: ShardedWeight) -> torch.Tensor:
        modified = id(weight.parameter) in self._modified
        return seams.bf16_shard(weight.parameter) if modified else seams.master_shard(weight.parameter)

    def read_on(self, stream: object) -> None:
        """Note the stream that gathers read the shards on: the next cast waits for it."""
        self._gather_stream = stream

    def casts_bf16(self, parameter: nn.Parameter) -> bool:
        """Return whether this weight is cast from its BF16 shard, which somebody has written to."""
        return id(parameter) in self._modified

    def bf16_updated(self, written: list[ShardedWeight], before: list[torch.Tensor]) -> None:
        """Cast from their BF16 shards, from now on, the weights whose shards differ from `before` on any rank.

        GatheredParameters with a modifier_rank may have written to them, or only have shown them to somebody (as
        save_16bit_model does): then they go on being cast from their FP32 masters. As in ZeRO-3 itself new values hold
        until the next step writes the masters over them. Collective; the host waits.
        """
        self._changed = streams.record_event()
        for pairs in in_runs(zip(written, before, strict=True), lambda pair: id(pair[0].shard.group)):
            changed = [
                bool((seams.bf16_shard(weight.parameter) != old)[: weight.shard.valid].any()) for weight, old in pairs
            ]
            flags = torch.tensor(changed, dtype=torch.int32, device=self.codes.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=pairs[0][0].shard.group)
            for (weight, _), flag in zip(pairs, flags.tolist(), strict=True):
                if flag:
                    self._modified.add(id(weight.parameter))
                    self._set_of[id(weight.parameter)].stale = True


def _peer_memory(
    numel: int, device: torch.device, groups: list[object], transport: str
) -> tuple[PeerMemory | None, str]:
    """Return memory that all ranks share, or None, and in words how shards travel. Collective.

    Raises UserError where `transport` is "copy_engine" and the ranks cannot share memory.
    """
    if transport == "nccl":
        return None, "by collectives"
    shared = share(numel, device, groups[0]) if len(groups) == 1 else "the weights are sharded over several groups"
    if isinstance(shared, PeerMemory):
        return shared, "by copy engines"
    if transport == "copy_engine":
        raise UserError(
            f"FP8 shards cannot be copied from rank to rank: {shared}",
            key="fp8.param_gather.transport",
            remedy='"transport": "nccl"',
        )
    return None, f"by collectives: {shared}"
