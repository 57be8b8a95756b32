"""Masters of weights that are quantized together, with their scales in one buffer: FP32 masters here.

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all weights together
    shard    = quantize(master shard, scale(amax))                 local, one byte a parameter

An optimizer step may find amax and data as it updates: one pass over memory where two were (one_pass_triton.py). Then
requantize has only the all-reduce of the amax left to do, and the blocks that lie on two ranks.

Residuals of outlier channels (casts/outliers.py) are of those columns; every rank keeps all of them.

    data[n, c] = cast((master[n, k] - data[n, k] * scale) / row_scale[n])     k = channels[c]

Only the rank that holds the master of an element knows what quantize has lost. Where shards are whole rows, it writes
the whole outlier block behind the data of the row, and every all-gather brings it.

Where rows are cut, or masters are data, each rank writes its own residuals into a zeroed buffer of all of them, and
one all-reduce adds up what no two ranks have both written: a byte a row and channel. Every forward makes an outlier
block of them. Either way they stay until the masters or the channels change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from ds_fp8.casts import scale_from_amax
from ds_fp8.casts.outliers import residual_data, residual_scale, weight_block
from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.casts.quantization import whole_blocks
from ds_fp8.config.formats import BLOCK, FORMATS, SCALE_TYPES, CastSpec
from ds_fp8.config.plans import MOMENTS
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import RESIDUAL
from ds_fp8.optim.adamw import AdamStep, AdamW
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.deepspeed.parameters import master_position
from ds_fp8.zero.param import SCALE_ALIGNMENT, FP8Param, Numbers, ReferenceShardCast, Stack, in_runs, on_device


def runs_of(stacks: list[Stack]) -> list[list[Stack]]:
    """Return stacks by process group and cast: the amax of each run are one slice, for one all-reduce."""
    return in_runs(stacks, lambda stack: (id(stack[0].shard.group), str(stack[0].spec)))


def place_scales(stacks: list[Stack]) -> int:
    """Give every weight its `scale_start`, those of a stack one behind the other; returns the floats needed."""
    place = 0
    for stack in stacks:
        for weight in stack:
            weight.scale_start = place
            place += weight.scale_numel
        place = math.ceil(place / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return place


def has_kernels(device: torch.device) -> bool:
    """Return whether shards on a device are cast by kernels."""
    return device.type == "cuda"


def make_shard_cast(weights: Sequence[FP8Param], shards: torch.Tensor, spec: CastSpec) -> ReferenceShardCast:
    """Return the casts of weights whose data are in the buffer `shards`, by kernels where there are any."""
    if not has_kernels(shards.device) or spec.by_torch:
        return ReferenceShardCast(weights, spec)
    from ds_fp8.zero.cast_triton import TritonShardCast

    return TritonShardCast(weights, shards, spec)


class Masters:
    """Scales and residuals of weights that are quantized together; subclasses quantize, and take part in a step."""

    # Whether an optimizer step writes data: by begin, update of every sub-group, finish, and taken where it counts.
    steps = False

    def __init__(self, stacks: list[Stack], wire: WireMeter):
        """Give scales to weights that have their memory, `stacks` in the order of `runs_of`."""
        self.weights = [weight for stack in stacks for weight in stack]
        self.device, self._wire = self.weights[0].data.device, wire
        self.num_scales = place_scales(stacks)
        runs = runs_of(stacks)
        ends = [run[0][0].scale_start for run in runs[1:]] + [self.num_scales]
        # Process group and cast of successive weights, and where their scales end.
        self._runs = [(run[0][0].shard.group, run[0][0].spec, end) for run, end in zip(runs, ends, strict=True)]
        self._pinned = False
        self._scales = torch.ones(self.num_scales, device=self.device)
        self._use(self._scales)
        with_outliers = [weight for weight in self.weights if weight.outliers is not None]
        self._residuals = OutlierResiduals(with_outliers, self.device) if with_outliers else None

    @property
    def stale(self) -> bool:
        """Return whether requantize is due: the other weights share its all-reduce and launch."""
        return any(weight.stale for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Return the bytes of scales and residuals, which every rank has of unsharded weights."""
        residuals = 0 if self._residuals is None else self._residuals.nbytes
        return self.num_scales * torch.float32.itemsize + residuals

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on: requantize writes them in place, for CUDA graphs read them."""
        if not self._pinned:
            # All of the buffer: behind the scales of a weight may lie those of its outlier blocks.
            self._use(self._scales.clone())
            self._pinned = True

    def write_residuals(self, only: OutlierChannels | None = None) -> None:
        """Quantize the residuals of outlier channels, of all products that know theirs or of one. Collective.

        On the current stream, behind the data of the shards.
        """
        if self._residuals is not None:
            self._residuals.write(self._scales, self._wire, only)

    def _use(self, scales: torch.Tensor) -> None:
        """Let these be the scales from now on.

        A new buffer, where they are not pinned: a product whose weight was unsharded before goes on reading the scales
        that it was unsharded with. Pinned ones are written behind the products of the last micro-step, which read them:
        the stream waits for an event that the products' own stream has recorded after them.
        """
        self._scales = self._scales.copy_(scales) if self._pinned else scales
        for weight in self.weights:
            weight.scale = weight.scales_in(self._scales)

    def _agree(
        self, amax: torch.Tensor, kept: Callable[[torch.Tensor, str], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the scales of the largest amax of any rank, rounded by `kept` to what masters keep. Collective."""
        scales, start = torch.empty_like(amax), 0
        for group, spec, end in self._runs:
            kind, own = SCALE_TYPES[spec.scale], amax[start:end]
            if kind.needs_amax:
                # One all-reduce for all weights of a group that are cast alike: their amax lie side by side.
                dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
                self._wire.count(GATHER, "all_reduce", own.nbytes, group)
            if kind.from_amax is None:
                own = own if kept is None else kept(own, spec.scale)
                scales[start:end] = scale_from_amax(own, spec.format, spec.scale)
            start = end
        for weight in self.weights:
            spec = weight.spec
            if SCALE_TYPES[spec.scale].from_amax is not None:  # from all amax of a weight together
                own = scale_from_amax(weight.scales_in(amax), spec.format, spec.scale)
                weight.scales_in(scales).copy_(own)
        return scales


