"""What the tests of the cross entropy and of the models that use it share."""

import torch

from ds_fp8.layers.head import cross_entropy

# Relative error of a loss or gradient against the computation with all logits in the same dtype
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def limit_chunks(monkeypatch, tokens, vocabulary):
    """Let a chunk of the plain torch computation hold this many tokens."""
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", tokens * 4 * vocabulary)
