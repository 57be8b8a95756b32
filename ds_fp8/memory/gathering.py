"""Bytes of gathered weights at a time: the layer that computes, those kept for their next use, and those fetched ahead.

A weight takes 2 bytes a parameter, gathered in FP8 1. On one GPU it is a view of its shard and takes none.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_fp8.memory.model_shape import ParameterShape
from ds_fp8.memory.states import is_partitioned
from ds_fp8.memory.workload import BF16, Workload


def gathered(parameters: Iterable[ParameterShape], w: Workload) -> int:
    """Return the bytes of these parameters, gathered."""
    if w.gpus == 1:
        return 0
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter, w)]
    return sum(p.numel * (1 if w.gathers_in_fp8 and p.in_fp8 else BF16) for p in partitioned)


def kept_for_backward(w: Workload) -> int:
    """Return the number of last layers that stay gathered from forward until backward.

    ZeRO-3 does not release a weight that recurs within stage3_max_reuse_distance parameters: layer i of L recurs after
    2 (L - 1 - i) layers and twice the head.
    """
    distance, count = 2 * _numel(_head(w)), 0
    for layer in reversed(w.model.layers):
        if distance >= w.zero.max_reuse_distance:
            break
        count += 1
        distance += 2 * _numel(layer.parameters)
    return count


def at_the_loss(w: Workload) -> int:
    """Return the head, and the last layers as far as they are kept."""
    count = kept_for_backward(w)
    last = [p for layer in w.model.layers[len(w.model.layers) - count :] for p in layer.parameters]
    return gathered(_head(w), w) + gathered(last, w)


def in_backward(w: Workload, layer: int) -> int:
    """Return the bytes in backward of layer number `layer`: its own, those kept, those fetched, and a fetch's copy.

    Fetched ahead are stage3_prefetch_bucket_size parameters and the rest of the last one, of the layers before that are
    not there yet. What arrives in one buffer is copied out of it, so that a fetch is there twice for a moment.
    """
    layers = w.model.layers
    first_kept = len(layers) - kept_for_backward(w)
    present = [p for index in range(first_kept, layer) for p in layers[index].parameters]
    ahead = list(reversed(layers[layer - 1].parameters)) if 0 < layer <= first_kept else []
    fetched, count, limit = [], 0, w.zero.prefetch_bucket_size
    if limit and w.gathers_in_fp8 and layers[layer].experts is not None:  # as engine/prefetch.py raises it
        limit = max(limit, _numel(layers[layer].parameters))
    for parameter in ahead:
        if count >= limit:
            break
        fetched.append(parameter)
        count += parameter.numel if is_partitioned(parameter, w) else 0
    own = layers[layer].parameters
    copies = max(gathered(fetched, w), gathered(own, w) if layer < first_kept and not fetched else 0)
    return gathered(own, w) + gathered(present, w) + gathered(fetched, w) + copies


def _head(w: Workload) -> list[ParameterShape]:
    if w.model.head is not None:
        return [w.model.head]
    return [ParameterShape(w.model.head_numel, None, True)]


def _numel(parameters: Iterable[ParameterShape]) -> int:
    return sum(parameter.numel for parameter in parameters)
