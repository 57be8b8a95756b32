"""Block Hadamard transforms of matrices before their casts: an outlier is spread over its block.

    R = D H / sqrt(n)      H [n, n] Sylvester's matrix of 1 and -1, D the signs (all 1 without a seed): R Rᵀ = 1
    rotate(x)   = x R      every n neighbours along one axis of x
    unrotate(y) = y Rᵀ

so that (a R)(b R)ᵀ = a bᵀ along the contraction of a product. HALO (arXiv 2501.02625) rotates operands of INT8 and FP6
training, NVFP4 pre-training (2509.25149) those of wgrad, with random signs.

The reference is log2 n stages of sums and differences in FP32, then one multiplication: a part of a matrix is rotated
to the same bits as within all of it. Kernels multiply by H, which differs in the order of FP32 sums alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ds_fp8.casts.hadamard import padded, signs
from ds_fp8.config.formats import Rotation


def rotate(x: torch.Tensor, rotation: Rotation | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rotate a matrix.

    Args:
        x: [M, K], floating point.
        rotation: None returns x itself.
        dtype: Of the result, rounded once.

    Returns:
        [M, K] in dtype; with rotation.axis 0 M is padded with zeros to a multiple of the block.

    Raises:
        ValueError: K is not a multiple of the block, with rotation.axis 1.
    """
    if rotation is None:
        return x
    if rotation.axis == 1 and x.shape[1] % rotation.block:
        raise ValueError(f"{x.shape[1]} columns are not a multiple of the rotation block {rotation.block}")
    if x.device.type == "cuda" and x.numel():
        from ds_fp8.casts.rotation_triton import rotate_tiles

        return rotate_tiles(x.detach(), rotation, dtype)
    return rotate_reference(x.detach(), rotation).to(dtype)


def rotate_reference(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Compute `rotate` in plain torch: the oracle of the kernels."""
    blocks = _blocks(x.float(), rotation)
    sign = signs(rotation.block, rotation.seed, x.device)
    return _joined(_transform(blocks * sign), rotation).contiguous()


def unrotate(y: torch.Tensor, rotation: Rotation | None, rows: int | None = None) -> torch.Tensor:
    """Undo `rotate` on a result of a product.

    Args:
        y: [M, K], floating point, M or K (rotation.axis) a multiple of the block.
        rotation: None returns y itself.
        rows: Rows before padding, with rotation.axis 0; the others are dropped.

    Returns:
        [M or rows, K] in y's dtype, rounded once.
    """
    if rotation is None:
        return y
    if y.device.type == "cuda" and y.numel():
        from ds_fp8.casts.rotation_triton import rotate_tiles

        result = rotate_tiles(y, rotation, y.dtype, inverse=True)
    else:
        sign = signs(rotation.block, rotation.seed, y.device)
        result = _joined(_transform(_blocks(y.float(), rotation)) * sign, rotation).to(y.dtype).contiguous()
    return result[:rows] if rotation.axis == 0 else result


def _blocks(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return x [M, K] with its blocks as the last dimension [.., .., n]."""
    if rotation.axis == 0:
        # Tokens come in any number. Rows of zeros add nothing to a product that contracts over them.
        x = F.pad(x, (0, 0, 0, padded(x.shape[0], rotation) - x.shape[0])).t()
    return x.unflatten(-1, (x.shape[-1] // rotation.block, rotation.block))


def _joined(blocks: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    x = blocks.flatten(-2)
    return x.t() if rotation.axis == 0 else x


def _transform(x: torch.Tensor) -> torch.Tensor:
    """Return x H / sqrt(n) for the last dimension n of x (the fast Walsh-Hadamard transform)."""
    size = x.shape[-1]
    half = 1
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x * size**-0.5
