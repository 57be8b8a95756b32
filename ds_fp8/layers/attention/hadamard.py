"""Block Hadamard transforms of matrices: they spread an outlier over its block before quantization.

    R = D H / sqrt(n)      H [n, n] Sylvester's Hadamard matrix, D the diagonal of signs (1 without a seed): R Rᵀ = 1
    rotate(x)   = x R      every n neighbours along one axis of x
    unrotate(y) = y Rᵀ

(a R)(b R)ᵀ = a bᵀ along the contraction of a product. The reference takes log2 n stages of sums and differences in
FP32, then one multiplication; kernels multiply by H, with another order of FP32 sums. Bits of a block do not depend on
the rest of the matrix.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ds_fp8.casts.primitives import random_key, uniform
from ds_fp8.config.formats import BLOCK

ROTATION_BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Rotation:
    block: int = BLOCK  # neighbours transformed together, one of ROTATION_BLOCKS
    seed: int | None = None  # of the random signs of a block; None: no signs
    axis: int = 1  # dimension of the matrix along which blocks lie

    def __str__(self) -> str:
        return f"rotated by {self.block}" + ("" if self.seed is None else f" with the signs of seed {self.seed}")


def rotate(x: torch.Tensor, rotation: Rotation | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rotate a matrix [M, K] into `dtype`, rounded once; None returns x itself.

    Along axis 0 M is padded with zeros to a multiple of the block.

    Raises:
        ValueError: K is not a multiple of the block, along axis 1.
    """
    if rotation is None:
        return x
    if rotation.axis == 1 and x.shape[1] % rotation.block:
        raise ValueError(f"{x.shape[1]} columns are not a multiple of the rotation block {rotation.block}")
    return _turn(x.detach(), rotation, dtype, inverse=False)


def unrotate(y: torch.Tensor, rotation: Rotation | None, rows: int | None = None) -> torch.Tensor:
    """Undo `rotate` on a product [M, K], in its dtype, rounded once; None returns y itself.

    rows: number of rows before the padding along axis 0.
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
        # Rows of zeros add nothing to a product that contracts over them.
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
    """Return the number of rows that `rotate` returns for a matrix of `length` rows."""
    if rotation is None or rotation.axis == 1:
        return length
    return -(-length // rotation.block) * rotation.block


@functools.lru_cache
def signs(block: int, seed: int | None, device: torch.device) -> torch.Tensor:
    """Return signs, FP32 [block] of 1 and -1, the same on every device; all 1 without a seed."""
    if seed is None:
        return torch.ones(block, device=device)
    draws = uniform(torch.arange(block), random_key("rotation", seed))
    return torch.where(draws < 0.5, -1.0, 1.0).to(device)


def kernel_arguments(rotation: Rotation, x: torch.Tensor) -> tuple[torch.Tensor, int, float, int]:
    """Return the arguments of rotate_tiles for a rotation of x: matrix, axis, factor, rows."""
    # Products in x's 16-bit dtype, in which 1 and -1 are exact; Triton's interpreter has no BF16 products.
    narrow = x.dtype is torch.float16 or (x.dtype is torch.bfloat16 and x.is_cuda)
    matrix = _tile_matrix(rotation, x.device, x.dtype if narrow else torch.float32)
    return matrix, rotation.axis, rotation.block**-0.5, padded(x.shape[0], rotation)


@functools.lru_cache
def _tile_matrix(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a block-diagonal matrix [128, 128] of 1, -1 and 0: one kernel for all sizes of blocks."""
    one = rotation_matrix(rotation, device, dtype)
    return torch.block_diag(*[one] * (BLOCK // rotation.block)).contiguous()
