"""FP32 masters of weights that are quantized together, with their scales in one buffer (others: coded_masters.py).

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all weights together
    shard    = quantize(master shard, scale(amax))                 local, one byte a parameter

An optimizer step may compute amax and data in the same pass as the update (one_pass_triton.py). requantize then does
only the all-reduce of the amax, and the blocks that two ranks share.

Residuals of outlier channels (casts/outliers.py), of all rows, on every rank:

    data[n, c] = quantize((master[n, k] - data[n, k] * scale) / row_scale[n])     k = channels[c]

The rank with the master of an element computes its residual. If shards are full rows, it writes the outlier block into
the padding of the row, which every all-gather includes.

If rows are cut, or masters are stored as data, each rank writes its residuals into a zeroed buffer of all of them, one
byte per row and channel, and an all-reduce SUM merges them. Every forward makes an outlier block of them. Residuals are
valid until the masters or the channels change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from ds_fp8.casts import scale_from_amax
from ds_fp8.casts.outliers import residual_data, residual_scale, weight_block
from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.casts.quantization import round_up_to_blocks
from ds_fp8.config.formats import BLOCK, FORMATS, SCALE_TYPES, CastSpec
from ds_fp8.config.plans import MOMENTS
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import RESIDUAL
from ds_fp8.optim.adamw import AdamW
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.deepspeed.parameters import master_position
from ds_fp8.zero.param import SCALE_ALIGNMENT, FP8Param, Numbers, ReferenceShardCast, Stack, in_runs, on_device


def runs_of(stacks: list[Stack]) -> list[list[Stack]]:
    """Group stacks by process group and cast: the amax of each run are one slice, for one all-reduce."""
    return in_runs(stacks, lambda stack: (id(stack[0].shard.group), str(stack[0].spec)))


def place_scales(stacks: list[Stack]) -> int:
    """Set `scale_start` of every weight, adjacent within a stack; return the floats needed."""
    place = 0
    for stack in stacks:
        for weight in stack:
            weight.scale_start = place
            place += weight.scale_numel
        place = math.ceil(place / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return place


def has_kernels(device: torch.device) -> bool:
    """Return whether kernels quantize shards on a device."""
    return device.type == "cuda"


def make_shard_cast(weights: Sequence[FP8Param], shards: torch.Tensor, spec: CastSpec) -> ReferenceShardCast:
    """Return the shard cast of weights whose data are views of `shards`: kernels if available, else torch."""
    if not has_kernels(shards.device) or spec.by_torch:
        return ReferenceShardCast(weights, spec)
    from ds_fp8.zero.cast_triton import TritonShardCast

    return TritonShardCast(weights, shards, spec)


class Quantizer:
    """Scales and residuals of weights that are quantized together; subclasses quantize, and take part in a step."""

    # Whether an optimizer step writes data: begin, update of every sub-group, finish, and taken unless it was skipped.
    steps = False

    def __init__(self, stacks: list[Stack], wire: WireMeter):
        """Allocate scales for weights with shards; `stacks` in the order of `runs_of`."""
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
        return any(weight.stale for weight in self.weights)

    @property
    def nbytes(self) -> int:
        residuals = 0 if self._residuals is None else self._residuals.nbytes
        return self.num_scales * torch.float32.itemsize + residuals

    def pin_scales(self) -> None:
        """Fix the address of the scales, once: requantize writes them in place, for CUDA graphs."""
        # The complete buffer, which includes scales of outlier blocks.
        self._use(self._scales.clone())
        self._pinned = True

    def write_residuals(self, only: OutlierChannels | None = None) -> None:
        """Quantize the residuals of all layers with selected channels, or of one. Collective.

        On the current stream, after the data of the shards.
        """
        if self._residuals is not None:
            self._residuals.write(self._scales, self._wire, only)

    def _use(self, scales: torch.Tensor) -> None:
        """Set the scales of all weights.

        A new buffer unless pinned: GEMMs with weights unsharded before still read the old scales. Pinned scales are
        overwritten after the GEMMs of the last micro-step, for whose event this stream has waited.
        """
        self._scales = self._scales.copy_(scales) if self._pinned else scales
        for weight in self.weights:
            weight.scale = weight.scales_in(self._scales)

    @staticmethod
    def _stored(amax: torch.Tensor, scale_type: str) -> torch.Tensor:
        return amax  # in the precision of masters

    def _agree(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scales from the all-reduced amax. Collective."""
        scales, start = torch.empty_like(amax), 0
        for group, spec, end in self._runs:
            kind, own = SCALE_TYPES[spec.scale], amax[start:end]
            if kind.needs_amax:
                # One all-reduce for all weights of a group and cast, whose amax are adjacent.
                dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
                self._wire.count(GATHER, "all_reduce", own.nbytes, group)
            if kind.from_amax is None:
                scales[start:end] = scale_from_amax(self._stored(own, spec.scale), spec.format, spec.scale)
            start = end
        for weight in self.weights:
            spec = weight.spec
            if SCALE_TYPES[spec.scale].from_amax is not None:  # from all amax of a weight
                own = scale_from_amax(weight.scales_in(amax), spec.format, spec.scale)
                weight.scales_in(scales).copy_(own)
        return scales


