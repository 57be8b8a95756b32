"""Token counts above which FP8 layers beat BF16, and gathering experts beats sending tokens.

The first is measured, where Python launches both; as CUDA graphs FP8 layers were faster at every size measured, and the
start report has nothing to say. The second is computed.
"""

from __future__ import annotations

import bisect

import torch

MEASURED = "one H200, 2026-11-22"

BREAK_EVEN = {512: 16384, 1024: 16384, 2048: 8192, 4096: 2048}
"""Hidden size -> the fewest tokens of a micro-batch, of those measured, with which a fused decoder layer of the infir2
preset took less time than transformers' in BF16, both launched by Python.

Measured: docs/performance.md, "Where FP8 pays".
"""


def tokens_needed(hidden: int) -> int | None:
    """Return the tokens of a micro-batch on one GPU from which FP8 pays, or None where it was never seen to.

    Args:
        hidden: Hidden size of the model. Between two measured sizes the smaller one's answer holds.
    """
    place = bisect.bisect_right(list(BREAK_EVEN), hidden)
    return None if place == 0 else list(BREAK_EVEN.values())[place - 1]


def warning(hidden: int | None, tokens: int | None) -> str | None:
    """Return a sentence for the start report about so many tokens a micro-batch at a hidden size (None: not known)."""
    if hidden is None:
        return None
    needed = tokens_needed(hidden)
    if needed is None:
        return (
            f"layers with {hidden} features are too small for FP8 to be faster than BF16 ({MEASURED}) without CUDA "
            "graphs: expect less memory and fewer bytes sent, not more tokens/s"
        )
    if tokens is None:
        return f"with {hidden} features FP8 is faster than BF16 from {needed} tokens a GPU and micro-batch ({MEASURED})"
    if tokens < needed:
        return (
            f"{tokens} tokens a GPU and micro-batch are too few for FP8 to be faster than BF16 with {hidden} features: "
            f"that begins at {needed} ({MEASURED}); larger micro-batches, longer sequences or "
            "CUDA graphs help"
        )
    return None


def typical_hidden(linears: list[torch.nn.Linear]) -> int | None:
    """Return the median number of input features of a model's FP8 linears: its hidden size, but for odd models."""
    features = sorted(linear.in_features for linear in linears)
    return features[len(features) // 2] if features else None


LINK = 400e9
"""Bytes a second that reach a GPU from the others of its host, by NVLink."""
PRODUCTS = 310e12
"""FLOP/s of FP8 products, casts included."""


def tokens_to_hide_experts(total: int, active: int, ranks: int) -> int:
    """Return the tokens of a micro-batch on one GPU below which gathers take longer than products.

    Every layer is gathered twice and its gradients are reduced once, a byte a parameter each, whatever the tokens;
    forward and backward take 6 FLOP a token and active parameter. Expert parallelism sends tokens instead.

    Args:
        total: Parameters of the decoder layers.
        active: Those that multiply one token.
        ranks: GPUs that the layers are sharded over, of one host.
    """
    return round(3 * total * (ranks - 1) / ranks / LINK / (6 * active / PRODUCTS))
