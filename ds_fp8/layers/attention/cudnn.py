"""fp8_attention.py's kernels: cuDNN's FP8 attention, reached through Transformer Engine.

Transformer Engine's own module (DotProductAttention) has on Hopper only scales that follow earlier steps (delayed
scaling): they would be state beside checkpoints, start at 1, and change under recomputation. Its operator takes any
scales, so they are given here. One thing it lacks: dq, dk and dv share one. Every product's scale is the product of its
operands' and its own, though, so that factors moved between operands set the three apart:

    dq = ds k      k's scale times a, q's by a:             q kᵀ stays, dq and dk part
    dv = pᵀ do     do's scale times b, v's and o's by b:    do vᵀ and do ∘ o stay, dv parts

Backward is called for one row and at most HEADS_A_CALL heads at a time: cuDNN's FP8 backward becomes slower with rows x
heads a call, BF16's does not (docs/log/attention.md).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import first_line
from ds_fp8.config.formats import FORMATS

FORWARD, BACKWARD = "e4m3", "e5m2"  # Formats of q, k, v, p and o, and of do, ds, dq, dk and dv

P_SCALE = FORMATS[FORWARD].max  # Factor of p before its cast


class Saved(NamedTuple):
    """Tensors that backward reads."""

    q: QuantizedTensor  # [B, S, heads, D]
    k: QuantizedTensor  # [B, S, kv_heads, D]
    v: QuantizedTensor  # [B, S, kv_heads, D]
    o: QuantizedTensor  # [B, S, heads, D]
    log_sums: torch.Tensor  # log Σ_j exp(s), FP32 [B, heads, S], or in the form that the implementation has it
    scaling: float


class GradientScales(NamedTuple):
    """Dequantisation factors of what backward casts, FP32 without dimensions: powers of two."""

    ds: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


HEAD_DIM = 128  # Features of a head: cuDNN's backward on Hopper has no other
# Heads of a call of backward. An H100, 8192 tokens: 28 heads 507 TFLOP/s, 32 heads 366, 112 (4 rows of 28) 246.
HEADS_A_CALL = 28

_MASK: dict[str, Any] = {"attn_mask_type": "causal", "window_size": (-1, 0)}
_LAYOUT = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}
_BACKWARD_LAYOUT = {**_LAYOUT, "do_format": "bshd", "dqkv_layout": "bshd_bshd_bshd"}


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Return why these kernels cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is not a Hopper GPU"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install ds-fp8[te])"
    load_cudnn()
    try:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine cannot be loaded: {first_line(error)}"
    if not {*_MASK, *_BACKWARD_LAYOUT} <= inspect.signature(fused_attn_bwd).parameters.keys():
        return "this Transformer Engine is too old: its attention takes other arguments (2.20 is known to work)"
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        return f"another cuDNN than torch's was loaded first, by Transformer Engine perhaps: {error}"
    return None


def load_cudnn() -> None:
    """Load all parts of one cuDNN: of that which is loaded in part, or else of the one that was installed with torch.

    cuDNN is eight libraries that find each other by name. Where the system has a cuDNN too, Transformer Engine, if it
    comes first, loads that one, also for torch, which was compiled against another; if torch comes first, Transformer
    Engine takes the parts that torch has not needed yet from the system's: "undefined symbol ... libcudnn_graph.so.9".
    """
    if not torch.cuda.is_available():
        return
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcudnn" in line]
    folders = {Path(path).parent for path in mapped}
    if not folders:
        spec = importlib.util.find_spec("nvidia")
        places = [Path(place, "cudnn", "lib") for place in (spec.submodule_search_locations or () if spec else ())]
        folders = {place for place in places if (place / "libcudnn.so.9").exists()}
    if len(folders) == 1:  # of two versions no order of loading makes one
        folder = folders.pop()
        for path in (folder / "libcudnn.so.9", *sorted(folder.glob("libcudnn_*.so.9"))):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def forward(
    q: QuantizedTensor, k: QuantizedTensor, v: QuantizedTensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [B, S, heads, D] in E4M3 with the scale of v, log_sums [B, heads, S, 1])."""
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd

    output, (log_sums, _) = fused_attn_fwd(
        True,
        q.shape[1],
        k.shape[1],
        *_ends(q),
        *(_operand(x.data, x.scale) for x in (q, k, v)),
        torch.bfloat16,
        FusedAttnBackend["FP8"],
        s_quantizer=_p_quantizer(q.data.device),
        o_quantizer=_quantizer(v.scale.reciprocal(), FORWARD),
        attn_scale=scaling,
        **_LAYOUT,
        **_MASK,
    )
    return output._data.view(FORMATS[FORWARD].dtype), log_sums


