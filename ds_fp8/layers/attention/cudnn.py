"""Kernels of fp8_attention.py: cuDNN's FP8 attention, called through Transformer Engine's operator.

On Hopper Transformer Engine's module (DotProductAttention) has delayed scaling only: state outside of checkpoints,
starting at 1, changed by recomputation. The operator takes given scales, but one scale for dq, dk and dv. Factors a and
b, moved between the scales of the inputs, give each its own:

    dq = ds k      scale of k · a, scale of q / a             q kᵀ is unchanged, dq and dk differ
    dv = pᵀ do     scale of do · b, scales of v and o / b     do vᵀ and do ∘ o are unchanged, dv differs

Backward runs one row and at most HEADS_A_CALL heads a call: unlike BF16, cuDNN's FP8 backward becomes slower with
rows x heads (docs/log/attention.md).
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

FORWARD, BACKWARD = "e4m3", "e5m2"  # formats of q, k, v, p and o, and of do, ds, dq, dk and dv

P_SCALE = FORMATS[FORWARD].max  # factor of p before its quantization


class Saved(NamedTuple):
    """Tensors saved for backward."""

    q: QuantizedTensor  # [B, S, heads, D]
    k: QuantizedTensor  # [B, S, kv_heads, D]
    v: QuantizedTensor  # [B, S, kv_heads, D]
    o: QuantizedTensor  # [B, S, heads, D]
    log_sums: torch.Tensor  # log Σ_j exp(s), FP32: [B, heads, S] of the reference, [B, heads, S, 1] of cuDNN
    scaling: float


class GradientScales(NamedTuple):
    """Scales of the tensors that backward quantizes: FP32 scalars, powers of two."""

    ds: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


HEAD_DIM = 128  # the only head size of cuDNN's FP8 backward on Hopper
# Heads a call of backward. H100, 8192 tokens: 28 heads 507 TFLOP/s, 32 heads 366, 112 (4 rows of 28) 246.
HEADS_A_CALL = 28

_MASK: dict[str, Any] = {"attn_mask_type": "causal", "window_size": (-1, 0)}
_LAYOUT = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}
_BACKWARD_LAYOUT = {**_LAYOUT, "do_format": "bshd", "dqkv_layout": "bshd_bshd_bshd"}


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Return the reason that the kernels cannot run on this machine, or None."""
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
    """Load all libraries of one cuDNN: the one already loaded in part, or else the one installed with torch.

    cuDNN is eight libraries that find each other by name. With a second cuDNN in the system, Transformer Engine mixes
    the two: "undefined symbol ... libcudnn_graph.so.9", or a version that torch was not compiled against.
    """
    if not torch.cuda.is_available():
        return
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcudnn" in line]
    folders = {Path(path).parent for path in mapped}
    if not folders:
        spec = importlib.util.find_spec("nvidia")
        places = [Path(place, "cudnn", "lib") for place in (spec.submodule_search_locations or () if spec else ())]
        folders = {place for place in places if (place / "libcudnn.so.9").exists()}
    if len(folders) == 1:  # with libraries of two versions loaded, it is too late
        folder = folders.pop()
        for path in (folder / "libcudnn.so.9", *sorted(folder.glob("libcudnn_*.so.9"))):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def forward(
    q: QuantizedTensor, k: QuantizedTensor, v: QuantizedTensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o, E4M3 [B, S, heads, D] with the scale of v, and log_sums [B, heads, S, 1]."""
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd

    output, (log_sums, _) = fused_attn_fwd(
        True,
        q.shape[1],
        k.shape[1],
        *_ends(q),
        *(_float8_tensor(x.data, x.scale) for x in (q, k, v)),
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
    """Return the data of dq, dk and dv, E5M2 of the shapes of q, k and v; their scales are given."""
    rows, heads, kv_heads = saved.q.shape[0], saved.q.shape[2], saved.k.shape[2]
    kv_heads_a_call = kv_heads_of_a_call(heads, kv_heads)
    if rows == 1 and kv_heads_a_call == kv_heads:
        return _backward(saved, do, scales)
    results = tuple(torch.empty_like(x.data, dtype=FORMATS[BACKWARD].dtype) for x in (saved.q, saved.k, saved.v))
    groups = heads // kv_heads
    for row in range(rows):
        for first in range(0, kv_heads, kv_heads_a_call):
            keys = (slice(row, row + 1), slice(None), slice(first, first + kv_heads_a_call))
            queries = (*keys[:2], slice(first * groups, (first + kv_heads_a_call) * groups))
            log_sums = saved.log_sums[queries[0], queries[2]].contiguous()  # of [B, heads, S, 1]
            *inputs, part_of_do = (
                QuantizedTensor(x.data[part].contiguous(), x.scale, "tensor", "pow2")
                for x, part in zip((*saved[:4], do), (queries, keys, keys, queries, queries), strict=True)
            )
            gradients = _backward(Saved(*inputs, log_sums, saved.scaling), part_of_do, scales)
            for result, part, gradient in zip(results, (queries, keys, keys), gradients, strict=True):
                result.view(torch.uint8)[part] = gradient.view(torch.uint8)
    return results


def kv_heads_of_a_call(heads: int, kv_heads: int) -> int:
    """Return the KV heads a call of backward: the most that divide kv_heads with <= HEADS_A_CALL query heads, or 1."""
    fitting = (n for n in range(kv_heads, 1, -1) if kv_heads % n == 0 and n * (heads // kv_heads) <= HEADS_A_CALL)
    return next(fitting, 1)


def _backward(saved: Saved, do: QuantizedTensor, scales: GradientScales) -> tuple[torch.Tensor, ...]:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd

    common, a, b = factors(scales)
    q, k, v, o, log_sums, scaling = saved
    inputs = [(q, 1 / a), (k, a), (v, 1 / b), (o, 1 / b), (do, b)]
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.data.device)  # an argument for dropout, not read without
    results = fused_attn_bwd(
        q.shape[1],
        k.shape[1],
        *_ends(q),
        *(_float8_tensor(x.data, x.scale * factor) for x, factor in inputs),
        torch.bfloat16,
        [log_sums, rng_state],
        FusedAttnBackend["FP8"],
        s_quantizer=_p_quantizer(q.data.device),
        dp_quantizer=_quantizer(scales.ds.reciprocal(), BACKWARD),
        dqkv_quantizer=_quantizer(common, BACKWARD),
        attn_scale=scaling,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_BACKWARD_LAYOUT,
        **_MASK,
    )
    return tuple(x._data.view(FORMATS[BACKWARD].dtype) for x in results[:3])


def factors(scales: GradientScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the kernel's one multiplier of dq, dk and dv, and the factors a and b of the module's docstring.

    dq is multiplied by a · common, dk by common / a, dv by b · common: the reciprocals of their scales.
    """
    # Two roots: the scales of zero gradients are 2^-75, whose product underflows in FP32.
    common = scales.dq.rsqrt() * scales.dk.rsqrt()
    return common, (scales.dk / scales.dq).sqrt(), (common * scales.dv).reciprocal()


def _ends(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cu_seqlens of queries and of keys: int32 [B + 1]."""
    ends = torch.arange(0, q.shape[0] + 1, dtype=torch.int32, device=q.data.device) * q.shape[1]
    return ends, ends


def _dtype(format: str) -> Any:
    import transformer_engine_torch as tex

    return {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}[format]


def _float8_tensor(data: torch.Tensor, scale: torch.Tensor) -> Any:
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    format = FORWARD if data.dtype == FORMATS[FORWARD].dtype else BACKWARD
    return Float8TensorStorage(
        data=data.view(torch.uint8),
        fp8_scale_inv=scale.view(1),
        fp8_dtype=_dtype(format),
        fake_dtype=torch.bfloat16,  # the nominal type; no BF16 copy is made
    )


def _quantizer(multiplier: torch.Tensor, format: str) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    amax = torch.zeros(1, device=multiplier.device)  # written by the kernel, not read
    return Float8Quantizer(multiplier.view(1), amax, _dtype(format), rowwise=True, columnwise=False)


def _p_quantizer(device: torch.device) -> Any:
    return _quantizer(torch.full((1,), P_SCALE, device=device), FORWARD)
