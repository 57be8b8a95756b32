"""Bytes of weights, moments and gradients: those held for the whole of a run, and those gathered, reduced and stepped.

N parameters, W GPUs, n = N / W. Every tensor is sharded by itself, so that a shard is rounded up to whole elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds_fp8.casts.quantization import width_with_outliers
from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.memory.shapes import BF16, FP32, ParameterShape, Workload
from ds_fp8.optim.masters import why_no_correction
from ds_fp8.optim.moments import CHUNK, moment_bytes

CORRECTION, OF_BF16 = 2, 2 + 1 / 8  # Bytes of a master beside its code, or its BF16 number

# Bytes an element that ds_fp8's own AdamW takes on a CPU, where it decodes and encodes moments in plain torch: rounded
# to nearest, or stochastically. What takes most: e4m3_expanded in groups of 128.
EMULATED = {"1x128": (30, 69), "tensor": (23, 58)}


def shard_numel(parameters: Iterable[ParameterShape], gpus: int) -> int:
    """Return the elements of one GPU's shards."""
    return sum(math.ceil(parameter.numel / gpus) for parameter in parameters)


def is_partitioned(parameter: ParameterShape, w: Workload) -> bool:
    """Return whether ZeRO-3 gathers the parameter for use.

    It keeps small ones whole (stage3_param_persistence_threshold).
    """
    return w.stage == 3 and parameter.numel > w.zero.param_persistence_threshold


def trained(w: Workload) -> list[ParameterShape]:
    return [parameter for parameter in w.model.parameters if parameter.trainable]


# ---------------------------------------------------------------- for the whole of a run


def lasting(w: Workload) -> dict[str, int]:
    """Return the bytes that are there whatever the batch, by kind."""
    terms = {
        "master weights": _masters(w),
        "moments": _moments(w),
        "gradient shards": _gradient_shards(w),
        "gradient bucket": _gradient_bucket(w),
        "BF16 weights": _bf16_weights(w),
        "FP8 weights": _fp8_weights(w),
    }
    return {kind: size for kind, size in terms.items() if size}


def _masters(w: Workload) -> int:
    """Return 4 n; 2 n of weights whose masters are data with corrections, then 2.125 n of others not kept whole."""
    if w.offloads_optimizer:
        return 0
    coded = [p for p in trained(w) if _is_coded(p, w)]
    split = [p for p in trained(w) if coded and is_partitioned(p, w) and not _in_fp8_only(p, w)]
    less = (FP32 - CORRECTION) * shard_numel(coded, w.gpus) + (FP32 - OF_BF16) * shard_numel(split, w.gpus)
    return FP32 * shard_numel(trained(w), w.gpus) - int(less)


def _moments(w: Workload) -> int:
    """Return 8 n in FP32; with compressed moments the bytes of `fp8.optimizer`, scales included."""
    if w.offloads_optimizer:
        return 0
    per_element = moment_bytes(w.fp8.optimizer.precision()) if w.fp8.enabled else 2 * FP32
    return round(per_element * shard_numel(trained(w), w.gpus))


def _gradient_shards(w: Workload) -> int:
    """Return the sums of gradients over micro-batches: 4 n with grad_accum_dtype fp32, else 2 n; stage 1 sums whole."""
    gpus = 1 if w.stage == 1 else w.gpus
    return 0 if w.offloads_optimizer else w.accumulation_bytes * shard_numel(trained(w), gpus)


def _gradient_bucket(w: Workload) -> int:
    """Return 2 reduce_bucket_size: gradients in BF16 on their way to the reduction. Stage 2 has two with overlap_comm.

    None with this package's step, which reads gradients where they are.
    """
    if not w.zero.contiguous_gradients or w.stage == 1 or w.own_step:
        return 0
    buckets = 2 if w.stage == 2 and w.zero.overlap_comm else 1
    return buckets * BF16 * w.zero.reduce_bucket_size


def _bf16_weights(w: Workload) -> int:
    """Return 2 n of shards in stage 3, with the small parameters whole beside them; 2 N in stages 1 and 2.

    With this package's step, none of the weights that are gathered in FP8: those of frozen ones wait on the host.
    """
    if w.stage < 3:
        return BF16 * w.model.numel
    on_device = w.device == "cpu"  # where the host is the device
    kept = [p for p in w.model.parameters if not (w.own_step and _in_fp8_only(p, w) and (p.trainable or not on_device))]
    shards = 0 if w.offloads_parameters else BF16 * shard_numel(kept, w.gpus)
    # On one GPU a whole parameter is its own shard.
    whole = [p.numel for p in w.model.parameters if not is_partitioned(p, w)] if w.gpus > 1 else []
    return shards + BF16 * sum(whole)