def backward(saved: Saved, do: QuantizedTensor, scales: GradientScales) -> tuple[torch.Tensor, ...]:
    """Return dq, dk and dv of the shapes of q, k and v in E5M2, in units of their scales."""
    rows, heads, kv_heads = saved.q.shape[0], saved.q.shape[2], saved.k.shape[2]
    kv_heads_a_call = kv_heads_of_a_call(heads, kv_heads)
    if rows == 1 and kv_heads_a_call == kv_heads:
        return _backward(saved, do, scales)
    found = tuple(torch.empty_like(x.data, dtype=FORMATS[BACKWARD].dtype) for x in (saved.q, saved.k, saved.v))
    groups = heads // kv_heads
    for row in range(rows):
        for first in range(0, kv_heads, kv_heads_a_call):
            of_keys = (slice(row, row + 1), slice(None), slice(first, first + kv_heads_a_call))
            of_queries = (*of_keys[:2], slice(first * groups, (first + kv_heads_a_call) * groups))

            # [B, heads, S, 1]: heads are in front.
            sums = saved.log_sums[of_queries[0], of_queries[2]].contiguous()
            places = of_queries, of_keys, of_keys, of_queries, of_queries
            *operands, of_do = (
                QuantizedTensor(x.data[at].contiguous(), x.scale, "tensor", "pow2")
                for x, at in zip((*saved[:4], do), places, strict=True)
            )
            gradients = _backward(Saved(*operands, sums, saved.scaling), of_do, scales)
            for whole, at, gradient in zip(found, (of_queries, of_keys, of_keys), gradients, strict=True):
                whole.view(torch.uint8)[at] = gradient.view(torch.uint8)
    return found


def kv_heads_of_a_call(heads: int, kv_heads: int) -> int:
    """Return the heads of keys of a call of backward: equal parts of at most HEADS_A_CALL heads of queries, or one."""
    fitting = (n for n in range(kv_heads, 1, -1) if kv_heads % n == 0 and n * (heads // kv_heads) <= HEADS_A_CALL)
    return next(fitting, 1)


def _backward(saved: Saved, do: QuantizedTensor, scales: GradientScales) -> tuple[torch.Tensor, ...]:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd

    shared, a, b = factors(scales)
    q, k, v, o, log_sums, scaling = saved
    operands = [(q, 1 / a), (k, a), (v, 1 / b), (o, 1 / b), (do, b)]
    # No dropout draws from the random numbers that forward noted down, and the kernel reads none.
    no_random_numbers = torch.zeros(2, dtype=torch.int64, device=q.data.device)
    found = fused_attn_bwd(
        q.shape[1],
        k.shape[1],
        *_ends(q),
        *(_operand(x.data, x.scale * factor) for x, factor in operands),
        torch.bfloat16,
        [log_sums, no_random_numbers],
        FusedAttnBackend["FP8"],
        s_quantizer=_p_quantizer(q.data.device),
        dp_quantizer=_quantizer(scales.ds.reciprocal(), BACKWARD),
        dqkv_quantizer=_quantizer(shared, BACKWARD),
        attn_scale=scaling,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_BACKWARD_LAYOUT,
        **_MASK,
    )
    return tuple(x._data.view(FORMATS[BACKWARD].dtype) for x in found[:3])


def factors(scales: GradientScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what brings results to units of their scales: `shared` for all, and a and b of the head of this file.

    dq is multiplied by a · shared, dk by shared / a, and dv by b · shared.
    """
    # Roots of each by itself: where gradients are zero both scales are 2^-75, whose product FP32 does not hold.
    shared = scales.dq.rsqrt() * scales.dk.rsqrt()
    return shared, (scales.dk / scales.dq).sqrt(), (shared * scales.dv).reciprocal()


def _ends(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where sequences of queries, and of keys, end: int32 [B + 1], from 0."""
    ends = torch.arange(0, q.shape[0] + 1, dtype=torch.int32, device=q.data.device) * q.shape[1]
    return ends, ends


def _dtype(format: str) -> Any:
    import transformer_engine_torch as tex

    return {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}[format]


def _operand(codes: torch.Tensor, scale: torch.Tensor) -> Any:
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    format = FORWARD if codes.dtype == FORMATS[FORWARD].dtype else BACKWARD
    return Float8TensorStorage(
        # fake_dtype is what Transformer Engine believes the tensor to be; no BF16 copy is made of it.
        data=codes.view(torch.uint8),
        fp8_scale_inv=scale.view(1),
        fp8_dtype=_dtype(format),
        fake_dtype=torch.bfloat16,
    )


def _quantizer(multiplier: torch.Tensor, format: str) -> Any:
    """Return what casts a result to a format, multiplied by a number; its amax is written and not read."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    amax = torch.zeros(1, device=multiplier.device)
    return Float8Quantizer(multiplier.view(1), amax, _dtype(format), rowwise=True, columnwise=False)


def _p_quantizer(device: torch.device) -> Any:
    return _quantizer(torch.full((1,), P_SCALE, device=device), FORWARD)
