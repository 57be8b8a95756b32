"""One sharded weight: the layout of its shard, its codes and scales, and its state.

A shard is a flat slice [start, stop) of a matrix [R, C]. To find its groups it is laid over the whole rows it touches,
down to a multiple of its blocks' rows, with zeros elsewhere: then the reference cast's own group arithmetic applies.

Its codes are as flat, or whole rows of fprop's operand, with room for an outlier block (casts/outliers.py) behind each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor, cast, group_amax
from ds_fp8.casts.primitives import infinite_to_nan
from ds_fp8.casts.quantization import width_with_outliers
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, FORMATS, CastSpec, group_shape, is_of_blocks, scale_shape
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import GATHERED, placeholder
from ds_fp8.optim.masters import decode, encode
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.masters import has_fp32_master
from ds_fp8.zero.deepspeed.parameters import (
    Shard,
    begin_gather,
    bf16_shard,
    end_gather,
    full_shape,
    in_use,
    is_trained,
    master_shard,
    put_bf16_shard,
    reshard,
)

SCALE_ALIGNMENT = 4
"""Floats that the rows of 128x128 scales are padded to a multiple of: block-scaled products read them 16 bytes at a
time. The scales of every weight or stack begin at a multiple of it too."""


class State(Enum):
    """What modules and users find in the Parameter."""

    SHARDED = "sharded"
    UNSHARDED_FP8 = "unsharded in FP8"
    """The operand of products in an attribute of the Parameter; its data is a placeholder of NaN."""
    UNSHARDED_BF16 = "unsharded in BF16"
    """The numbers in its data, gathered by DeepSpeed, on their way or there."""


class Source(Enum):
    """What the next cast reads."""

    MASTER = "master"
    BF16 = "BF16 shard"
    """Until a step writes the masters over it: a user has written to it."""


class ShardedWeight:
    """One weight [R, C] that is gathered in FP8; experts [E, N, K] are [E*N, K].

        SHARDED --unshard, finish_unshard--> UNSHARDED_FP8  --reshard--> SHARDED
        SHARDED --unshard_bf16-------------> UNSHARDED_BF16 --reshard--> SHARDED
        master_wrote, bf16_wrote --> stale --was_cast--> fresh

    Only the methods of this class change what describes the state; DeepSpeed's own marks follow it.
    """

    def __init__(
        self, parameter: nn.Parameter, shard: Shard, spec: CastSpec, outliers: OutlierChannels | None = None
    ) -> None:
        """Describe a weight with its cast and outlier channels; `data` and `scale_start` are to be set."""
        self.parameter, self.shard, self.spec, self.outliers = parameter, shard, spec, outliers
        rows, columns = shard.shape
        if (why := spec.why_not_sharded(shard.numel, columns)) is not None:
            raise UserError(
                f"a weight of {rows} x {columns} is sharded over {shard.world} ranks in parts of {shard.numel} "
                f"elements, which {why}",
                key="fp8.param_gather.format",
                remedy='"param_gather": {"format": "bf16"}',
            )
        self.numel = rows * columns
        self.data: torch.Tensor
        """uint8 [codes_in_shard], the FP8 codes of the shard; a slice of the buffer of all shards."""
        self.kept: torch.Tensor | None = None
        """uint8 [world * codes_in_shard], all ranks' codes: no gather of this weight sends anything."""
        self.scale: torch.Tensor
        """Scales of the whole weight; a view of the buffer of all scales."""
        self.scale_start: int
        """Index of the first of them in that buffer."""
        self.granularity = spec.granularity
        # Rows that share a row of scales; the cover begins with a whole group of them.
        self.unit = group_shape(self.granularity)[0] if is_of_blocks(self.granularity) else 1
        # A shard begins anywhere in a row. Casts by torch see whole rows, from the first row of a block of scales on:
        #     cover   rows [first_row, first_row + num_rows) of the weight, zeros where other ranks have the elements
        #     offset  of the shard's first element in the cover
        self.first_row = min(shard.start, self.numel) // columns // self.unit * self.unit
        stop = math.ceil((shard.start + shard.valid) / columns) if shard.valid else self.first_row
        self.num_rows = stop - self.first_row
        self.offset = shard.start - self.first_row * columns
        self.placeholder = placeholder(full_shape(parameter), parameter.dtype, parameter.device)
        self.pitch = width_with_outliers(columns, min(outliers.count, columns)) if self.may_have_room else columns
        """Codes from one row to the next, gathered and, where a shard has whole rows, in it."""
        self.codes_in_shard, self.codes_in_all = shard.numel * self.pitch // columns, rows * self.pitch
        self.origin = -shard.start * self.pitch // columns
        """Place of the weight's first code, counted from the shard's."""
        self.scale_shape = scale_shape(shard.shape, self.granularity)
        # One scale for all of the weight has no dimensions.
        scales_per_row = scale_shape((rows, self.pitch), self.granularity)[-1] if self.scale_shape else 1
        if self.granularity == "128x128":
            scales_per_row = math.ceil(scales_per_row / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        self.scale_strides = (scales_per_row, 1) if self.scale_shape else ()
        # Padding included: products read whole rows of scales, 16 bytes at a time.
        self.scale_numel = math.prod(self.scale_shape[:1]) * scales_per_row

        self.correction: torch.Tensor | None = None
        """int16 [shard.numel]: masters are codes and corrections (optim/masters.py), and DeepSpeed has none."""
        self.apart: torch.Tensor | None = None
        """Its masters [shard.numel] where the codes are not their cast, until a step or a cast has read them."""
        self.state = State.SHARDED
        self.source = Source.MASTER
        self.stale = True
        """Whether masters or the BF16 shard were written since the last cast."""
        self.shown = False
        """Whether its present cast was measured."""
        self.in_fp8 = True
        """Whether modules get it in FP8: not one that was left out later, although it is cast with the others."""
        self.frees_bf16 = False
        """Whether its BF16 shard exists only while something reads it."""
        self.has_bf16 = True
        """Whether its BF16 shard is on the device. Another is NaN with stride 0, an error to write to; frozen weights
        have it on the host, where DeepSpeed saves and loads it."""

    def __repr__(self) -> str:
        shard = self.shard
        flags = [name for name in ("stale", "in_fp8", "frees_bf16", "has_bf16") if getattr(self, name)]
        flags += ["kept whole"] if self.kept is not None else []
        return (
            f"ShardedWeight({tuple(shard.shape)}, {self.spec}, elements {shard.start} to {shard.start + shard.valid} "
            f"of one of {shard.world} ranks, {self.state.value}, cast from {self.source.value}, {', '.join(flags)})"
        )

    @property
    def may_have_room(self) -> bool:
        """Return whether shards are whole rows of a weight with outlier channels: then one rank has all of a row."""
        rows, columns = self.shard.shape
        # The step of masters that are codes writes them flat (masters_triton.py).
        wanted = self.outliers is not None and has_fp32_master(self.parameter)
        return wanted and self.shard.numel == rows // self.shard.world * columns

    @property
    def has_room(self) -> bool:
        """Return whether codes have an outlier block behind every row, in the shard and gathered."""
        return self.pitch > self.shard.shape[1]

    # ---------------------------------------------------------------- transitions

    @property
    def operand(self) -> QuantizedTensor | None:
        """Return what products read while the weight is unsharded in FP8."""
        return getattr(self.parameter, GATHERED, None)

    def unshard(self) -> None:
        """Begin to gather the codes; RuntimeError if DeepSpeed has it in another state than partitioned."""
        begin_gather(self.parameter)

    def finish_unshard(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Make gathered codes available to modules, with the scales that they were cast with."""
        codes = codes.view(-1, self.pitch)[:, : self.shard.shape[1]]
        whole = QuantizedTensor.of_bytes(codes, scale, self.spec)
        # The parameter's data is a placeholder meanwhile, for code that looks at shape and dtype.
        setattr(self.parameter, GATHERED, whole)
        self.parameter.data = self.placeholder
        end_gather(self.parameter)
        self.state = State.UNSHARDED_FP8

    def unshard_bf16(self) -> None:
        """Prepare for a gather by DeepSpeed: its readers, such as GatheredParameters, want numbers."""
        if self.state is State.UNSHARDED_FP8:
            if in_use(self.parameter) and self.in_fp8:
                raise RuntimeError(
                    "a weight gathered in FP8 was asked for in BF16 while its layer is computing; "
                    'name the layer in "fp8": {"linear": {"skip": [...]}}'
                )
            reshard(self.parameter)  # which comes back to the method of this name
        self.make_bf16()
        self.state = State.UNSHARDED_BF16

    def part_from_shard(self) -> None:
        """Copy what was gathered in BF16 and is the shard itself (one rank): writes are found by comparing the two."""
        if self.in_fp8 and self.has_bf16 and self.parameter.data_ptr() == bf16_shard(self.parameter).data_ptr():
            self.parameter.data = self.parameter.data.clone()

    def reshard(self) -> None:
        """Drop the operand, before DeepSpeed frees the parameter's data."""
        if self.operand is not None:
            if not self.operand_in_place:
                # Allocated on the stream of gathers, read by products on this one.
                streams.used_by_current_stream(self.operand.data)
            setattr(self.parameter, GATHERED, None)
        self.state = State.SHARDED

    def forget(self) -> None:
        """Drop what a capture that failed has gathered; DeepSpeed's marks are put back by others."""
        setattr(self.parameter, GATHERED, None)
        self.state = State.SHARDED

    @property
    def on_host(self) -> bool:
        """Return whether what casts read lies on the host: the BF16 shard of a frozen weight."""
        return not self.has_bf16 and not is_trained(self.parameter)

    @property
    def operand_in_place(self) -> bool:
        """Return whether the next cast writes to the operand: to the shard itself (one rank), or to what is kept."""
        whole, places = self.operand, [self.data] if self.kept is None else [self.data, self.kept]
        mine = {place.untyped_storage().data_ptr() for place in places}
        return whole is not None and whole.data.untyped_storage().data_ptr() in mine

    @property
    def operand_codes(self) -> torch.Tensor:
        """Return the flat codes of the operand, room included: uint8 [codes_in_all]."""
        return self.operand.data.view(torch.uint8).as_strided((self.codes_in_all,), (1,))

    def copy_operand(self) -> None:
        """Copy an operand out of the shard, before a cast writes there: its scales belong to the codes of now."""
        data = self.operand_codes.clone().view(-1, self.pitch)[:, : self.shard.shape[1]]
        setattr(self.parameter, GATHERED, replace(self.operand, data=data.view(self.operand.data.dtype)))

    def master_wrote(self) -> None:
        """Note new masters, over what a user wrote to the BF16 shard."""
        self.stale, self.source = True, Source.MASTER

    def bf16_wrote(self, before: torch.Tensor) -> None:
        if self.correction is not None:
            self.apart = self.master()  # the codes are about to be those of what the user wrote
        self.stale, self.source = True, Source.BF16

    def was_cast(self, scales: torch.Tensor) -> None:
        """Note that the codes are those of the present numbers, with scales in the buffer `scales` of all weights."""
        self.stale, self.scale, self.shown = False, self.scales_in(scales), False

    def keep_whole(self, codes: torch.Tensor) -> None:
        """Keep all ranks' codes from now on, in memory [world * codes_in_shard] that the next gather fills."""
        self.kept = codes

    def leave_fp8(self) -> None:
        """Let DeepSpeed gather this weight from now on; what is gathered in FP8 stays so until resharded."""
        self.in_fp8, self.kept = False, None

    def need_no_bf16(self) -> None:
        """Keep a BF16 shard only while something reads it."""
        self.frees_bf16 = True

    def keep_bf16(self) -> None:
        """Keep the BF16 shard from now on; what a user wrote there stays."""
        self.make_bf16()
        self.frees_bf16 = False

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

    # ---------------------------------------------------------------- layout

    @property
    def start(self) -> int:
        """Return the shard's offset in the buffer of all shards."""
        return self.data.storage_offset()

    def numbers(self) -> torch.Tensor:
        """Return the flat numbers that the next cast reads: [at least shard.valid], FP32 or BF16, on any device."""
        return bf16_shard(self.parameter) if self.source is Source.BF16 else self.master()

    def master(self) -> torch.Tensor:
        """Return the flat FP32 masters [at least shard.valid]: where they lie, or decoded."""
        if self.correction is None:
            return master_shard(self.parameter)
        if self.apart is not None:
            return self.apart
        codes = self.codes().view(FORMATS[self.spec.format].dtype)
        master = decode(codes, self.cover(self.correction), self.covered(self.scale), self.granularity)
        flat = torch.zeros(self.shard.numel, device=codes.device)
        return self.into(flat, master)

    def write_master(self, numbers: torch.Tensor, scales: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        """Write codes and corrections of flat FP32 numbers by their scales; nothing where `skip` is not zero."""
        found = encode(self.cover(numbers), self.covered(self.scales_in(scales)), self.granularity)
        for kept, new in zip((self.data, self.correction), (found[0].view(torch.uint8), found[1]), strict=True):
            if skip is not None:
                new = torch.where(skip != 0, self.cover(kept), new)
            self.into(kept, new)

    @property
    def rows(self) -> torch.Tensor:
        """Return the shard's codes with their room: uint8 [rows of the shard, pitch]."""
        return self.data.view(-1, self.pitch)

    def codes(self) -> torch.Tensor:
        """Return the codes over the cover."""
        return self.cover(self.rows[:, : self.shard.shape[1]].flatten() if self.has_room else self.data)

    def write_codes(self, cover: torch.Tensor) -> None:
        """Write the shard's codes from those over the cover."""
        if self.has_room:
            own = self.into(self.data.new_empty(self.shard.numel), cover)
            self.rows[:, : self.shard.shape[1]] = own.view(-1, self.shard.shape[1])
        else:
            self.into(self.data, cover)

    def into(self, flat: torch.Tensor, cover: torch.Tensor) -> torch.Tensor:
        """Write the shard's elements of a matrix over the cover into a flat tensor, and return that."""
        flat[: self.shard.valid] = cover.flatten()[self.offset : self.offset + self.shard.valid]
        return flat

    def scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this weight's scales (or amax) in a flat buffer of those of all weights."""
        # A view: what a cast writes is what every holder of these scales reads.
        return buffer.as_strided(self.scale_shape, self.scale_strides, self.scale_start)

    def block_scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the scales of its outlier blocks there: [R/128, blocks]."""
        rows, used = self.scale_shape
        return buffer.as_strided((rows, self.pitch // BLOCK - used), self.scale_strides, self.scale_start + used)

    def before_cast(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.spec.before_cast(numbers[: self.shard.valid])

    def cover(self, source: torch.Tensor) -> torch.Tensor:
        """Return the shard's valid elements on whole rows [num_rows, C], zeros around; a view if none are needed."""
        shape = (self.num_rows, self.shard.shape[1])
        if self.shard.valid == math.prod(shape):
            return source[: self.shard.valid].view(shape)
        cover = source.new_zeros(math.prod(shape))
        cover[self.offset : self.offset + self.shard.valid] = source[: self.shard.valid]
        return cover.view(shape)

    def covered(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the part of the scales of the whole weight that belongs to the cover."""
        if self.granularity == "tensor":
            return scales
        return scales[self.first_row // self.unit : math.ceil((self.first_row + self.num_rows) / self.unit)]


Numbers = Callable[[ShardedWeight], torch.Tensor]
"""Returns what a weight is cast from, as ShardedWeight.numbers."""


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `numbers` as FP32 on `device`: themselves, or a copy."""
    return numbers.to(device).float()  # in this order: as many bytes are copied as there are


class ReferenceShardCast:
    """The casts of a fixed list of weights in torch, on any device; the oracle of the kernels."""

    def __init__(self, weights: Sequence[ShardedWeight], spec: CastSpec):
        self._weights, self._spec = [weight for weight in weights if weight.shard.valid], spec

    def write_amax(self, amax: torch.Tensor, source: Numbers) -> None:
        """Write the amax of every group that has a part here into the zeroed FP32 buffer `amax`; Inf for NaN or Inf."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), amax.device))
            weight.covered(weight.scales_in(amax)).copy_(group_amax(weight.cover(numbers), weight.granularity))

    def cast(self, scales: torch.Tensor, source: Numbers) -> None:
        """Refill every weight's `data` in units of the agreed scales, a flat FP32 buffer."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), scales.device))
            own = weight.covered(weight.scales_in(scales))
            cover = infinite_to_nan(weight.cover(numbers), self._spec.scale)
            cover = cast(cover, own, self._spec.format, weight.granularity)
            weight.write_codes(cover.view(torch.uint8))
