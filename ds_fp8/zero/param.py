"""One sharded weight: its layout, its quantized shard, its masters, and its state.

A shard is a flat slice [start, stop) of a matrix [R, C]. To find its groups it is extended to the full rows it touches,
down to a multiple of its blocks' rows, with zeros elsewhere: then quantization in torch applies as to a matrix.
Its data are as flat, or rows of fprop's weight, with room for an outlier block (casts/outliers.py) behind each.

    SHARDED --unshard, finish_unshard--> UNSHARDED      --reshard--> SHARDED
    SHARDED --unshard_bf16-------------> UNSHARDED_BF16 --reshard--> SHARDED

The quantized shard is stale from a write to what it is quantized from, the masters or the BF16 shard, until the next
requantize. Only the methods of FP8Param change what describes the state; DeepSpeed's own marks follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor, group_amax, quantize_with_scale
from ds_fp8.casts.primitives import infinite_to_nan
from ds_fp8.casts.quantization import width_with_outliers
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, FORMATS, CastSpec, group_shape, is_of_blocks, scale_shape
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import UNSHARDED, group_of, placeholder
from ds_fp8.optim.masters import dequantize_masters, quantize_masters
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.masters import has_fp32_master
from ds_fp8.zero.deepspeed.parameters import (
    Shard,
    begin_gather,
    bf16_shard,
    end_gather,
    full_shape,
    in_use,
    is_gathered,
    is_trained,
    master_shard,
    put_bf16_shard,
    reshard,
)

# Floats that the rows of 128x128 scales are padded to a multiple of: block-scaled products read them 16 bytes at a
# time. The scales of every weight or fused product begin at a multiple of it too.
SCALE_ALIGNMENT = 4


class State(Enum):
    """Form in which modules and users find a weight in its Parameter."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded in FP8"  # the quantized weight in an attribute; its data is a placeholder of NaN
    UNSHARDED_BF16 = "unsharded in BF16"  # the numbers in its data, all-gathered by DeepSpeed, on their way or there


