"""Loss and gradients of a language-model head on a chunk of tokens, its products in high precision or in FP8.

    logits  [C, V]  = x [C, H] · weight [V, H]ᵀ
    dx      [C, H]  = dlogits [C, V] · weight
    dweight [V, H] += dlogits [C, V]ᵀ · x

Either head holds what the chunks share: the weight, cast or not, and the sum of its gradient.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.head.softmax_gradient import IGNORED, softmax_gradient
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_operand


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
        from ds_fp8.casts.store_triton import empty_result
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
