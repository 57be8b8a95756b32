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
from ds_fp8.layers.outlier_channels import OutlierChannels
from ds_fp8.layers.weights import GATHERED
from ds_fp8.zero import grouped, seams, streams
from ds_fp8.zero.cast_set import in_runs
from ds_fp8.zero.fp8_shards import FP8Shards
from ds_fp8.zero.seams.bf16_shards import Bf16Shards
from ds_fp8.zero.shards import ShardedWeight, stacks_of, without_padding
from ds_fp8.zero.wire import GATHER, WireMeter

ALIGNMENT = 256
"""Bytes from the beginning of all shards that a product's operand may lie at a multiple of; elsewhere it is copied.
cuBLASLt chooses its kernel, and with it the last bits, by the alignment of addresses."""


class _Handle:
    """Handle that DeepSpeed waits on: FP8 gathers in flight, and its own handle for parameters gathered in BF16."""

    def __init__(self, finish: list[Callable[[], None]], stock: object | None):
        self._finish, self._stock = finish, stock

    def wait(self, handle_dependency: bool = True) -> None:
        if self._stock is not None:
            self._stock.wait(handle_dependency=handle_dependency)
            self._stock = None
        while self._finish:
            self._finish.pop(0)()


class ParameterGather:
    """Gathers the given weights of a ZeRO-3 engine in FP8; every other parameter as DeepSpeed does."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        weights: Iterable[tuple[nn.Parameter, CastSpec, OutlierChannels | None]],
        wire: WireMeter,
        transport: str = "nccl",
    ):
        """Install the gather.

        Args:
            engine: of ZeRO stage 3.
            weights: each with its cast, which is the one its products read, and the outlier channels of its input.
            wire: counts the bytes.
            transport: as of fp8.param_gather; UserError for "copy_engine" where that cannot be.
        """
        self._wire = wire
        self._shards = FP8Shards(weights, wire, transport)
        self._weights = self._shards.weights
        """By id: a Parameter compares element by element."""
        self._all = list(self._weights.values())
        """Those too that were left out later: some may still be gathered in FP8."""
        self._shards.before_cast = self._leave_shards
        self.transport = self._shards.transport
        self._bf16: Bf16Shards | None = None
        for parameter in engine.module.parameters():
            if seams.is_zero_parameter(parameter):
                for name, wrapper in (
                    ("all_gather_coalesced", self._wrap_all_gather_coalesced),
                    ("all_gather", lambda stock, p=parameter: self._wrap_all_gather(p, stock)),
                    ("partition", lambda stock, p=parameter: self._wrap_partition(p, stock)),
                ):
                    seams.wrap_closure(engine, parameter, name, wrapper)
        seams.on_destroy(engine, self._release)
        # Whoever reads a weight that is not its own wants numbers, not FP8 codes.
        seams.on_external_parameter(engine, lambda parameter: self.leave_out([parameter]))
        shards = self._shards
        seams.around_master_update(
            engine, shards.wait_for_refresh, shards.masters_updated, shards.loaded, shards.master_written
        )
        seams.on_step(engine, self._shards.refresh_if_stale)
        seams.before_load(engine, shards.loaded)
        self._shards.loaded()

    def free_bf16_shards(self, engine: deepspeed.DeepSpeedEngine) -> Bf16Shards:
        """Keep no BF16 shards of the weights gathered in FP8. For engines whose step writes the others' only."""
        self._bf16 = Bf16Shards(engine, (weight.parameter for weight in self._weights.values()))
        return self._bf16

    @property
    def bytes_per_rank(self) -> int:
        """Return the bytes of this rank's FP8 shards and of the scales of all weights."""
        return self._shards.nbytes

    def observe(self, show: Callable[[nn.Parameter, torch.Tensor, QuantizedTensor, int], None]) -> None:
        """Call an observer with the casts of all weights, as FP8Shards.observe does. Between steps."""
        self._shards.observe(show)

    def settle(self) -> None:
        """Let the current stream wait until all shards are cast from the present masters, if need be by a cast."""
        self._shards.refresh_if_stale()
        self._shards.wait_for_refresh()

    def write_residuals(self) -> None:
        """Cast residuals again after outlier channels have changed. Collective, between steps."""
        self._shards.write_residuals()

    def pin_scales(self) -> None:
        """Keep the scales where they are, as FP8Shards.pin_scales does."""
        self._shards.pin_scales()

    def addresses(self) -> tuple[int, ...]:
        """Return where the shards lie, and which weights are gathered from them."""
        return (self._shards.codes.data_ptr(), *self._weights)

    def forget_gathered(self) -> None:
        """Drop the gathered weights, without a word to DeepSpeed."""
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
        self._shards.refresh_if_stale()
        self._gather([self._weights[id(parameter)]])()
        gathered = getattr(parameter, GATHERED)
        parameter.partition()
        return self._copied(gathered) if self._in_shards(gathered) else gathered

    def _in_shards(self, gathered: QuantizedTensor) -> bool:
        """Return whether a gathered weight is this rank's shard itself."""
        return gathered.data.untyped_storage().data_ptr() == self._shards.codes.untyped_storage().data_ptr()

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

    def _gather(self, weights: list[ShardedWeight]) -> Callable[[], None]:
        """Start one all-gather for `weights`, of one process group and sorted by `start`.

        The result, called, waits and makes them available.
        Whatever stream is current when it is waited for (DeepSpeed waits for a prefetch that nobody used on that of the
        products), the waiting and the copies behind it stay on the stream that the buffers belong to.
        """
        self._shards.wait_for_refresh()
        self._shards.read_on(stream := streams.current_stream())
        for weight in weights:
            seams.begin_gather(weight.parameter)
        world, group = weights[0].shard.world, weights[0].shard.group
        # The weights of a fused product land next to each other, where the product reads them.
        stacks = stacks_of(weights)
        landed, sent = {}, []
        for stack in stacks:
            if world == 1 and stack[0].start % ALIGNMENT == 0:
                landed.update((weight, weight.data) for weight in stack)
                continue
            sent += stack
            lengths = [world * weight.shard.numel for weight in stack]
            landed.update(zip(stack, self._shards.codes.new_empty(sum(lengths)).split(lengths), strict=True))
        self._wire.count(GATHER, "all_gather", sum(weight.data.nbytes for weight in sent), group)
        outputs, inputs = [landed[weight] for weight in sent], [weight.data for weight in sent]
        peers = self._shards.peers
        work = None
        if sent:
            work = peers.all_gather(outputs, inputs) if peers else grouped.all_gather(outputs, inputs, group)
        scales = {weight: weight.scale for weight in sent}  # those of the codes just sent, whatever comes later

        def finish() -> None:
            gathered = {}
            with streams.on_stream(stream):
                if work is not None:
                    work.wait()
                if len(sent) < len(weights):
                    self._shards.wait_for_refresh()  # there may have been a cast since; those in place are its result
                for stack in stacks:
                    gathered.update(
                        zip(stack, without_padding(stack, [landed[weight] for weight in stack]), strict=True)
                    )
            streams.wait_stream(stream)
            for weight, codes in gathered.items():
                self._make_available(weight, codes, scales.get(weight, weight.scale))

        return finish

    def _make_available(self, weight: ShardedWeight, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Set the parameter's `fp8_gathered` from the uint8 codes [R * C]."""
        gathered = QuantizedTensor.of_bytes(codes.view(weight.shard.shape), scale, weight.spec)
        setattr(weight.parameter, GATHERED, gathered)
        weight.parameter.data = weight.placeholder
        seams.end_gather(weight.parameter)

    def _wrap_all_gather_coalesced(self, stock: Callable) -> Callable:
        def all_gather_coalesced(params: Iterable[nn.Parameter], safe_mode: bool = False, quantize: bool = False):
            params = sorted(params, key=seams.order)
            ours = [self._weights[id(p)] for p in params if id(p) in self._weights]
            ours.sort(key=lambda weight: weight.start)
            others = [p for p in params if id(p) not in self._weights]
            if ours:
                self._shards.refresh_if_stale()
            if self._bf16 is not None:
                for p in others:
                    self._bf16.make(p)
            handle = stock(others, safe_mode=safe_mode, quantize=quantize) if others else None
            by_group = in_runs(ours, lambda weight: id(weight.shard.group))
            return _Handle([self._gather(weights) for weights in by_group], handle)

        return all_gather_coalesced

    def _wrap_all_gather(self, parameter: nn.Parameter, stock: Callable) -> Callable:
        """Wrap the blocking gather behind GatheredParameters: its users want real BF16 weights."""

        def all_gather(param_list: list[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0):
            params = [parameter] if param_list is None else list(param_list)
            for p in params:
                if getattr(p, GATHERED, None) is not None:
                    if seams.in_use(p) and id(p) in self._weights:
                        raise RuntimeError(
                            "a weight gathered in FP8 was asked for in BF16 while its layer is computing; "
                            'name the layer in "fp8": {"linear": {"skip": [...]}}'
                        )
                    p.partition()
                if self._bf16 is not None:
                    self._bf16.make(p)
            return stock(params, async_op=async_op, hierarchy=hierarchy)

        return all_gather

    def _wrap_partition(self, parameter: nn.Parameter, stock: Callable) -> Callable:
        def partition(
            param_list: list[nn.Parameter] | None = None,
            hierarchy: int = 0,
            has_been_updated: bool = False,
            free_data: bool = True,
        ):
            params = [parameter] if param_list is None else list(param_list)
            if has_been_updated:
                self._shards.wait_for_refresh()
            written = []
            for p in params:
                gathered = getattr(p, GATHERED, None)
                if gathered is not None:
                    if not self._in_shards(gathered):
                        streams.used_by_current_stream(gathered.data)
                    setattr(p, GATHERED, None)
                elif has_been_updated and id(p) in self._weights:
                    written.append(self._weights[id(p)])
            before = [seams.bf16_shard(weight.parameter).clone() for weight in written]
            stock(params, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
            if has_been_updated:
                self._shards.bf16_updated(written, before)
            if self._bf16 is not None:
                for p in params:
                    if not self._shards.casts_bf16(p):
                        self._bf16.free(p)

        return partition

    def _release(self) -> None:
        """Partition every weight that is still gathered in FP8."""
        for weight in self._weights.values():
            if getattr(weight.parameter, GATHERED, None) is not None:
                weight.parameter.partition()
