"""FP8 shards of all weights that are gathered in FP8, cast from the masters after each change (cast_set.py).

Frozen weights are cast once, and again only after a write to them. Casts run on a separate stream, right after an
optimizer step, and overlap with the work that precedes the first gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.zero import seams, streams
from ds_fp8.zero.cast_set import CastSet, in_runs
from ds_fp8.zero.profiling import profiled
from ds_fp8.zero.shards import ShardedWeight, on_device, stacks_of
from ds_fp8.zero.transport import Transport, choose
from ds_fp8.zero.wire import WireMeter

Written = tuple[ShardedWeight, torch.Tensor]
"""A weight whose BF16 shard a user may write to, and a copy of the shard from before."""


class FP8Shards:
    """This rank's FP8 shards, in one buffer, and the scales of whole weights, the same on all ranks."""

    def __init__(
        self,
        weights: Iterable[tuple[nn.Parameter, CastSpec, OutlierChannels | None]],
        wire: WireMeter,
    ):
        """Allocate the shards.

        Args:
            weights: each with its cast, and the outlier channels of its input where those are multiplied exactly.
            wire: counts the bytes of amax.
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
        self.transport: Transport = choose(sum(numels), device, groups)
        self.codes = self.transport.local
        for weight, data in zip(self.weights.values(), self.codes.split(numels), strict=True):
            weight.data = data
        for some in self._sets:
            some.place(self.codes)
        for weight in self.weights.values():
            if weight.outliers is not None:
                weight.outliers.on_found = self.write_residuals
        self._modified: set[int] = set()
        # A stream apart from the products': the cast overlaps with whatever precedes the first gather of the next step.
        self._stream = streams.new_stream()
        # Recorded at once, since weights were written on the current stream before: the first cast waits for them.
        self._changed: object | None = streams.record_event()
        """Event behind the last write to masters or BF16 shards."""
        self._refreshed: object | None = None
        """Event behind the last cast."""
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
        self.wait_for_cast()
        for weight in self.weights.values():
            if weight.shard.valid:
                numbers = weight.before_cast(on_device(self._source(weight), self.codes.device))
                cast = QuantizedTensor.of_bytes(weight.cover(weight.data), weight.covered(weight.scale), weight.spec)
                show(weight.parameter, weight.cover(numbers), cast, weight.shard.valid)

    def wait_for_cast(self) -> None:
        """Let the current stream wait for the last cast: it may still write shards and read masters."""
        streams.wait_event(self._refreshed)

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on: later casts write them in place, for CUDA graphs read them.

        Between steps. Until then every cast has scales of its own, so that whoever holds the earlier ones keeps them.
        """
        if not self._pinned:
            # Scales exist only after a cast, and the pinned buffer begins with copies of them.
            self.cast()
            self.wait_for_cast()
            for some in self._sets:
                some.pin_scales()
            self._pinned = True

    def masters_updated(self) -> None:
        """Note that an optimizer step wrote masters on the current stream: those that are trained need another cast."""
        if self._trained is not None:
            self._trained.stale = True
            # The step has written the masters over what users wrote to BF16 shards.
            self._modified.difference_update(id(weight.parameter) for weight in self._trained.weights)
            self._changed = streams.record_event()

    def loaded(self) -> None:
        """Note that all masters and BF16 shards may have been written on the current stream."""
        for some in self._sets:
            some.stale = True
        self._modified.clear()
        self._changed = streams.record_event()

    def frozen_written(self) -> None:
        """Note that shards of weights which are not trained may have been written on the current stream."""
        for some in self._sets:
            if some is not self._trained:
                some.stale = True
        self._changed = streams.record_event()

    def master_written(self, parameter: nn.Parameter) -> None:
        """Note that the user wrote a parameter's masters: what was written to its BF16 shard counts no longer."""
        if id(parameter) in self._set_of:
            self._set_of[id(parameter)].stale = True
            self._modified.discard(id(parameter))
            self._changed = streams.record_event()

    @torch.no_grad()
    def cast(self) -> None:
        """Cast again what was written since the last cast. Collective; the host waits for nothing."""
        stale = [some for some in self._sets if some.stale]
        if not stale:
            return
        # It may have copied BF16 shards on the current stream: the cast's stream must wait for that, too.
        if self.before_cast():
            self._changed = streams.record_event()
        with profiled("cast"), streams.on_stream(self._stream):
            # The stream that the masters were written on holds the products too, which read the scales.
            streams.wait_event(self._changed)
            # In this order: the last gathers have read, then all shards are written, then all ranks know it.
            self.transport.write()
            for some in stale:
                some.cast(self._source, self._wire)
            self.transport.written()
            self._refreshed = streams.record_event()  # gathers begin behind it

    @torch.no_grad()
    def write_residuals(self, only: OutlierChannels | None = None) -> None:
        """Cast residuals again after outlier channels have changed, of all products or of one. Collective."""
        self.wait_for_cast()
        for some in self._sets:
            if not some.stale:  # or else its next cast writes them
                some.write_residuals(self._source, self._wire, only)

    def _source(self, weight: ShardedWeight) -> torch.Tensor:
        modified = id(weight.parameter) in self._modified
        return seams.bf16_shard(weight.parameter) if modified else seams.master_shard(weight.parameter)

    def casts_bf16(self, parameter: nn.Parameter) -> bool:
        """Return whether this weight is cast from its BF16 shard, which somebody has written to."""
        return id(parameter) in self._modified

    def bf16_updated(self, written: Iterable[Written]) -> None:
        """Cast from their BF16 shards, from now on, the weights whose shards have changed on any rank.

        GatheredParameters with a modifier_rank may have written to them, or only have shown them to somebody (as
        save_16bit_model does): then they go on being cast from their FP32 masters. As in ZeRO-3 itself new values hold
        until the next step writes the masters over them. Collective; the host waits.
        """
        self._changed = streams.record_event()
        for pairs in in_runs(written, lambda pair: id(pair[0].shard.group)):
            changed = [
                bool((seams.bf16_shard(weight.parameter) != old)[: weight.shard.valid].any()) for weight, old in pairs
            ]
            # A rank whose part of the weight is unchanged must cast it again as well, for its blocks share scales with
            # the others.
            flags = torch.tensor(changed, dtype=torch.int32, device=self.codes.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=pairs[0][0].shard.group)
            for (weight, _), flag in zip(pairs, flags.tolist(), strict=True):
                if flag:
                    self._modified.add(id(weight.parameter))
                    self._set_of[id(weight.parameter)].stale = True
