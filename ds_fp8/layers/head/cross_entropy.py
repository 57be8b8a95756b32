"""Cross entropy without logits in memory: the language-model head and its loss as one operation.

FP32 logits of T tokens over a vocabulary of V take 4·T·V bytes, several times over. Here loss and gradients are
computed together in chunks of C tokens:

    logits_C [C, V] = hidden_C [C, H] · weight [V, H]ᵀ
    loss            = Σ logsumexp(logits) - logits[target]
    dlogits_C       = softmax(logits) - onehot(target)                     in place of the logits
    dhidden_C       = dlogits_C · weight,    dweight += dlogits_Cᵀ · hidden_C

H is the hidden size. Backward scales the gradients from forward and never reads the weight, which ZeRO-3 has resharded
by then.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_fp8.config.formats import BLOCK, SCALE_TYPES
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import transposed_weight

IGNORED = -100  # target of a token without loss
LOGITS_BYTES = 64 << 20  # of the FP32 logits in a chunk on a CPU; lower bound on a GPU
MAX_LOGITS_BYTES = 1 << 30  # upper bound for one of several chunks on a GPU

_outside: dict[torch.device, torch.Tensor] = {}


def label_errors(device: torch.device) -> torch.Tensor:
    """Return int64 [3] on a device: the number of targets outside the vocabulary so far, one of them, and V."""
    if device not in _outside:
        with torch.inference_mode(False):  # updated in place, also outside inference mode
            _outside[device] = torch.zeros(3, dtype=torch.int64, device=device)
    return _outside[device]


def pop_label_errors() -> str | None:
    """Report and clear targets outside the vocabulary since the last call; None without any. Synchronizes."""
    for counted in _outside.values():
        count, target, vocabulary = counted.tolist()
        counted.zero_()
        if count:
            return f"{count} labels are outside the vocabulary of {vocabulary} tokens, {target} for one"
    return None


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, recipe: LinearRecipe | None = None
) -> torch.Tensor:
    """Return the summed cross entropy of hidden [T, H] · weightᵀ [V, H], FP32, without a second derivative.

    targets: int64 [T], below V or IGNORED; others make the loss NaN and are reported by `pop_label_errors`. recipe: of
    FP8 products, None: BF16. Autocast applies to hidden and weight; their gradients have their dtypes, the weight's is
    summed in FP32.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states of {tuple(hidden.shape[:-1])} tokens, targets of {tuple(targets.shape)}")
    # autocast does not apply inside a Function
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
    """Return the number of tokens in a chunk: equal chunks, as few as memory allows.

    On a GPU several chunks sum the weight's gradient in FP32, 4VH bytes, which backward rounds to another 2VH: BF16
    logits of 2VH bytes, freed by then, do not raise the peak. A single chunk needs no FP32 sum and may have 4VH bytes.
    Every further chunk costs a read and a write of the FP32 gradient, but not with FP8, which sums per group: there
    half the size makes room for the quantized weight.
    """
    if on_gpu:
        # one chunk: 2 bytes x tokens x V of logits are at most 4VH
        if tokens <= 2 * hidden_size and not in_fp8:
            return max(tokens, 1)
        row = 2 * vocabulary
        most = max(LOGITS_BYTES, min(MAX_LOGITS_BYTES, row * hidden_size) // (2 if in_fp8 else 1)) // row
    else:
        most = LOGITS_BYTES // (4 * vocabulary)
    most = max(most, 1)
    if tokens <= most:
        return most
    # equal chunks: a short last one would leave the GPU underused
    even = -(-tokens // -(-tokens // most))
    # multiples of a tile, for softmax_gradient_quantize
    return min(most, -(-even // BLOCK) * BLOCK)


def group_tokens(hidden_size: int, chunk: int) -> int:
    """Return the tokens of a group, whose FP8 dlogits are held for one wgrad: up to 4H, 4VH bytes."""
    return max(4 * hidden_size // chunk, 1) * chunk


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, recipe: LinearRecipe | None):
        # gradients for dloss = 1, computed while the logits exist
        loss, dhidden, dweight = _compute(hidden, weight, targets, recipe, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: torch.Tensor):
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(x if x is None else scaled(x, dloss, dtype) for x, dtype in gradients), None, None


def _compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    recipe: LinearRecipe | None,
    wants_dhidden: bool,
    wants_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (summed loss, dhidden or None, dweight or None), for dloss = 1."""
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
    """Return (losses FP32 [T], dweight or None), write dhidden; products in the weight's dtype, on a CPU from FP32."""
    losses, dweight = [], None
    # a GPU rounds the FP32 sums of a product once: a single chunk needs no FP32 gradient
    dtype = torch.float32 if len(hidden) > chunk or not weight.is_cuda else weight.dtype
    for rows in _slices(len(hidden), chunk):
        #     logits = x W';   dlogits = softmax(logits) - onehot      in the memory of the logits
        #     dx = dlogits W;  dW += dlogits' x
        x = hidden[rows]
        logits = F.linear(x, weight)
        if not x.is_cuda:
            logits = logits.float()
        losses.append(softmax_gradient(logits, targets[rows], dhidden is not None or wants_dweight))
        if dhidden is not None:
            # `logits` holds dlogits by now
            torch.mm(logits.to(weight.dtype), weight, out=dhidden[rows])
        if wants_dweight:
            beta = 0 if dweight is None else 1
            if dweight is None:
                dweight = torch.empty_like(weight, dtype=dtype)  # beta 0 does not read it
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
    """Compute _in_high_precision in FP8: the weight is quantized once, x and dlogits per chunk.

    A group of chunks has one wgrad product, from dlogits quantized along its tokens, rounded to the weight's dtype;
    several groups are summed in FP32.
    """
    losses, dweight, wants_dx = [], None, dhidden is not None
    if not SCALE_TYPES[recipe.grad_output.scale].needs_amax:
        # Gradients of the summed loss are as large as 1, and would leave a fixed scale.
        recipe = replace(recipe, grad_output=replace(recipe.grad_output, scale="pow2"))
    weight_fp8, transposed, factor = recipe.quantize_weight(weight), None, None
    if wants_dx and recipe.quantizes_weight_twice:
        transposed = recipe.quantize_weight_columnwise(weight)
    elif wants_dx:
        transposed, factor = transposed_weight(weight_fp8, recipe.transposed)
    by_tile, spec = factor is None and _quantizes_by_tile(recipe, hidden, len(weight), chunk), recipe.grad_output
    if by_tile:
        from ds_fp8.casts.primitives_triton import empty_result
        from ds_fp8.layers.head.softmax_gradient_triton import softmax_gradient_quantize
    for group in _slices(len(hidden), group_tokens(weight.shape[1], chunk) if by_tile else chunk):
        x, target, dx = hidden[group], targets[group], dhidden[group] if wants_dx else None
        columns = None  # dlogits [V, T] of the group; a chunk writes its tokens
        if by_tile and wants_dweight:
            columns = empty_result(len(weight), len(x), spec.format, spec.granularity, spec.scale, x.device)
        for rows in _slices(len(x), chunk):
            logits, row = recipe.multiply(recipe.quantize_input(x[rows]), weight_fp8, x.dtype), None
            if by_tile:
                loss, row = softmax_gradient_quantize(
                    logits, target[rows], IGNORED, label_errors(x.device), spec, wants_dx, columns, rows.start
                )
            else:
                loss = softmax_gradient(logits, target[rows], wants_dx or wants_dweight)
                if wants_dx or wants_dweight:
                    row, columns = recipe.quantize_grad_output(logits, wants_dx, wants_dweight, factor)
            losses.append(loss)
            del logits
            if wants_dx:
                dx[rows] = recipe.multiply(row, transposed, x.dtype)
            del row
        if wants_dweight:
            # one product per group: each rounds its sum to BF16
            share = recipe.multiply(columns, recipe.quantize_input_columnwise(x), weight.dtype)
            del columns
            # float() copies once; from then on the sum is in FP32, in place
            dweight = share if dweight is None else dweight.float().add_(share)
    return torch.cat(losses), dweight


def _quantizes_by_tile(recipe: LinearRecipe, hidden: torch.Tensor, vocabulary: int, chunk: int) -> bool:
    """Return whether softmax_gradient_quantize can take all chunks: it masks nothing."""
    tiles = all(length % BLOCK == 0 for length in (len(hidden), min(chunk, len(hidden)), vocabulary))
    return hidden.is_cuda and tiles and recipe.quantizes_by_tile


def scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x times a scalar FP32 factor, computed in FP32 and rounded once to `dtype`."""
    # A vector factor takes part in type promotion: the product is FP32. A scalar would be rounded to x's dtype first.
    return torch.mul(x, factor.view(1), out=torch.empty_like(x, dtype=dtype))


def softmax_gradient(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Return the cross entropy of every row of logits [C, V], computed in FP32, FP32 [C] in nats.

    gradient: whether logits become their gradient in place. Loss and gradient of a row are zero if its target is
    IGNORED, NaN if it is outside the vocabulary.
    """
    if logits.is_cuda:
        from ds_fp8.layers.head import softmax_gradient_triton

        return softmax_gradient_triton.softmax_gradient(logits, targets, IGNORED, label_errors(logits.device), gradient)
    ignored = targets == IGNORED
    outside = ~ignored & ((targets < 0) | (targets >= logits.shape[1]))
    count, counted = outside.sum(), label_errors(logits.device)
    found = counted[0] + count, targets.take(outside.int().argmax()), torch.full_like(count, logits.shape[1])
    counted.copy_(torch.where(count > 0, torch.stack(found), counted))  # no branch: CUDA graphs
    column = targets.masked_fill(ignored | outside, 0).unsqueeze(1)
    x = logits.float()
    normaliser = x.logsumexp(1, keepdim=True).masked_fill(outside[:, None], torch.nan)
    losses = (normaliser - x.gather(1, column)).squeeze(1).masked_fill(ignored, 0)
    if gradient:
        # in place: `x` is a copy of BF16 logits, and FP32 logits themselves
        dlogits = x.sub_(normaliser).exp_()
        dlogits.scatter_add_(1, column, torch.full_like(normaliser, -1)).masked_fill_(ignored.unsqueeze(1), 0)
        if dlogits is not logits:
            logits.copy_(dlogits)
    return losses


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
