"""Stochastic rounding, the same on every device: random bits are a hash of a key and an element's index."""

from __future__ import annotations

import struct
import zlib

import torch

from ds_fp8.config.formats import FORMATS

MULTIPLIERS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B)
"""The golden ratio, which parts neighbouring indices, and the two multipliers of the 32-bit integer hash "lowbias32"
(Chris Wellons, Hash Prospector; public domain)."""
_WORD = 0xFFFFFFFF


def random_key(*parts: int | str) -> int:
    """Return 31 bits that depend on these 64-bit integers and names only, in every process and Python version."""
    # crc32 and not hash(), which differs between processes; 31 bits fit a signed argument of a kernel.
    return zlib.crc32(b"".join(p.encode() if isinstance(p, str) else struct.pack("q", p) for p in parts)) >> 1


def uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """Return for every index (int64) an FP32 number k / 65536 in [0, 1) that depends on it and the 31-bit `key` only.

    16 bits: added to an element in units of the grid, the sum is still exact.
    """
    step, first, second = MULTIPLIERS
    # int64 stands for the kernel's uint32: products of 32 bits overflow nothing that the mask keeps.
    word = (index * step + key) & _WORD
    word = ((word ^ (word >> 16)) * first) & _WORD
    word = ((word ^ (word >> 15)) * second) & _WORD
    return ((word ^ (word >> 16)) >> 16).float() * 2.0**-16


def round_stochastically(x: torch.Tensor, draw: torch.Tensor, format: str) -> torch.Tensor:
    """Round x to the grid of a format, up or down so that its expectation stays.

    Args:
        x: FP32, within the format's range. NaN stays NaN.
        draw: Numbers in [0, 1), the shape of x.
        format: Name of the format.

    Returns:
        FP32 numbers of the format, the shape of x.
    """
    target = FORMATS[format]
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e of every element
    spacing = (binade * torch.finfo(target.dtype).eps).clamp_min(target.smallest_subnormal)
    return torch.copysign((x.abs() / spacing + draw).floor() * spacing, x)