class FP32Quantizer(Quantizer):
    """Weights with FP32 masters, or without masters."""

    def __init__(self, stacks: list[Stack], wire: WireMeter, data: torch.Tensor):
        """Quantize into `data`, of which every weight's `data` is a view."""
        super().__init__(stacks, wire)
        self._shard_casts = [
            (make_shard_cast(same, data, same[0].spec), same[0].spec)
            for same in in_runs(self.weights, lambda weight: str(weight.spec))
        ]
        # Per-group amax computed by the fused optimizer step, which has also written the data of blocks of this rank
        # alone; consumed by the next requantize, dropped when masters are loaded or written.
        self.amax: torch.Tensor | None = None
        self._amax_of_step = torch.empty(0)
        self._kernels: dict[int, Any] = {}  # by sub-group

    def requantize(self) -> None:
        """Quantize all shards on the current stream. Collective; no host sync, except to copy offloaded masters."""
        amax, self.amax = self.amax, None
        if amax is None:
            # Zeros: the amax of blocks without elements on this rank.
            amax = torch.zeros(self.num_scales, device=self.device)
            for shard_cast, spec in self._shard_casts:
                if SCALE_TYPES[spec.scale].needs_amax:
                    shard_cast.write_amax(amax, FP8Param.numbers)
        scales = self._agree(amax)
        for shard_cast, _ in self._shard_casts:
            shard_cast.cast(scales, FP8Param.numbers)
        self._use(scales)
        self.write_residuals()
        for weight in self.weights:  # last: an interrupted requantize is repeated
            weight.requantized()

    # ---------------------------------------------------------------- a step in one pass

    @property
    def steps(self) -> bool:
        return bool(self._kernels)

    def quantize_in_step(self, optimizer: AdamW, numels: Sequence[int]) -> None:
        """Let steps compute amax and data, unless two passes are needed or faster; `numels`: of all sub-groups."""
        data, precision = self.weights[0].data, optimizer.precision
        if not has_kernels(data.device) or any(getattr(precision, key) != "fp32" for key in MOMENTS):
            return
        from ds_fp8.zero import one_pass_triton

        places = [master_position(weight.parameter) for weight in self.weights]
        if None in places:  # frozen, stacked with trained ones
            return
        kernels = {}
        for some in in_runs(zip(self.weights, places, strict=True), lambda one: one[1][0]):
            index, members = some[0][1][0], [(weight, start) for weight, (_, start, _) in some]
            if not one_pass_triton.can_take(members, numels[index]):
                return
            kernels[index] = one_pass_triton.StepAndCast(members, numels[index], data)
        self._kernels = kernels

    def begin(self) -> None:
        """Begin a step, after the last reads of data."""
        # Held until the next step: requantize reads it on another stream.
        self._amax_of_step = torch.zeros(self.num_scales, device=self.device)

    def update(self, sub_group: int, masters: torch.Tensor) -> Callable[..., None] | None:
        """Return the fused step of a sub-group; None if it has no weights here."""
        kernel = self._kernels.get(sub_group)
        return kernel and functools.partial(kernel, masters, self._amax_of_step)

    def finish(self, skip: torch.Tensor) -> None:
        """No-op: requantize does the all-reduce of amax and the shared blocks."""

    def taken(self) -> None:
        """Commit the step: its amax are valid for requantize."""
        self.amax = self._amax_of_step


# ---------------------------------------------------------------- residuals of outlier channels


class OutlierWeight(NamedTuple):
    """A sharded weight with outlier channels."""

    weight: FP8Param
    # uint8: residuals [N, C] of all rows, a view of the common buffer; for a weight with room the outlier blocks of the
    # shard's rows, in their padding
    residual: torch.Tensor


class ReferenceResidualCast:
    """Residuals in torch, on any device; the reference of the kernel."""

    def write(self, weights: Sequence[OutlierWeight], scales: torch.Tensor, source: Numbers) -> None:
        """Write residuals of shards, zero before, or outlier blocks where there is room; channels are selected."""
        for weight, residual in weights:
            shard, at = weight.shard, weight.outliers.channels.long()
            if not shard.valid:
                continue
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
    """The residuals of all weights with outlier channels."""

    def __init__(self, weights: Sequence[FP8Param], device: torch.device) -> None:
        """Allocate the residuals in the order of the shards: adjacent within a stack."""
        cut = [weight for weight in weights if not weight.has_room]
        shapes = [(w.shard.shape[0], min(w.outliers.count, w.shard.shape[1])) for w in cut]
        numels = [rows * columns for rows, columns in shapes]
        self._buffer = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
        views = [flat.view(shape) for flat, shape in zip(self._buffer.split(numels), shapes, strict=True)]
        self._weights = [OutlierWeight(weight, view) for weight, view in zip(cut, views, strict=True)]
        self._weights += [
            OutlierWeight(w, w.rows[:, round_up_to_blocks(w.shard.shape[1]) :]) for w in weights if w.has_room
        ]
        if device.type == "cuda":
            from ds_fp8.zero.cast_triton import TritonResidualCast

            self._cast: ReferenceResidualCast = TritonResidualCast()
        else:
            self._cast = ReferenceResidualCast()

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def write(self, scales: torch.Tensor, wire: WireMeter, only: OutlierChannels | None = None) -> None:
        known = [
            one
            for one in self._weights
            if one.weight.outliers.channels is not None and only in (None, one.weight.outliers)
        ]
        if not known:
            return
        # One all-reduce per run of one process group; residuals in between, without channels yet, are zero. Never over
        # two groups: bytes would be summed twice.
        cut = [one for one in known if not one.weight.has_room]
        runs = [list(run) for _, run in groupby(cut, lambda one: id(one.weight.shard.group))]
        parts = [self._from(run[0], run[-1]).zero_() for run in runs]
        # One launch, but one at a time for offloaded shards, which bounds the copies.
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
