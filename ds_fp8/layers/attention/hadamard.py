"""Block Hadamard transforms of matrices: an outlier is spread over its block before a cast.

    R = D H / sqrt(n)      H [n, n] Sylvester's matrix of 1 and -1, D the signs (all 1 without a seed): R Rᵀ = 1
    rotate(x)   = x R      every n neighbours along one axis of x
    unrotate(y) = y Rᵀ

so that (a R)(b R)ᵀ = a bᵀ along the contraction of a product. The reference is log2 n stages of sums and differences in
FP32, then one multiplication: a part of a matrix is rotated to the same bits as within all of it. Kernels multiply by
H, which differs in the order of FP32 sums alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ds_fp8.casts.primitives import random_key, uniform
from ds_fp8.config.formats import BLOCK

ROTATION_BLOCKS = (16, 32, 64, 128)  # Sizes of the transforms


@dataclass(frozen=True)
class Rotation:
    block: int = BLOCK  # Neighbours that are transformed together, one of ROTATION_BLOCKS
    # Seed of the signs that the elements of every block are multiplied by before it; None: no signs
    seed: int | None = None
    axis: int = 1  # Dimension of the matrix along which blocks lie: 1 its columns, 0 its rows

    def __str__(self) -> str:
        return f"rotated by {self.block}" + ("" if self.seed is None else f" with the signs of seed {self.seed}")


def rotate(x: torch.Tensor, rotation: Rotation | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rotate a matrix [M, K] into `dtype`, rounded once; None returns x itself.

    With rotation.axis 0 M is padded with zeros to a multiple of the block.

    Raises:
        ValueError: K is not a multiple of the block, with rotation.axis 1.
    """
    if rotation is None:
        return x
    if rotation.axis == 1 and x.shape[1] % rotation.block:
        raise ValueError(f"{x.shape[1]} columns are not a multiple of the rotation block {rotation.block}")
    return _turn(x.detach(), rotation, dtype, inverse=False)


def unrotate(y: torch.Tensor, rotation: Rotation | None, rows: int | None = None) -> torch.Tensor:
    """Undo `rotate` on a result of a product [M, K], in its dtype, rounded once; None returns y itself.

    `rows`: those before padding, with rotation.axis 0; the others are dropped.
    """
    if rotation is None:
        return y
    result = _turn(y, rotation, y.dtype, inverse=True)
    return result[:rows] if rotation.axis == 0 else result


def _turn(x: torch.Tensor, rotation: Rotation, dtype: torch.dtype, inverse: bool) -> torch.Tensor:
    if x.device.type == "cuda" and x.numel():
        from ds_fp8.layers.attention.hadamard_triton import rotate_tiles

        return rotate_tiles(x, *kernel_arguments(rotation, x), dtype, inverse)
    sign, x = signs(rotation.block, rotation.seed, x.device), x.float()
    if rotation.axis == 0:
        # Tokens come in any number. Rows of zeros add nothing to a product that contracts over them.
        x = F.pad(x, (0, 0, 0, padded(x.shape[0], rotation) - x.shape[0])).t()
    blocks = x.unflatten(-1, (x.shape[-1] // rotation.block, rotation.block))
    turned = (_transform(blocks) * sign if inverse else _transform(blocks * sign)).flatten(-2)
    return (turned.t() if rotation.axis == 0 else turned).to(dtype).contiguous()


def _transform(x: torch.Tensor) -> torch.Tensor:
    """Return x H / sqrt(n) for the last dimension n of x (the fast Walsh-Hadamard transform)."""
    size = x.shape[-1]
    half = 1
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x * size**-0.5


@functools.lru_cache
def rotation_matrix(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return sqrt(n) R [n, n], of 1 and -1."""
    own = signs(rotation.block, rotation.seed, torch.device("cpu"))
    return (own[:, None] * _transform(torch.eye(rotation.block)).sign()).to(device, dtype)


def padded(length: int, rotation: Rotation | None) -> int:
    """Return the rows that `rotate` returns of a matrix of `length` rows."""
    if rotation is None or rotation.axis == 1:
        return length
    return -(-length // rotation.block) * rotation.block


@functools.lru_cache
def signs(block: int, seed: int | None, device: torch.device) -> torch.Tensor:
    """Return FP32 [block] of 1 and -1, the same on every device; all 1 without a seed."""
    if seed is None:
        return torch.ones(block, device=device)
    draws = uniform(torch.arange(block), random_key("rotation", seed))
    return torch.where(draws < 0.5, -1.0, 1.0).to(device)


def kernel_arguments(rotation: Rotation, x: torch.Tensor) -> tuple[torch.Tensor, int, float, int]:
    """Return what rotate_tiles takes of a rotation of x: matrix, axis, factor, rows."""
    # Products are taken in x's own 16-bit dtype, for 1 and -1 are exact; Triton's interpreter has none in BF16.
    narrow = x.dtype is torch.float16 or (x.dtype is torch.bfloat16 and x.is_cuda)
    matrix = _tile_matrix(rotation, x.device, x.dtype if narrow else torch.float32)
    return matrix, rotation.axis, rotation.block**-0.5, padded(x.shape[0], rotation)


@functools.lru_cache
def _tile_matrix(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [128, 128] of a tile's blocks, of 1, -1 and 0."""
    one = rotation_matrix(rotation, device, dtype)
    # Zeros off the diagonal add exact zeros to the sums: blocks below 128 cost no kernel of another shape.
    return torch.block_diag(*[one] * (BLOCK // rotation.block)).contiguous()