def _in_fp8_only(parameter: ParameterShape, w: Workload) -> bool:
    return w.gathers_in_fp8 and parameter.in_fp8 and is_partitioned(parameter, w)


def _is_coded(p: ParameterShape, w: Workload) -> bool:
    return p.trainable and w.fp8.optimizer.master != "fp32" and _in_fp8_only(p, w) and not why_no_correction(p.cast)


def _is_kept_whole(p: ParameterShape, w: Workload) -> bool:
    return w.gpus > 1 and w.fp8.param_gather.frozen == "whole" and not p.trainable and _in_fp8_only(p, w)


def _room(p: ParameterShape, w: Workload) -> int:
    """Return the bytes of outlier blocks behind the rows of a weight: none where shards are not whole rows."""
    if not p.channels or p.rows % w.gpus or not _in_fp8_only(p, w) or _is_coded(p, w):
        return 0
    columns = p.numel // p.rows
    return p.rows * (width_with_outliers(columns, p.channels) - columns)


def _fp8_weights(w: Workload) -> int:
    """Return n of shards, which FP8 gathers send, and what every GPU has of whole weights. None in BF16 gathers.

    Of a weight [R, C] that is scales in FP32, 4 R C / 128^2 for blocks of 128x128, 4 R for rows, 4 for tensors, taken
    as if its rows were as long as the hidden size; and without room for them R bytes of residuals for each of its
    outlier channels. With fp8.param_gather.frozen "whole" also the data of frozen ones, which are not all-gathered.
    """
    gathered_in_fp8 = [p for p in w.model.parameters if _in_fp8_only(p, w)]
    of_whole = 0
    for weight in gathered_in_fp8:
        rows = math.ceil(weight.numel / w.model.hidden)
        scales = math.prod(scale_shape((rows, w.model.hidden), weight.cast.granularity))
        of_whole += FP32 * scales + (0 if _room(weight, w) else weight.rows * weight.channels)
    of_whole += sum(weight.numel + _room(weight, w) for weight in gathered_in_fp8 if _is_kept_whole(weight, w))
    room = sum(_room(weight, w) for weight in gathered_in_fp8) // w.gpus
    return shard_numel(gathered_in_fp8, w.gpus) + room + of_whole


# ---------------------------------------------------------------- gathered weights


def gathered(parameters: Iterable[ParameterShape], w: Workload) -> int:
    """Return the bytes of these parameters, gathered: 2 a parameter, in FP8 1; views of their shards on one GPU."""
    if w.gpus == 1:
        return 0
    partitioned = [p for p in parameters if is_partitioned(p, w) and not _is_kept_whole(p, w)]
    return sum(p.numel * (1 if w.gathers_in_fp8 and p.in_fp8 else BF16) + _room(p, w) for p in partitioned)


def gathered_at_the_loss(w: Workload) -> int:
    """Return the bytes of the head, and of the last layers as far as they are kept."""
    last = w.model.layers[len(w.model.layers) - _kept_for_backward(w) :]
    return gathered(_head(w), w) + sum(gathered(layer.parameters, w) for layer in last)


def gathered_in_backward(w: Workload, layer: int) -> int:
    """Return the bytes in backward of layer number `layer`: its own, those kept, those fetched, and a fetch's copy.

    Fetched ahead are stage3_prefetch_bucket_size parameters and the rest of the last one, of the layers before that are
    not there yet. What arrives in one buffer is copied out of it, so that a fetch is there twice for a moment. The room
    that the last one leaves for the rest of its product (zero/collectives.py) is not counted.
    """
    layers = w.model.layers
    first_kept = len(layers) - _kept_for_backward(w)
    present = sum(gathered(layers[index].parameters, w) for index in range(first_kept, layer))
    ahead = list(reversed(layers[layer - 1].parameters)) if 0 < layer <= first_kept else []
    fetched, count, limit = [], 0, w.zero.prefetch_bucket_size
    if limit and w.gathers_in_fp8 and layers[layer].has_experts:  # as engine/model.py raises it
        limit = max(limit, _numel(layers[layer].parameters))
    for parameter in ahead:
        if count >= limit:
            break
        fetched.append(parameter)
        count += parameter.numel if is_partitioned(parameter, w) else 0
    own = gathered(layers[layer].parameters, w)
    copies = max(gathered(fetched, w), own if layer < first_kept and not fetched else 0)
    return own + present + gathered(fetched, w) + copies


