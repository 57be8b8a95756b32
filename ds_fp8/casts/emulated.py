"""Casts to formats that tensor cores do not support here: minifloats, integers, logarithms, in one byte an element.

A format is the list of its magnitudes (config.formats.Format). A number becomes the code of the nearest one, of two as
near the one with the even code, which for floating point is IEEE's rounding to nearest even; beyond the largest it
saturates:

    index = number of midpoints between neighbours that lie below |x|        (on one of them: the even neighbour)
    code  = index | sign << (bits - 1)
"""

from __future__ import annotations

import functools

import torch

from ds_fp8.config.formats import Format


@functools.lru_cache
def midpoints(format: Format, device: torch.device) -> torch.Tensor:
    """Return the FP32 numbers half-way between neighbouring magnitudes, ascending.

    Where FP32 has no such number (log8), the neighbour of it that the rule for ties puts on its side.
    """
    magnitudes = torch.tensor(format.magnitudes, dtype=torch.float64)
    exact = (magnitudes[1:] + magnitudes[:-1]) / 2
    rounded = exact.float()
    goes_up = torch.arange(len(exact)) % 2 == 1
    wrong = torch.where(goes_up, rounded < exact, rounded > exact)
    corrected = torch.nextafter(rounded, torch.where(goes_up, torch.inf, -torch.inf))
    return torch.where(wrong, corrected, rounded).to(device)


@functools.lru_cache
def numbers(format: Format, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of each of the 256 codes a byte can hold; those that the format has not are NaN."""
    magnitudes, sign = torch.tensor(format.magnitudes), 2 ** (format.bits - 1)
    table = torch.full((256,), torch.nan)
    table[: len(magnitudes)] = magnitudes
    table[sign : sign + len(magnitudes)] = -magnitudes
    return table.to(device, dtype)


def encode(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the uint8 codes of FP32 numbers x, of any shape. NaN, whose scale is NaN too, gets some code."""
    if x.device.type == "cuda":
        from ds_fp8.casts.emulated_triton import encode_elements

        return encode_elements(x, midpoints(format, x.device), format.bits)
    return encode_reference(x, format)


def encode_reference(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Compute `encode` in plain torch: the oracle of the kernel."""
    limits, magnitude = midpoints(format, x.device), x.abs()
    index = torch.bucketize(magnitude, limits)
    on_limit = limits[index.clamp_max(len(limits) - 1)] == magnitude
    index += on_limit & (index % 2 == 1)
    return (index | x.signbit().long() << format.bits - 1).to(torch.uint8)


def encode_stochastically(x: torch.Tensor, draw: torch.Tensor, format: Format) -> torch.Tensor:
    """Return codes of FP32 numbers x, of one of the two neighbours each, with chances that keep the expectation.

    draw: numbers in [0, 1), the shape of x.
    """
    magnitudes = numbers(format, x.device, torch.float32)[: len(format.magnitudes)]
    magnitude = x.abs().clamp_max(format.max)
    below = (torch.bucketize(magnitude, magnitudes, right=True) - 1).clamp_max(len(magnitudes) - 2)
    lower, upper = magnitudes[below], magnitudes[below + 1]
    index = below + (draw < (magnitude - lower) / (upper - lower))
    return (index | x.signbit().long() << format.bits - 1).to(torch.uint8)


def decode(codes: torch.Tensor, format: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of uint8 codes, of their shape."""
    table = numbers(format, codes.device, dtype)
    return table.index_select(0, codes.contiguous().flatten().int()).view(codes.shape)
