"""Bytes that the optimizer step allocates, for s parameters that are stepped at once (sub_group_size)."""

from __future__ import annotations

from ds_fp8.config.optimizer_state import StatePrecision
from ds_fp8.memory.states import shard_numel, trained
from ds_fp8.memory.workload import FP32, Workload
from ds_fp8.optim.moment import CHUNK

EMULATED = {"1x128": (30, 69), "tensor": (23, 58)}
"""Bytes an element that ds_fp8's own AdamW takes on a CPU, where it decodes and encodes moments in plain torch: rounded
to nearest, or stochastically. What takes most: e4m3_expanded in groups of 128."""


def optimizer_step(w: Workload) -> int:
    """Return 4 s: the gradients of a sub-group as one flat tensor.

    This package's step under ZeRO-3 does not need it.

    torch's AdamW takes the root of exp_avg_sq besides, 4 s, and on a CPU the denominator that is made of it, 4 s. This
    package's own needs neither. Nothing with the optimizer offloaded.
    """
    if w.offloads_optimizer:
        return 0
    stepped = largest_sub_group(w)
    copies = 0 if w.own_step else 1
    if w.own_optimizer and w.device == "cpu":
        precision = w.fp8.optimizer.precision()
        emulated = EMULATED[precision.granularity][bool(precision.stochastic_parts)]
        return copies * FP32 * stepped + emulated * min(stepped, _decoded_at_once(w, precision))
    if w.torch_adam and not w.own_optimizer:
        copies += 1 if w.device == "cuda" else 2
    return FP32 * stepped * copies


def _decoded_at_once(w: Workload, precision: StatePrecision) -> int:
    """Return the elements: CHUNK, or a rank's part of the largest tensor where tensors have one scale."""
    if precision.granularity != "tensor":
        return CHUNK
    return max(shard_numel([parameter], w.gpus if w.stage == 3 else 1) for parameter in trained(w))


def largest_sub_group(w: Workload) -> int:
    """Return s: ZeRO-3 fills sub-groups with whole parameters until they reach sub_group_size.

    Other stages have one.
    """
    limit = w.zero.sub_group_size
    total = shard_numel(trained(w), w.gpus)
    if w.stage != 3 or total <= limit:
        return total
    sizes, current = [], 0
    for parameter in trained(w):
        current += shard_numel([parameter], w.gpus)
        if current >= limit:
            sizes.append(current)
            current = 0
    return max([*sizes, current])
