"""Scaled matrix products: one interface over several backends.

    scaled_matmul(a [M, K], b [N, K]) = (a.data * a.scale) @ (b.data * b.scale)ᵀ -> [M, N]

The contraction K is the last, contiguous dimension of both operands, the only layout of Hopper's FP8 tensor cores
(`reads_transposed`: backends that also take views). fprop, dgrad and wgrad are calls with different operands (see
ds_fp8.layers.linear.linear).

The backend is selected at the start by a small trial product for every pair of casts: neither compute capability nor
torch's version determines which scales cuBLASLt supports. deep_gemm.py leaves what it lacks to cublas.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config import registry
from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.formats import FORMATS, CastSpec, scale_shape
from ds_fp8.gemm import cublas, deep_gemm, reference

__all__ = ["BACKENDS", "DESCRIPTIONS", "reads_transposed", "scaled_matmul", "select_backend", "unavailable"]

# In order of preference; research registers more. A backend has unavailable(), unsupported(formats and granularities),
# a scaled_matmul for supported operands that are not empty, and optionally unsupported_scale(type, granularity) and
# READS_TRANSPOSED.
BACKENDS: dict[str, ModuleType] = {"deep_gemm": deep_gemm, "cublas": cublas, "reference": reference}

DESCRIPTIONS = {
    "deep_gemm": "DeepGEMM for 1x128 by 128x128, cuBLASLt for the rest",
    "cublas": "cuBLASLt through torch.nn.functional.scaled_mm",
    "reference": "emulated: FP8 operands multiplied as BF16 (exact for pow2 scales) or FP32, FP32 sums",
}

Multiply = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype], torch.Tensor]
TRIAL = 128  # side of the operands of a trial product


def unavailable(name: str, products: Iterable[tuple[CastSpec, CastSpec]] = ()) -> str | None:
    """Return why backend `name` cannot run all `products`, casts of operands (a, b), on this machine, or None."""
    module = BACKENDS[name]
    reason, emulates = module.unavailable(), name == "reference"
    why_not_scaled = getattr(module, "unsupported_scale", lambda scale, granularity: None)
    for a, b in products:
        emulated = next((cast for cast in (a, b) if cast.emulated and not emulates), None)
        reason = reason or (emulated and f"operands quantized as {emulated} are emulated")
        reason = reason or why_not_scaled(a.scale, a.granularity) or why_not_scaled(b.scale, b.granularity)
        reason = reason or module.unsupported(a.format, a.granularity, b.format, b.granularity)
        # Last, since it launches kernels; the checks above need no GPU.
        reason = reason or (None if emulates else why_not_multiplied(module.scaled_matmul, a, b))
    return reason


def why_not_in_fp32(name: str, a: CastSpec, b: CastSpec) -> str | None:
    if name == "reference":
        return None
    return why_not_multiplied(BACKENDS[name].scaled_matmul, a, b, torch.float32)


def reads_transposed(backend: str) -> bool:
    """Return whether a backend multiplies transposed views without a copy."""
    return getattr(BACKENDS[backend], "READS_TRANSPOSED", False)


def select_backend(name: str, products: Iterable[tuple[CastSpec, CastSpec]] = ()) -> str:
    """Return backend `name`, or for "auto" the first that runs `products` on this machine.

    Raises UserError if the named backend cannot run them, and if "auto" finds only the emulation on a machine with a
    GPU, unless the casts themselves are emulated.
    """
    products, reasons = list(products), {}
    for backend in _candidates() if name == "auto" else [name]:
        reasons[backend] = unavailable(backend, products)
        if reasons[backend] is None:
            return backend
    on_gpu, able = torch.cuda.is_available(), ["reference"]
    if name != "auto":
        problem = f'the GEMM backend "{name}" cannot run here: {reasons[name]}'
        able = [backend for backend in BACKENDS if unavailable(backend, products) is None]
    elif not on_gpu or any(cast.emulated for pair in products for cast in pair):
        return "reference"
    else:
        listed = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        problem = f"no FP8 products on this machine ({listed})"
    # On a GPU "reference" is slower than BF16: no remedy.
    emulate = able == ["reference"] and on_gpu
    remedy = _remedy(products) if emulate else f"use {' or '.join(able)}, or auto"
    raise UserError(problem, key="fp8.linear.backend", remedy=remedy)


def _candidates() -> Iterator[str]:
    """Yield all backends but the reference, on a GPU those of research last."""
    own = [name for name in BACKENDS if name != "reference"]
    yield from own
    if torch.cuda.is_available():
        registry.load()
        yield from (name for name in BACKENDS if name not in (*own, "reference"))


def _remedy(products: Sequence[tuple[CastSpec, CastSpec]]) -> str:
    emulate = '"backend": "reference" emulates FP8, slower than BF16'
    for preset, cast in (
        ("rowwise", CastSpec("e4m3", "row", "pow2")),
        ("tensorwise", CastSpec("e4m3", "tensor", "pow2")),
    ):
        if (cast, cast) not in products and unavailable("cublas", [(cast, cast)]) is None:
            return f'"preset": "{preset}", whose scales this machine multiplies; {emulate}'
    return (
        "block scales need a Hopper GPU, torch >= 2.10 built for CUDA 12.9 or later, other FP8 products an Ada GPU or "
        f"later; {emulate}"
    )


def scaled_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    backend: str = "reference",
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply a [M, K] @ b [N, K]ᵀ -> [M, N], summed in FP32 and rounded once; the backend must support the casts."""
    # cuBLASLt refuses empty matrices; an empty contraction sums to zeros.
    if 0 in (*a.shape, *b.shape):
        return torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.data.device)
    return BACKENDS[backend].scaled_matmul(a, b, out_dtype)


def why_not_multiplied(
    multiply: Multiply, a: CastSpec, b: CastSpec, out_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Return why a backend cannot multiply operands of these casts on this GPU, or None.

    Syncs the host for the trial product; cached per process and GPU.
    """
    return _tried(multiply, (a.format, a.granularity), (b.format, b.granularity), out_dtype, _device())


@functools.lru_cache(maxsize=256)
def _tried(
    multiply: Multiply, a: tuple[str, str], b: tuple[str, str], out_dtype: torch.dtype, device: torch.device
) -> str | None:
    try:
        with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
            product = multiply(_ones(*a, device), _ones(*b, device), out_dtype)
            # A sum of 128 ones is 128 exactly, unless a kernel reads scales in a wrong layout.
            if product.shape == (TRIAL, TRIAL) and product.dtype is out_dtype and bool((product == TRIAL).all()):
                return None
        what = "its result is wrong"
    # Libraries raise anything: RuntimeError, AssertionError, OSError of a compiler.
    except Exception as error:
        what = first_line(error) if not isinstance(error, UserError) else error.problem
    (a_format, a_granularity), (b_format, b_granularity) = a, b
    return f"a product of {a_granularity} {a_format} by {b_granularity} {b_format} fails: {what}"


def _ones(format: str, granularity: str, device: torch.device) -> QuantizedTensor:
    data = torch.ones(TRIAL, TRIAL).to(FORMATS[format].dtype).to(device)
    scale = torch.ones(scale_shape((TRIAL, TRIAL), granularity), device=device)
    return QuantizedTensor(data, scale, granularity, "pow2")


def _device() -> torch.device:
    """Return the GPU of this rank, which DeepSpeed may not have made current yet."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, local_rank = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
    # Not yet set by DeepSpeed: all ranks of a host would use GPU 0.
    if index == 0 and local_rank.isdigit() and int(local_rank) < torch.cuda.device_count():
        index = int(local_rank)
    return torch.device("cuda", index)
