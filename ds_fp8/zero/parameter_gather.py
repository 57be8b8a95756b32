"""FP8 parameter all-gather: ZeRO-3 gathers one byte a parameter, and no BF16 copy of the weight ever exists.

After each change of the FP32 master shards, once:

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all parameters together
    shard    = cast(master shard, scale(amax))                     local, one byte a parameter

and at every gather of a weight only the bytes of the shards travel; every rank knows all scales already. The result is
bit-equal to casting the whole master tensor (Micikevicius et al. cast whole tensors; a block on the edge of two shards
is why its amax must be agreed).

A shard is a flat slice [start, stop) of a matrix [R, C]. To find its blocks it is laid over the whole rows it touches,
down to a multiple of 128 rows, with zeros elsewhere: then the reference cast's own block arithmetic applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.config import Cast
from ds_fp8.formats import BLOCK, FORMATS, scale_shape
from ds_fp8.modules.linear import GATHERED
from ds_fp8.quantize import QuantizedTensor, cast, group_amax, scale_from_amax
from ds_fp8.zero import seams
from ds_fp8.zero.wire import GATHER, WireMeter


@dataclass
class _Weight:
    """One weight [R, C] that is gathered in FP8, and its cast shard."""

    parameter: nn.Parameter
    shard: seams.Shard
    first_row: int
    """First row of the cover: the shard's first row, rounded down to a multiple of the block."""
    num_rows: int
    scale: torch.Tensor = field(init=False)
    data: torch.Tensor = field(init=False)
    """uint8 [shard.numel], the FP8 codes of the shard."""
    placeholder: torch.Tensor = field(init=False)

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Weight:
        shard = seams.shard_of(parameter)
        columns = shard.shape[1]
        first = min(shard.start, math.prod(shard.shape)) // columns // BLOCK * BLOCK
        last = math.ceil((shard.start + shard.valid) / columns) if shard.valid else first
        weight = cls(parameter, shard, first, last - first)
        device = parameter.device
        weight.data = torch.zeros(shard.numel, dtype=torch.uint8, device=device)
        # 2 bytes of storage with the dtype and shape of the whole weight: hooks and gradient accumulation are content,
        # and whoever reads it gets NaN.
        weight.placeholder = torch.full((1,), torch.nan, dtype=parameter.dtype, device=device).expand(shard.shape)
        return weight

    def cover(self, source: torch.Tensor) -> torch.Tensor:
        """The shard's valid elements on whole rows [num_rows, C], zeros around them."""
        columns = self.shard.shape[1]
        offset = self.shard.start - self.first_row * columns
        cover = source.new_zeros(self.num_rows * columns)
        cover[offset : offset + self.shard.valid] = source[: self.shard.valid]
        return cover.view(self.num_rows, columns)

    def covered_scales(self, values: torch.Tensor, granularity: str) -> torch.Tensor:
        """The part of per-group `values` of the whole weight (a view) that belongs to the cover."""
        if granularity == "tensor":
            return values
        size = BLOCK if granularity == "128x128" else 1
        first = self.first_row // size
        return values[first : first + math.ceil(self.num_rows / size)]

    def amax(self, granularity: str, source: torch.Tensor) -> torch.Tensor:
        """This rank's share of the amax of every group of the whole weight; zero for groups it holds nothing of."""
        amax = torch.zeros(scale_shape(self.shard.shape, granularity), device=self.data.device)
        if self.shard.valid:
            self.covered_scales(amax, granularity).copy_(group_amax(self.cover(source), granularity))
        return amax

    def cast_shard(self, spec: Cast, source: torch.Tensor, scale: torch.Tensor) -> None:
        """Refill `data` from the FP32 shard `source`, in units of the agreed scales of the whole weight."""
        self.scale = scale
        if self.shard.valid:
            cover = cast(
                self.cover(source), self.covered_scales(scale, spec.granularity), spec.format, spec.granularity
            )
            offset = self.shard.start - self.first_row * self.shard.shape[1]
            codes = cover.view(torch.uint8).flatten()[offset : offset + self.shard.valid]
            self.data[: self.shard.valid].copy_(codes)


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
        # Keyed by id: a Parameter compares element by element. Sorted, so that all ranks agree on the order.
        self._weights = {id(p): _Weight.of(p) for p in sorted(weights, key=seams.order)}
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
        return sum(
            w.data.nbytes + 4 * math.prod(scale_shape(w.shard.shape, self._spec.granularity))
            for w in self._weights.values()
        )

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
        granularity = self._spec.granularity
        sources = {
            key: seams.bf16_shard(w.parameter) if key in self._modified else seams.master_shard(w.parameter)
            for key, w in self._weights.items()
        }
        amax = [w.amax(granularity, sources[key]) for key, w in self._weights.items()]
        flat = torch.cat([a.flatten() for a in amax])
        with self._wire.counted_as(GATHER):
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=next(iter(self._weights.values())).shard.group)
        scales = scale_from_amax(flat, self._spec.format, self._spec.scale).split([a.numel() for a in amax])
        for (key, weight), scale, own in zip(self._weights.items(), scales, amax, strict=True):
            weight.cast_shard(self._spec, sources[key], scale.view(own.shape))
        self._stale = False

    def _gather(self, weights: list[_Weight]) -> Callable[[], None]:
        """Start one all-gather for all of `weights`; the result, called, waits for it and makes them available."""
        for weight in weights:
            seams.begin_gather(weight.parameter)
        shards = [weight.data for weight in weights]
        send = torch.cat(shards) if len(shards) > 1 else shards[0]
        world = weights[0].shard.world
        buffer = torch.empty(world, send.numel(), dtype=torch.uint8, device=send.device)
        work = dist.all_gather_into_tensor(buffer.view(-1), send, group=weights[0].shard.group, async_op=True)

        def finish() -> None:
            work.wait()
            # [W, shards of all weights] -> of each weight its W shards, side by side (a copy unless it is alone)
            for weight, pieces in zip(weights, buffer.split([s.numel() for s in shards], dim=1), strict=True):
                shape = weight.shard.shape
                codes = pieces.reshape(-1)[: math.prod(shape)].view(FORMATS[self._spec.format].dtype).view(shape)
                gathered = QuantizedTensor(codes, weight.scale, self._spec.granularity, self._spec.scale)
                setattr(weight.parameter, GATHERED, gathered)
                weight.parameter.data = weight.placeholder
                seams.end_gather(weight.parameter)

        return finish

    def _wrap_all_gather_coalesced(self, stock: Callable) -> Callable:
        def all_gather_coalesced(params: Iterable[nn.Parameter], safe_mode: bool = False, quantize: bool = False):
            params = sorted(params, key=seams.order)
            ours = [self._weights[id(p)] for p in params if id(p) in self._weights]
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
