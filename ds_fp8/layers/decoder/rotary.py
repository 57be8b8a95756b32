"""Bias, norm of the heads and rotary embedding in one pass over the product of q, k and v.

    x = qkv + bias                                         (optional)
    n = x · rsqrt(mean_d x² + eps) · weight                (optional, q and k: Qwen3)
    y = n · cos + rotate_half(n) · sin                     q and k (Su et al., arXiv 2104.09864)

rotate_half([x1, x2]) = [-x2, x1] on the two halves of a head. q, k and v are views [B, heads, S, D] of one matrix;
without head norms the product's matrix is rotated in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

# (dqkv [B·S, N], dweight of the q norm and of the k norm)
Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class HeadLayout(NamedTuple):
    """q, k and v as the columns of a matrix [B·S, (heads + 2 · kv_heads) · head_dim]."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def split(self, qkv: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views q [B, heads, S, D], k and v [B, kv_heads, S, D] of the matrix, B = `batch`, S = `length`."""
        parts = qkv.view(batch, length, qkv.shape[-1]).split(self.sizes, -1)
        return tuple(part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)


class HeadNorms(NamedTuple):
    """RMSNorm of each head of q and k: weights [D]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class HeadTransform(NamedTuple):
    """Arguments of `rotate`."""

    cos: torch.Tensor  # [B or 1, S, D]
    sin: torch.Tensor  # [B or 1, S, D]
    layout: HeadLayout
    bias: torch.Tensor | None = None  # [N]
    norms: HeadNorms | None = None


def rotate(qkv: torch.Tensor, transform: HeadTransform) -> torch.Tensor:
    """Add the bias, norm and rotate the heads of qkv [B·S, N] in FP32, rounded once to its dtype.

    On a GPU without norms in place, else into a new matrix.
    """
    if qkv.device.type == "cuda":
        from ds_fp8.layers.decoder.rotary_triton import rotate_heads

        return rotate_heads(qkv, transform)
    cos, sin, layout, bias, norms = transform
    x = qkv.float() if bias is None else qkv.float() + bias.float()
    length = cos.shape[1]
    q, k, v = layout.split(x, qkv.shape[0] // length if length else 0, length)
    if norms is not None:
        q, k = (_norm(part, weight, norms.eps) for part, weight in ((q, norms.q), (k, norms.k)))
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    half = layout.head_dim // 2
    parts = [part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin for part in (q, k)] + [v]
    return torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts], -1).to(qkv.dtype)


def rotate_backward(
    gradients: tuple[torch.Tensor, ...], transform: HeadTransform, qkv: torch.Tensor | None = None
) -> Gradients:
    """Return the gradients of `rotate` from those of q, k and v [B, heads, S, D]; norms need its input `qkv`."""
    if gradients[0].device.type == "cuda":
        from ds_fp8.layers.decoder.rotary_triton import rotate_heads_backward

        return rotate_heads_backward(gradients, transform, qkv)
    grad, norms = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in gradients], -1), transform.norms
    with torch.enable_grad():
        # without norms the rotation is linear: any qkv gives its gradient
        leaf = (torch.zeros_like(grad) if qkv is None else qkv.detach()).float().requires_grad_()
        if norms is not None:
            norms = HeadNorms(*(w.detach().float().requires_grad_() for w in norms[:2]), norms.eps)
        result = rotate(leaf, transform._replace(norms=norms))
        inputs = [leaf] if norms is None else [leaf, norms.q, norms.k]
    dqkv, *dnorms = torch.autograd.grad(result, inputs, grad.float())
    dq_norm, dk_norm = dnorms or (None, None)
    return dqkv.to(grad.dtype), dq_norm, dk_norm


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def restore_inverse_frequencies(model: nn.Module) -> list[str]:
    """Recompute inverse frequencies that are in 16 bits in FP32, by the model's own initialisation.

    BF16 rounds a frequency by up to 0.2%, and so the angle at position 1000 by up to 2 radians. zero.Init creates, and
    `model.bfloat16()` converts to, 16-bit buffers.

    Returns:
        Lines for the start report: the restored modules, and those without an initialisation, whose frequencies stay
        rounded. Empty if all were in FP32.
    """
    owners = {
        id(module): owner
        for owner in model.modules()
        if isinstance(owner, PreTrainedModel)
        for module in owner.modules()  # the innermost model comes last
    }
    restored, rounded = [], []
    for name, module in model.named_modules():
        halves = {
            key: buffer
            for key, buffer in module.named_buffers(recurse=False)
            if key.endswith("inv_freq") and buffer.dtype in (torch.bfloat16, torch.float16)
        }
        if not halves:
            continue
        for key, buffer in halves.items():
            module._buffers[key] = buffer.float()
        if id(module) in owners:
            owners[id(module)]._init_weights(module)
        same = all(torch.equal(module._buffers[key], buffer.float()) for key, buffer in halves.items())
        (rounded if same else restored).append(name)
    endings = {
        "had been rounded to 16 bits: computed again in FP32": restored,
        "are rounded to 16 bits, and positions with them: set them again in FP32 after loading the model": rounded,
    }
    return [f"inverse frequencies of {', '.join(names)} {ending}" for ending, names in endings.items() if names]