class FP8Param:
    """One weight [R, C] that is unsharded in FP8; experts [E, N, K] are [E*N, K]."""

    def __init__(
        self, parameter: nn.Parameter, shard: Shard, spec: CastSpec, outliers: OutlierChannels | None = None
    ) -> None:
        """Lay a shard out with its cast and outlier channels; whoever quantizes it gives it memory."""
        self.parameter, self.shard, self.spec, self.outliers = parameter, shard, spec, outliers
        rows, columns = shard.shape
        if (why := spec.why_not_sharded(shard.numel, columns)) is not None:
            raise UserError(
                f"a weight of {rows} x {columns} is sharded over {shard.world} ranks in parts of {shard.numel} "
                f"elements, which {why}",
                key="fp8.param_gather.format",
                remedy='"param_gather": {"format": "bf16"}',
            )
        # Layout, for the life of an engine. Rows that share a row of scales; the cover begins with a whole group of
        # them.
        self.unit = group_shape(spec.granularity)[0] if is_of_blocks(spec.granularity) else 1
        # A shard begins anywhere in a row. Casts by torch see whole rows, from the first row of a block of scales on:
        #     cover   rows [first_row, first_row + num_rows) of the weight, zeros where other ranks have the elements
        #     offset  of the shard's first element in the cover
        self.first_row = min(shard.start, rows * columns) // columns // self.unit * self.unit
        stop = math.ceil((shard.start + shard.valid) / columns) if shard.valid else self.first_row
        self.num_rows = stop - self.first_row
        self.offset = shard.start - self.first_row * columns
        # Data have room for an outlier block behind every row, unsharded and in the shard, where shards are whole rows:
        # one rank has all of a row then, and room costs no copy. Not where masters are data and corrections: their step
        # writes data flat (coded_masters_triton.py).
        whole_rows = shard.numel == rows // shard.world * columns and has_fp32_master(parameter)
        channels = min(outliers.count, columns) if outliers is not None and whole_rows else 0
        self.pitch = width_with_outliers(columns, channels) if channels else columns  # from one row of data to the next
        self.has_room = self.pitch > columns
        self.data_numel = shard.numel * self.pitch // columns  # bytes of the shard's data, padding and room included
        self.unsharded_numel = rows * self.pitch  # bytes of the unsharded weight's data, without padding
        self.origin = -shard.start * self.pitch // columns  # of the weight's first byte of data, from the shard's
        self.scale_shape = scale_shape(shard.shape, spec.granularity)
        # One scale for all of the weight has no dimensions. Padding included: products read whole rows of scales.
        scales_per_row = scale_shape((rows, self.pitch), spec.granularity)[-1] if self.scale_shape else 1
        if spec.granularity == "128x128":
            scales_per_row = math.ceil(scales_per_row / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        self.scale_strides = (scales_per_row, 1) if self.scale_shape else ()
        self.scale_numel = math.prod(self.scale_shape[:1]) * scales_per_row

        self.placeholder = placeholder(full_shape(parameter), parameter.dtype, parameter.device)
        self.data = torch.empty(0, dtype=torch.uint8)  # the quantized shard, a slice of the buffer of all shards
        self.scale_start = 0  # first of the weight's scales in the buffer of those that are quantized with it
        self.scale = torch.empty(0)  # FP32, of the unsharded weight, a view of that buffer
        self.kept_data: torch.Tensor | None = None  # all ranks' data, kept: no gather sends anything
        self.correction: torch.Tensor | None = None  # int16: masters are data and corrections, DeepSpeed has none
        # FP32 master shard that overrides data and corrections; dropped at the next requantize or step.
        self.master_override: torch.Tensor | None = None
        self.stale = True
        self.from_bf16 = False  # a user wrote to the BF16 shard: it is the source until a step writes masters over it
        self.logged = False  # the present data were measured
        self.in_fp8 = True  # modules get it in FP8; one that has left FP8 is quantized with the others still
        self.frees_bf16 = False  # the BF16 shard exists only while something reads it
        # An absent BF16 shard is NaN with stride 0, an error to write to; frozen weights have it on the host, where
        # DeepSpeed saves and loads it.
        self.has_bf16 = True

    @property
    def state(self) -> State:
        if self.unsharded is not None:
            return State.UNSHARDED
        return State.UNSHARDED_BF16 if is_gathered(self.parameter) else State.SHARDED

    # ---------------------------------------------------------------- layout

    def cover(self, source: torch.Tensor) -> torch.Tensor:
        """Return the shard's valid elements on whole rows [num_rows, C], zeros around; a view if none are needed."""
        shape = (self.num_rows, self.shard.shape[1])
        if self.shard.valid == math.prod(shape):
            return source[: self.shard.valid].view(shape)
        cover = source.new_zeros(math.prod(shape))
        cover[self.offset : self.offset + self.shard.valid] = source[: self.shard.valid]
        return cover.view(shape)

    def covered(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the part of the unsharded weight's scales that belongs to the cover."""
        if self.spec.granularity == "tensor":
            return scales
        return scales[self.first_row // self.unit : math.ceil((self.first_row + self.num_rows) / self.unit)]

    def into(self, flat: torch.Tensor, cover: torch.Tensor) -> torch.Tensor:
        """Copy the shard's elements out of `cover`, all rows that it touches, to the front of `flat`; return `flat`."""
        flat[: self.shard.valid] = cover.flatten()[self.offset : self.offset + self.shard.valid]
        return flat

    # ---------------------------------------------------------------- unshard and reshard

    @property
    def unsharded(self) -> QuantizedTensor | None:
        """Return the quantized weight that products read while it is unsharded in FP8."""
        return getattr(self.parameter, UNSHARDED, None)

    def unshard(self) -> None:
        """Begin to gather the data; RuntimeError if DeepSpeed has it in another state than partitioned."""
        begin_gather(self.parameter)

    def finish_unshard(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        """Make unsharded data available to modules, with the scales that they were quantized with."""
        data = data.view(-1, self.pitch)[:, : self.shard.shape[1]]
        # The parameter's data is a placeholder meanwhile, for code that looks at shape and dtype.
        setattr(self.parameter, UNSHARDED, QuantizedTensor.of_bytes(data, scale, self.spec))
        self.parameter.data = self.placeholder
        end_gather(self.parameter)

    def unshard_bf16(self) -> None:
        """Prepare for a gather by DeepSpeed: its readers, such as GatheredParameters, want numbers."""
        if self.unsharded is not None:
            if in_use(self.parameter) and self.in_fp8:
                raise RuntimeError(
                    "a weight gathered in FP8 was asked for in BF16 while its layer is computing; "
                    'name the layer in "fp8": {"linear": {"skip": [...]}}'
                )
            reshard(self.parameter)  # which comes back to the method of this name
        self.make_bf16()

    def reshard(self) -> None:
        """Drop the quantized weight, before DeepSpeed frees the parameter's data."""
        if self.unsharded is not None:
            if not self.unsharded_in_place:
                # Allocated on the stream of gathers, read by products on this one.
                streams.used_by_current_stream(self.unsharded.data)
            self.forget()

    def forget(self) -> None:
        """Drop a quantized weight without its marks of DeepSpeed, which the caller resets."""
        setattr(self.parameter, UNSHARDED, None)

    @property
    def unsharded_in_place(self) -> bool:
        """Return whether requantize writes to the unsharded weight: to the shard (one rank) or to kept data."""
        places = [self.data] if self.kept_data is None else [self.data, self.kept_data]
        mine = {place.untyped_storage().data_ptr() for place in places}
        return self.unsharded is not None and self.unsharded.data.untyped_storage().data_ptr() in mine

    @property
    def unsharded_flat(self) -> torch.Tensor:
        """Return the flat data of the unsharded weight, room included: uint8 [unsharded_numel]."""
        return self.unsharded.data.view(torch.uint8).as_strided((self.unsharded_numel,), (1,))

    def copy_unsharded(self) -> None:
        """Copy the unsharded weight, before requantize writes there: its scales belong to the data of now."""
        data = self.unsharded_flat.clone().view(-1, self.pitch)[:, : self.shard.shape[1]]
        setattr(self.parameter, UNSHARDED, replace(self.unsharded, data=data.view(self.unsharded.data.dtype)))

    def leave_fp8(self) -> None:
        """Let DeepSpeed all-gather this weight in BF16 from now on; if unsharded, it stays in FP8 until resharded."""
        self.in_fp8, self.kept_data = False, None

    # ---------------------------------------------------------------- stale or fresh

    def master_written(self) -> None:
        """Note that the masters are new: they override what a user wrote to the BF16 shard."""
        self.stale, self.from_bf16 = True, False

    def bf16_written(self, before: torch.Tensor) -> None:
        """Note that a user wrote to the BF16 shard, `before` until then: requantize reads it, not the masters."""
        if self.correction is not None:
            self.master_override = self.master()  # the data are about to be those of what the user wrote
        self.stale = self.from_bf16 = True

    def requantized(self) -> None:
        """Note that the data are those of the present numbers."""
        self.stale = self.logged = False
        if not self.from_bf16:
            self.master_override = None

    # ---------------------------------------------------------------- BF16 shards

    @property
    def on_host(self) -> bool:
        """Return whether what it is quantized from lies on the host: the BF16 shard of a frozen weight."""
        return not self.has_bf16 and not is_trained(self.parameter)

    def make_bf16(self) -> None:
        """Make a BF16 shard on the device, if there is none: rounded from the masters, or copied from the host."""
        if not self.has_bf16:
            put_bf16_shard(self.parameter, self.master().to(self.data.device, self.parameter.dtype))
            self.has_bf16 = True

    def free_bf16(self) -> None:
        """Free the BF16 shard, unless it is kept. Without masters it is moved to the host, for nothing else has it."""
        if self.frees_bf16 and self.has_bf16:
            shard = bf16_shard(self.parameter)
            absent = shard.new_full((1,), torch.nan).expand(self.shard.numel)
            put_bf16_shard(self.parameter, absent if is_trained(self.parameter) else shard.cpu())
            self.has_bf16 = False

    # ---------------------------------------------------------------- masters and data

    def numbers(self) -> torch.Tensor:
        """Return the flat numbers that it is quantized from: [at least shard.valid], FP32 or BF16, on any device."""
        return bf16_shard(self.parameter) if self.from_bf16 else self.master()

    def before_cast(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.spec.before_cast(numbers[: self.shard.valid])

    def master(self) -> torch.Tensor:
        """Return the flat FP32 masters [at least shard.valid]: a view, or dequantized."""
        if self.correction is None:
            return master_shard(self.parameter)
        if self.master_override is not None:
            return self.master_override
        data = self.covered_data().view(FORMATS[self.spec.format].dtype)
        master = dequantize_masters(data, self.cover(self.correction), self.covered(self.scale), self.spec.granularity)
        return self.into(torch.zeros(self.shard.numel, device=data.device), master)

    def write_master(self, numbers: torch.Tensor, scales: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        """Write data and corrections of flat FP32 numbers by their scales; nothing where `skip` is not zero."""
        found = quantize_masters(self.cover(numbers), self.covered(self.scales_in(scales)), self.spec.granularity)
        for old, new in zip((self.data, self.correction), (found[0].view(torch.uint8), found[1]), strict=True):
            if skip is not None:
                new = torch.where(skip != 0, self.cover(old), new)
            self.into(old, new)

    @property
    def start(self) -> int:
        """Return the shard's offset in the buffer of all shards."""
        return self.data.storage_offset()

    @property
    def rows(self) -> torch.Tensor:
        """Return the shard's data with their room: uint8 [rows of the shard, pitch]."""
        return self.data.view(-1, self.pitch)

    def covered_data(self) -> torch.Tensor:
        return self.cover(self.rows[:, : self.shard.shape[1]].flatten() if self.has_room else self.data)

    def write_data(self, cover: torch.Tensor) -> None:
        """Write the shard's data from those over the cover."""
        if self.has_room:
            own = self.into(self.data.new_empty(self.shard.numel), cover)
            self.rows[:, : self.shard.shape[1]] = own.view(-1, self.shard.shape[1])
        else:
            self.into(self.data, cover)

    def scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this weight's scales (or amax) in a flat buffer of those of all weights."""
        # A view: what requantize writes is what every holder of these scales reads.
        return buffer.as_strided(self.scale_shape, self.scale_strides, self.scale_start)

    def block_scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the scales of its outlier blocks there: [R/128, blocks]."""
        rows, used = self.scale_shape
        return buffer.as_strided((rows, self.pitch // BLOCK - used), self.scale_strides, self.scale_start + used)


# Weights of one fused product, whose scales lie side by side, and so do their unsharded data; or one weight alone.
Stack = list[FP8Param]


def stacks_of(weights: Iterable[FP8Param]) -> list[Stack]:
    """Return `weights` in order, those of one fused product together if all of it is there, every other one alone."""
    present = {id(weight.parameter): weight for weight in weights}
    stacks = []
    for weight in present.values():
        group = [id(p) for p in group_of(weight.parameter)]
        stack = [present[key] for key in group] if all(key in present for key in group) else [weight]
        if stack[0] is weight:
            stacks.append(stack)
    return stacks


def in_runs(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return the items in lists of one key each, in the order they come."""
    runs: dict[Any, list[Any]] = {}
    for item in items:
        runs.setdefault(key(item), []).append(item)
    return list(runs.values())


Numbers = Callable[[FP8Param], torch.Tensor]  # returns what a weight is quantized from, as FP8Param.numbers


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `numbers` as FP32 on `device`: themselves, or a copy."""
    return numbers.to(device).float()  # in this order: as many bytes are copied as there are


class ReferenceShardCast:
    """Quantization of a fixed list of shards in torch, on any device; the reference of the kernels."""

    def __init__(self, weights: Sequence[FP8Param], spec: CastSpec):
        self._weights, self._spec = [weight for weight in weights if weight.shard.valid], spec

    def write_amax(self, amax: torch.Tensor, source: Numbers) -> None:
        """Write the amax of every group that has a part here into the zeroed FP32 buffer `amax`; Inf for NaN or Inf."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), amax.device))
            weight.covered(weight.scales_in(amax)).copy_(group_amax(weight.cover(numbers), weight.spec.granularity))

    def cast(self, scales: torch.Tensor, source: Numbers) -> None:
        """Quantize into every weight's `data` with `scales`, a flat FP32 buffer."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), scales.device))
            own = weight.covered(weight.scales_in(scales))
            cover = infinite_to_nan(weight.cover(numbers), self._spec.scale)
            cover = quantize_with_scale(cover, own, self._spec.format, weight.spec.granularity)
            weight.write_data(cover.view(torch.uint8))
