"""The weights of an engine that are gathered in FP8: ZeRO-3 sends one byte a parameter, and makes no BF16 copy of them.

After each change of the FP32 master shards they are cast once, on a stream of their own, right after an optimizer step,
beside the work that precedes the first gather. A step may have cast most of their blocks itself (one_pass.py). Frozen
weights are cast once, and again only after a write to them.

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all trained weights together
    shard    = cast(master shard, scale(amax))                     local, one byte a parameter

Weights whose scale needs no amax need no all-reduce either. The result is bit-equal to casting the whole master tensor
(Micikevicius et al. cast whole tensors; a block on the edge of two shards is why its amax must be agreed). At every
gather of a weight only the bytes of the shards travel: every rank knows all scales already.

Weights of one fused product arrive as adjacent row slices of one buffer if no padding parts them, and their scales lie
so: wherever stacking keeps the scales, it is a view (stacks.py).

On one rank a shard is the weight: it is used where it lies, until the next cast writes there.

Weights with outlier channels whose shards are whole rows have room behind every row for the outlier block, which the
rank of the row writes: their gathers bring the operand of fprop, and nothing of it is copied (residuals.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.zero import streams
from ds_fp8.zero.bf16_shards import Bf16Shards, move_frozen_to_host
from ds_fp8.zero.cast_set import CastSet, in_runs
from ds_fp8.zero.collectives import GATHER, Transport, WireMeter, choose
from ds_fp8.zero.deepspeed.masters import has_fp32_master
from ds_fp8.zero.deepspeed.methods import on_destroy
from ds_fp8.zero.deepspeed.parameters import (
    bf16_shard,
    is_gathered,
    is_trained,
    on_external_parameter,
    order,
    reshard,
    shard_of,
)
from ds_fp8.zero.masters import MasterSet, SplitParameter
from ds_fp8.zero.stacks import Rooms, stacks_of, without_padding
from ds_fp8.zero.streams import profiled
from ds_fp8.zero.weight import ShardedWeight, Source, State, on_device

ALIGNMENT = 256
"""Bytes from the beginning of all shards that a product's operand may lie at a multiple of; elsewhere it is copied.
cuBLASLt chooses its kernel, and with it the last bits, by the alignment of addresses."""

Written = tuple[ShardedWeight | SplitParameter, torch.Tensor]
"""A parameter whose BF16 shard a user may write to, and a copy of the shard from before."""


def _kind(stack: list[ShardedWeight]) -> int:
    if not all(has_fp32_master(weight.parameter) for weight in stack):
        return 0
    return 1 if any(is_trained(weight.parameter) for weight in stack) else 2


def _is_short_of(size: int, device: torch.device) -> bool:
    """Return whether a device lacks room for so many bytes and as many for what comes and goes."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * size


