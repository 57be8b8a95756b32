"""fp8_attention.py for sequences that ranks share: FP8 codes travel between them, and attention's bits are the same.

Attention of whole sequences casts q, k and v once a rank, over all tokens of its heads. The scale of that cast is the
largest of those that the tokens' owners find, so that it can be known before anything travels, and codes be sent:

    sums                of k and v over all tokens, for their means: an all-reduce SUM of FP64 [2, B, kv_heads, 1, D]
    bounds    [4, P]    amax of q, k, v and max ‖v‖, by the rank whose heads these are: an all-reduce MAX
    q, k, v             cast by their owners with the scale of the rank they go to: 1 byte an element in place of 2
    o                   as the kernels leave it, in E4M3 with the scale of v, which all ranks know: 1 byte
    do                  BF16: backward's bounds are sums over all tokens, which partial sums would round otherwise
    dq, dk, dv          as the kernels leave them, in E5M2 with scales of the rank that computed them: 1 byte

Codes decode exactly, at either end. Tensors on the way are [P, S / P, B, heads, D], as DeepSpeed has them: of the ranks
they go to, or come from. Heads of k and v that several ranks need are cast once and sent several times.
"""

from __future__ import annotations

import torch
from deepspeed import comm as dist
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives import scale_from_amax
from ds_fp8.config.formats import FORMATS
from ds_fp8.layers.attention import exchanged_bytes
from ds_fp8.layers.attention.fp8_attention import (
    Implementation,
    attend,
    decode_exactly,
    factor_of,
    find_gradients,
    implementation_for,
)
from ds_fp8.layers.attention.invariances import add_mean_of_values, rotate_back, rotate_heads, sum_over_tokens
from ds_fp8.layers.attention.tensors import FORWARD


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scaling: float, implementation: Implementation, group: dist.ProcessGroup):
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        k_mean, v_mean = _means(k, v, group)
        slices = [by_rank(x, ranks) for x in (rotate_heads(q), rotate_heads(k - k_mean), v - v_mean)]
        # A maximum does not depend on the order of the ranks: every one casts with the scale that a cast of the whole
        # tensor, after the exchange, would find.
        bounds = bounds_by_rank(*slices, ranks)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
        exchanged_bytes.count(2 * bounds.nbytes * (ranks - 1) // ranks)
        scales = scale_from_amax(bounds[:3], FORWARD, "pow2")
        whole = []
        for x, scale in zip(slices, scales, strict=True):
            codes = _whole_sequences(_exchange(cast_by_rank(x, scale), group))
            whole.append(QuantizedTensor(codes, scale[rank].clone(), "tensor", "pow2"))
        o = attend(ctx, *whole, bounds[3, rank].clone(), scaling, implementation)
        ctx.group, ctx.kv_heads, ctx.head_dim = group, k.shape[1], q.shape[-1]
        # Averages of rows of v are never larger than v, so o has v's scale. Codes that arrive come from all ranks, each
        # with its own: scales[2] has them in the order of the ranks, as they lie in what was received.
        output = own_tokens(_exchange(_by_owner(o, ranks), group), scales[2], v.dtype)
        return add_mean_of_values(output, v_mean).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        group, ranks = ctx.group, dist.get_world_size(ctx.group)
        parts = do.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3)  # [P, S / P, B, heads / P · D]
        whole = _exchange(parts.contiguous(), group).flatten(0, 1).transpose(0, 1)
        # dq, dk and dv come as codes with one scale each, which only this rank knows: the others are told.
        codes, scales = zip(*find_gradients(ctx, whole.unflatten(2, (-1, ctx.head_dim))), strict=True)
        of_all = torch.empty(3 * ranks, device=do.device)
        dist.all_gather_into_tensor(of_all, torch.stack(scales), group)
        exchanged_bytes.count(of_all.nbytes * (ranks - 1) // ranks)
        gradients = []
        for which, (x, scale) in enumerate(zip(codes, of_all.view(ranks, 3).t(), strict=True)):
            found = own_tokens(_exchange(_by_owner(x, ranks), group), scale, do.dtype)
            gradients.append(own_gradient(found, which, ctx.kv_heads, ranks).transpose(1, 2))
        return *gradients, None, None, None


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def shared_fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, scaling: float | None = None
) -> torch.Tensor:
    """Compute causal attention in FP8 over whole sequences, of which each rank has consecutive tokens. Collective.

    Args:
        q: Queries [B, heads, S / P, D] of this rank's tokens, BF16; P divides heads.
        k: Keys [B, kv_heads, S / P, D]; heads is a multiple of kv_heads, which divides P or is a multiple of it.
        v: Values [B, kv_heads, S / P, D].
        group: The P ranks, in the order of their tokens.
        scaling: Factor of q kᵀ; D^(-1/2) by default.

    Returns:
        The output [B, S / P, heads · D] in the dtype of v, differentiable.
    """
    return _SharedAttention.apply(q, k, v, factor_of(q, scaling), implementation_for(q), group)


