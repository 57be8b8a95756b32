"""Cross entropy without logits: the language-model head and its loss as one operation.

Logits of T tokens over a vocabulary of V take 4·T·V bytes in FP32, several times over. Here loss and gradients are
computed together, a chunk of tokens at a time, so that only a small piece of the logits ever exists:

    logits_C [C, V] = hidden_C [C, H] · weight [V, H]ᵀ
    loss            = Σ logsumexp(logits) - logits[target]
    dlogits_C       = softmax(logits) - onehot(target)                     in place of the logits
    dhidden_C       = dlogits_C · weight,    dweight += dlogits_Cᵀ · hidden_C

T tokens, C of them in a chunk, H the hidden size. Backward scales what forward computed and never reads the weight,
which ZeRO-3 has released by then.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_fp8.config.formats import BLOCK, SCALE_TYPES
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_operand

IGNORED = -100
"""The target of a token that carries no loss."""

LOGITS_BYTES = 64 << 20
"""Bytes of FP32 logits in a chunk on a CPU, and the fewest bytes of logits in a chunk on a GPU."""

MAX_LOGITS_BYTES = 1 << 30
"""The most bytes of logits in one of several chunks on a GPU."""


_outside: dict[torch.device, torch.Tensor] = {}


def outside_on(device: torch.device) -> torch.Tensor:
    """Return int64 [3] on a device: the number of targets so far that have no logit, one of them, and V."""
    if device not in _outside:
        with torch.inference_mode(False):  # written in place, by forwards outside such a mode too
            _outside[device] = torch.zeros(3, dtype=torch.int64, device=device)
    return _outside[device]


def take_outside() -> str | None:
    """Say which targets had no logit since the last call, or None where all had one; the host waits for the device."""
    for counted in _outside.values():
        count, target, vocabulary = counted.tolist()
        counted.zero_()
        if count:
            return f"{count} labels are outside the vocabulary of {vocabulary} tokens, {target} for one"
    return None


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, recipe: LinearRecipe | None = None
) -> torch.Tensor:
    """Return the summed cross entropy of hidden [T, H] · weightᵀ [V, H], FP32. Only its first derivative exists.

    targets: int64 [T], each below V or IGNORED; of any other the loss is NaN, and `take_outside` names it. recipe:
    casts the operands of the three products to FP8. Autocast applies to hidden and weight; gradients have their dtypes,
    the weight's is summed in FP32.
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


def implementation(recipe: LinearRecipe | None = None) -> str:
    where = "in Triton" if torch.cuda.is_available() else "in plain torch: no GPU"
    products = "" if recipe is None else f", the head's products in FP8 ({recipe.backend})"
    return f"chunks of tokens {where}{products}"


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


