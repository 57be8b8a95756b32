"""What the gradient reduction sends: FP8 slices with their scales, packed by the sender, summed by the receiver.

A message is uint8 [rows, places * width * 33/32], one row for each rank it goes to: first the codes, `width` for each
of `places` slices, then one FP32 scale for every 128 of them. The slice of rank r lies in row r mod rows, place r div
rows; one flat exchange has as many rows as ranks and one place, the first of two levels has a place for every node.

Each function has a Triton kernel for the GPU and a reference in torch; where scales are powers of two, the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ds_fp8.formats import BLOCK, FORMATS
from ds_fp8.quantize import QuantizedTensor, group_amax, scale_from_amax
from ds_fp8.quantize.reference import decode
from ds_fp8.quantize.stochastic import round_stochastically, uniform


@dataclass(frozen=True)
class Message:
    """The shape of a message; `width` is a multiple of 128."""

    rows: int
    places: int
    width: int

    @property
    def codes(self) -> int:
        """Codes of one row."""
        return self.places * self.width

    @property
    def row_bytes(self) -> int:
        """Codes and scales of one row."""
        return self.codes + self.codes // BLOCK * torch.float32.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.rows, self.row_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Slices:
    """Where one flat gradient lies in a message: rank r gets its elements [r * length, (r + 1) * length)."""

    length: int
    column: int
    """Where its slice begins in the `width` codes of every place; a multiple of 128."""

    @property
    def padded(self) -> int:
        """Codes that a slice takes: whole groups."""
        return -(-self.length // BLOCK) * BLOCK


@dataclass(frozen=True)
class CastOptions:
    """How a gradient is cast."""

    format: str
    key: int | None = None
    """Of stochastic rounding, 31 bits; None rounds to nearest even."""
    scale: torch.Tensor | None = None
    """FP32 [], one scale for the whole gradient, with saturation; None gives every group of 128 its own."""
    clipped: torch.Tensor | None = None
    """int32 [], where the elements that saturated in units of `scale` are counted, NaN left out."""
    residual: torch.Tensor | None = None
    """[numel], FP32 or BF16: added to the gradient before its cast; what the cast then lost takes its place, except
    where that is not finite."""


def pack(gradient: torch.Tensor, message: torch.Tensor, shape: Message, slices: Slices, options: CastOptions) -> None:
    """Cast a gradient (any shape, FP32 or BF16) into its slices of `message`, zeros behind their ends."""
    if gradient.device.type == "cuda":
        from ds_fp8.zero.kernels import gradient_wire

        gradient_wire.pack(gradient, message, shape, slices, options)
    else:
        pack_reference(gradient, message, shape, slices, options)


def pack_reference(
    gradient: torch.Tensor, message: torch.Tensor, shape: Message, slices: Slices, options: CastOptions
) -> None:
    """pack in torch, on any device; the oracle of the kernel."""
    flat = gradient.flatten().float()
    if options.residual is not None:
        flat = flat + options.residual.float()
    world = shape.rows * shape.places
    x = pad(flat, (0, world * slices.length - flat.numel())).view(world, slices.length)
    x = pad(x, (0, slices.padded - slices.length))
    if options.scale is None:
        scales = scale_from_amax(group_amax(x, "1x128"), options.format, "pow2")
    else:
        scales = options.scale.expand(world, slices.padded // BLOCK)
    codes = _codes(x, scales, slices, options)
    if options.residual is not None:
        lost = x - QuantizedTensor(codes, scales, "1x128").dequantize()
        lost = lost[:, : slices.length].flatten()[: flat.numel()]
        options.residual.copy_(torch.where(lost.isfinite(), lost, options.residual.float()))

    groups = slice(slices.column // BLOCK, (slices.column + slices.padded) // BLOCK)
    columns = slice(slices.column, slices.column + slices.padded)
    codes_of, scales_of = _parts(message, shape)
    by_place = (shape.places, shape.rows, -1)
    codes_of[:, :, columns] = codes.view(torch.uint8).view(by_place).transpose(0, 1)
    scales_of[:, :, groups] = scales.reshape(by_place).transpose(0, 1)


def _codes(x: torch.Tensor, scales: torch.Tensor, slices: Slices, options: CastOptions) -> torch.Tensor:
    """The FP8 codes of x [W, padded] in units of scales [W, padded/128]."""
    target = FORMATS[options.format]
    in_units = x / scales.repeat_interleave(BLOCK, 1)
    if options.clipped is not None:
        options.clipped.add_((in_units.abs() > target.max).sum())
    in_units = in_units.clamp(-target.max, target.max)
    if options.key is not None:
        rank, within = (torch.arange(n, device=x.device) for n in x.shape)
        draw = uniform(rank[:, None] * slices.length + within, options.key)
        in_units = round_stochastically(in_units, draw, options.format)
    return in_units.to(target.dtype)


def _parts(message: torch.Tensor, shape: Message) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a message's codes, uint8 [rows, places, width], and scales, FP32 [rows, places, width/128]."""
    codes = message[:, : shape.codes].unflatten(1, (shape.places, shape.width))
    scales = message.view(torch.float32)[:, shape.codes // 4 :].unflatten(1, (shape.places, shape.width // BLOCK))
    return codes, scales


def sum_rows(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """The FP32 sum over its rows of the numbers of a message, [places * width], added in order and divided at last."""
    if message.device.type == "cuda":
        from ds_fp8.zero.kernels import gradient_wire

        return gradient_wire.sum_rows(message, shape, format, divisor)
    return sum_rows_reference(message, shape, format, divisor)


def sum_rows_reference(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """sum_rows in torch, on any device; the oracle of the kernel."""
    total = torch.zeros(shape.codes // BLOCK, BLOCK, device=message.device)
    codes, scales = _parts(message, shape)
    for row, scale in zip(codes, scales, strict=True):
        numbers = decode(row.contiguous().view(FORMATS[format].dtype))
        total += numbers.view(-1, BLOCK) * scale.reshape(-1, 1)
    return (total / divisor).flatten()