def by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """View x [B, heads, S / P, D] as [P, S / P, B, heads / P, D]; with fewer than P heads [heads, S / P, B, 1, D]."""
    return x.unflatten(1, (min(ranks, x.shape[1]), -1)).permute(1, 3, 0, 2, 4)


def _means(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the means of k and v [B, kv_heads, S / P, D] over the tokens of all ranks, [2, B, kv_heads, 1, D]."""
    sums = all_reduced(torch.stack([sum_over_tokens(x) for x in (k, v)]), group)
    return (sums / (k.shape[2] * dist.get_world_size(group))).to(k.dtype)


def bounds_by_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the amax of q, k, v and the largest norm of v by rank, FP32 [4, P]; Inf where anything is not finite."""
    amax = [torch.linalg.vector_norm(x, torch.inf, dim=(1, 2, 3, 4), dtype=torch.float32) for x in (q, k, v)]
    norms = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32).amax((1, 2, 3))
    found = torch.stack([x.repeat_interleave(ranks // len(x)) for x in (*amax, norms)])
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks carries Inf, and not NaN


def cast_by_rank(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes [P, S / P, B, n, D] of x as `by_rank` views it, with a scale for each rank."""
    copies = len(scale) // len(x)
    # In BF16 as exact as in FP32, for scales are powers of two, and nothing saturates: they come of the largest amax.
    in_units = x * scale[::copies].reciprocal().to(x.dtype).view(-1, 1, 1, 1, 1)
    codes = torch.empty(x.shape, dtype=FORMATS[FORWARD].dtype, device=x.device).copy_(in_units)
    return codes if copies == 1 else codes.view(torch.uint8).repeat_interleave(copies, 0).view(codes.dtype)


def own_gradient(found: torch.Tensor, which: int, kv_heads: int, ranks: int) -> torch.Tensor:
    """Return the gradient of q, k or v [..., heads, D] of what ranks have sent, [..., P · n, D].

    Args:
        found: Decoded, with the heads of all ranks.
        which: 0, 1 or 2: of q, k or v.
        kv_heads: Heads of k and v.
        ranks: P.
    """
    if which < 2:
        found = rotate_back(found)
    if which and kv_heads < ranks:  # each rank that needed a head has a part of its gradient
        found = found.unflatten(-2, (kv_heads, -1)).sum(-2)
    return found


def all_reduced(sums: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return sums over the tokens of all ranks, of those over their own: in place."""
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    ranks = dist.get_world_size(group)
    exchanged_bytes.count(2 * sums.nbytes * (ranks - 1) // ranks)
    return sums


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send x[r] to rank r, for every r, and return what came, likewise. FP8 travels as bytes."""
    # NCCL and gloo know no FP8; they only move the bytes.
    sent = x.view(torch.uint8) if x.element_size() == 1 else x
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    exchanged_bytes.count_all_to_all(sent.nbytes, len(sent))
    return received.view(x.dtype)


def _whole_sequences(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous [B, S, n, D] of what ranks have sent [P, S / P, B, n, D]; of one row no copy."""
    whole = x.flatten(0, 1).transpose(0, 1)
    return whole.reshape(-1).view(whole.shape)


def _by_owner(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return contiguous [P, S / P, B, n, D] of whole sequences [B, S, n, D], by the rank whose tokens they are."""
    # Contiguous, for all_to_all_single sends the first 1/P of the memory to rank 0, the next to rank 1, and so on.
    return x.transpose(0, 1).unflatten(0, (ranks, -1)).contiguous()


def own_tokens(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, S / P, P · n, D] in `dtype` of what ranks have sent [P, S / P, B, n, D], with a scale each."""
    found = decode_exactly(codes, scales.view(-1, 1, 1, 1, 1), dtype)
    return found.permute(2, 1, 0, 3, 4).flatten(2, 3)
