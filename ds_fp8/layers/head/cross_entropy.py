"""Cross entropy without logits: the language-model head and its loss as one operation.

Logits of T tokens over a vocabulary of V take 4·T·V bytes in FP32, several times over. Here loss and gradients are
computed together, a chunk of tokens at a time, so that only a small piece of the logits ever exists:

    logits_C [C, V] = hidden_C [C, H] · weight [V, H]ᵀ
    loss            = Σ logsumexp(logits) - logits[target]
    dlogits_C       = softmax(logits) - onehot(target)                     in place of the logits
    dhidden_C       = dlogits_C · weight,    dweight += dlogits_Cᵀ · hidden_C

T tokens, C of them in a chunk, H the hidden size. Backward scales what forward computed and never reads the weight,
which ZeRO-3 has released by then. A chunk is computed by lm_head.py, in high precision or in FP8.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.head.lm_head import FP8Head, HighPrecisionHead
from ds_fp8.layers.head.softmax_gradient import IGNORED
from ds_fp8.layers.linear.recipe import LinearRecipe

LOGITS_BYTES = 64 << 20
"""Bytes of FP32 logits in a chunk on a CPU, and the fewest bytes of logits in a chunk on a GPU."""

MAX_LOGITS_BYTES = 1 << 30
"""The most bytes of logits in one of several chunks on a GPU."""

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def linear_cross_entropy_reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute what `linear_cross_entropy` computes, by way of all logits in FP32. Differentiable."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, recipe: LinearRecipe | None = None
) -> torch.Tensor:
    """Return the summed cross entropy of the logits hidden · weightᵀ. Only its first derivative exists.

    Args:
        hidden: [T, H].
        weight: [V, H], of the same dtype. Autocast applies to both.
        targets: int64 [T], each below V or IGNORED.
        recipe: casts the operands of the three products to FP8; None multiplies them as they are.

    Returns:
        nats, FP32 scalar. Gradients have the dtype of what they belong to; the weight's is summed in FP32.

    Raises:
        ValueError: the numbers of tokens differ.
        RuntimeError: a second derivative is asked for.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states of {tuple(hidden.shape[:-1])} tokens, targets of {tuple(targets.shape)}")
    # Inside a Function autocast does not apply, so its casts are made here, where autograd sees them.
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, targets, recipe)
    return _compute(hidden, weight, targets, recipe, False, False)[0]


def chunk_tokens(tokens: int, vocabulary: int, hidden_size: int, on_gpu: bool, in_fp8: bool = False) -> int:
    """Return how many tokens a chunk has: equal chunks, as few as memory allows.

    On a GPU several chunks sum the weight's gradient in FP32, 4VH bytes, which backward rounds to another 2VH. So a
    chunk of BF16 logits, gone by then, may take 2VH bytes and not raise the peak; and one chunk alone, which needs no
    sum in FP32, 4VH bytes. Every further chunk costs a read and a write of the FP32 gradient. A head in FP8 holds the
    casts of its weight beside, and pays nothing for chunks: half the size.
    """
    if on_gpu:
        # One chunk: 2 bytes x tokens x V of logits are at most 4VH, what the FP32 sum of several chunks would take.
        if tokens <= 2 * hidden_size and not in_fp8:
            return max(tokens, 1)
        row = 2 * vocabulary
        most = max(LOGITS_BYTES, min(MAX_LOGITS_BYTES, row * hidden_size) // (2 if in_fp8 else 1)) // row
    else:
        most = LOGITS_BYTES // (4 * vocabulary)
    most = max(most, 1)
    if tokens <= most:
        return most
    # As many chunks as `most` needs, but of equal size: a short last one would run at a part of the GPU's speed.
    even = -(-tokens // -(-tokens // most))
    # Whole tiles, so that the kernel that casts by tile can take every chunk but the last.
    return min(most, -(-even // BLOCK) * BLOCK)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, recipe: LinearRecipe | None):
        # Gradients are made in forward, for a loss gradient of one: the logits are there then, and never again.
        # Backward multiplies by what it gets.
        loss, dhidden, dweight = _compute(hidden, weight, targets, recipe, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: torch.Tensor):
        scaled = [
            None if gradient is None else _scaled(gradient, dloss, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # As a vector the scale takes part in type promotion, so the product is FP32; as a scalar it would first be rounded
    # to the gradient's dtype, and all gradients below would be off by the same factor.
    return torch.mul(gradient, scale.view(1), out=torch.empty_like(gradient, dtype=dtype))


def _compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    recipe: LinearRecipe | None,
    wants_dhidden: bool,
    wants_dweight: bool,
) -> Result:
    """Return (summed loss, dhidden or None, dweight or None), gradients for a loss gradient of one."""
    tokens = len(hidden)
    dhidden = torch.empty_like(hidden) if wants_dhidden else None
    if not tokens:
        return hidden.new_zeros((), dtype=torch.float32), dhidden, torch.zeros_like(weight) if wants_dweight else None
    chunk = chunk_tokens(tokens, *weight.shape, hidden.is_cuda, recipe is not None)
    head = HighPrecisionHead(weight, tokens > chunk) if recipe is None else FP8Head(weight, recipe)
    losses = head.losses(hidden, targets, dhidden, wants_dweight, chunk)
    return losses.sum(), dhidden, head.dweight


def implementation(recipe: LinearRecipe | None = None) -> str:
    """Return a few words on what computes the loss on this machine."""
    where = "in Triton" if torch.cuda.is_available() else "in plain torch: no GPU"
    products = "" if recipe is None else f", the head's products in FP8 ({recipe.backend})"
    return f"chunks of tokens {where}{products}"