class ShardedWeights:
    """This rank's FP8 shards, in one buffer, and the scales of whole weights, the same on all ranks."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        weights: Iterable[tuple[nn.Parameter, CastSpec, OutlierChannels | None]],
        wire: WireMeter,
        frees_bf16: bool = False,
    ):
        """Allocate the shards of `weights`, each with its cast and outlier channels; the first gather casts.

        `frees_bf16`: whether `free_bf16_shards` will follow.
        """
        self._engine, self._wire = engine, wire
        # Sorted, so that all ranks agree on the order.
        ordered = sorted(weights, key=lambda weight: order(weight[0]))
        stacks = stacks_of(ShardedWeight(p, shard_of(p), spec, outliers) for p, spec, outliers in ordered)
        self._rooms = Rooms(stacks)
        # Weights without FP32 masters, others that are trained, the rest.
        coded, trained, rest = ([stack for stack in stacks if _kind(stack) == kind] for kind in range(3))
        self.masters = MasterSet(engine, coded, wire) if coded else None
        self.trained = CastSet(trained) if trained else None
        """Trained weights with FP32 masters."""
        self._sets = [some for some in (self.masters, self.trained, CastSet(rest) if rest else None) if some]
        # Keyed by id: a Parameter compares element by element.
        self._weights = {id(weight.parameter): weight for some in self._sets for weight in some.weights}
        # Shards that are fetched together lie side by side: what is sent is a view.
        numels = [weight.codes_in_shard for weight in self]
        if frees_bf16 and _is_short_of(sum(numels), stacks[0][0].parameter.device):
            move_frozen_to_host(self)  # before there are codes; the first cast copies them back one by one
        groups = list({id(weight.shard.group): weight.shard.group for weight in self}.values())
        self.transport: Transport = choose(sum(numels), stacks[0][0].parameter.device, groups)
        self.codes = self.transport.local
        for weight, data in zip(self, self.codes.split(numels), strict=True):
            weight.data = data
            if weight.outliers is not None:
                weight.outliers.on_found = self.write_residuals
        for some in self._sets:
            some.place(self.codes)
        # A stream apart from the products': the cast overlaps with whatever precedes the first gather of the next step.
        self._stream = streams.new_stream()
        # Recorded at once, since weights were written on the current stream before: the first cast waits for them.
        self._changed: object | None = streams.record_event()
        """Event behind the last write to masters or BF16 shards."""
        self._refreshed: object | None = None
        """Event behind the last cast."""
        self._pinned = False
        self.bf16: Bf16Shards | None = None
        """DeepSpeed's buffer of BF16 shards, where it is freed."""
        on_destroy(engine, self._end)
        # A module that reads another module's weight needs numbers, not FP8 codes.
        on_external_parameter(engine, lambda parameter: self.leave_fp8([parameter]))

    def __iter__(self) -> Iterator[ShardedWeight]:
        return iter(self._weights.values())

    def of(self, parameter: nn.Parameter) -> ShardedWeight | None:
        """Return the weight of a parameter; None where DeepSpeed gathers it."""
        return self._weights.get(id(parameter))

    def in_fp8(self, parameter: nn.Parameter) -> bool:
        """Return whether modules get this parameter in FP8."""
        weight = self.of(parameter)
        return weight is not None and weight.in_fp8

    def on_host(self, parameter: nn.Parameter) -> bool:
        """Return whether the BF16 shard of this parameter waits on the host while its codes are used."""
        weight = self.of(parameter)
        return weight is not None and weight.on_host

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's FP8 shards, and of whole weights: kept codes, scales, outliers' residuals."""
        kept = sum(weight.kept.nbytes for weight in self if weight.kept is not None)
        return self.codes.nbytes + kept + sum(some.nbytes for some in self._sets)

    @property
    def kept_numel(self) -> int:
        """Return the number of parameters that every rank has whole in FP8, and never gathers."""
        return sum(weight.numel for weight in self if weight.kept is not None)

    def addresses(self) -> tuple[int, ...]:
        """Return where the shards lie, and which weights are gathered from them."""
        return (self.codes.data_ptr(), *(key for key, weight in self._weights.items() if weight.in_fp8))

    def observe(self, show: Callable[[nn.Parameter, torch.Tensor, QuantizedTensor, int], None]) -> None:
        """Call `show(parameter, rows, cast, elements)` for each shard that is gathered in FP8. Between steps.

        The rows are those that the shard of so many elements touches, in high precision and as they are sent. A shard
        that waits on the host is shown once after its cast.
        """
        self.wait_for_cast()
        for weight in self:
            if weight.in_fp8 and weight.shard.valid and not (weight.on_host and weight.shown):
                weight.shown = True
                numbers = weight.before_cast(on_device(weight.numbers(), self.codes.device))
                cast = QuantizedTensor.of_bytes(weight.codes(), weight.covered(weight.scale), weight.spec)
                show(weight.parameter, weight.cover(numbers), cast, weight.shard.valid)

    # ---------------------------------------------------------------- casts

    @torch.no_grad()
    def cast(self) -> None:
        """Cast again what was written since the last cast. Collective; the host waits for nothing."""
        self.check_masters()
        stale = [some for some in self._sets if some.stale]
        if not stale:
            return
        if self._copy_operands():  # on the current stream, which the cast's stream must wait for, too
            self._changed = streams.record_event()
        with profiled("cast"), streams.on_stream(self._stream):
            # The stream that the masters were written on holds the products too, which read the scales.
            streams.wait_event(self._changed)
            # In this order: the last gathers have read, then all shards are written, then all ranks know it.
            self.transport.write()
            for some in stale:
                some.cast(self._wire)
            self.transport.written()
            self._gather_kept(weight for some in stale for weight in some.weights)
            self._refreshed = streams.record_event()  # gathers begin behind it

    def _copy_operands(self) -> bool:
        """Copy the codes of weights that are used in place; DeepSpeed has resharded nearly all by now."""
        in_use = [weight for weight in self if weight.operand_in_place]
        for weight in in_use:
            weight.copy_operand()
        return bool(in_use)

    def before_codes(self) -> None:
        """Let the current stream wait until a step may write codes. Collective."""
        self.check_masters()
        self.wait_for_cast()
        self._copy_operands()
        self.transport.write()

    def wait_for_cast(self) -> None:
        """Let the current stream wait for the last cast: it may still write shards and read masters."""
        streams.wait_event(self._refreshed)

    def cast_and_wait(self) -> None:
        """Let the current stream wait until all shards are cast from the present masters."""
        self.cast()
        self.wait_for_cast()

    @torch.no_grad()
    def write_residuals(self, only: OutlierChannels | None = None, but_fixed: bool = False) -> None:
        """Cast residuals again after outlier channels have changed, of all products or of one. Collective.

        `but_fixed`: not of weights whose channels do not change.
        """
        self.wait_for_cast()
        self.transport.write()
        written: list[ShardedWeight] = []
        for some in self._sets:
            fixed = all(weight.outliers is None or weight.outliers.fixed for weight in some.weights)
            if not some.stale and not (fixed and but_fixed):  # what is stale, its next cast writes
                some.write_residuals(self._wire, only)
                written += some.weights
        self.transport.written()
        in_room = [weight for weight in written if weight.has_room and only in (None, weight.outliers)]
        self._gather_kept(in_room)
        self._refreshed = streams.record_event()
        for weight in in_room:
            # The product that has just found its channels has its weights already, with the blocks of before.
            if weight.operand and not weight.operand_in_place:
                self._wire.count(GATHER, "all_gather", weight.data.nbytes, weight.shard.group)
                self.transport.gather([weight.operand_codes], [weight.data], weight.shard.group).wait()
                weight.finish_unshard(weight.operand_codes, weight.scale)

    def keep_frozen_whole(self) -> None:
        """Keep all ranks' codes of frozen weights on each from now on. Collective."""
        self.cast_and_wait()
        for stack in stacks_of(self):
            if stack[0].shard.world > 1 and all(w.in_fp8 and not is_trained(w.parameter) for w in stack):
                for weight, codes in zip(stack, self._rooms.take(stack, self.transport.allocate), strict=True):
                    weight.keep_whole(codes)
        self._gather_kept(self)
        self._refreshed = streams.record_event()  # products read what is kept as they read shards

    def _gather_kept(self, weights: Iterable[ShardedWeight]) -> None:
        """Gather codes that every rank keeps, after they were written; the current stream waits. Collective."""
        kept = sorted((weight for weight in weights if weight.kept is not None), key=lambda weight: weight.start)
        for some in in_runs(kept, lambda weight: id(weight.shard.group)):
            self._wire.count(GATHER, "all_gather", sum(weight.data.nbytes for weight in some), some[0].shard.group)
            outputs, inputs = [weight.kept for weight in some], [weight.data for weight in some]
            self.transport.gather(outputs, inputs, some[0].shard.group).wait()

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on: later casts write them in place, for CUDA graphs read them.

        Between steps. Until then every cast has scales of its own, so that whoever holds the earlier ones keeps them.
        """
        if not self._pinned:
            self.cast_and_wait()  # scales exist only after a cast, and the pinned buffer begins with copies of them
            for some in self._sets:
                some.pin_scales()
            self._pinned = True

    def check_masters(self) -> None:
        """Raise UserError where masters that are codes and corrections are those of half a step."""
        if self.masters is not None:
            self.masters.check()

    # ---------------------------------------------------------------- writes

    def step_wrote(self) -> None:
        self._wrote(self.trained.weights if self.trained else (), by_step=True)

    def step_ended_midway(self) -> None:
        """Let BF16 shards and codes follow FP32 masters of which a step has written some."""
        if self.masters is not None:
            self.masters.step_ended_midway()
        self._wrote(self.trained.weights if self.trained else ())
        if self.bf16 is not None:
            self.bf16.prepare()()

    def load_wrote(self, frozen_only: bool = False) -> None:
        """Note that all masters and BF16 shards, or those of weights that are not trained, may have been written."""
        self._wrote([weight for weight in self if not frozen_only or not is_trained(weight.parameter)])

    def user_wrote(self, parameter: nn.Parameter) -> None:
        """Note that the user wrote a parameter's masters: what was written to its BF16 shard counts no longer."""
        weight = self.of(parameter)
        if weight is not None:
            self._wrote([weight])
            if not is_gathered(parameter):  # else `reshard` frees it
                weight.free_bf16()

    def _wrote(self, weights: Iterable[ShardedWeight], by_step: bool = False) -> None:
        for weight in weights:
            weight.master_wrote()
        if self.trained and not by_step:
            self.trained.amax = None
        self._changed = streams.record_event()

    # ---------------------------------------------------------------- unshard and reshard

    def unshard(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Begin to gather weights, all `in_fp8`; return functions that wait, and make the weights available."""
        weights = sorted((self._weights[id(parameter)] for parameter in parameters), key=lambda weight: weight.start)
        return [self._unshard(some) for some in in_runs(weights, lambda weight: id(weight.shard.group))]

    def _unshard(self, weights: list[ShardedWeight], leaves_room: bool = True) -> Callable[[], None]:
        """Begin one gather of weights of one process group, sorted by `start`; the result waits for it.

        `leaves_room`: beside weights whose product is not there yet, for the rest of it.
        """
        self.wait_for_cast()
        stream = streams.current_stream()
        world, group = weights[0].shard.world, weights[0].shard.group
        stacks = stacks_of(weights)
        landed, sent = {}, []
        for stack in stacks:
            if world == 1 and stack[0].start % ALIGNMENT == 0:
                # One rank has the whole weight: its shard is what products read, and nothing is copied. A cast would
                # overwrite it while a product reads; `cast` copies what is gathered at that moment.
                landed.update((weight, weight.data) for weight in stack)
                continue
            if all(weight.kept is not None for weight in stack):
                landed.update((weight, weight.kept) for weight in stack)
                continue
            sent += stack
            landed.update(zip(stack, self._rooms.take(stack, self.transport.allocate, leaves_room), strict=True))
        for weight in weights:
            weight.unshard()  # behind the rooms, which are left for weights that are not on their way
        self._wire.count(GATHER, "all_gather", sum(weight.data.nbytes for weight in sent), group)
        outputs, inputs = [landed[weight] for weight in sent], [weight.data for weight in sent]
        # All of the group's shards in one launch: the latency of a collective is paid once a fetch, not once a weight.
        work = self.transport.gather(outputs, inputs, group) if sent else None
        scales = {weight: weight.scale for weight in sent}  # those of the codes just sent, also after later casts

        def finish() -> None:
            codes: dict[ShardedWeight, torch.Tensor] = {}
            # DeepSpeed waits for a prefetch that nobody used on the stream of the products. Waiting and copies stay on
            # the stream that the buffers were allocated on: there they are reused in order.
            with streams.on_stream(stream):
                if work is not None:
                    work.wait()
                if len(sent) < len(weights):
                    self.wait_for_cast()  # there may have been a cast since; those in place are its result
                for stack in stacks:
                    codes.update(zip(stack, without_padding(stack, [landed[w] for w in stack]), strict=True))
            streams.wait_stream(stream)
            for weight, mine in codes.items():
                weight.finish_unshard(mine, scales.get(weight, weight.scale))

        return finish

    def whole(self, parameter: nn.Parameter) -> QuantizedTensor:
        """Gather one weight for a reader other than its layer. Collective, between two steps."""
        weight = self._weights[id(parameter)]
        if weight.state is State.UNSHARDED_FP8:
            reshard(parameter)
        self.cast()
        # Begun and awaited at once: the reader wants the numbers now, and nothing runs beside it. It may keep them.
        self._unshard([weight], leaves_room=False)()
        if weight.operand_in_place:  # which the next cast overwrites: the reader gets a copy to keep
            weight.copy_operand()
        whole = replace(weight.operand, data=weight.operand.data.contiguous())  # without room
        reshard(parameter)
        return whole

    def unshard_bf16(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepare parameters for a gather by DeepSpeed; RuntimeError where a layer computes with one of them in FP8."""
        for weight in filter(None, map(self.of, parameters)):
            if weight.correction is not None:
                self.check_masters()
                self.wait_for_cast()  # it may still write what masters are decoded from
            weight.unshard_bf16()

    def part_from_shards(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy what DeepSpeed has gathered and is the shard itself (one rank)."""
        for weight in filter(None, map(self.of, parameters)):
            weight.part_from_shard()
        for parameter in (one.parameter for one in self._split(parameters)):
            if parameter.data_ptr() == bf16_shard(parameter).data_ptr():
                parameter.data = parameter.data.clone()

    def reshard(self, parameters: Iterable[nn.Parameter], may_be_written: bool) -> list[Written] | None:
        """Drop what was gathered in FP8, before DeepSpeed releases the parameters.

        Returns, for `resharded`, the weights whose BF16 shards DeepSpeed may write then; None where it writes none.
        """
        weights = [weight for weight in map(self.of, parameters) if weight is not None]
        written = [w for w in weights if may_be_written and w.state is not State.UNSHARDED_FP8 and w.in_fp8]
        for weight in weights:
            weight.reshard()
            self._rooms.resharded(weight)
        if not may_be_written:
            return None
        self.wait_for_cast()  # it may read the BF16 shards
        return [(one, bf16_shard(one.parameter).clone()) for one in (*written, *self._split(parameters))]

    def _split(self, parameters: Iterable[nn.Parameter]) -> list[SplitParameter]:
        split = {} if self.masters is None else self.masters.split
        return [split[id(parameter)] for parameter in parameters if id(parameter) in split]

    def resharded(self, parameters: Iterable[nn.Parameter], before: list[Written] | None) -> None:
        """Find out what DeepSpeed's release has written, if it may have, and free BF16 shards. Collective."""
        if before is not None:
            self._find_writes(before)
        for weight in filter(None, map(self.of, parameters)):
            # A BF16 shard that a user wrote to is what the next cast reads: it stays until a step has written masters
            # over it.
            if weight.source is Source.MASTER:
                weight.free_bf16()

    def _find_writes(self, written: Iterable[Written]) -> None:
        """Cast from their BF16 shards, from now on, the weights whose shards have changed on any rank.

        GatheredParameters with a modifier_rank may have written to them, or only have shown them to somebody (as
        save_16bit_model does): then they go on being cast from their FP32 masters. As in ZeRO-3 itself new values hold
        until the next step writes the masters over them. Collective; the host waits.
        """
        self._wrote(())
        for pairs in in_runs(written, lambda pair: id(pair[0].shard.group)):
            # By bits: NaN differs from itself.
            bits = ((w, bf16_shard(w.parameter).view(torch.int16), old.view(torch.int16)) for w, old in pairs)
            changed = [bool((new != old)[: weight.shard.valid].any()) for weight, new, old in bits]
            # A rank whose part of the weight is unchanged must cast it again as well, for its blocks share scales with
            # the others.
            flags = torch.tensor(changed, dtype=torch.int32, device=self.codes.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=pairs[0][0].shard.group)
            for (weight, old), flag in zip(pairs, flags.tolist(), strict=True):
                if flag:
                    weight.bf16_wrote(old)

    def forget_unsharded(self) -> None:
        """Drop the gathered weights of a capture that failed."""
        for weight in self:
            weight.forget()
            self._rooms.resharded(weight)

    def _end(self) -> None:
        """Leave to DeepSpeed what it would have: every weight sharded, in BF16."""
        for weight in self:
            if weight.state is State.UNSHARDED_FP8:
                reshard(weight.parameter)
            weight.leave_fp8()
            weight.make_bf16()
        self.restore_bf16()

    # ---------------------------------------------------------------- out of FP8

    def leave_fp8(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these in BF16 from now on, on all ranks alike; they are cast with the others still."""
        self.check_masters()
        self.wait_for_cast()
        for weight in filter(None, map(self.of, parameters)):
            weight.leave_fp8()
            weight.keep_bf16()

    def end_fp8(self) -> None:
        """Gather all weights in BF16 from now on, on all ranks, from shards made for each gather."""
        self.check_masters()
        self.wait_for_cast()  # it may still write codes that are kept whole, and freed now
        for weight in self:
            weight.leave_fp8()

    # ---------------------------------------------------------------- BF16 shards

    def free_bf16_shards(self) -> None:
        """Keep no BF16 shards that nobody reads. For engines whose step writes the others' only (`bf16.prepare`)."""
        if self.masters is not None or not all(is_trained(weight.parameter) for weight in self):
            self.cast_and_wait()  # while the BF16 shards are there, of which masters are made, and codes
        self.bf16 = Bf16Shards(self._engine, self._weights)

    def frozen_with_bf16(self) -> tuple[int, int] | None:
        """Return how many frozen parameters have a BF16 shard on the device, and how many there are; None without."""
        frozen = [weight for weight in self if weight.in_fp8 and not is_trained(weight.parameter)]
        if not frozen:
            return None
        return sum(weight.numel for weight in frozen if weight.has_bf16), sum(weight.numel for weight in frozen)

    def restore_bf16(self) -> None:
        """Make DeepSpeed's flat buffer of all BF16 shards, for code of its that reads or writes it."""
        if self.bf16 is not None:
            self.wait_for_cast()
            self.bf16.restore()

    def drop_bf16(self) -> None:
        """Free the flat buffer, where `restore_bf16` has made it."""
        if self.bf16 is not None:
            self.bf16.drop()