def _kept_for_backward(w: Workload) -> int:
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


def _head(w: Workload) -> list[ParameterShape]:
    return [w.model.head or ParameterShape(w.model.head_numel, None, True)]


def _numel(parameters: Iterable[ParameterShape]) -> int:
    return sum(parameter.numel for parameter in parameters)


# ---------------------------------------------------------------- reduction of gradients


class Reduction(NamedTuple):
    """A bucket of gradients that is reduced in backward."""

    layer: int  # Whose backward; -1: after the last of them
    elements: int
    # Elements of gradients that stay where autograd put them: of one too large for the bucket's buffer, of all with
    # this package's step, which has no buffer
    outside: int


def reductions(w: Workload) -> list[Reduction]:
    """Return every reduction of a micro-batch, in order.

    Gradients come in from the head down to the embedding. ZeRO collects them in a bucket and reduces it when the next
    one does not fit (reduce_bucket_size).
    """
    limit, layers = w.zero.reduce_bucket_size, w.model.layers
    arriving = [(len(layers) - 1, w.model.head)] if w.model.head else []
    arriving += [(index, p) for index in reversed(range(len(layers))) for p in reversed(layers[index].parameters)]
    arriving += [(-1, p) for p in w.model.outside]

    def of(layer: int, elements: int) -> Reduction:
        return Reduction(layer, elements, elements if w.own_step or elements > limit else 0)

    found, elements = [], 0
    for layer, parameter in arriving:
        numel = parameter.numel if parameter.trainable else 0
        if numel and elements and elements + numel > limit:
            found.append(of(layer, elements))
            elements = 0
        elements += numel
    return [*found, of(-1, elements)]


def reduction_bytes(found: Sequence[Reduction], layer: int, w: Workload) -> int:
    return max((_transient(reduction, w) for reduction in found if reduction.layer == layer), default=0)


def _transient(reduction: Reduction, w: Workload) -> int:
    """Return the bytes that a reduction allocates, with the gradient that did not fit into the bucket.

    FP8   2 E (1 + 1/32): messages sent and received; with DeepSpeed's step their sum in FP32, 4 E / W, too
    BF16  2 E of gradients in the order of the ranks (not for one alone), and the own part in FP32, 4 E / W
    """
    E, outside = reduction.elements, BF16 * reduction.outside
    if w.stage != 3:
        return outside
    if w.reduces_in_fp8:
        summed = 0 if w.own_step else FP32 * E // w.gpus
        return outside + 2 * (E + FP32 * E // BLOCK) + summed
    own_part = w.accumulation_bytes * E // w.gpus if w.accumulation_bytes != BF16 else 0
    return outside + (0 if reduction.outside else BF16 * E) + own_part


# ---------------------------------------------------------------- the optimizer's step


def optimizer_step(w: Workload) -> int:
    """Return 4 s, for s parameters that are stepped at once: the gradients of a sub-group as one flat tensor.

    This package's step under ZeRO-3 does not need it. torch's AdamW takes the root of exp_avg_sq besides, 4 s, and on a
    CPU the denominator that is made of it, 4 s; this package's own neither. Nothing with the optimizer offloaded.
    """
    if w.offloads_optimizer:
        return 0
    stepped = largest_sub_group(w)
    copies = 0 if w.own_step else 1
    if w.own_optimizer and w.device == "cpu":
        precision = w.fp8.optimizer.precision()
        at_once = CHUNK
        if precision.granularity == "tensor":
            at_once = max(shard_numel([parameter], w.gpus if w.stage == 3 else 1) for parameter in trained(w))
        emulated = EMULATED[precision.granularity][bool(precision.stochastic_parts)]
        return copies * FP32 * stepped + emulated * min(stepped, at_once)
    if w.torch_adam and not w.own_optimizer:
        copies += 1 if w.device == "cuda" else 2
    return FP32 * stepped * copies


def largest_sub_group(w: Workload) -> int:
    """Return s: ZeRO-3 fills sub-groups with whole parameters up to sub_group_size; other stages have one."""
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
