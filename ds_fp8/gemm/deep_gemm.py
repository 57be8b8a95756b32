"""The block-scaled product through DeepGEMM, if installed: 1.07 to 1.18 times as fast as cuBLASLt.

DeepGEMM multiplies 1x128 by 128x128: fprop and dgrad of the block recipes, and wgrad of hybrid_fast. All else is
cuBLASLt's: 1x128 by 1x128, for which DeepGEMM returns FP32 only and is no faster, other granularities, and dimensions
that are no multiples of 128.

DeepGEMM compiles a kernel per shape in 6 to 15 s, cached on disk in ~/.deep_gemm or DG_JIT_CACHE_DIR. One process per
host compiles at a time; the others then load its kernel.

The package comes from `pip install ds-fp8[deep-gemm]` (SGLang's build, sgl-deep-gemm) or from DeepGEMM's source.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.formats import BLOCK
from ds_fp8.config.log import logger
from ds_fp8.gemm import cublas

ROWS = 16  # rows of a product must be a multiple of this, the padding of its scales

# (rows, columns, contraction) of products whose kernels this process has loaded
_ready: set[tuple[int, int, int]] = set()


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
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
        what = first_line(error)
        return f"DeepGEMM cannot be loaded with torch {torch.__version__}: {what} (a wheel fits one version of torch)"
    return None if hasattr(deep_gemm, "fp8_gemm_nt") else f"DeepGEMM {deep_gemm.__version__} has no fp8_gemm_nt"


unsupported = cublas.unsupported


def scaled_matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    shape = rows, columns, contraction = a.shape[0], b.shape[0], a.shape[1]
    casts, fits = (a.granularity, b.granularity), rows % ROWS == columns % BLOCK == contraction % BLOCK == 0
    if casts != ("1x128", "128x128") or out_dtype is not torch.bfloat16 or not fits:
        return cublas.scaled_matmul(a, b, out_dtype)
    import deep_gemm

    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=a.data.device)
    # scales of a [M, K/128] with strides (1, M); of b [N/128, K/128] with strides (K/128, 1), also of a single row,
    # which contiguous() does not ensure
    packed = b.scale
    if packed.stride() != (packed.shape[1], 1):
        packed = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device).copy_(packed)
    arguments = (a.data.contiguous(), cublas.group_scale(a)), (b.data.contiguous(), packed), result
    # Kernels are specialised for N and K. The number of rows only decides which tiles are the fastest, and so whether
    # other rows need another kernel.
    launch = functools.partial(deep_gemm.fp8_gemm_nt, *arguments, recipe=(1, BLOCK, BLOCK), compiled_dims="nk")
    if shape in _ready:
        launch()
        return result
    words = " x ".join(map(str, shape))
    with _compile_lock():
        begin = time.monotonic()
        try:
            launch()
        # Its assertions are RuntimeErrors, those of its Python parts AssertionErrors.
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"DeepGEMM cannot multiply {words}: {str(error).strip() or type(error).__name__}",
                key="fp8.linear.backend",
                remedy='"backend": "cublas"',
            ) from error
        seconds = time.monotonic() - begin
    if seconds > 1:
        logger.info("DeepGEMM: kernel of %s compiled in %.0f s, once for GPU and version", words, seconds)
    _ready.add(shape)
    return result


@contextlib.contextmanager
def _compile_lock() -> Iterator[None]:
    """Lock compilation on this host; the kernel releases the lock of a dead process."""
    folder = Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm").absolute()
    # Not in the cache folder, which hosts may share and whose file system may not lock.
    name = f"ds_fp8_deep_gemm_{os.getuid()}_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.lock"
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(Path(tempfile.gettempdir(), name), flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
