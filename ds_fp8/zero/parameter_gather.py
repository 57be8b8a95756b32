"""FP8 parameter all-gather: ZeRO-3 gathers one byte a parameter, and no BF16 copy of the weight ever exists.

After each change of the FP32 master shards, once:

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all parameters together
    shard    = cast(master shard, scale(amax))                     local, one byte a parameter

and at every gather of a weight only the bytes of the shards travel; every rank knows all scales already. The result is
bit-equal to casting the whole master tensor (Micikevicius et al. cast whole tensors; a block on the edge of two shards
is why its amax must be agreed).

That happens on a stream of its own, right after an optimizer step, beside whatever comes before the first gather.

Weights of one fused product (`GROUP`: q, k, v; gate, up) that are fetched together arrive as adjacent row slices of one
buffer, and their scales always lie so: wherever stacking keeps the scales, it is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.config import Cast
from ds_fp8.formats import FORMATS
from ds_fp8.modules.weights import GATHERED
from ds_fp8.quantize import QuantizedTensor, scale_from_amax
from ds_fp8.zero import seams, streams
from ds_fp8.zero.shard_cast import make_shard_cast, on_device
from ds_fp8.zero.shards import ShardedWeight, place_scales, side_by_side, stacks_of
from ds_fp8.zero.wire import GATHER, WireMeter


class _Handle:
    """What DeepSpeed waits on: an FP8 gather in flight, and its own handle for the parameters gathered in BF16."""

    def __init__(self, finish: Callable[[], None] | None, stock: object | None):
        self._finish, self._stock = finish, stock

    def wait(self, handle_dependency: bool = True) -> None:
        if self._stock is not None:
            self._stock.wait(handle_dependency=handle_dependency)
            self._stock = None
        if self._finish is not None:
            self._finish()
            self._finish = None


class ParameterGather:
    """Gathers the given weights of a ZeRO-3 engine in FP8; every other parameter as DeepSpeed does."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, weights: Iterable[nn.Parameter], spec: Cast, wire: WireMeter):
        self._spec, self._wire = spec, wire
        # Sorted, so that all ranks agree on the order.
        ordered = sorted(weights, key=seams.order)
        stacks = stacks_of(ShardedWeight(p, seams.shard_of(p), spec.granularity) for p in ordered)
        # Keyed by id: a Parameter compares element by element.
        self._weights = {id(weight.parameter): weight for stack in stacks for weight in stack}
        self._group = stacks[0][0].shard.group
        self._num_scales = place_scales(stacks)
        # Shards that are fetched together lie side by side: what is sent is a view.
        numels = [weight.shard.numel for weight in self._weights.values()]
        self._shards = torch.zeros(sum(numels), dtype=torch.uint8, device=stacks[0][0].parameter.device)
        for weight, data in zip(self._weights.values(), self._shards.split(numels), strict=True):
            weight.data = data
        self._shard_cast = make_shard_cast(list(self._weights.values()), self._shards, spec)
        self._modified: set[int] = set()
        self._stream = streams.new_stream()
        self._gather_stream = self._changed = self._refreshed = None
        for parameter in engine.module.parameters():
            if seams.is_zero_parameter(parameter):
                seams.wrap_closure(parameter, "all_gather_coalesced", self._wrap_all_gather_coalesced)
                seams.wrap_closure(parameter, "all_gather", lambda stock, p=parameter: self._wrap_all_gather(p, stock))
                seams.wrap_closure(parameter, "partition", lambda stock, p=parameter: self._wrap_partition(p, stock))
        seams.around_master_update(engine, self._wait_for_refresh, self._master_updated)
        seams.on_step(engine, self._refresh_if_stale)
        self._master_updated()

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of this rank's FP8 shards and of the scales of all weights."""
        return self._shards.nbytes + self._num_scales * torch.float32.itemsize

    def observe(self, show: Callable[[nn.Parameter, torch.Tensor, QuantizedTensor, int], None]) -> None:
        """Call `show(weight, rows, cast, elements)` with the rows of every weight that this rank's shard touches, in
        high precision and as they are sent; they have zeros where `elements` of the shard end. Between steps."""
        self._wait_for_refresh()
        for weight in self._weights.values():
            if weight.shard.valid:
                numbers = on_device(self._source(weight), self._shards.device)
                codes = weight.cover(weight.data).view(FORMATS[self._spec.format].dtype)
                cast = QuantizedTensor(codes, weight.covered(weight.scale), self._spec.granularity, self._spec.scale)
                show(weight.parameter, weight.cover(numbers), cast, weight.shard.valid)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these weights in BF16 from now on, on all ranks alike. Between steps, while none is gathered.

        Their place among the FP8 shards stays, and is cast with the others'.
        """
        for parameter in parameters:
            self._weights.pop(id(parameter), None)

    def _wait_for_refresh(self) -> None:
        """Nobody reads what the last cast is still writing, or writes what it is still reading."""
        streams.wait_event(self._refreshed)

    def _master_updated(self) -> None:
        self._stale = True
        self._modified.clear()
        self._changed = streams.record_event()

    def _refresh_if_stale(self) -> None:
        if self._stale:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all shards anew from the master shards. Collective; the host waits for nothing.

        Begins behind `_changed`, an event on the stream that the masters were written on, which the products, readers
        of the scales, lie in too, and behind all gathers, which read the shards: also those that were prefetched and
        that no product has waited for. Gathers begin behind `_refreshed`. Offloaded masters are copied here first, and
        for that the host does wait.
        """
        with streams.on_stream(self._stream):
            streams.wait_event(self._changed)
            streams.wait_stream(self._gather_stream)
            amax = torch.zeros(self._num_scales, device=self._shards.device)
            self._shard_cast.write_amax(amax, self._source)
            with self._wire.counted_as(GATHER):
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
            scales = scale_from_amax(amax, self._spec.format, self._spec.scale)
            self._shard_cast.cast(scales, self._source)
            for weight in self._weights.values():
                weight.scale = weight.scales_in(scales)
            self._refreshed = streams.record_event()
        self._stale = False

    def _source(self, weight: ShardedWeight) -> torch.Tensor:
        modified = id(weight.parameter) in self._modified
        return seams.bf16_shard(weight.parameter) if modified else seams.master_shard(weight.parameter)

    def _gather(self, weights: list[ShardedWeight]) -> Callable[[], None]:
        """Start one all-gather for `weights`, sorted by `start`; the result, called, waits and makes them available.

        Whatever stream is current when it is waited for (DeepSpeed waits for a prefetch that nobody used on that of the
        products), the waiting and the copies behind it stay on the stream that the buffers belong to.
        """
        self._wait_for_refresh()
        self._gather_stream = stream = streams.current_stream()
        for weight in weights:
            seams.begin_gather(weight.parameter)
        lengths = [weight.shard.numel for weight in weights]
        start, total = weights[0].start, sum(lengths)
        if weights[-1].start + lengths[-1] == start + total:
            send = self._shards[start : start + total]
        else:
            send = torch.cat([weight.data for weight in weights])
        buffer = send.new_empty(weights[0].shard.world, total)
        work = dist.all_gather_into_tensor(buffer.view(-1), send, group=self._group, async_op=True)
        scales = {weight: weight.scale for weight in weights}  # those of the codes just sent, whatever comes later

        def finish() -> None:
            with streams.on_stream(stream):
                work.wait()
                if len(weights) == 1:
                    gathered = {weights[0]: buffer.flatten()[: weights[0].numel]}
                else:
                    gathered = {}
                    shards = dict(zip(weights, buffer.split(lengths, dim=1), strict=True))
                    for stack in stacks_of(weights):
                        codes = side_by_side([shards[weight] for weight in stack], [weight.numel for weight in stack])
                        gathered.update(zip(stack, codes, strict=True))
            streams.wait_stream(stream)
            for weight, codes in gathered.items():
                self._make_available(weight, codes, scales[weight])

        return finish

    def _make_available(self, weight: ShardedWeight, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Hang the gathered weight on its parameter, from the uint8 codes [R * C]."""
        data = codes.view(FORMATS[self._spec.format].dtype).view(weight.shard.shape)
        gathered = QuantizedTensor(data, scale, self._spec.granularity, self._spec.scale)
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
                self._refresh_if_stale()
            handle = stock(others, safe_mode=safe_mode, quantize=quantize) if others else None
            return _Handle(self._gather(ours) if ours else None, handle)

        return all_gather_coalesced

    def _wrap_all_gather(self, parameter: nn.Parameter, stock: Callable) -> Callable:
        """The blocking gather behind GatheredParameters: its users want real BF16 weights."""

        def all_gather(param_list: list[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0):
            params = [parameter] if param_list is None else list(param_list)
            for p in params:
                if getattr(p, GATHERED, None) is not None:
                    if seams.in_use(p):
                        raise RuntimeError(
                            "a weight gathered in FP8 was asked for in BF16 while its layer is computing; "
                            'name the layer in "fp8": {"linear": {"skip": [...]}}'
                        )
                    p.partition()
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
                self._wait_for_refresh()
            for p in params:
                gathered = getattr(p, GATHERED, None)
                if gathered is not None:
                    streams.used_by_current_stream(gathered.data)
                    setattr(p, GATHERED, None)
                elif has_been_updated and id(p) in self._weights:
                    # Written to under GatheredParameters. As in stock ZeRO-3 the new values hold until the next step
                    # writes the master weights over them.
                    self._modified.add(id(p))
                    self._stale = True
            stock(params, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
            if has_been_updated:
                self._changed = streams.record_event()

        return partition
