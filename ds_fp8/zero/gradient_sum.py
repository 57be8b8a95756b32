"""Receiver's half of the gradient reduction: rows of a message summed into the FP32 gradient shards.

    gradient[i]  = 1/W * sum over rows of code * scale              first micro-batch of a step
    gradient[i] += the same                                         later ones
    squares[s]   = sum of gradient[i]² over the SPAN elements i of span s, after that

One pass: each message byte is read once, each accumulated element written once. The sums of squares make up the
gradient norm without another read. They are FP64 and each is written whole by one program, so a run repeats bit for bit
and a norm does not overflow before its gradient does. Inf or NaN anywhere makes the norm Inf or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_fp8.config.formats import FORMATS
from ds_fp8.zero.gradient_wire import sum_rows_reference
from ds_fp8.zero.message import SPAN, Message, Target


def add_rows(
    message: torch.Tensor,
    shape: Message,
    format: str,
    divisor: int,
    targets: Sequence[Target],
    gradient: torch.Tensor,
    squares: torch.Tensor,
    accumulate: bool,
) -> None:
    """Sum the rows of a received message into the gradient shards.

    Args:
        message: uint8 [rows, row bytes].
        shape: Shape of the message; one place.
        format: Format of the codes.
        divisor: What the sum is divided by.
        targets: Slices of the message to add; none may overlap another.
        gradient: Flat shards of all gradients, FP32 or BF16 [n], written in place.
        squares: FP64 [spans], written in place: sums over what `gradient` then holds.
        accumulate: Add to what `gradient` holds rather than replace it.
    """
    if message.device.type == "cuda" and FORMATS[format].codec is None:
        from ds_fp8.zero import gradient_sum_triton

        gradient_sum_triton.add_rows(message, shape, format, divisor, targets, gradient, squares, accumulate)
    else:
        add_rows_reference(message, shape, format, divisor, targets, gradient, squares, accumulate)


def add_rows_reference(
    message: torch.Tensor,
    shape: Message,
    format: str,
    divisor: int,
    targets: Sequence[Target],
    gradient: torch.Tensor,
    squares: torch.Tensor,
    accumulate: bool,
) -> None:
    """Do add_rows in torch, on any device; the oracle of the kernel."""
    total = sum_rows_reference(message, shape, format, divisor)
    for target in targets:
        found = total[target.column : target.column + target.numel]
        place = gradient[target.start : target.start + target.numel]
        place.copy_(place + found if accumulate else found)
        spans = torch.nn.functional.pad(place, (0, -target.numel % SPAN)).view(-1, SPAN)
        squares[target.span : target.span + len(spans)] = spans.double().square().sum(1)