def group_tokens(hidden_size: int, chunk: int) -> int:
    """Return how many tokens' dlogits are kept in FP8 for one product: chunks of up to 4H tokens, 4VH bytes."""
    return max(4 * hidden_size // chunk, 1) * chunk


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
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(x if x is None else scaled(x, dloss, dtype) for x, dtype in found), None, None


def _compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    recipe: LinearRecipe | None,
    wants_dhidden: bool,
    wants_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (summed loss, dhidden or None, dweight or None), gradients for a loss gradient of one."""
    tokens, dhidden = len(hidden), torch.empty_like(hidden) if wants_dhidden else None
    if not tokens:
        return hidden.new_zeros((), dtype=torch.float32), dhidden, torch.zeros_like(weight) if wants_dweight else None
    chunk = chunk_tokens(tokens, *weight.shape, hidden.is_cuda, recipe is not None)
    options = hidden, weight, targets, dhidden, wants_dweight, chunk
    losses, dweight = _in_high_precision(*options) if recipe is None else _in_fp8(*options, recipe)
    return losses.sum(), dhidden, dweight


def _in_high_precision(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    dhidden: torch.Tensor | None,
    wants_dweight: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (losses FP32 [T], dweight or None), and write dhidden where it is given.

    Products are in the weight's dtype; on a CPU logits and their gradient are in FP32.
    """
    losses, dweight = [], None
    # A GPU's product rounds its FP32 sums once, so that the gradient of a single chunk needs no sum in FP32.
    dtype = torch.float32 if len(hidden) > chunk or not weight.is_cuda else weight.dtype
    for rows in _slices(len(hidden), chunk):
        #     logits = x W';   dlogits = softmax(logits) - onehot      in the memory of the logits
        #     dx = dlogits W;  dW += dlogits' x                        chunk by chunk: never all logits at once
        x = hidden[rows]
        logits = F.linear(x, weight)
        if not x.is_cuda:
            logits = logits.float()
        losses.append(softmax_gradient(logits, targets[rows], dhidden is not None or wants_dweight))
        if dhidden is not None:
            # `logits` holds dlogits by now, on a GPU in the weight's dtype already.
            torch.mm(logits.to(weight.dtype), weight, out=dhidden[rows])
        if wants_dweight:
            beta = 0 if dweight is None else 1
            if dweight is None:
                # Uninitialised: beta 0 reads nothing of it, so that the first chunk is no addition to zeros.
                dweight = torch.empty_like(weight, dtype=dtype)
            if x.is_cuda:
                torch.addmm(dweight, logits.t(), x, out_dtype=dtype, beta=beta, out=dweight)
            else:
                dweight.addmm_(logits.t(), x.float(), beta=beta)
        del logits
    return torch.cat(losses), dweight


def _in_fp8(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    dhidden: torch.Tensor | None,
    wants_dweight: bool,
    chunk: int,
    recipe: LinearRecipe,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do _in_high_precision with a recipe's casts: the weight is cast once, x and dlogits by chunk.

    dweight is one product of the tokens of several chunks, a group, for which dlogits are kept cast along the tokens;
    it is rounded to the weight's dtype, and summed in FP32 where there are several groups.
    """
    losses, dweight, wants_dx = [], None, dhidden is not None
    if not SCALE_TYPES[recipe.grad_output.scale].needs_amax:
        # Gradients of the summed loss are as large as 1, and would leave a fixed scale.
        recipe = replace(recipe, grad_output=replace(recipe.grad_output, scale="pow2"))
    # Cast once for all chunks: V x H elements, more than the activations of a chunk.
    cast, transposed, factor = recipe.cast_weight(weight), None, None
    if wants_dx and recipe.casts_weight_twice:
        transposed = recipe.cast_weight_columnwise(weight)
    elif wants_dx:
        transposed, factor = dgrad_operand(cast, recipe.transposed)
    by_tile, spec = factor is None and _casts_by_tile(recipe, hidden, len(weight), chunk), recipe.grad_output
    if by_tile:
        from ds_fp8.casts.primitives_triton import empty_result
        from ds_fp8.layers.head.softmax_gradient_triton import softmax_gradient_cast
    for group in _slices(len(hidden), group_tokens(weight.shape[1], chunk) if by_tile else chunk):
        x, target, dx = hidden[group], targets[group], dhidden[group] if wants_dx else None
        # One operand [V, T] for all chunks of the group, each of which writes its own range of tokens.
        columns = None
        if by_tile and wants_dweight:
            columns = empty_result(len(weight), len(x), spec.format, spec.granularity, spec.scale, x.device)
        for rows in _slices(len(x), chunk):
            logits, row = recipe.multiply(recipe.cast_input(x[rows]), cast, x.dtype), None
            if by_tile:
                found, row = softmax_gradient_cast(
                    logits, target[rows], IGNORED, outside_on(x.device), spec, wants_dx, columns, rows.start
                )
            else:
                found = softmax_gradient(logits, target[rows], wants_dx or wants_dweight)
                if wants_dx or wants_dweight:
                    row, columns = recipe.cast_grad_output(logits, wants_dx, wants_dweight, factor)
            losses.append(found)
            del logits
            if wants_dx:
                dx[rows] = recipe.multiply(row, transposed, x.dtype)
            del row
        if wants_dweight:
            # One product over the tokens of several chunks: every product rounds its sum to BF16.
            share = recipe.multiply(columns, recipe.cast_input_columnwise(x), weight.dtype)
            del columns
            # float() copies only the first time; from then on the sum is in FP32, in place.
            dweight = share if dweight is None else dweight.float().add_(share)
    return torch.cat(losses), dweight


def _casts_by_tile(recipe: LinearRecipe, hidden: torch.Tensor, vocabulary: int, chunk: int) -> bool:
    """Return whether a kernel can turn the logits of every chunk into both casts of their gradient."""
    whole = all(length % BLOCK == 0 for length in (len(hidden), min(chunk, len(hidden)), vocabulary))
    return hidden.is_cuda and whole and recipe.casts_by_tile


def scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x times a scalar FP32 factor, computed in FP32 and rounded once to `dtype`."""
    if x.is_cuda:
        from ds_fp8.layers.head import softmax_gradient_triton

        return softmax_gradient_triton.scaled(x, factor, dtype)
    return scaled_reference(x, factor, dtype)


def scaled_reference(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # As a vector the factor takes part in type promotion, so the product is FP32; as a scalar it would first be
    # rounded to the gradient's dtype, and all gradients below would be off by the same factor.
    return torch.mul(x, factor.view(1), out=torch.empty_like(x, dtype=dtype))


def softmax_gradient(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Return the cross entropy of every row of logits [C, V], FP32 [C] in nats.

    Logits of any floating point dtype are computed with in FP32; with `gradient` they become their gradient in place,
    rounded once. Rows whose target is IGNORED have loss and gradient zero for any logits; of targets that have no logit
    both are NaN.
    """
    if logits.is_cuda:
        from ds_fp8.layers.head import softmax_gradient_triton

        return softmax_gradient_triton.softmax_gradient(logits, targets, IGNORED, outside_on(logits.device), gradient)
    return softmax_gradient_reference(logits, targets, gradient)


def softmax_gradient_reference(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    ignored = targets == IGNORED
    outside = ~ignored & ((targets < 0) | (targets >= logits.shape[1]))
    count, counted = outside.sum(), outside_on(logits.device)
    found = counted[0] + count, targets.take(outside.int().argmax()), torch.full_like(count, logits.shape[1])
    counted.copy_(torch.where(count > 0, torch.stack(found), counted))  # by no branch, which graphs cannot take
    column = targets.masked_fill(ignored | outside, 0).unsqueeze(1)
    x = logits.float()
    normaliser = x.logsumexp(1, keepdim=True).masked_fill(outside[:, None], torch.nan)
    losses = (normaliser - x.gather(1, column)).squeeze(1).masked_fill(ignored, 0)
    if gradient:
        # In place: `x` is a copy where logits are BF16, and the logits themselves in FP32.
        dlogits = x.sub_(normaliser).exp_()
        dlogits.scatter_add_(1, column, torch.full_like(normaliser, -1)).masked_fill_(ignored.unsqueeze(1), 0)
        if dlogits is not logits:
            logits.copy_(dlogits)
    return losses


def _slices(length: int, step: int) -> list[slice]:
    """Return the slices of so many tokens each that make up `length`, the last shorter where it must be."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