class FP32Masters(Masters):
    """Weights with FP32 masters, or without masters."""

    def __init__(self, stacks: list[Stack], wire: WireMeter, data: torch.Tensor):
        """Quantize into `data`, the buffer that every weight's `data` is a view of."""
        super().__init__(stacks, wire)
        self._shard_casts = [
            (make_shard_cast(same, data, same[0].spec), same[0].spec)
            for same in in_runs(self.weights, lambda weight: str(weight.spec))
        ]
        # Of what requantize reads next, where a step has found it and written the data of blocks that are this rank's
        # alone. Taken away by requantize, and by loads and writes of all masters.
        self.amax: torch.Tensor | None = None
        self._amax_of_step = torch.empty(0)
        self._kernels: dict[int, Any] = {}  # by sub-group, of all that have weights here

    def requantize(self) -> None:
        """Quantize all shards from their numbers, on the current stream. Collective; the host waits for nothing.

        Offloaded numbers are copied here first, and for that the host waits.
        """
        amax, self.amax = self.amax, None
        if amax is None:
            # Zeros: blocks of which this rank has no element must not raise the maximum of the others.
            amax = torch.zeros(self.num_scales, device=self.device)
            for shard_cast, spec in self._shard_casts:
                if SCALE_TYPES[spec.scale].needs_amax:
                    shard_cast.write_amax(amax, FP8Param.numbers)
        scales = self._agree(amax)
        for shard_cast, _ in self._shard_casts:
            shard_cast.cast(scales, FP8Param.numbers)
        self._use(scales)
        self.write_residuals()
        for weight in self.weights:  # last: what ends midway is quantized again
            weight.requantized()

    # ---------------------------------------------------------------- a step in one pass

    @property
    def steps(self) -> bool:
        return bool(self._kernels)

    def quantize_in_step(self, optimizer: AdamW, numels: Sequence[int]) -> None:
        """Let steps find amax and data, unless two passes are needed or faster.

        `numels`: elements of all sub-groups.
        """
        self._kernels = one_pass_kernels(self.weights, optimizer, numels)

    def begin(self) -> None:
        """Begin a step, behind the last reads of data."""
        # Held until the next step: requantize reads it on another stream than it is allocated on.
        self._amax_of_step = torch.zeros(self.num_scales, device=self.device)

    def update(self, sub_group: int, masters: torch.Tensor) -> Callable[..., None] | None:
        """Return what takes AdamW's step of a sub-group; None for one without weights of these."""
        if sub_group not in self._kernels:
            return None

        def update(
            gradient: torch.Tensor,
            exp_avg: torch.Tensor,
            exp_avg_sq: torch.Tensor,
            step: AdamStep,
            *,
            skip: torch.Tensor | None,
            factor: torch.Tensor | None,
            **of_compressed_moments: object,
        ) -> None:
            kernel = self._kernels[sub_group]
            kernel(masters, self._amax_of_step, gradient, exp_avg, exp_avg_sq, step, skip=skip, factor=factor)

        return update

    def finish(self, skip: torch.Tensor) -> None:
        """Do nothing: the amax of other ranks, and blocks that they have a part of, are left to requantize."""

    def taken(self) -> None:
        """Note that the step counts: its amax are those of the masters, and most data quantized from them."""
        self.amax = self._amax_of_step


def one_pass_kernels(weights: Sequence[FP8Param], optimizer: AdamW, numels: Sequence[int]) -> dict[int, Any]:
    """Return by sub-group the kernel that updates and quantizes weights; none if two passes are needed or faster."""
    data, precision = weights[0].data, optimizer.precision
    if not has_kernels(data.device) or any(getattr(precision, key) != "fp32" for key in MOMENTS):
        return {}
    from ds_fp8.zero import one_pass_triton

    places = [master_position(weight.parameter) for weight in weights]
    if None in places:  # frozen, in a product with trained ones
        return {}
    kernels = {}
    for some in in_runs(zip(weights, places, strict=True), lambda one: one[1][0]):
        index, members = some[0][1][0], [(weight, start) for weight, (_, start, _) in some]
        if not one_pass_triton.can_take(members, numels[index]):
            return {}
        kernels[index] = one_pass_triton.StepAndCast(members, numels[index], data)
    return kernels


