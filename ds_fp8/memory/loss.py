"""The head and its cross entropy. T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from ds_fp8.layers.head.cross_entropy import LOGITS_BYTES, chunk_tokens
from ds_fp8.layers.head.lm_head import group_tokens
from ds_fp8.memory.workload import BF16, FP32, Workload


def loss(w: Workload) -> int:
    """Return the most that the head and the loss allocate at once, at the end of forward.

    The loss of transformers allocates it at the start of backward.
    """
    if not w.model.loss_without_logits:
        return over_all_logits(w)
    return on_gpu(w) if w.device == "cuda" else in_chunks(w)


def over_all_logits(w: Workload) -> int:
    """Return the bytes of Hugging Face's loss, 12TV: log-softmax, its gradient and the one that came in, each in FP32.

    In forward it is 10TV: logits in BF16, in FP32, and their log-softmax.
    """
    return 3 * FP32 * w.tokens * w.model.vocabulary


def on_gpu(w: Workload) -> int:
    """Return the bytes of the fused loss with a head in BF16.

    dhidden 2TH, dweight 4VH (2VH of one chunk); then a chunk of logits in BF16 or dweight once more in BF16, 2VH.
    """
    if w.fp8.multiplies_head_in_fp8:
        return in_fp8(w)
    model = w.model
    chunk = chunk_tokens(w.tokens, model.vocabulary, model.hidden, on_gpu=True)
    logits = BF16 * min(w.tokens, chunk) * model.vocabulary
    dweight = (FP32 if w.tokens > chunk else BF16) * model.head_numel
    return BF16 * w.tokens * model.hidden + dweight + max(logits, BF16 * model.head_numel)


def in_fp8(w: Workload) -> int:
    """Return the bytes of the fused loss with a head in FP8.

    dhidden 2TH; two casts of the weight 2VH, dlogits of a group cast along its tokens, and of a chunk the logits and
    another cast 3CV, or dweight in BF16 2VH; of several groups dweight in FP32 4VH, too.
    """
    model = w.model
    chunk = chunk_tokens(w.tokens, model.vocabulary, model.hidden, on_gpu=True, in_fp8=True)
    group = group_tokens(model.hidden, chunk)
    total = 4 * model.head_numel if w.tokens > group else 0
    columns = min(w.tokens, group) * model.vocabulary
    of_chunk = max(3 * min(w.tokens, chunk) * model.vocabulary, BF16 * model.head_numel)
    return BF16 * w.tokens * model.hidden + total + 2 * model.head_numel + columns + of_chunk


def in_chunks(w: Workload) -> int:
    """Return the bytes of the fused loss in plain torch, chunk by chunk.

    dhidden 2TH, dweight 4VH, and a chunk of logits: LOGITS_BYTES in FP32 and half as much in BF16, twice.
    """
    chunk = min(LOGITS_BYTES, FP32 * w.tokens * w.model.vocabulary)
    return BF16 * w.tokens * w.model.hidden + FP32 * w.model.head_numel + 2 * chunk


def head_gradient(w: Workload) -> int:
    """Return 2VH: a gradient of tied embeddings waits through all of backward for its other half."""
    return BF16 * w.model.head_numel if w.model.head is None else 0
