"""Bias, norm of the heads and rotary embedding in one pass over the product of q, k and v.

    x = qkv + bias                                         (optional)
    n = x · rsqrt(mean_d x² + eps) · weight                (optional, q and k: Qwen3)
    y = n · cos + rotate_half(n) · sin                     q and k (Su et al., arXiv 2104.09864)

rotate_half([x1, x2]) = [-x2, x1] on the two halves of a head. q, k and v stay where the product wrote them: the result
is three views [B, heads, S, D] of one matrix. Without head norms it is that of the product itself, rotated in place.
"""

from __future__ import annotations

import torch

from ds_fp8.layers.decoder.heads import HeadLayout, HeadNorms


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: HeadLayout,
    bias: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotate q and k in the matrix qkv [B·S, N]; without `norms` in place, else into a new matrix.

    cos, sin [B or 1, S, D]; bias [N].
    """
    if qkv.device.type == "cuda":
        from ds_fp8.layers.decoder.rotary_triton import rotate_heads

        return rotate_heads(qkv, cos, sin, layout, bias, norms)
    return rotate_reference(qkv, cos, sin, layout, bias, norms)


def rotate_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: HeadLayout,
    qkv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (dqkv [B·S, N], dweight of the q norm, of the k norm) from the gradients of q, k and v [B, heads, S, D].

    With `norms`, `qkv` is the matrix before `rotate`.
    """
    if gradients[0].device.type == "cuda":
        from ds_fp8.layers.decoder.rotary_triton import rotate_heads_backward

        return rotate_heads_backward(gradients, cos, sin, layout, qkv, bias, norms)
    return rotate_backward_reference(gradients, cos, sin, layout, qkv, bias, norms)


def rotate_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: HeadLayout,
    bias: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Do `rotate` in plain torch, in FP32, rounded once to qkv's dtype; always a new matrix."""
    x = qkv.float() if bias is None else qkv.float() + bias.float()
    q, k, v = layout.split(x, cos_batch(qkv, cos), cos.shape[1])
    if norms is not None:
        q, k = (_norm(part, weight, norms.eps) for part, weight in ((q, norms.q), (k, norms.k)))
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    parts = [part * cos + _rotate_half(part) * sin for part in (q, k)] + [v]
    return torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts], -1).to(qkv.dtype)


def rotate_backward_reference(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: HeadLayout,
    qkv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Do `rotate_backward` through torch's autograd over `rotate_reference`."""
    grad = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in gradients], -1)
    with torch.enable_grad():
        # Without norms the rotation is linear: its gradient does not depend on where it is taken.
        leaf = (torch.zeros_like(grad) if qkv is None else qkv.detach()).float().requires_grad_()
        if norms is not None:
            norms = HeadNorms(*(w.detach().float().requires_grad_() for w in norms[:2]), norms.eps)
        result = rotate_reference(leaf, cos, sin, layout, bias, norms)
        inputs = [leaf] if norms is None else [leaf, norms.q, norms.k]
    dqkv, *dnorms = torch.autograd.grad(result, inputs, grad.float())
    dq_norm, dk_norm = dnorms or (None, None)
    return dqkv.to(grad.dtype), dq_norm, dk_norm


def cos_batch(qkv: torch.Tensor, cos: torch.Tensor) -> int:
    """Return the number of sequences in qkv [B·S, N], whose length cos [B or 1, S, D] has."""
    return qkv.shape[0] // cos.shape[1] if cos.shape[1] else 0


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