# ---------------------------------------------------------------- residuals of outlier channels


class OutlierWeight(NamedTuple):
    """A sharded weight with outlier channels."""

    weight: FP8Param
    # uint8: data [N, C] of all rows, a view of the buffer of all residuals; of a weight with room the outlier blocks of
    # the shard's rows, behind their data.
    residual: torch.Tensor


class ReferenceResidualCast:
    """Residuals in torch, on any device; the oracle of the kernel."""

    def write(self, weights: Sequence[OutlierWeight], scales: torch.Tensor, source: Numbers) -> None:
        """Write residuals of the shards' elements, zero so far, of weights whose channels are known."""
        for weight, residual in weights:
            write_residual(weight, residual, scales, source)


def write_residual(weight: FP8Param, residual: torch.Tensor, scales: torch.Tensor, source: Numbers) -> None:
    """Write the residuals of one weight's shard into `residual`, or its outlier blocks, where it has room for them."""
    shard, at = weight.shard, weight.outliers.channels.long()
    if not shard.valid:
        return
    columns = shard.shape[1]
    rows = slice(shard.start // columns, -(-(shard.start + shard.valid) // columns))
    row = torch.arange(rows.start, rows.stop, device=at.device)[:, None]
    place = row * columns + at - shard.start
    inside = (place >= 0) & (place < shard.valid)
    place = place.clamp(0, shard.valid - 1)
    scale = weight.scales_in(scales)
    values = on_device(source(weight), at.device)[place]
    data = weight.data[place // columns * weight.pitch + place % columns if weight.has_room else place]
    data, scale_of_row = data.view(FORMATS[weight.spec.format].dtype), residual_scale(scale)
    of_row, of_element = scale_of_row[row // BLOCK], scale[row // BLOCK, at // BLOCK]
    found = residual_data(values, data, of_element, of_row, weight.spec.format)
    if weight.has_room:
        residual.copy_(weight_block(found, dequantize_unscaled(data) * of_element, of_row, weight.spec.format))
        weight.block_scales_in(scales).copy_(scale_of_row[:, None])
    else:
        residual[rows] = torch.where(inside, found.view(torch.uint8), residual[rows])


class OutlierResiduals:
    """Keeps the residuals of all weights with outlier channels up to date."""

    def __init__(self, weights: Sequence[FP8Param], device: torch.device) -> None:
        """Allocate the residuals of weights in the order of the shards: those of one product are neighbours."""
        cut = [weight for weight in weights if not weight.has_room]
        shapes = [(w.shard.shape[0], min(w.outliers.count, w.shard.shape[1])) for w in cut]
        numels = [rows * columns for rows, columns in shapes]
        self._buffer = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
        views = [flat.view(shape) for flat, shape in zip(self._buffer.split(numels), shapes, strict=True)]
        self._weights = [OutlierWeight(weight, view) for weight, view in zip(cut, views, strict=True)]
        self._weights += [OutlierWeight(w, w.rows[:, whole_blocks(w.shard.shape[1]) :]) for w in weights if w.has_room]
        if device.type == "cuda":
            from ds_fp8.zero.cast_triton import TritonResidualCast

            self._cast: ReferenceResidualCast = TritonResidualCast()
        else:
            self._cast = ReferenceResidualCast()

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def write(self, scales: torch.Tensor, wire: WireMeter, only: OutlierChannels | None = None) -> None:
        """Cast the residuals again, of all weights whose channels are known or those of one product. Collective.

        On the current stream, behind the cast of the shards.
        """
        known = [
            one
            for one in self._weights
            if one.weight.outliers.channels is not None and only in (None, one.weight.outliers)
        ]
        if not known:
            return
        # One collective for neighbours of one process group: what lies between belongs to products without channels,
        # and is zero. Each is added up over its own group alone: a sum of sums would be no code.
        cut = [one for one in known if not one.weight.has_room]
        runs = [list(run) for _, run in groupby(cut, lambda one: id(one.weight.shard.group))]
        parts = [self._from(run[0], run[-1]).zero_() for run in runs]
        # One launch; of shards on the host one after the other, for their copies are as large as they are.
        for some in [[one] for one in known] if any(one.weight.on_host for one in known) else [known]:
            self._cast.write(some, scales, FP8Param.numbers)
        for run, part in zip(runs, parts, strict=True):
            group = run[0].weight.shard.group
            dist.all_reduce(part, group=group)
            wire.count(GATHER, "all_reduce", part.nbytes, group)
        for one in cut:
            dtype = FORMATS[one.weight.spec.format].dtype
            setattr(one.weight.parameter, RESIDUAL, one.residual.view(dtype))

    def _from(self, first: OutlierWeight, last: OutlierWeight) -> torch.Tensor:
        return self._buffer[first.residual.storage_offset() : last.residual.storage_offset() + last.residual.numel()]
