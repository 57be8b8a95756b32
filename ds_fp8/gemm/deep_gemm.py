"""The block-scaled product through DeepGEMM, where it is installed: 1.07 to 1.18 times as fast as cuBLASLt.

It multiplies 1x128 by 128x128 in this backend, which is fprop and dgrad of the block recipes, and wgrad of hybrid_fast.
Everything else goes to cuBLASLt: 1x128 by 1x128, where DeepGEMM writes FP32 only and is no faster, other granularities,
and dimensions that are no multiples of 128. Kernels of new sizes are compiled by nvcc, at the start or before the
first product (deep_gemm_kernels.py).

The package comes from `pip install ds-fp8[deep-gemm]` (SGLang's build, sgl-deep-gemm) or from DeepGEMM's own source.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.gemm import cublas, deep_gemm_kernels
from ds_fp8.gemm.deep_gemm_kernels import Product


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Return why this backend cannot run on this machine, or None."""
    reason = cublas.unavailable()
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability()[0] != 9:
        return "its FP32 block scales are for Hopper"
    if importlib.util.find_spec("deep_gemm") is None:
        return "DeepGEMM is not installed (pip install ds-fp8[deep-gemm])"
    try:
        import deep_gemm
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"DeepGEMM cannot be loaded with torch {torch.__version__}: {what} (a wheel fits one version of torch)"
    return None if hasattr(deep_gemm, "fp8_gemm_nt") else f"DeepGEMM {deep_gemm.__version__} has no fp8_gemm_nt"


unsupported = cublas.unsupported


def scaled_matmul(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accumulation: bool = False
) -> torch.Tensor:
    """Multiply a [M, K] @ b [N, K]ᵀ -> [M, N] for operands that are supported and not empty."""
    product = Product(a.shape[0], b.shape[0], a.shape[1])
    if (a.granularity, b.granularity, out_dtype) != ("1x128", "128x128", torch.bfloat16) or not product.possible:
        return cublas.scaled_matmul(a, b, out_dtype, fast_accumulation)
    deep_gemm_kernels.before(product, a.data.device)
    return launch(a, b)


def multiplies_groups() -> bool:
    """Return whether the installed DeepGEMM multiplies groups of rows by their own matrices."""
    import deep_gemm

    return hasattr(deep_gemm, "m_grouped_fp8_gemm_nt_contiguous")


def grouped_matmul(a: QuantizedTensor, b: QuantizedTensor, of_tile: torch.Tensor, groups: int) -> torch.Tensor:
    """Multiply the rows a [R, K] of each group by its matrix of b [groups * N, K], transposed: BF16 [R, N].

    Args:
        a: Cast 1x128.
        b: Cast 128x128.
        of_tile: int32 [R/128], the group of each 128 rows; the result of those with -1 is undefined.
        groups: Number of groups.
    """
    product = Product(a.shape[0], b.shape[0] // groups, a.shape[1], groups)
    deep_gemm_kernels.before(product, a.data.device)
    return launch(a, b, of_tile, groups)


def launch(
    a: QuantizedTensor, b: QuantizedTensor, of_tile: torch.Tensor | None = None, groups: int = 0
) -> torch.Tensor:
    """Multiply as grouped_matmul, or without groups a [M, K] by b [N, K]; compile the kernel if it is not there yet."""
    import deep_gemm

    (rows, contraction), columns = a.shape, b.shape[0] // (groups or 1)
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=a.data.device)
    # Kernels are specialised for N and K. The number of rows only decides which tiles are the fastest, and so whether
    # other rows need another kernel.
    options = {"recipe": (1, BLOCK, BLOCK), "compiled_dims": "nk"}
    # scales of a [M, K/128] with strides (1, M); of b [N/128, K/128] with strides (K/128, 1)
    left = a.data.contiguous(), cublas.group_scale(a)
    if not groups:
        deep_gemm.fp8_gemm_nt(left, (b.data.contiguous(), _packed(b.scale)), result, **options)
        return result
    matrices = b.data.contiguous().view(groups, columns, contraction)
    scales = b.scale.contiguous().view(groups, -1, contraction // BLOCK)
    # DeepGEMM wants the group of every row.
    of_row = of_tile[:, None].expand(-1, BLOCK).reshape(-1)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(left, (matrices, scales), result, of_row, **options)
    return result


def zeros(product: Product, device: torch.device) -> tuple:
    """Return operands of `launch` with these sizes."""
    rows, columns, contraction, groups = product
    a, b = (
        QuantizedTensor(
            torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
            torch.ones(scale_shape(shape, granularity), device=device),
            granularity,
            "pow2",
        )
        for shape, granularity in (((rows, contraction), "1x128"), (((groups or 1) * columns, contraction), "128x128"))
    )
    return (a, b, torch.zeros(rows // BLOCK, dtype=torch.int32, device=device), groups) if groups else (a, b)


def _packed(scale: torch.Tensor) -> torch.Tensor:
    """Return `scale` [rows, columns] with strides (columns, 1), which contiguous() does not promise for one row."""
    if scale.stride() == (scale.shape[1], 1):
        return scale
    return torch.empty(scale.shape, dtype=scale.dtype, device=scale.device).copy_(scale)
