"""Cross entropy without logits: the language-model head and its loss as one operation.

Logits of T tokens over a vocabulary of V take 4·T·V bytes in FP32, several times over. Here loss and gradients are
computed together, a few tokens at a time, so that only a small piece of the logits ever exists:

    logits_C [C, V] = hidden_C [C, H] · weight [V, H]ᵀ
    loss            = Σ logsumexp(logits) - logits[target]
    dlogits_C       = softmax(logits) - onehot(target)
    dhidden_C       = dlogits_C · weight,    dweight += dlogits_Cᵀ · hidden_C

T tokens, C of them in a chunk, H the hidden size. Backward scales what forward computed and never reads the weight,
which ZeRO-3 has released by then. On a GPU Liger's kernels compute it, where they are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
"""The target of a token that carries no loss."""

LOGITS_BYTES = 64 << 20
"""Bytes of FP32 logits in a chunk of the plain torch computation."""

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def linear_cross_entropy_reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What `linear_cross_entropy` computes, by way of all logits in FP32. Differentiable."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy (nats, FP32 scalar) of the logits `hidden` [T, H] · `weight` [V, H]ᵀ.

    `targets` are int64 [T], each below V or IGNORED. Gradients have the dtype of what they belong to; the weight's is
    summed in FP32. Only the first derivative exists: a second raises RuntimeError. Raises ValueError when the numbers
    of tokens differ.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states of {tuple(hidden.shape[:-1])} tokens, targets of {tuple(targets.shape)}")
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, targets)
    return _compute(hidden, weight, targets, False, False)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss, dhidden, dweight = _compute(hidden, weight, targets, *ctx.needs_input_grad[:2])
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
        return *scaled, None


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # As a vector the scale takes part in type promotion, so the product is FP32; as a scalar it would first be rounded
    # to the gradient's dtype, and all gradients below would be off by the same factor.
    return torch.mul(gradient, scale.view(1), out=torch.empty_like(gradient, dtype=dtype))


def _compute(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, wants_dhidden: bool, wants_dweight: bool
) -> Result:
    """(summed loss, dhidden or None, dweight or None), gradients for a loss gradient of one."""
    # Liger divides by the number of tokens, so none is not for it.
    compute = _by_liger if hidden.is_cuda and targets.numel() and _liger() else _in_chunks
    return compute(hidden, weight, targets, wants_dhidden, wants_dweight)


def implementation() -> str:
    """In words, what computes the loss on this machine, and why it is not Liger where it is not."""
    if not torch.cuda.is_available():
        return "chunks of tokens in plain torch: no GPU"
    function, why_not = _find_liger()
    return (
        f"chunks of tokens in plain torch: liger-kernel, which is faster, {why_not}"
        if function is None
        else "Liger's kernels"
    )


def _liger() -> Callable[..., tuple] | None:
    return _find_liger()[0]


@functools.cache
def _find_liger() -> tuple[Callable[..., tuple] | None, str]:
    """(Liger's function, or None; why there is none)."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
    except ModuleNotFoundError as error:
        if error.name == "liger_kernel":
            return None, "is not installed"
        return None, f"cannot be imported: {error}"
    except Exception as error:  # it imports what else is installed, whose errors are of any kind
        return None, f"cannot be imported: {error}"
    return fused_linear_cross_entropy_forward, ""


def _by_liger(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, wants_dhidden: bool, wants_dweight: bool
) -> Result:
    # Liger reads off its operands which gradients are wanted, and computes none unless `hidden` wants one.
    result = _liger()(
        hidden.detach().requires_grad_(wants_dhidden or wants_dweight),
        weight.detach().requires_grad_(wants_dweight),
        targets,
        ignore_index=IGNORED,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    loss, (dhidden, dweight, _) = result[0], result[-3:]
    return loss, dhidden if wants_dhidden else None, dweight


def _in_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, wants_dhidden: bool, wants_dweight: bool
) -> Result:
    """As `_compute`, in plain torch; dweight in FP32."""
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    dhidden = torch.empty_like(hidden) if wants_dhidden else None
    dweight = torch.zeros_like(weight, dtype=torch.float32) if wants_dweight else None
    chunk = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
    for start in range(0, hidden.shape[0], chunk):
        x, target = hidden[start : start + chunk], targets[start : start + chunk]
        ignored = target == IGNORED
        target = target.masked_fill(ignored, 0).unsqueeze(1)
        logits = F.linear(x, weight).float()
        normaliser = logits.logsumexp(1, keepdim=True)
        loss += (normaliser - logits.gather(1, target)).squeeze(1).masked_fill(ignored, 0).sum()
        if dhidden is None and dweight is None:
            continue
        dlogits = logits.sub_(normaliser).exp_()
        dlogits.scatter_add_(1, target, torch.full_like(normaliser, -1)).masked_fill_(ignored.unsqueeze(1), 0)
        if dhidden is not None:
            dhidden[start : start + chunk] = dlogits.to(weight.dtype) @ weight
        if dweight is not None:
            dweight.addmm_(dlogits.t(), x.float())
    return loss, dhidden, dweight
