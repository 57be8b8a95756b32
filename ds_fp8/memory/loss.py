"""The head and its cross entropy. T tokens, H hidden, V vocabulary."""

from __future__ import annotations

import math

from ds_fp8.memory.workload import BF16, FP32, Workload
from ds_fp8.modules.cross_entropy import LOGITS_BYTES


def loss(w: Workload) -> int:
    """The most that the head and the loss allocate at once, at the end of forward (HF: at the start of backward).

    On a GPU it is computed by Liger's kernels, on a CPU in plain torch.
    """
    if not w.model.loss_without_logits:
        return over_all_logits(w)
    return by_liger(w) if w.device == "cuda" else in_chunks(w)


def over_all_logits(w: Workload) -> int:
    """Hugging Face's own: 12TV. log-softmax, its gradient and the gradient it came from, each in FP32.

    In forward it is 10TV: logits in BF16, in FP32, and their log-softmax.
    """
    return 3 * FP32 * w.tokens * w.model.vocabulary


def by_liger(w: Workload) -> int:
    """dhidden 2TH, dweight summed in FP32 4VH; then either a chunk of logits in BF16, or dweight once more in BF16 2VH.

    A chunk has T / (V / H) tokens, rounded up to a power of two: about as many bytes as the hidden states.
    """
    model = w.model
    chunk = min(w.tokens, _power_of_two(math.ceil(w.tokens / math.ceil(model.vocabulary / model.hidden))))
    logits = BF16 * chunk * model.vocabulary
    return BF16 * w.tokens * model.hidden + FP32 * model.head_numel + max(logits, BF16 * model.head_numel)


def in_chunks(w: Workload) -> int:
    """dhidden 2TH, dweight 4VH, and a chunk of logits: LOGITS_BYTES in FP32 and half as much in BF16, twice."""
    chunk = min(LOGITS_BYTES, FP32 * w.tokens * w.model.vocabulary)
    return BF16 * w.tokens * w.model.hidden + FP32 * w.model.head_numel + 2 * chunk


def head_gradient(w: Workload) -> int:
    """2VH: a gradient of tied embeddings waits through all of backward for its other half."""
    return BF16 * w.model.head_numel if w.model.head is None else 0


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
