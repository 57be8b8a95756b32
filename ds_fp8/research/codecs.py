"""Casts to formats that tensor cores do not support here: minifloats, integers, logarithms, in one byte an element.

A format is the list of its magnitudes (TableCodec). A number becomes the code of the nearest one, of two as
near the one with the even code, which for floating point is IEEE's rounding to nearest even; beyond the largest it
saturates:

    index = number of midpoints between neighbours that lie below |x|        (on one of them: the even neighbour)
    code  = index | sign << (bits - 1)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TableCodec:
    """Codec (Format.codec in config/formats.py) of a format by the list of its numbers."""

    # Numbers from 0 upwards. The code of magnitudes[i] is i, that of its negative i + 2^(bits - 1).
    magnitudes: tuple[float, ...]
    bits: int

    def encode(self, x: torch.Tensor, draw: torch.Tensor | None = None) -> torch.Tensor:
        """Return the uint8 codes of FP32 numbers: of the nearest, or with draws from [0, 1) of either neighbour."""
        return encode(x, self) if draw is None else encode_stochastically(x, draw, self)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of uint8 codes, of their shape."""
        table = numbers(self, codes.device, dtype)
        return table.index_select(0, codes.contiguous().flatten().int()).view(codes.shape)


@functools.lru_cache
def midpoints(codec: TableCodec, device: torch.device) -> torch.Tensor:
    """Return the FP32 numbers half-way between neighbouring magnitudes, ascending.

    Where FP32 has no such number (log8), the neighbour of it that the rule for ties puts on its side.
    """
    magnitudes = torch.tensor(codec.magnitudes, dtype=torch.float64)
    exact = (magnitudes[1:] + magnitudes[:-1]) / 2
    rounded = exact.float()
    goes_up = torch.arange(len(exact)) % 2 == 1
    wrong = torch.where(goes_up, rounded < exact, rounded > exact)
    # Moved by one FP32 number where rounding has put the midpoint on the wrong side for ties to even.
    corrected = torch.nextafter(rounded, torch.where(goes_up, torch.inf, -torch.inf))
    return torch.where(wrong, corrected, rounded).to(device)


@functools.lru_cache
def numbers(codec: TableCodec, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of each of the 256 codes a byte can hold; those that the format has not are NaN."""
    magnitudes, sign = torch.tensor(codec.magnitudes), 2 ** (codec.bits - 1)
    table = torch.full((256,), torch.nan)
    table[: len(magnitudes)] = magnitudes
    table[sign : sign + len(magnitudes)] = -magnitudes
    return table.to(device, dtype)


def _cells(limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by upper 16 bits how many of `limits` lie below all magnitudes with them, and the next limit: [32768].

    No two limits may lie between the same two neighbours in BF16, which is what those bits are.
    """
    smallest = (torch.arange(2**15, dtype=torch.int32) << 16).view(torch.float32)
    index = torch.bucketize(smallest, limits)
    return index, torch.cat([limits, limits.new_full((1,), torch.inf)])[index]


def _just_below(numbers: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(numbers, torch.tensor(-torch.inf))


@functools.lru_cache
def _nearest_cells(codec: TableCodec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by upper 16 bits the code of the smallest magnitude with them, and where the next one begins."""
    limits = midpoints(codec, torch.device("cpu"))
    # On a midpoint with an odd index below it the even one above it is nearest.
    limits = torch.where(torch.arange(len(limits)) % 2 == 1, _just_below(limits), limits)
    index, beyond = _cells(limits)
    codes = torch.cat([index, index | 2 ** (codec.bits - 1)]).to(torch.uint8)
    return codes.to(device), beyond.repeat(2).to(device)


@functools.lru_cache
def _cells_below(codec: TableCodec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    index, beyond = _cells(_just_below(torch.tensor(codec.magnitudes)))
    return index.to(device, torch.int32), beyond.to(device)


def encode(x: torch.Tensor, codec: TableCodec) -> torch.Tensor:
    """Return the uint8 codes of FP32 numbers x, of any shape. NaN, whose scale is NaN too, gets some code."""
    if x.device.type == "cuda":
        from ds_fp8.research.codecs_triton import encode_elements

        return encode_elements(x, midpoints(codec, x.device), codec.bits)
    # Two look-ups an element: on a CPU ten times faster than looking for the place.
    codes, beyond = _nearest_cells(codec, x.device)
    # The upper half of an FP32 number is the BF16 number below it in magnitude: 65536 cells, with at most one limit
    # each.
    cell = (x.contiguous().view(torch.int32).flatten() >> 16) & 0xFFFF
    code = codes.index_select(0, cell) + (x.abs().flatten() > beyond.index_select(0, cell))
    return code.view(x.shape)


def encode_stochastically(x: torch.Tensor, draw: torch.Tensor, codec: TableCodec) -> torch.Tensor:
    """Return codes of x, of one of the two neighbours each, with chances that keep the expectation; draw in [0, 1)."""
    magnitudes = numbers(codec, x.device, torch.float32)[: len(codec.magnitudes)]
    magnitude = x.abs().clamp_max(codec.magnitudes[-1])
    count, beyond = _cells_below(codec, x.device)
    cell = magnitude.view(torch.int32).flatten() >> 16
    above = count.index_select(0, cell) + (magnitude.flatten() > beyond.index_select(0, cell))
    # The largest magnitude has no neighbour above: it is the upper one of the last pair.
    below = (above - 1).clamp_max(len(magnitudes) - 2)
    lower, upper = (magnitudes.index_select(0, index).view(x.shape) for index in (below, below + 1))
    index = below.view(x.shape) + (draw < (magnitude - lower) / (upper - lower))
    return (index | x.signbit().int() << codec.bits - 1).to(torch.uint8)
