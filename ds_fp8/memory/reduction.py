"""Bytes of the gradient reduction: those in the bucket when it is reduced, where in backward, and transient ones.

In backward gradients come in from the head down to the embedding. ZeRO gathers them in a bucket and reduces it when the
next one does not fit (reduce_bucket_size). E elements of a bucket, W GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_fp8.config.formats import BLOCK
from ds_fp8.memory.workload import BF16, FP32, Workload


@dataclass(frozen=True)
class Reduction:
    """A bucket that is reduced in backward of a layer."""

    layer: int
    """-1: after the last of them."""
    elements: int
    outside: int
    """Elements of gradients that stay where autograd put them: of one too large for the bucket's buffer, of all with
    this package's step, which has no buffer."""


def reductions(w: Workload) -> list[Reduction]:
    """Return every reduction of a micro-batch, in order."""
    limit, layers = w.zero.reduce_bucket_size, w.model.layers
    head = [(len(layers) - 1, w.model.head.numel)] if w.model.head and w.model.head.trainable else []
    inside = [
        (index, parameter.numel)
        for index in reversed(range(len(layers)))
        for parameter in reversed(layers[index].parameters)
        if parameter.trainable
    ]
    outside = [(-1, parameter.numel) for parameter in w.model.outside if parameter.trainable]

    def outside_bucket(elements: int) -> int:
        return elements if w.own_step or elements > limit else 0

    found, elements = [], 0
    for layer, numel in [*head, *inside, *outside]:
        if elements and elements + numel > limit:
            found.append(Reduction(layer, elements, outside_bucket(elements)))
            elements = 0
        elements += numel
    return [*found, Reduction(-1, elements, outside_bucket(elements))]


def transient(reduction: Reduction, w: Workload) -> int:
    """Return the bytes that a reduction allocates, with the gradient that did not fit into the bucket.

    FP8   2 E (1 + 1/32): messages sent and received; with DeepSpeed's step their sum in FP32, 4 E / W, too
    BF16  2 E of gradients in the order of the ranks (not for one alone), and the own part in FP32, 4 E / W
    """
    E = reduction.elements
    own_part = w.accumulation_bytes * E // w.gpus
    outside = BF16 * reduction.outside
    if w.stage != 3:
        return outside
    if w.reduces_in_fp8:
        summed = 0 if w.own_step else FP32 * E // w.gpus
        return outside + 2 * (E + FP32 * E // BLOCK) + summed
    in_order = 0 if reduction.outside else BF16 * E
    return outside + in_order + (own_part if w.accumulation_bytes != BF16 else 0)
