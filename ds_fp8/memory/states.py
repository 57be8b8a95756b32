"""Bytes that are held for the whole of a run, whatever the batch: weights, their shards, moments and gradients.

N parameters, W GPUs, n = N / W. Every tensor is sharded by itself, so that a shard is rounded up to whole elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ds_fp8.config.formats import scale_shape
from ds_fp8.memory.model_shape import ParameterShape
from ds_fp8.memory.workload import BF16, FP32, Workload
from ds_fp8.optim.codecs import moment_bytes
from ds_fp8.zero.gradient_reduce import residual_bytes


def shard_numel(parameters: Iterable[ParameterShape], gpus: int) -> int:
    """Return the elements of the shards of one GPU: sum of ceil(numel / W)."""
    return sum(math.ceil(parameter.numel / gpus) for parameter in parameters)


def is_partitioned(parameter: ParameterShape, w: Workload) -> bool:
    """Return whether ZeRO-3 gathers the parameter for use.

    It keeps small ones whole (stage3_param_persistence_threshold).
    """
    return w.stage == 3 and parameter.numel > w.zero.param_persistence_threshold


def trained(w: Workload) -> list[ParameterShape]:
    """Return the parameters that the optimizer steps."""
    return [parameter for parameter in w.model.parameters if parameter.trainable]


def master_weights(w: Workload) -> int:
    """Return 4 n: an FP32 copy of this GPU's part of the trained parameters. Nothing with the optimizer offloaded."""
    return 0 if w.offloads_optimizer else FP32 * shard_numel(trained(w), w.gpus)


def moments(w: Workload) -> int:
    """Return 8 n in FP32; with compressed moments the bytes of `fp8.optimizer` (codecs.moment_bytes).

    Scales included.
    """
    if w.offloads_optimizer:
        return 0
    per_element = moment_bytes(w.fp8.optimizer.precision()) if w.fp8.enabled else 2 * FP32
    return round(per_element * shard_numel(trained(w), w.gpus))


def gradient_shards(w: Workload) -> int:
    """Return the sums of gradients over micro-batches: 4 n with grad_accum_dtype fp32, else 2 n.

    Stage 1 sums whole gradients: 4 N or 2 N.
    """
    gpus = 1 if w.stage == 1 else w.gpus
    return 0 if w.offloads_optimizer else w.accumulation_bytes * shard_numel(trained(w), gpus)


def gradient_bucket(w: Workload) -> int:
    """Return 2 reduce_bucket_size: gradients in BF16 on their way to the reduction. Stage 2 has two with overlap_comm.

    None with this package's step, which reads gradients where they are.
    """
    if not w.zero.contiguous_gradients or w.stage == 1 or w.own_step:
        return 0
    buckets = 2 if w.stage == 2 and w.zero.overlap_comm else 1
    return buckets * BF16 * w.zero.reduce_bucket_size


def bf16_weights(w: Workload) -> int:
    """Return 2 n of shards in stage 3, with the small parameters whole beside them; 2 N in stages 1 and 2.

    With this package's step, none of the trained weights that are gathered in FP8.
    """
    if w.stage < 3:
        return BF16 * w.model.numel
    kept = [p for p in w.model.parameters if not (w.own_step and p.trainable and in_fp8_only(p, w))]
    shards = 0 if w.offloads_parameters else BF16 * shard_numel(kept, w.gpus)
    # On one GPU a whole parameter is its own shard.
    whole = [p.numel for p in w.model.parameters if not is_partitioned(p, w)] if w.gpus > 1 else []
    return shards + BF16 * sum(whole)


def in_fp8_only(parameter: ParameterShape, w: Workload) -> bool:
    """Return whether ZeRO-3 gathers the parameter in FP8."""
    return w.gathers_in_fp8 and parameter.in_fp8 and is_partitioned(parameter, w)


def fp8_weights(w: Workload) -> int:
    """Return n of shards, which FP8 gathers send, and what every GPU has of whole weights. None in BF16 gathers.

    Of a weight [R, C] that is scales in FP32, 4 R C / 128^2 for blocks of 128x128, 4 R for rows, 4 for tensors; and R
    bytes of residuals for each of its outlier channels.
    """
    gathered = [p for p in w.model.parameters if in_fp8_only(p, w)]
    of_whole = sum(weight_scales(p, w) + p.residuals for p in gathered)
    return shard_numel(gathered, w.gpus) + of_whole


def weight_scales(weight: ParameterShape, w: Workload) -> int:
    """Return the bytes of the scales of an FP8 weight, as if its rows were as long as the hidden size."""
    rows = math.ceil(weight.numel / w.model.hidden)
    return FP32 * math.prod(scale_shape((rows, w.model.hidden), weight.cast.granularity))


def error_feedback(w: Workload) -> int:
    """Return 2 N or 4 N with grad_reduce.error_feedback: what casts of whole gradients lost is kept on every GPU."""
    if not w.reduces_in_fp8:
        return 0
    # As if all were matrices: vectors that are long enough to count are few.
    return residual_bytes([torch.Size((1, p.numel)) for p in trained(w)], w.fp8.grad_reduce.error_feedback)
