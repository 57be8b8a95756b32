"""Cross entropy of logits and its gradient, in place of the logits.

loss    = logsumexp(logits) - logits[target]
dlogits = softmax(logits) - onehot(target)
"""

from __future__ import annotations

import torch

IGNORED = -100
"""The target of a token that carries no loss."""


def softmax_gradient(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Return the cross entropy of every row of `logits`, which with `gradient` become their gradient in place.

    Args:
        logits: [C, V], any floating point dtype; computed in FP32 and rounded once.
        targets: int64 [C], each below V or IGNORED, whose rows have loss and gradient zero for any logits.
        gradient: whether to overwrite the logits.

    Returns:
        nats, FP32 [C].
    """
    if logits.is_cuda:
        from ds_fp8.layers.head import softmax_gradient_triton

        return softmax_gradient_triton.softmax_gradient(logits, targets, IGNORED, gradient)
    return softmax_gradient_reference(logits, targets, gradient)


def softmax_gradient_reference(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Compute what `softmax_gradient` computes, in plain torch."""
    ignored = targets == IGNORED
    column = targets.masked_fill(ignored, 0).unsqueeze(1)
    x = logits.float()
    normaliser = x.logsumexp(1, keepdim=True)
    losses = (normaliser - x.gather(1, column)).squeeze(1).masked_fill(ignored, 0)
    if gradient:
        # In place: `x` is a copy where logits are BF16, and the logits themselves in FP32.
        dlogits = x.sub_(normaliser).exp_()
        dlogits.scatter_add_(1, column, torch.full_like(normaliser, -1)).masked_fill_(ignored.unsqueeze(1), 0)
        if dlogits is not logits:
            logits.copy_(dlogits)
    return losses
