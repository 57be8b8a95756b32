"""Wire format of a gradient reduction: FP8 slices with scales, packed by the sender, summed by the receiver.

Each function has a Triton kernel for the GPU and a reference in torch; where scales are powers of two, the same bits.
Formats with a codec have the reference only.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ds_fp8.casts import group_amax, scale_from_amax
from ds_fp8.casts.primitives import decode
from ds_fp8.config.formats import BLOCK, FORMATS
from ds_fp8.zero.message import CastOptions, Message, Slices


def pack(gradient: torch.Tensor, message: torch.Tensor, shape: Message, slices: Slices, options: CastOptions) -> None:
    """Cast a gradient into its slices of a message.

    Args:
        gradient: FP32 or BF16, of any shape.
        message: uint8 [rows, row bytes], written in place: codes and scales, zeros behind the ends of slices.
        shape: Shape of the message.
        slices: Where the gradient lies in it.
        options: How it is cast.
    """
    if gradient.device.type == "cuda" and FORMATS[options.format].codec is None:
        from ds_fp8.zero import gradient_wire_triton

        gradient_wire_triton.pack(gradient, message, shape, slices, options)
    else:
        pack_reference(gradient, message, shape, slices, options)


def pack_reference(
    gradient: torch.Tensor, message: torch.Tensor, shape: Message, slices: Slices, options: CastOptions
) -> None:
    """Do pack in torch, on any device; the oracle of the kernel."""
    flat = gradient.flatten().float()
    world = shape.rows * shape.places
    x = pad(flat, (0, world * slices.length - flat.numel())).view(world, slices.length)
    x = pad(x, (0, slices.padded - slices.length))
    if options.scale is None:
        scales = scale_from_amax(group_amax(x, "1x128"), options.format, "pow2")
    else:
        scales = options.scale.expand(world, slices.padded // BLOCK)
    codes = _codes(x, scales, options)

    groups = slice(slices.column // BLOCK, (slices.column + slices.padded) // BLOCK)
    columns = slice(slices.column, slices.column + slices.padded)
    codes_of, scales_of = _parts(message, shape)
    by_place = (shape.places, shape.rows, -1)
    codes_of[:, :, columns] = codes.view(by_place).transpose(0, 1)
    scales_of[:, :, groups] = scales.reshape(by_place).transpose(0, 1)


def _codes(x: torch.Tensor, scales: torch.Tensor, options: CastOptions) -> torch.Tensor:
    """Return the codes, as bytes, of x [W, padded] in units of scales [W, padded/128]."""
    target = FORMATS[options.format]
    in_units = x / scales.repeat_interleave(BLOCK, 1)
    if options.clipped is not None:
        options.clipped.add_((in_units.abs() > target.max).sum())
    in_units = in_units.clamp(-target.max, target.max)
    if target.codec is not None:
        return target.codec.encode(in_units, None)
    return in_units.to(target.dtype).view(torch.uint8)


def _parts(message: torch.Tensor, shape: Message) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of codes, uint8 [rows, places, width], and scales, FP32 [rows, places, width/128]."""
    codes = message[:, : shape.codes].unflatten(1, (shape.places, shape.width))
    scales = message.view(torch.float32)[:, shape.codes // 4 :].unflatten(1, (shape.places, shape.width // BLOCK))
    return codes, scales


def sum_rows(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """Sum the rows of a message in order, in FP32, and divide the sum.

    Args:
        message: uint8 [rows, row bytes].
        shape: Shape of the message.
        format: FP8 format of its codes.
        divisor: What the sum is divided by at last.

    Returns:
        FP32 [places * width].
    """
    if message.device.type == "cuda" and FORMATS[format].codec is None:
        from ds_fp8.zero import gradient_wire_triton

        return gradient_wire_triton.sum_rows(message, shape, format, divisor)
    return sum_rows_reference(message, shape, format, divisor)


def sum_rows_reference(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """Do sum_rows in torch, on any device; the oracle of the kernel."""
    total = torch.zeros(shape.codes // BLOCK, BLOCK, device=message.device)
    codes, scales = _parts(message, shape)
    for row, scale in zip(codes, scales, strict=True):
        numbers = decode(row.contiguous().view(FORMATS[format].dtype), format=format)
        total += numbers.view(-1, BLOCK) * scale.reshape(-1, 1)
    return (total / divisor).flatten()
