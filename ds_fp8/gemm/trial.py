"""One small product of a pair of casts, to learn whether a backend multiplies them on this GPU.

Neither compute capability nor torch's version tells: which scales cuBLASLt takes depends on GPU, CUDA and torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import FORMATS, CastSpec, scale_shape

SIZE = 128

Multiply = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype], torch.Tensor]


def why_not(multiply: Multiply, a: CastSpec, b: CastSpec, out_dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why a backend cannot multiply operands of these casts on this GPU, or None.

    The host waits for the first product of a kind; its outcome is kept for this process and GPU.

    Args:
        multiply: The backend's product.
        a: Cast of the left operand.
        b: Cast of the right operand.
        out_dtype: Dtype of the result.
    """
    return _why_not(multiply, (a.format, a.granularity), (b.format, b.granularity), out_dtype, _device())


@functools.lru_cache(maxsize=256)
def _why_not(
    multiply: Multiply, a: tuple[str, str], b: tuple[str, str], out_dtype: torch.dtype, device: torch.device
) -> str | None:
    try:
        with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
            product = multiply(_ones(*a, device), _ones(*b, device), out_dtype)
            # Ones times ones, summed 128 times, is 128 exactly: a kernel that reads the wrong layout of scales shows.
            if product.shape == (SIZE, SIZE) and product.dtype is out_dtype and bool((product == SIZE).all()):
                return None
        what = "its result is wrong"
    # A library that cannot run raises the errors of its parts: RuntimeError, AssertionError, OSError of a compiler.
    except Exception as error:
        what = getattr(error, "problem", str(error)).partition("\n")[0] or type(error).__name__
    (a_format, a_granularity), (b_format, b_granularity) = a, b
    return f"a product of {a_granularity} {a_format} by {b_granularity} {b_format} fails: {what}"


def _ones(format: str, granularity: str, device: torch.device) -> QuantizedTensor:
    """Return ones [SIZE, SIZE] with scales of 1."""
    data = torch.ones(SIZE, SIZE).to(FORMATS[format].dtype).to(device)
    scale = torch.ones(scale_shape((SIZE, SIZE), granularity), device=device)
    return QuantizedTensor(data, scale, granularity, "pow2")


def _device() -> torch.device:
    """Return the GPU of this rank: DeepSpeed makes it the current one at its initialisation, which may come later."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, local_rank = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
    # Not yet set by DeepSpeed: all ranks of a host would try the first GPU at once.
    if index == 0 and local_rank.isdigit() and int(local_rank) < torch.cuda.device_count():
        index = int(local_rank)
    return torch.device("cuda", index)
