"""Inspect and change a model for `initialize`: trained weights, prefetch limits, recomputation, caches."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from transformers import PreTrainedModel

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.fp8 import section_of
from ds_fp8.config.log import logger
from ds_fp8.graphs.conditions import by_name, text_config
from ds_fp8.graphs.host_checkpoints import HostCheckpoints, keep_on_host, recomputed_by
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.zero.deepspeed.parameters import full_shape, is_zero_parameter, values_here
from ds_fp8.zero.deepspeed.patches import on_destroy, replace

BUCKET, LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"
SECTION, ON_HOST = "activation_checkpointing", "cpu_checkpointing"


def weights_are_trained(model: nn.Module) -> tuple[bool, str]:
    """Return whether a model's weights are trained, and the evidence; the same on all ranks. Collective.

    All libraries initialize a norm with one constant, and no norm is constant after some steps of training. If norms
    have no weights (OLMo), transformers' mark of loaded parameters counts.
    """
    norms = [
        parameter
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    ]
    # DeepSpeed broadcasts the first rank's weights: unsharded parameters of other ranks do not count.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    first = ranks == 1 or dist.get_rank() == 0
    if norms:
        values = [values_here(parameter) for parameter in norms if first or is_zero_parameter(parameter)]
        varies = any(one.device.type != "meta" and one.numel() > 1 and bool((one != one[0]).any()) for one in values)
    else:
        marked = [getattr(parameter, "_is_hf_initialized", False) for parameter in model.parameters()]
        varies = first and 2 * sum(marked) > len(marked)  # more than half: missing parameters are random
    if ranks > 1:
        if "LOCAL_RANK" in os.environ:
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        found = torch.tensor([int(varies)], device=get_accelerator().current_device_name())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        varies = bool(found.item())
    if norms:
        evidence = "trained: norms are not constant" if varies else "random: all norms are constant"
        return varies, f"the weights are {evidence}"
    if varies:
        return True, "the weights are trained: transformers has loaded them"
    return False, "neither norms nor transformers show that weights are trained"


def wider_prefetch(zero: DeepSpeedZeroConfig, model: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return limits of ZeRO-3's prefetch that fit two layers with experts, all-gathered in FP8, and notes on them.

    DeepSpeed prefetches, in the order of its trace, until BUCKET parameters are in flight or LIVE are unsharded. A
    layer with experts is larger than either default: its prefetch would not begin, or stop before its last weight. A
    BUCKET of 0, no prefetch, stays. LIVE is at most doubled: FP8 parameters take half the memory.
    """
    layer, bucket, live = _largest_layer(model), zero.prefetch_bucket_size, zero.max_live_parameters
    if zero.stage != 3 or not layer or not bucket:
        return {}, []
    wider, notes = {}, []
    if bucket < layer:
        wider[BUCKET] = layer
        notes.append(f"{BUCKET} raised from {bucket:,} to {layer:,}, the parameters of a layer with experts")
    if live < 2 * layer:
        wider[LIVE] = min(2 * layer, 2 * live)
        notes.append(f"{LIVE} raised from {live:,} to {wider[LIVE]:,}: those all-gathered in FP8 take half the memory")
    # Two layers: one computes, the next is prefetched.
    if wider.get(LIVE, live) < 2 * layer:
        notes.append(f"{LIVE} is too small to fetch a layer with experts ahead: {2 * layer:,} would do")
    return wider, notes


def _largest_layer(model: nn.Module) -> int:
    """Return the number of parameters of the largest layer with FP8Experts, or 0."""
    modules, sizes = dict(model.named_modules()), [0]
    for name, module in modules.items():
        if isinstance(module, FP8Experts):
            parts = name.split(".")
            # "model.layers.3" of "model.layers.3.mlp.experts"; the module itself where no part is a number
            place = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
            layer = modules[".".join(parts[: place + 1])]
            sizes.append(sum(full_shape(parameter).numel() for parameter in layer.parameters()))
    return max(sizes)


def apply_checkpointing_section(configuration: Configuration, model: nn.Module | None) -> None:
    """Apply DeepSpeed's section "activation_checkpointing" to layers that transformers recomputes: inputs on the host.

    DeepSpeed reads it in `deepspeed.checkpointing.configure` alone, for layers that call its own `checkpoint`, not
    torch's.
    """
    asked = [key for key, value in section_of(configuration.values, SECTION).items() if value]
    if "fp8" not in configuration.values or not asked or model is None or deepspeed.checkpointing.is_configured():
        return
    if ON_HOST in asked:
        functions = [recomputed_by(part) for part in model.modules()]
        if keep_on_host(model) or any(isinstance(function, HostCheckpoints) for function in functions):
            asked.remove(ON_HOST)
    if asked:
        logger.warning(
            "warning: %s has no effect: DeepSpeed reads it in deepspeed.checkpointing.configure alone, which was not "
            "called, and no layer is recomputed by torch's checkpoint (model.gradient_checkpointing_enable())",
            ", ".join(f"{SECTION}.{key}" for key in asked),
        )


def added_in_bf16(model: nn.Module) -> list[str]:
    """Round FP32 parameters added to a model built under zero.Init to BF16; return a note if there are any.

    PEFT makes adapters in FP32. DeepSpeed rounds them in unsharded models alone.
    """
    added = [p for p in model.parameters() if p.dtype is torch.float32 and not is_zero_parameter(p)]
    if not added or not any(map(is_zero_parameter, model.parameters())):
        return []
    for parameter in added:
        parameter.data = parameter.data.bfloat16()
    return [f"{sum(p.numel() for p in added):,} parameters were added in FP32 (adapters): they are BF16, as all others"]


def default_to_no_cache(engine: deepspeed.DeepSpeedEngine) -> None:
    """Default to use_cache=False in training for models of transformers, until engine.destroy().

    A cache saves keys and values of all layers, and CUDA graphs cannot return one. Trainer sets use_cache on the
    outermost configuration alone. Every inner model gets a hook: an outer one (PEFT, multimodal) may not pass the
    argument on.
    """
    for module in engine.module.modules():
        if not isinstance(module, PreTrainedModel) or "use_cache" not in inspect.signature(module.forward).parameters:
            continue
        # Since transformers 5.5 layers that share keys and values (Gemma 3n, 4) read them from the cache.
        if not getattr(text_config(module.config), "num_kv_shared_layers", 0):
            on_destroy(engine, module.register_forward_pre_hook(_without_cache, with_kwargs=True).remove)


def _without_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    args, kwargs = by_name(module, args, kwargs)
    # use_cache, past_key_values, cache_params ...
    given = any(value is not None for name, value in kwargs.items() if "cache" in name or name.startswith("past_"))
    default = module.training and torch.is_grad_enabled() and not (args or given)
    return args, {**kwargs, "use_cache": False} if default else kwargs


def score_all_positions(engine: deepspeed.DeepSpeedEngine) -> None:
    """Compute TRL's SFT loss on every position, as without Triton, until engine.destroy().

    With Triton TRL selects labelled positions by a mask: a shape that depends on values, not for CUDA graphs.
    """
    losses = sys.modules.get("trl.trainer.utils")
    if "trl.trainer.sft_trainer" in sys.modules and hasattr(losses, "_use_triton"):
        replace(engine, losses, "_use_triton", lambda device: False)
