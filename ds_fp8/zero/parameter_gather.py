"""FP8 parameter all-gather: ZeRO-3 gathers one byte a parameter, and no BF16 copy of the weight ever exists.

After each change of the FP32 master shards, once:

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all parameters together
    shard    = cast(master shard, scale(amax))                     local, one byte a parameter

and at every gather of a weight only the bytes of the shards travel; every rank knows all scales already. The result is
bit-equal to casting the whole master tensor (Micikevicius et al. cast whole tensors; a block on the edge of two shards
is why its amax must be agreed).

A shard is a flat slice [start, stop) of a matrix [R, C]. To find its blocks it is laid over the whole rows it touches,
down to a multiple of 128 rows, with zeros elsewhere: then the reference cast's own block arithmetic applies.

Weights of one fused product (`GROUP`: q, k, v; gate, up) that are fetched together arrive as adjacent row slices of one
buffer, and their scales always lie so: wherever stacking keeps the scales, it is a view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.config import Cast
from ds_fp8.formats import BLOCK, FORMATS, scale_shape
from ds_fp8.modules.weights import GATHERED, GROUP, placeholder
from ds_fp8.quantize import QuantizedTensor, cast, group_amax, scale_from_amax
from ds_fp8.zero import seams
from ds_fp8.zero.wire import GATHER, WireMeter

SCALE_ALIGNMENT = 4
"""Floats that the rows of 128x128 scales are padded to a multiple of: block-scaled products read them 16 bytes at a
time. The scales of every weight or stack begin at a multiple of it too."""


@dataclass(eq=False)
class _Weight:
    """One weight [R, C] that is gathered in FP8, its cast shard and its scales."""

    parameter: nn.Parameter
    shard: seams.Shard
    granularity: str
    data: torch.Tensor = field(init=False)
    """uint8 [shard.numel], the FP8 codes of the shard; a slice of the buffer of all shards."""
    scale: torch.Tensor = field(init=False)
    """Scales of the whole weight; a view of the buffer of all scales."""
    scale_start: int = field(init=False)
    """Where they begin in that buffer."""

    def __post_init__(self) -> None:
        rows, columns = self.shard.shape
        # Rows that share a row of scales; the cover begins with a whole group of them.
        self.unit = BLOCK if self.granularity == "128x128" else 1
        self.first_row = min(self.shard.start, rows * columns) // columns // self.unit * self.unit
        stop = math.ceil((self.shard.start + self.shard.valid) / columns) if self.shard.valid else self.first_row
        self.num_rows = stop - self.first_row
        self.offset = self.shard.start - self.first_row * columns
        self.placeholder = placeholder(self.shard.shape, self.parameter.dtype, self.parameter.device)
        self.scale_shape = scale_shape(self.shard.shape, self.granularity)
        scales_per_row = self.scale_shape[-1] if self.scale_shape else 1
        if self.granularity == "128x128":
            scales_per_row = math.ceil(scales_per_row / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        self.scale_strides = (scales_per_row, 1) if self.scale_shape else ()
        self.scale_numel = math.prod(self.scale_shape[:1]) * scales_per_row

    def cover(self, source: torch.Tensor) -> torch.Tensor:
        """The shard's valid elements on whole rows [num_rows, C], zeros around them; a view where none are needed."""
        shape = (self.num_rows, self.shard.shape[1])
        if self.shard.valid == math.prod(shape):
            return source[: self.shard.valid].view(shape)
        cover = source.new_zeros(math.prod(shape))
        cover[self.offset : self.offset + self.shard.valid] = source[: self.shard.valid]
        return cover.view(shape)

    @property
    def start(self) -> int:
        """Where the shard begins in the buffer of all shards."""
        return self.data.storage_offset()

    def scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """This weight's scales (or amax) in a flat buffer of those of all weights."""
        return buffer.as_strided(self.scale_shape, self.scale_strides, self.scale_start)

    def _covered(self, scales: torch.Tensor) -> torch.Tensor:
        """The part of the scales of the whole weight that belongs to the cover."""
        if self.granularity == "tensor":
            return scales
        return scales[self.first_row // self.unit : math.ceil((self.first_row + self.num_rows) / self.unit)]

    def write_amax(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        """Write the amax of every group that the FP32 shard `source` has a part of into the zeroed flat `buffer`."""
        if self.shard.valid:
            self._covered(self.scales_in(buffer)).copy_(group_amax(self.cover(source), self.granularity))

    def cast_shard(self, format: str, source: torch.Tensor, buffer: torch.Tensor) -> None:
        """Refill `data` from the FP32 shard `source`, in units of the agreed scales in the flat `buffer`."""
        self.scale = self.scales_in(buffer)
        if self.shard.valid:
            cover = cast(self.cover(source), self._covered(self.scale), format, self.granularity)
            codes = cover.view(torch.uint8).flatten()[self.offset : self.offset + self.shard.valid]
            self.data[: self.shard.valid].copy_(codes)


def _stacks(weights: Iterable[_Weight]) -> list[list[_Weight]]:
    """`weights` in their order, those of one fused product together where all of it is there, every other one alone."""
    present = {id(weight.parameter): weight for weight in weights}
    stacks = []
    for weight in present.values():
        group = [id(p) for p in getattr(weight.parameter, GROUP, (weight.parameter,))]
        stack = [present[key] for key in group] if all(key in present for key in group) else [weight]
        if stack[0] is weight:
            stacks.append(stack)
    return stacks


def _place_scales(stacks: list[list[_Weight]]) -> int:
    """Give every weight its `scale_start`, those of a stack one behind the other; returns the floats needed."""
    place = 0
    for stack in stacks:
        for weight in stack:
            weight.scale_start = place
            place += weight.scale_numel
        place = math.ceil(place / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return place


def _side_by_side(shards: list[torch.Tensor], numels: list[int]) -> list[torch.Tensor]:
    """Of every weight its shards [W, n] as one flat tensor [numel], adjacent in a new buffer."""
    starts = list(itertools.accumulate(numels, initial=0))
    codes = shards[0].new_empty(max(start + s.numel() for start, s in zip(starts[:-1], shards, strict=True)))
    for start, pieces in zip(starts[:-1], shards, strict=True):
        # The padding behind a weight's last shard lands where the next weight begins, which is written after it.
        codes[start : start + pieces.numel()].view(pieces.shape).copy_(pieces)
    return [codes[start:stop] for start, stop in itertools.pairwise(starts)]


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
        stacks = _stacks(_Weight(p, seams.shard_of(p), spec.granularity) for p in sorted(weights, key=seams.order))
        # Keyed by id: a Parameter compares element by element.
        self._weights = {id(weight.parameter): weight for stack in stacks for weight in stack}
        self._group = stacks[0][0].shard.group
        self._num_scales = _place_scales(stacks)
        # Shards that are fetched together lie side by side: what is sent is a view.
        numels = [weight.shard.numel for weight in self._weights.values()]
        self._shards = torch.zeros(sum(numels), dtype=torch.uint8, device=stacks[0][0].parameter.device)
        for weight, data in zip(self._weights.values(), self._shards.split(numels), strict=True):
            weight.data = data
        self._modified: set[int] = set()
        self._stale = True
        self._changed: object | None = None
        for parameter in engine.module.parameters():
            if seams.is_zero_parameter(parameter):
                seams.wrap_closure(parameter, "all_gather_coalesced", self._wrap_all_gather_coalesced)
                seams.wrap_closure(parameter, "all_gather", lambda stock, p=parameter: self._wrap_all_gather(p, stock))
                seams.wrap_closure(parameter, "partition", lambda stock, p=parameter: self._wrap_partition(p, stock))
        seams.on_master_update(engine, self._master_updated)
        self._master_updated()

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of this rank's FP8 shards and of the scales of all weights."""
        return self._shards.nbytes + self._num_scales * torch.float32.itemsize

    def _master_updated(self) -> None:
        self._stale = True
        self._modified.clear()
        self._changed = seams.record_event()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Cast all shards anew from the master shards. Collective; runs on the stream of the gathers.

        The stream waits for the master update first. Every earlier gather ran on this same stream, and every earlier
        reader of the scales was enqueued before the update, so nothing still reads what is overwritten here.
        """
        seams.wait_event(self._changed)
        amax = torch.zeros(self._num_scales, device=self._shards.device)
        for weight in self._weights.values():
            weight.write_amax(amax, self._source(weight))
        with self._wire.counted_as(GATHER):
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        scales = scale_from_amax(amax, self._spec.format, self._spec.scale)
        for weight in self._weights.values():
            weight.cast_shard(self._spec.format, self._source(weight), scales)
        self._stale = False

    def _source(self, weight: _Weight) -> torch.Tensor:
        """The shard to cast, FP32 [shard.numel]: for a moment only, since offloaded shards are copies on the device."""
        modified = id(weight.parameter) in self._modified
        return seams.bf16_shard(weight.parameter) if modified else seams.master_shard(weight.parameter)

    def _gather(self, weights: list[_Weight]) -> Callable[[], None]:
        """Start one all-gather for `weights`, sorted by `start`; the result, called, waits and makes them available."""
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

        def finish() -> None:
            work.wait()
            if len(weights) == 1:
                self._make_available(weights[0], buffer.flatten()[: math.prod(weights[0].shard.shape)])
                return
            shards = dict(zip(weights, buffer.split(lengths, dim=1), strict=True))
            for stack in _stacks(weights):
                numels = [math.prod(weight.shard.shape) for weight in stack]
                codes = _side_by_side([shards[weight] for weight in stack], numels)
                for weight, own in zip(stack, codes, strict=True):
                    self._make_available(weight, own)

        return finish

    def _make_available(self, weight: _Weight, codes: torch.Tensor) -> None:
        """Hang the gathered weight on its parameter, from the uint8 codes [R * C]."""
        data = codes.view(FORMATS[self._spec.format].dtype).view(weight.shard.shape)
        gathered = QuantizedTensor(data, weight.scale, self._spec.granularity, self._spec.scale)
        setattr(weight.parameter, GATHERED, gathered)
        weight.parameter.data = weight.placeholder
        seams.end_gather(weight.parameter)

    def _wrap_all_gather_coalesced(self, stock: Callable) -> Callable:
        def all_gather_coalesced(params: Iterable[nn.Parameter], safe_mode: bool = False, quantize: bool = False):
            params = sorted(params, key=seams.order)
            ours = [self._weights[id(p)] for p in params if id(p) in self._weights]
            ours.sort(key=lambda weight: weight.start)
            others = [p for p in params if id(p) not in self._weights]
            if ours and self._stale:
                self._refresh()
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
            for p in params:
                gathered = getattr(p, GATHERED, None)
                if gathered is not None:
                    seams.used_by_current_stream(gathered.data)
                    setattr(p, GATHERED, None)
                elif has_been_updated and id(p) in self._weights:
                    # Written to under GatheredParameters. As in stock ZeRO-3 the new values hold until the next step
                    # writes the master weights over them.
                    self._modified.add(id(p))
                    self._stale = True
            stock(params, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
            if has_been_updated:
                self._changed = seams.record_event()

        return partition
