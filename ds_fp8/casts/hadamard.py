"""The matrices of block Hadamard transforms (rotation.py), and their padding."""

from __future__ import annotations

import functools
import math

import torch

from ds_fp8.casts.stochastic import random_key, uniform
from ds_fp8.config.formats import Rotation


@functools.lru_cache
def rotation_matrix(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return sqrt(n) R [n, n], of 1 and -1."""
    own = signs(rotation.block, rotation.seed, torch.device("cpu"))
    return (own[:, None] * _hadamard(rotation.block)).to(device, dtype)


def padded(length: int, rotation: Rotation | None) -> int:
    """Return the rows that `rotate` returns of a matrix of `length` rows."""
    if rotation is None or rotation.axis == 1:
        return length
    return -(-length // rotation.block) * rotation.block


def _hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix [size, size]: element (i, j) is -1 to the number of bits that i and j share."""
    matrix = torch.ones(1, 1)
    for _ in range(int(math.log2(size))):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@functools.lru_cache
def signs(block: int, seed: int | None, device: torch.device) -> torch.Tensor:
    """Return FP32 [block] of 1 and -1, the same on every device; all 1 without a seed."""
    if seed is None:
        return torch.ones(block, device=device)
    draws = uniform(torch.arange(block), random_key("rotation", seed))
    return torch.where(draws < 0.5, -1.0, 1.0).to(device)
