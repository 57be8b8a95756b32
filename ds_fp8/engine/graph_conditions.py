"""Conditions under which a micro-step can run as a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.layers.linear import FP8Linear
from ds_fp8.layers.loss import LossFusion
from ds_fp8.monitor.cast_monitor import CastMonitor

MEASURED = "casts are measured"
ITEMS = "num_items_in_batch"
COPIED = frozenset({"input_ids", "labels", "shift_labels", "inputs_embeds", "position_ids", ITEMS})
"""Tensors of a batch whose values decide nothing but numbers, once every row is known to be one whole sequence."""


def why_no_graphs(
    engine: deepspeed.DeepSpeedEngine, fp8: FP8Config, loss: LossFusion | None, why_no_step: str | None
) -> str | None:
    """Return what keeps this engine from capturing any micro-step, or None.

    Args:
        engine: Of any ZeRO stage.
        fp8: Its "fp8" section.
        loss: How its loss was fused.
        why_no_step: Why DeepSpeed's optimizer step stays, or None.
    """
    recipes = [module.recipe for module in engine.module.modules() if isinstance(module, FP8Linear)]
    casts = [cast for recipe in recipes for cast in (recipe.input, recipe.weight, recipe.grad_output)]
    reasons = {
        '"graph" is "off"': fp8.graph == "off",
        "there is no CUDA device": engine.device.type != "cuda",
        f"DeepSpeed's step stays: {why_no_step}": why_no_step is not None,
        "the loss is not fused: logits may have gradients of their own": loss is None or not loss.fused,
        "gradients are rounded at random, with a key of every micro-batch": fp8.grad_reduce.rounding == "stochastic",
        "gradients have one scale each, which adapts over time": fp8.grad_reduce.scale == "tensor",
        "casts are emulated, operation by operation": any(cast.by_torch for cast in casts),
        "ranks share sequences": engine.sequence_parallel_size > 1,
        "DeepSpeed times or profiles forward": engine.wall_clock_breakdown() or engine.flops_profiler_enabled(),
        "overlap_comm is false": engine.zero_optimization_stage() == 3 and not engine.zero_overlap_comm(),
        "layers are dropped at random": (getattr(getattr(engine.module, "config", None), "layerdrop", None) or 0) > 0,
        "the module is compiled": engine.module._compiled_call_impl is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def why_eager(
    engine: deepspeed.DeepSpeedEngine, monitor: CastMonitor, args: tuple, kwargs: Mapping[str, Any]
) -> str | None:
    """Return why a call of the engine's module in training cannot be a graph, or None.

    The host waits for the device where masks or positions are given.
    """
    if monitor.active:
        return MEASURED
    if args:
        return "the batch is passed by position"
    why = why_not_recomputed(engine.module)
    if why is not None:
        return why
    for name, value in kwargs.items():
        if torch.is_tensor(value):
            if value.requires_grad:
                return f'"{name}" has a gradient of its own'
            if name not in COPIED and not (name == "attention_mask" and value.dim() == 2):
                return f'the values of "{name}" may decide what is computed'
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            return f'"{name}" is a {type(value).__name__}'
    if torch.is_autocast_enabled(engine.device.type):
        return "autocast is on"
    if not one_sequence_a_row(kwargs):
        return "rows are padded, or hold several documents: what attention computes differs from batch to batch"
    return None


def why_not_recomputed(module: nn.Module) -> str | None:
    """Return why a graph cannot recompute the activations of a model as Python does, or None; None where none are."""
    recomputed = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
    if not recomputed:
        return None
    functions = [getattr(part, "_gradient_checkpointing_func", None) for part in recomputed]
    if any(getattr(function, "func", function) is not checkpoint for function in functions):
        return "activations are recomputed by a function of the model's own, or kept on the host"
    for part in module.modules():
        dropout = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "attention_dropout", 0)
        if part.training and dropout:
            return "activations are recomputed with dropout, whose random numbers the host repeats"
    return None


def one_sequence_a_row(batch: Mapping[str, Any]) -> bool:
    """Return whether no token of a batch is masked, and its positions count from 0; the host waits for the answer.

    transformers waits as well when it builds the mask of such a batch.
    """
    mask, positions = (batch.get(name) for name in ("attention_mask", "position_ids"))
    plain = [] if mask is None else [mask.all()]
    if positions is not None:
        plain.append((positions == torch.arange(positions.shape[-1], device=positions.device)).all())
    return not plain or bool(torch.stack(plain).all())
