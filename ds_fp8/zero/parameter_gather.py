"""FP8 parameter all-gather: ZeRO-3 gathers one byte a parameter, and no BF16 copy of the weight ever exists.

After each change of the FP32 master shards they are cast once (fp8_shards.py). At every gather of a weight only the
bytes of the shards travel: every rank knows all scales already.

Weights of one fused product (`GROUP`: q, k, v; gate, up) that are fetched together arrive as adjacent row slices of one
buffer, and their scales always lie so: wherever stacking keeps the scales, it is a view.

On one rank a shard is the weight: it is used where it lies, until the next cast writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import deepspeed
import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import GATHERED
from ds_fp8.zero import seams, streams
from ds_fp8.zero.cast_set import in_runs
from ds_fp8.zero.fp8_shards import FP8Shards, Written
from ds_fp8.zero.seams.bf16_shards import Bf16Shards
from ds_fp8.zero.shards import ShardedWeight, stacks_of, without_padding
from ds_fp8.zero.wire import GATHER, WireMeter

ALIGNMENT = 256
"""Bytes from the beginning of all shards that a product's operand may lie at a multiple of; elsewhere it is copied.
cuBLASLt chooses its kernel, and with it the last bits, by the alignment of addresses."""


class ParameterGather:
    """Gathers the given weights of a ZeRO-3 engine in FP8; every other parameter as DeepSpeed does."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        weights: Iterable[tuple[nn.Parameter, CastSpec, OutlierChannels | None]],
        wire: WireMeter,
    ):
        """Allocate and cast nothing yet: the first gather does.

        Args:
            engine: of ZeRO stage 3.
            weights: each with its cast, which is the one its products read, and the outlier channels of its input.
            wire: counts the bytes.
        """
        self._wire = wire
        self.shards = FP8Shards(weights, wire)
        self._weights = self.shards.weights
        """Weights that are gathered in FP8, by id: a Parameter compares element by element."""
        self._all = list(self._weights.values())
        """Weights that were left out later, too: some may still be gathered in FP8."""
        self.shards.before_cast = self._leave_shards
        self.transport = self.shards.transport.description
        self._bf16: Bf16Shards | None = None
        seams.on_destroy(engine, self._release)
        # A module that reads another module's weight needs numbers, not FP8 codes.
        seams.on_external_parameter(engine, lambda parameter: self.leave_out([parameter]))

    def free_bf16_shards(self, engine: deepspeed.DeepSpeedEngine) -> Bf16Shards:
        """Keep no BF16 shards of the weights gathered in FP8. For engines whose step writes the others' only."""
        self._bf16 = Bf16Shards(engine, (weight.parameter for weight in self._weights.values()))
        return self._bf16

    def settle(self) -> None:
        """Let the current stream wait until all shards are cast from the present masters, if need be by a cast."""
        self.shards.cast()
        self.shards.wait_for_cast()

    def pin_scales(self) -> None:
        """Keep the scales where they are, as FP8Shards.pin_scales does."""
        self.shards.pin_scales()

    def addresses(self) -> tuple[int, ...]:
        """Return where the shards lie, and which weights are gathered from them."""
        return (self.shards.codes.data_ptr(), *self._weights)

    def forget_gathered(self) -> None:
        """Drop the gathered weights, without updating their ds_status."""
        for weight in self._weights.values():
            setattr(weight.parameter, GATHERED, None)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these weights in BF16 from now on, on all ranks alike; those gathered in FP8 stay so until released.

        Their place among the FP8 shards stays, and is cast with the others'.
        """
        for parameter in parameters:
            if self._weights.pop(id(parameter), None) is not None and self._bf16 is not None:
                self._bf16.need(parameter)

    def gather_in_bf16(self) -> None:
        """Gather every weight in BF16 from now on, on all ranks alike; none is gathered at this moment.

        Unlike `leave_out` this keeps no BF16 shards: each gather rounds its own from the masters.
        """
        self._weights.clear()

    def gathers(self, parameter: nn.Parameter) -> bool:
        """Return whether this weight is gathered in FP8."""
        return id(parameter) in self._weights

    def whole(self, parameter: nn.Parameter) -> QuantizedTensor:
        """Gather one weight for a reader other than its layer. Collective, between two steps.

        Returns:
            The codes and scales [R, C] that the next forward multiplies by.
        """
        if getattr(parameter, GATHERED, None) is not None:
            parameter.partition()
        self.shards.cast()
        # Begun and awaited at once: the reader wants the numbers now, and nothing runs beside it.
        self._begin([self._weights[id(parameter)]])()
        gathered = getattr(parameter, GATHERED)
        parameter.partition()
        # On one rank the operand is the shard itself, which the next cast overwrites: the reader gets a copy to keep.
        return self._copied(gathered) if self._in_shards(gathered) else gathered

    def _in_shards(self, gathered: QuantizedTensor) -> bool:
        """Return whether a gathered weight is this rank's shard itself."""
        return gathered.data.untyped_storage().data_ptr() == self.shards.codes.untyped_storage().data_ptr()

    @staticmethod
    def _copied(gathered: QuantizedTensor) -> QuantizedTensor:
        return replace(gathered, data=gathered.data.view(torch.uint8).clone().view(gathered.data.dtype))

    def _leave_shards(self) -> bool:
        """Copy the weights that are gathered now and lie in the shards: their scales belong to the codes of now.

        DeepSpeed has released nearly all of them by the time of a cast.

        Returns:
            Whether there were any.
        """
        gathered = [(weight.parameter, getattr(weight.parameter, GATHERED, None)) for weight in self._all]
        inside = [(parameter, mine) for parameter, mine in gathered if mine is not None and self._in_shards(mine)]
        for parameter, mine in inside:
            setattr(parameter, GATHERED, self._copied(mine))
        return bool(inside)

    def gather(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Begin to gather weights that are gathered in FP8.

        Returns:
            Functions that wait, and make the weights available.
        """
        weights = sorted((self._weights[id(parameter)] for parameter in parameters), key=lambda weight: weight.start)
        return [self._begin(some) for some in in_runs(weights, lambda weight: id(weight.shard.group))]

    def _begin(self, weights: list[ShardedWeight]) -> Callable[[], None]:
        """Begin one gather of weights of one process group, sorted by `start`; the result waits for it."""
        self.shards.wait_for_cast()
        stream = streams.current_stream()
        # DeepSpeed counts a parameter as in flight from here on: a second gather of it would be an error.
        for weight in weights:
            seams.begin_gather(weight.parameter)
        world, group = weights[0].shard.world, weights[0].shard.group
        # The weights of a fused product land next to each other, where the product reads them.
        stacks = stacks_of(weights)
        landed, sent = {}, []
        for stack in stacks:
            if world == 1 and stack[0].start % ALIGNMENT == 0:
                # One rank has the whole weight: its shard is what products read, and nothing is copied. A cast would
                # overwrite it while a product reads; before_cast copies what is gathered at that moment.
                landed.update((weight, weight.data) for weight in stack)
                continue
            sent += stack
            # One allocation for a stack: what lands side by side is one operand, without a concatenation.
            lengths = [world * weight.shard.numel for weight in stack]
            landed.update(zip(stack, self.shards.transport.allocate(sum(lengths)).split(lengths), strict=True))
        self._wire.count(GATHER, "all_gather", sum(weight.data.nbytes for weight in sent), group)
        outputs, inputs = [landed[weight] for weight in sent], [weight.data for weight in sent]
        # All of the group's shards in one launch: the latency of a collective is paid once a fetch, not once a weight.
        work = self.shards.transport.gather(outputs, inputs, group) if sent else None
        scales = {weight: weight.scale for weight in sent}  # those of the codes just sent, also after later casts

        def finish() -> None:
            gathered = {}
            # DeepSpeed waits for a prefetch that nobody used on the stream of the products. Waiting and copies stay on
            # the stream that the buffers were allocated on: there they are reused in order.
            with streams.on_stream(stream):
                if work is not None:
                    work.wait()
                if len(sent) < len(weights):
                    self.shards.wait_for_cast()  # there may have been a cast since; those in place are its result
                for stack in stacks:
                    codes = without_padding(stack, [landed[weight] for weight in stack])
                    gathered.update(zip(stack, codes, strict=True))
            streams.wait_stream(stream)
            for weight, codes in gathered.items():
                scale = scales.get(weight, weight.scale)
                whole = QuantizedTensor.of_bytes(codes.view(weight.shard.shape), scale, weight.spec)
                # Layers read their operand from this attribute. The parameter's data is a placeholder meanwhile, for
                # code that looks at shape and dtype.
                setattr(weight.parameter, GATHERED, whole)
                weight.parameter.data = weight.placeholder
                seams.end_gather(weight.parameter)

        return finish

    def give_bf16(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepare parameters for a gather in BF16: readers such as GatheredParameters want numbers.

        Raises:
            RuntimeError: One of them is gathered in FP8, for a layer that is computing.
        """
        for parameter in parameters:
            if getattr(parameter, GATHERED, None) is not None:
                if seams.in_use(parameter) and id(parameter) in self._weights:
                    raise RuntimeError(
                        "a weight gathered in FP8 was asked for in BF16 while its layer is computing; "
                        'name the layer in "fp8": {"linear": {"skip": [...]}}'
                    )
                parameter.partition()
            if self._bf16 is not None:
                self._bf16.make(parameter)

    def part_from_shards(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy what was gathered in BF16 and is the shard itself (one rank): `release` compares it with the shard."""
        for parameter in parameters:
            shard = seams.bf16_shard(parameter)
            if id(parameter) in self._weights and parameter.data_ptr() == shard.data_ptr() and shard.is_contiguous():
                parameter.data = parameter.data.clone()

    def release(self, parameters: Iterable[nn.Parameter], may_be_written: bool) -> list[Written] | None:
        """Drop what was gathered in FP8, before DeepSpeed releases the parameters.

        Args:
            parameters: Those to be released.
            may_be_written: Whether DeepSpeed then writes what was gathered in BF16 back to its shards.

        Returns:
            Weights whose BF16 shards may be written, for `released`; None where none can be.
        """
        written = []
        for parameter in parameters:
            gathered = getattr(parameter, GATHERED, None)
            if gathered is not None:
                if not self._in_shards(gathered):
                    # Allocated on the stream of gathers, read by products on this one.
                    streams.used_by_current_stream(gathered.data)
                setattr(parameter, GATHERED, None)
            elif may_be_written and id(parameter) in self._weights:
                written.append(self._weights[id(parameter)])
        if not may_be_written:
            return None
        self.shards.wait_for_cast()  # it may read the BF16 shards
        return [(weight, seams.bf16_shard(weight.parameter).clone()) for weight in written]

    def released(self, parameters: Iterable[nn.Parameter], before: list[Written] | None) -> None:
        """Find out what was written, after DeepSpeed has released the parameters. Collective where something may be."""
        if before is not None:
            self.shards.bf16_updated(before)
        if self._bf16 is not None:
            for parameter in parameters:
                # A BF16 shard that a user wrote to is what the next cast reads: it stays until a step has written
                # masters over it.
                if not self.shards.casts_bf16(parameter):
                    self._bf16.free(parameter)

    def _release(self) -> None:
        """Partition every weight that is still gathered in FP8."""
        for weight in self._weights.values():
            if getattr(weight.parameter, GATHERED, None) is not None:
                weight.parameter.partition()
