"""The weights of an engine that are unsharded in FP8: ZeRO-3 sends one byte a parameter, and makes no BF16 copy.

After each change of the master shards they are requantized once, on a stream of their own, right after an optimizer
step, during the work that precedes the first all-gather. A step may have quantized most of their blocks itself
(quantizer.py). Frozen weights are quantized once, and again only after a write to them.

Weights whose scale needs no amax need no all-reduce. The result is bit-equal to quantizing the whole master tensor
(Micikevicius et al. quantize whole tensors; a block on the edge of two shards is why its amax must be agreed). At every
all-gather only the bytes of the shards travel: every rank knows all scales already.

On one rank a shard is the weight: it is used where it lies, until the next requantize writes there.

DeepSpeed holds a BF16 shard of every parameter, in one flat buffer, next to its FP32 master. BF16 shards of weights in
FP8 are freed, and rounded from the masters when something reads them (GatheredParameters, saving, loading). Those of
frozen weights are offloaded to the host, from where a requantize after a load reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.zero import streams
from ds_fp8.zero.coded_masters import CodedQuantizer, SplitParameter
from ds_fp8.zero.collectives import AllGather, Transport, WireMeter, choose
from ds_fp8.zero.deepspeed.masters import has_fp32_master
from ds_fp8.zero.deepspeed.optimizer import FlatBf16
from ds_fp8.zero.deepspeed.parameters import (
    bf16_shard,
    is_gathered,
    is_trained,
    master_shard,
    on_external_parameter,
    order,
    reshard,
    shard_of,
)
from ds_fp8.zero.deepspeed.patches import on_destroy
from ds_fp8.zero.param import FP8Param, Stack, State, in_runs, on_device, stacks_of
from ds_fp8.zero.quantizer import FP32Quantizer, runs_of
from ds_fp8.zero.streams import profiled

Snapshot = tuple[FP8Param | SplitParameter, torch.Tensor]  # and its BF16 shard before a release that may write to it


def _kind(stack: Stack) -> int:
    """Return which masters weights have: 0 data and corrections, 1 FP32, 2 none, for they are not trained."""
    if not all(has_fp32_master(weight.parameter) for weight in stack):
        return 0
    return 1 if any(is_trained(weight.parameter) for weight in stack) else 2


class FP8ParamGroup:
    """This rank's FP8 shards, in one buffer, and the scales of unsharded weights, the same on all ranks."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        weights: Iterable[tuple[nn.Parameter, CastSpec, OutlierChannels | None]],
        wire: WireMeter,
        frees_bf16: bool = False,
    ):
        """Allocate the shards of `weights`, each with its cast and outlier channels; the first unshard quantizes.

        `frees_bf16`: whether `free_bf16_shards` will follow.
        """
        self._engine = engine
        # Sorted, so that all ranks agree on the order.
        ordered = sorted(weights, key=lambda weight: order(weight[0]))
        stacks = stacks_of(FP8Param(p, shard_of(p), spec, outliers) for p, spec, outliers in ordered)
        kinds = [runs_of([stack for stack in stacks if _kind(stack) == kind]) for kind in range(3)]
        coded, trained, frozen = ([stack for run in runs for stack in run] for runs in kinds)
        # Keyed by id: a Parameter compares element by element.
        self._params = {id(w.parameter): w for stack in (*coded, *trained, *frozen) for w in stack}
        # Shards that are fetched together lie side by side: what is sent is a view.
        numels, device = [weight.data_numel for weight in self], stacks[0][0].parameter.device
        if frees_bf16 and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * sum(numels):
            self._move_frozen_to_host()  # before there are data; the first requantize copies them back one by one
        groups = list({id(weight.shard.group): weight.shard.group for weight in self}.values())
        self.transport: Transport = choose(sum(numels), device, groups)
        self._all_gather = AllGather(stacks, wire, self.transport)
        self.data = self.transport.local
        for weight, data in zip(self, self.data.split(numels), strict=True):
            weight.data = data
            if weight.outliers is not None:
                weight.outliers.on_found = self.write_residuals
        self.coded = CodedQuantizer(engine, coded, wire) if coded else None
        self.trained = FP32Quantizer(trained, wire, self.data) if trained else None
        rest = FP32Quantizer(frozen, wire, self.data) if frozen else None
        self.quantizers = [some for some in (self.coded, self.trained, rest) if some is not None]
        # Not the stream of the products: requantize overlaps with all that precedes the first all-gather of the step.
        self._stream = streams.new_stream()
        self._stale = True  # something may have been written since the last requantize
        # After the last write to masters or BF16 shards; the initial weights were written on the current stream.
        self._write_event: object | None = streams.record_event()
        self._pinned = False
        self._flat_bf16: FlatBf16 | None = None  # DeepSpeed's buffer of BF16 shards, where it is freed
        on_destroy(engine, self._end)
        # A module that reads another module's weight needs BF16, not FP8 data.
        on_external_parameter(engine, lambda parameter: self.leave_fp8([parameter]))

    def __iter__(self) -> Iterator[FP8Param]:
        return iter(self._params.values())

    def of(self, parameter: nn.Parameter) -> FP8Param | None:
        """Return the weight of a parameter; None where DeepSpeed gathers it."""
        return self._params.get(id(parameter))

    def _of(self, parameters: Iterable[nn.Parameter]) -> list[FP8Param]:
        return [weight for weight in map(self.of, parameters) if weight is not None]

    def in_fp8(self, parameter: nn.Parameter) -> bool:
        weight = self.of(parameter)
        return weight is not None and weight.in_fp8

    def on_host(self, parameter: nn.Parameter) -> bool:
        """Return whether the BF16 shard of this parameter is offloaded while its FP8 shard is resident."""
        weight = self.of(parameter)
        return weight is not None and weight.on_host

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's FP8 shards, and for unsharded weights: data kept, scales, residuals."""
        kept = sum(weight.kept_data.nbytes for weight in self if weight.kept_data is not None)
        return self.data.nbytes + kept + sum(some.nbytes for some in self.quantizers)

    @property
    def kept_numel(self) -> int:
        """Return the number of parameters that every rank keeps unsharded in FP8, and never gathers."""
        return sum(weight.shard.shape.numel() for weight in self if weight.kept_data is not None)

    def addresses(self) -> tuple[int, ...]:
        """Return where the shards lie, and which weights are gathered from them."""
        return (self.data.data_ptr(), *(key for key, weight in self._params.items() if weight.in_fp8))

    def observe(self, report: Callable[[nn.Parameter, torch.Tensor, QuantizedTensor, int], None]) -> None:
        """Call `report(parameter, rows, quantized, elements)` for each shard that is gathered in FP8. Between steps.

        Rows: those of which the shard has elements, in high precision and quantized. A frozen weight, whose BF16 shard
        is on the host, is reported once after each requantize.
        """
        self.wait_for_requantize()
        for weight in self:
            if weight.in_fp8 and weight.shard.valid and not (weight.on_host and weight.logged):
                weight.logged = True
                numbers = weight.before_cast(on_device(weight.numbers(), self.data.device))
                quantized = QuantizedTensor.of_bytes(weight.covered_data(), weight.covered(weight.scale), weight.spec)
                report(weight.parameter, weight.cover(numbers), quantized, weight.shard.valid)

    # ---------------------------------------------------------------- requantize

    @torch.no_grad()
    def requantize(self) -> None:
        """Quantize again what was written since the last time. Collective; the host waits for nothing."""
        self.check_masters()
        # Called for every fetch: one flag, before all weights are asked.
        stale = [some for some in self.quantizers if some.stale] if self._stale else []
        if not stale:
            return
        if self._copy_unsharded():  # on the current stream, which the stream of requantize must wait for, too
            self._write_event = streams.record_event()
        with profiled("cast"), streams.on_stream(self._stream):
            # Products run on the stream that wrote the masters, and read the present scales: this waits for them too.
            streams.wait_event(self._write_event)
            # In this order: wait for the last all-gathers, write all shards, let all ranks know.
            self.transport.write()
            for some in stale:
                some.requantize()
            self.transport.written()
            self._all_gather.gather_kept(weight for some in stale for weight in some.weights)
            self._all_gather.ready = streams.record_event()  # the next all-gathers wait for it
        self._stale = False  # last: an interrupted requantize is repeated

    def _copy_unsharded(self) -> bool:
        """Copy the data of weights that products read in place; DeepSpeed has resharded nearly all by now."""
        in_use = [weight for weight in self if weight.unsharded_in_place]
        for weight in in_use:
            weight.copy_unsharded()
        return bool(in_use)

    def before_update(self) -> None:
        """Let the current stream wait until a step may write data. Collective."""
        self.check_masters()
        self.wait_for_requantize()
        self._copy_unsharded()
        self.transport.write()

    def wait_for_requantize(self) -> None:
        """Let the current stream wait for the last requantize: it may still write shards and read masters."""
        streams.wait_event(self._all_gather.ready)

    def requantize_and_wait(self) -> None:
        """Let the current stream wait until all shards are quantized from the present masters."""
        self.requantize()
        self.wait_for_requantize()

    @torch.no_grad()
    def write_residuals(self, only: OutlierChannels | None = None, but_fixed: bool = False) -> None:
        """Quantize residuals again after outlier channels have changed, of all products or of one. Collective.

        `but_fixed`: not of weights whose channels do not change.
        """
        self.wait_for_requantize()
        self.transport.write()
        written: list[FP8Param] = []
        for some in self.quantizers:
            fixed = all(weight.outliers is None or weight.outliers.fixed for weight in some.weights)
            if not some.stale and not (fixed and but_fixed):  # what is stale, requantize writes
                some.write_residuals(only)
                written += some.weights
        self.transport.written()
        in_room = [weight for weight in written if weight.has_room and only in (None, weight.outliers)]
        self._all_gather.gather_kept(in_room)
        self._all_gather.ready = streams.record_event()
        for weight in in_room:
            # The product that has just selected its channels has unsharded weights with the old blocks.
            if weight.unsharded and not weight.unsharded_in_place:
                self._all_gather.gather_again(weight)

    def keep_frozen_unsharded(self) -> None:
        """Keep all ranks' data of frozen weights on each from now on. Collective."""
        self.requantize_and_wait()
        for stack in stacks_of(self):
            if stack[0].shard.world > 1 and all(w.in_fp8 and not is_trained(w.parameter) for w in stack):
                for weight, data in zip(stack, self._all_gather.allocate(stack), strict=True):
                    weight.kept_data = data
        self._all_gather.gather_kept(self)
        self._all_gather.ready = streams.record_event()  # products wait for it before they read kept data

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on, between steps: requantize writes in place what graphs read."""
        if not self._pinned:
            self.requantize_and_wait()  # the pinned buffer begins with copies of the present scales
            for some in self.quantizers:
                some.pin_scales()
            self._pinned = True

    # ---------------------------------------------------------------- masters: reads and writes

    def check_masters(self) -> None:
        """Raise UserError where masters that are data and corrections are those of half a step."""
        if self.coded is not None:
            self.coded.check()

    def read_master(self, parameter: nn.Parameter) -> AbstractContextManager:
        """Let DeepSpeed find the FP32 masters of a parameter inside."""
        if self.coded is None:
            return nullcontext()
        self.wait_for_requantize()
        return self.coded.read(parameter)

    def write_master(self, parameter: nn.Parameter | None = None) -> AbstractContextManager:
        """Let DeepSpeed write the FP32 masters of one parameter, or of all, inside."""
        self.wait_for_requantize()
        return nullcontext() if self.coded is None else self.coded.written(parameter)

    def into_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put FP32 masters into a state dict of the ZeRO optimizer that has none of some parameters."""
        if self.coded is None:
            return state
        self.wait_for_requantize()
        return self.coded.into_state(state)

    def step_wrote(self) -> None:
        self._mark_stale(self.trained.weights if self.trained else (), by_step=True)

    def step_ended_midway(self) -> None:
        """Let BF16 shards and data follow FP32 masters of which a step has written some."""
        if self.coded is not None:
            self.coded.step_ended_midway()
        self._mark_stale(self.trained.weights if self.trained else ())
        if self._flat_bf16 is not None:
            self.prepare_bf16()()

    def load_wrote(self, frozen_only: bool = False) -> None:
        """Note that all masters and BF16 shards, or those of weights that are not trained, may have been written."""
        self._mark_stale([weight for weight in self if not frozen_only or not is_trained(weight.parameter)])

    def user_wrote(self, parameter: nn.Parameter) -> None:
        """Note that the user wrote a parameter's masters: they override writes to its BF16 shard."""
        weight = self.of(parameter)
        if weight is not None:
            self._mark_stale([weight])
            if not is_gathered(parameter):  # else `reshard` frees it
                weight.free_bf16()

    def _mark_stale(self, weights: Iterable[FP8Param], by_step: bool = False) -> None:
        for weight in weights:
            weight.master_written()
        if self.trained and not by_step:
            self.trained.amax = None
        self._stale = True
        self._write_event = streams.record_event()

    # ---------------------------------------------------------------- unshard and reshard

    def unshard(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Begin to gather weights, all `in_fp8`; return functions that wait, and make the weights available."""
        weights = sorted((self._params[id(parameter)] for parameter in parameters), key=lambda weight: weight.start)
        return [self._all_gather.begin(some) for some in in_runs(weights, lambda weight: id(weight.shard.group))]

    def unsharded(self, parameter: nn.Parameter) -> QuantizedTensor:
        """Gather one weight for a reader other than its layer. Collective, between two steps."""
        weight = self._params[id(parameter)]
        if weight.state is State.UNSHARDED:
            reshard(parameter)
        self.requantize()
        # Waited for at once: nothing overlaps with it.
        self._all_gather.begin([weight], alone=True)()
        if weight.unsharded_in_place:  # which requantize overwrites: the reader gets a copy to keep
            weight.copy_unsharded()
        unsharded = replace(weight.unsharded, data=weight.unsharded.data.contiguous())  # without room
        reshard(parameter)
        return unsharded

    def unshard_bf16(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepare parameters for a gather by DeepSpeed; RuntimeError where a layer computes with one of them in FP8."""
        for weight in self._of(parameters):
            if weight.correction is not None:
                self.check_masters()
                self.wait_for_requantize()  # it may still write the data of masters
            weight.unshard_bf16()

    def copy_from_shards(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy BF16 weights that are the shard itself (one rank): writes are found by comparing the two."""
        weights = [weight for weight in self._of(parameters) if weight.in_fp8 and weight.has_bf16]
        for parameter in (one.parameter for one in (*weights, *self._split(parameters))):
            if parameter.data_ptr() == bf16_shard(parameter).data_ptr():
                parameter.data = parameter.data.clone()

    def reshard(self, parameters: Iterable[nn.Parameter], may_be_written: bool) -> list[Snapshot] | None:
        """Drop what was unsharded in FP8, before DeepSpeed releases the parameters.

        Returns, for `resharded`, the weights whose BF16 shards DeepSpeed may write then; None where it writes none.
        """
        weights = self._of(parameters)
        written = [w for w in weights if may_be_written and w.in_fp8 and w.state is not State.UNSHARDED]
        for weight in weights:
            weight.reshard()
            self._all_gather.resharded(weight)
        if not may_be_written:
            return None
        self.wait_for_requantize()  # it may read the BF16 shards
        return [(one, bf16_shard(one.parameter).clone()) for one in (*written, *self._split(parameters))]

    def _split(self, parameters: Iterable[nn.Parameter]) -> list[SplitParameter]:
        split = {} if self.coded is None else self.coded.split
        return [split[id(parameter)] for parameter in parameters if id(parameter) in split]

    def resharded(self, parameters: Iterable[nn.Parameter], before: list[Snapshot] | None) -> None:
        """Find out what DeepSpeed's release has written, if it may have, and free BF16 shards. Collective."""
        if before is not None:
            self._find_writes(before)
        for weight in self._of(parameters):
            # A BF16 shard that a user wrote to is the source of requantize until a step writes the masters.
            if not weight.from_bf16:
                weight.free_bf16()

    def _find_writes(self, before: Iterable[Snapshot]) -> None:
        """Quantize from their BF16 shards, from now on, the weights whose shards have changed on any rank.

        GatheredParameters with a modifier_rank may have written to them, or only have read them (as
        save_16bit_model does): then the FP32 masters stay the source. As in ZeRO-3 itself new values hold until the
        next step writes the masters over them. Collective; the host waits.
        """
        self._mark_stale(())
        for pairs in in_runs(before, lambda pair: id(pair[0].shard.group)):
            # By bits: NaN differs from itself.
            bits = ((w, bf16_shard(w.parameter).view(torch.int16), old.view(torch.int16)) for w, old in pairs)
            changed = [bool((new != old)[: weight.shard.valid].any()) for weight, new, old in bits]
            # A rank whose part of the weight is unchanged must quantize it again as well, for its blocks share scales
            # with the others.
            flags = torch.tensor(changed, dtype=torch.int32, device=self.data.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=pairs[0][0].shard.group)
            for (weight, old), flag in zip(pairs, flags.tolist(), strict=True):
                if flag:
                    weight.bf16_written(old)

    def forget_unsharded(self) -> None:
        """Drop the unsharded weights of a capture that failed."""
        for weight in self:
            weight.forget()
            self._all_gather.resharded(weight)

    def _end(self) -> None:
        """Leave to DeepSpeed what it would have: every weight sharded, in BF16."""
        for weight in self:
            if weight.state is State.UNSHARDED:
                reshard(weight.parameter)
            weight.leave_fp8()
            weight.make_bf16()
        self.restore_bf16()

    # ---------------------------------------------------------------- weights that leave FP8

    def leave_fp8(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these in BF16 from now on, on all ranks alike; they are quantized with the others still."""
        self.check_masters()
        self.wait_for_requantize()
        for weight in self._of(parameters):
            weight.leave_fp8()
            weight.make_bf16()  # what a user wrote there stays
            weight.frees_bf16 = False

    def end_fp8(self) -> None:
        """Gather all weights in BF16 from now on, on all ranks, from shards made for each gather."""
        self.check_masters()
        self.wait_for_requantize()  # it may still write data that are kept unsharded, and freed now
        for weight in self:
            weight.leave_fp8()

    # ---------------------------------------------------------------- BF16 shards

    def free_bf16_shards(self) -> None:
        """Keep no BF16 shards that nobody reads. For engines whose step writes the others only (`prepare_bf16`)."""
        if self.coded is not None or not all(is_trained(weight.parameter) for weight in self):
            self.requantize_and_wait()  # while the BF16 shards are there, of which masters are made, and data
        self._flat_bf16 = FlatBf16(self._engine)
        for weight in self:
            weight.frees_bf16 = weight.frees_bf16 or (weight.in_fp8 and is_trained(weight.parameter))
        self._move_frozen_to_host()
        self.drop_bf16()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # of blocks as large as the model, which activations would leave in pieces

    def _move_frozen_to_host(self) -> None:
        for weight in self:
            if weight.in_fp8 and not is_trained(weight.parameter):
                weight.frees_bf16 = True
                weight.free_bf16()
                if weight.outliers is not None:
                    weight.outliers.fixed = True

    def prepare_bf16(self) -> Callable[[], None]:
        """Return what rounds the new masters of a step into the BF16 shards that exist for good, and frees the others.

        Finding them takes the host longer than rounding takes the GPU: hundreds of adapters and vectors.
        """
        kept = self._trained_with(lambda weight: not weight.frees_bf16)
        coded = [weight for weight in self._of(kept) if weight.correction is not None]
        # Without those whose masters are in BF16: the step has rounded them.
        masters = {p: master_shard(p) for p in kept if has_fp32_master(p)}

        def write() -> None:
            # Masters of data are dequantized with the scales of the step.
            self._flat_bf16.round(masters | {weight.parameter: weight.master() for weight in coded})
            for weight in self:
                weight.free_bf16()  # what a user wrote there held until now

        return write

    def restore_bf16(self) -> None:
        """Make DeepSpeed's flat buffer of all BF16 shards, for code of its that reads or writes it."""
        if self._flat_bf16 is not None:
            self.wait_for_requantize()
            for weight in self:
                if not weight.on_host:
                    weight.make_bf16()
            self._flat_bf16.restore()

    def drop_bf16(self) -> None:
        """Free the flat buffer, if it exists, and keep of it only what is needed, or quantized from."""
        if self._flat_bf16 is not None and self._flat_bf16.exists:
            for weight in self:
                if not weight.from_bf16:
                    weight.free_bf16()
            self._flat_bf16.drop(self._trained_with(lambda weight: weight.has_bf16))

    def _trained_with(self, keeps: Callable[[FP8Param], bool]) -> list[nn.Parameter]:
        trained = self._flat_bf16.parameters
        return [parameter for parameter in trained if (weight := self.of(parameter)) is None or keeps(weight)]

    def frozen_with_bf16(self) -> tuple[int, int] | None:
        """Return how many frozen parameters have a BF16 shard on the device, and how many there are; None without."""
        frozen = [weight for weight in self if weight.in_fp8 and not is_trained(weight.parameter)]
        numel = sum(weight.shard.shape.numel() for weight in frozen)
        return (sum(weight.shard.shape.numel() for weight in frozen if weight.has_bf16), numel) if frozen else None
