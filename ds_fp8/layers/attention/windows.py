"""Windows of transformers' attention modules."""

from __future__ import annotations

from torch import nn

SLIDING = "sliding_attention"
"""Layers with a window, in those configurations of transformers that have a list of types of layers."""


def window_of(module: nn.Module) -> int | None:
    """Return how many tokens an attention module's sliding window has; None where it sees all before.

    Args:
        module: An attention module of transformers.
    """
    # Some classes keep it, with None in layers without one, or not at all there (Qwen2-MoE); the others read the
    # configuration in each call. Configurations without one have None or 0.
    config = module.config
    types, index = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", None)
    if hasattr(module, "sliding_window"):
        found = module.sliding_window
    elif index is not None and SLIDING in types and types[index] != SLIDING:
        found = None
    else:
        found = getattr(config, "sliding_window", None)
    return found or None
