"""Keep the inverse frequencies of rotary embeddings in FP32.

A rotary embedding turns a head by position times inverse frequency. Rounded to BF16, a frequency is off by up to 0.2%,
and the angle at position 1000 by up to 2 radians. It happens to models that were loaded under zero.Init, which
makes every floating-point tensor in the dtype of the model, and to those cast by `model.bfloat16()`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


def restore_inverse_frequencies(model: nn.Module) -> list[str]:
    """Compute inverse frequencies that are in 16 bits again, in FP32, as the model's own initialisation does.

    Args:
        model: any module, with parameters partitioned by ZeRO-3 or not.

    Returns:
        Lines for the start report: what was restored, and what stays rounded because its module does not say how it is
        computed. Empty where all was in FP32.
    """
    owners = {
        id(module): owner
        for owner in model.modules()
        if isinstance(owner, PreTrainedModel)
        for module in owner.modules()  # an inner model comes later, and counts
    }
    restored, rounded = [], []
    for name, module in model.named_modules():
        halves = {
            key: buffer
            for key, buffer in module.named_buffers(recurse=False)
            if key.endswith("inv_freq") and buffer.dtype in (torch.bfloat16, torch.float16)
        }
        if not halves:
            continue
        for key, buffer in halves.items():
            module._buffers[key] = buffer.float()
        if id(module) in owners:
            owners[id(module)]._init_weights(module)
        same = all(torch.equal(module._buffers[key], buffer.float()) for key, buffer in halves.items())
        (rounded if same else restored).append(name)
    lines = []
    if restored:
        lines.append(
            f"inverse frequencies of {', '.join(restored)} had been rounded to 16 bits: computed again in FP32"
        )
    if rounded:
        lines.append(
            f"inverse frequencies of {', '.join(rounded)} are rounded to 16 bits, and positions with them: set them "
            "again in FP32 after loading the model"
        )
    return lines
