"""Cross entropy without logits: the language-model head and its loss as one operation.

Logits of T tokens over a vocabulary of V take 4·T·V bytes in FP32, several times over. Here loss and gradients are
computed together, a chunk of tokens at a time, so that only a small piece of the logits ever exists:

    logits_C [C, V] = hidden_C [C, H] · weight [V, H]ᵀ
    loss            = Σ logsumexp(logits) - logits[target]
    dlogits_C       = softmax(logits) - onehot(target)                     in place of the logits
    dhidden_C       = dlogits_C · weight,    dweight += dlogits_Cᵀ · hidden_C

T tokens, C of them in a chunk, H the hidden size. Backward scales what forward computed and never reads the weight,
which ZeRO-3 has released by then. A chunk is computed by lm_head.py, in high precision or in FP8.

Cross entropy of logits and its gradient, in place of the logits.

loss    = logsumexp(logits) - logits[target]
dlogits = softmax(logits) - onehot(target)

Loss and gradients of a language-model head on a chunk of tokens, its products in high precision or in FP8.

    logits  [C, V]  = x [C, H] · weight [V, H]ᵀ
    dx      [C, H]  = dlogits [C, V] · weight
    dweight [V, H] += dlogits [C, V]ᵀ · x

Either head holds what the chunks share: the weight, cast or not, and the sum of its gradient.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_operand

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


class HighPrecisionHead:
    """The products in the dtype of weight [V, H]; on a CPU logits and their gradient are in FP32."""

    def __init__(self, weight: torch.Tensor, several_chunks: bool):
        self._weight = weight
        # A GPU's product rounds its FP32 sums once, so that the gradient of a single chunk needs no sum in FP32.
        self._dtype = torch.float32 if several_chunks or not weight.is_cuda else weight.dtype
        self.dweight: torch.Tensor | None = None

    def losses(
        self, hidden: torch.Tensor, targets: torch.Tensor, dhidden: torch.Tensor | None, wants_dweight: bool, chunk: int
    ) -> torch.Tensor:
        """Return the losses of hidden [T, H], FP32 [T]; write dhidden where it is given, and `dweight` where wanted."""
        return torch.cat(
            [
                self._chunk(hidden[rows], targets[rows], None if dhidden is None else dhidden[rows], wants_dweight)
                for rows in slices(len(hidden), chunk)
            ]
        )

    def _chunk(
        self, x: torch.Tensor, targets: torch.Tensor, dx: torch.Tensor | None, wants_dweight: bool
    ) -> torch.Tensor:
        weight = self._weight
        #     logits = x W';   dlogits = softmax(logits) - onehot      in the memory of the logits
        #     dx = dlogits W;  dW += dlogits' x                        chunk by chunk: never all logits at once
        logits = F.linear(x, weight)
        if not x.is_cuda:
            logits = logits.float()
        losses = softmax_gradient(logits, targets, dx is not None or wants_dweight)
        if dx is not None:
            # `logits` holds dlogits by now, on a GPU in the weight's dtype already. Written straight into its rows of
            # dhidden.
            torch.mm(logits.to(weight.dtype), weight, out=dx)
        if wants_dweight:
            beta = 0 if self.dweight is None else 1
            if self.dweight is None:
                # Uninitialised: beta 0 reads nothing of it, so that the first chunk is no addition to zeros.
                self.dweight = torch.empty_like(weight, dtype=self._dtype)
            if x.is_cuda:
                torch.addmm(self.dweight, logits.t(), x, out_dtype=self._dtype, beta=beta, out=self.dweight)
            else:
                self.dweight.addmm_(logits.t(), x.float(), beta=beta)
        return losses


class FP8Head:
    """The products with a recipe's casts: weight [V, H] is cast once, x and dlogits by chunk.

    dweight is one product of the tokens of several chunks, a group, for which dlogits are kept cast along the tokens;
    it is rounded to the weight's dtype, and summed in FP32 where there are several groups.
    """

    def __init__(self, weight: torch.Tensor, recipe: LinearRecipe):
        self._recipe = recipe = recipe.for_head()
        self._dtype = weight.dtype
        self._hidden_size = weight.shape[1]
        # Cast once for all chunks: V x H elements, more than the activations of a chunk.
        self._high_precision, self._weight = weight, recipe.cast_weight(weight)
        self._transposed, self._factor = None, None
        self.dweight: torch.Tensor | None = None

    def losses(
        self, hidden: torch.Tensor, targets: torch.Tensor, dhidden: torch.Tensor | None, wants_dweight: bool, chunk: int
    ) -> torch.Tensor:
        """Return the losses of hidden [T, H], FP32 [T]; write dhidden where it is given, and `dweight` where wanted."""
        wants_dx = dhidden is not None
        if wants_dx:
            if self._recipe.casts_weight_twice:
                self._transposed = self._recipe.cast_weight_columnwise(self._high_precision)
            else:
                self._transposed, self._factor = dgrad_operand(self._weight, self._recipe.transposed)
        by_tile = self._casts_by_tile(hidden, chunk)
        group = group_tokens(self._hidden_size, chunk) if by_tile else chunk
        losses = []
        for rows in slices(len(hidden), group):
            x, target, dx = hidden[rows], targets[rows], dhidden[rows] if wants_dx else None
            if by_tile:
                columns = self._chunks_by_tile(x, target, dx, wants_dweight, chunk, losses)
            else:
                columns = self._chunk(x, target, dx, wants_dweight, losses)
            if wants_dweight:
                # One product over the tokens of several chunks: every product rounds its sum to BF16.
                share = self._recipe.multiply(columns, self._recipe.cast_input_columnwise(x), self._dtype)
                del columns
                # float() copies only the first time, from the weight's dtype; from then on the sum is in FP32, in
                # place.
                self.dweight = share if self.dweight is None else self.dweight.float().add_(share)
        return torch.cat(losses)

    def _casts_by_tile(self, hidden: torch.Tensor, chunk: int) -> bool:
        """Return whether a kernel can turn the logits of every chunk into both casts of their gradient."""
        whole = all(length % BLOCK == 0 for length in (len(hidden), min(chunk, len(hidden)), self._weight.shape[0]))
        return hidden.is_cuda and whole and self._recipe.casts_by_tile and self._factor is None

    def _chunks_by_tile(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        dhidden: torch.Tensor | None,
        wants_dweight: bool,
        chunk: int,
        losses: list[torch.Tensor],
    ) -> QuantizedTensor | None:
        """Append the losses of a group, write dhidden, and return dlogits [V, T] cast along the tokens."""
        from ds_fp8.casts.primitives_triton import empty_result
        from ds_fp8.layers.head.softmax_gradient_triton import softmax_gradient_cast

        recipe, spec, columns = self._recipe, self._recipe.grad_output, None
        if wants_dweight:
            shape = self._weight.shape[0], len(hidden)
            # One operand [V, T] for all chunks of the group, each of which writes its own range of tokens.
            columns = empty_result(*shape, spec.format, spec.granularity, spec.scale, hidden.device)
        for rows in slices(len(hidden), chunk):
            logits = recipe.multiply(recipe.cast_input(hidden[rows]), self._weight, hidden.dtype)
            found, row = softmax_gradient_cast(
                logits, targets[rows], IGNORED, spec, dhidden is not None, columns, rows.start
            )
            losses.append(found)
            del logits
            if dhidden is not None:
                dhidden[rows] = recipe.multiply(row, self._transposed, hidden.dtype)
        return columns

    def _chunk(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        dx: torch.Tensor | None,
        wants_dweight: bool,
        losses: list[torch.Tensor],
    ) -> QuantizedTensor | None:
        """Append the losses of one chunk, write dx, and return dlogits [V, C] cast along the tokens."""
        recipe, wants_dx = self._recipe, dx is not None
        logits = recipe.multiply(recipe.cast_input(x), self._weight, x.dtype)
        losses.append(softmax_gradient(logits, targets, wants_dx or wants_dweight))
        if not (wants_dx or wants_dweight):
            return None
        row, column = recipe.cast_grad_output(logits, wants_dx, wants_dweight, self._factor)
        del logits
        if wants_dx:
            dx.copy_(recipe.multiply(row, self._transposed, x.dtype))
        return column


def group_tokens(hidden_size: int, chunk: int) -> int:
    """Return how many tokens' dlogits are kept in FP8 for one product: chunks of up to 4H tokens, 4VH bytes."""
    return max(4 * hidden_size // chunk, 1) * chunk


def slices(length: int, step: int) -> list[slice]:
    """Return the slices of so many tokens each that make up `length`, the last shorter where it must be."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


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
