"""What `initialize` finds out about a model: trained or random, its largest layer, which layers are recomputed."""

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
from ds_fp8.zero.deepspeed.methods import on_destroy, replace
from ds_fp8.zero.deepspeed.parameters import full_shape, is_zero_parameter, values_here

BUCKET, LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"
SECTION, ON_HOST = "activation_checkpointing", "cpu_checkpointing"


def weights_are_trained(model: nn.Module) -> tuple[bool, str]:
    """Return whether a model's weights are trained, and how that shows; the same on all ranks. Collective.

    Nothing notes weights that a program has loaded by itself, and transformers notes where a configuration came from,
    of random models too. The weights tell: all libraries start each norm from one constant, and no norm is constant
    after some steps of training. Where norms have no weights (OLMo), transformers marks the parameters it has loaded.
    """
    norms = [
        parameter
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    ]
    # DeepSpeed broadcasts the first rank's weights: what others hold of a whole parameter does not count.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    first = ranks == 1 or dist.get_rank() == 0
    if norms:
        varies = any(_varies(values_here(parameter)) for parameter in norms if first or is_zero_parameter(parameter))
    else:
        marked = [getattr(parameter, "_is_hf_initialized", False) for parameter in model.parameters()]
        varies = first and 2 * sum(marked) > len(marked)  # more than half: missing ones were drawn
    if ranks > 1:
        if "LOCAL_RANK" in os.environ:
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        found = torch.tensor([int(varies)], device=get_accelerator().current_device_name())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        varies = bool(found.item())
    if norms:
        shown = "trained: norms are not constant" if varies else "random: all norms are constant"
        return varies, f"the weights are {shown}"
    if varies:
        return True, "the weights are trained: transformers has loaded them"
    return False, "neither norms nor transformers show that weights are trained"


def _varies(values: torch.Tensor) -> bool:
    return values.device.type != "meta" and values.numel() > 1 and bool((values != values[0]).any())


def wider_prefetch(zero: DeepSpeedZeroConfig, model: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return limits of ZeRO-3's fetches that fit two layers with experts, gathered in FP8, and notes on them.

    DeepSpeed fetches ahead, in the order of its trace, until BUCKET parameters are under way or LIVE are gathered. A
    layer with experts is larger than both are made for: its fetch would begin when it is needed, or stop before its
    last weight. A bucket of 0, no prefetch, stays. LIVE is at most doubled: gathered in FP8, twice as many parameters
    take the memory that it was set for.
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
        notes.append(f"{LIVE} raised from {live:,} to {wider[LIVE]:,}: those gathered in FP8 take half the memory")
    # Two layers: the one that computes and the one that is fetched ahead of it.
    if wider.get(LIVE, live) < 2 * layer:
        notes.append(f"{LIVE} is too small to fetch a layer with experts ahead: {2 * layer:,} would do")
    return wider, notes


def _largest_layer(model: nn.Module) -> int:
    """Return the parameters of the largest layer with FP8Experts, or 0. Layers are the parts of a list of modules."""
    modules = dict(model.named_modules())
    layers = {_layer_of(name) for name, module in modules.items() if isinstance(module, FP8Experts)}
    sizes = [sum(full_shape(parameter).numel() for parameter in modules[name].parameters()) for name in layers]
    return max(sizes, default=0)


def _layer_of(name: str) -> str:
    """Return the name up to its first number, "model.layers.3" of "model.layers.3.mlp.experts"; all of it without."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: place + 1])


def apply_checkpointing_section(configuration: Configuration, model: nn.Module | None) -> None:
    """Keep the inputs of recomputed layers on the host where DeepSpeed's section says so.

    DeepSpeed reads the section in `deepspeed.checkpointing.configure` alone, for layers that call its own `checkpoint`;
    transformers recomputes layers by torch's.
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
    """Cast the FP32 parameters that were added to a model born sharded to BF16, and return a note if there are any.

    PEFT makes adapters in FP32. DeepSpeed casts them, but only in a model that is whole.
    """
    added = [p for p in model.parameters() if p.dtype is torch.float32 and not is_zero_parameter(p)]
    if not added or not any(map(is_zero_parameter, model.parameters())):
        return []
    for parameter in added:
        parameter.data = parameter.data.bfloat16()
    return [f"{sum(p.numel() for p in added):,} parameters were added in FP32 (adapters): they are BF16, as all others"]


def leave_out_caches(engine: deepspeed.DeepSpeedEngine) -> None:
    """Keep transformers' models from making a cache in training that nobody asked for, until engine.destroy().

    A cache keeps the keys and values of all layers, and CUDA graphs cannot return one. Trainer says use_cache=False of
    the outermost configuration alone, other loops say nothing. Every model inside is told by itself: the call of one
    around it (of PEFT, of images and text) may not pass it on.
    """
    for module in engine.module.modules():
        if not isinstance(module, PreTrainedModel) or "use_cache" not in inspect.signature(module.forward).parameters:
            continue
        # transformers 5.5 lets layers that share keys and values (Gemma 3n, 4) read them from the cache.
        if not getattr(text_config(module.config), "num_kv_shared_layers", 0):
            on_destroy(engine, module.register_forward_pre_hook(_without_cache, with_kwargs=True).remove)


def _without_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    args, kwargs = by_name(module, args, kwargs)
    # Said or given: use_cache, past_key_values, cache_params ...
    asked = any(value is not None for name, value in kwargs.items() if "cache" in name or name.startswith("past_"))
    unasked = module.training and torch.is_grad_enabled() and not (args or asked)
    return args, {**kwargs, "use_cache": False} if unasked else kwargs


def score_all_positions(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let the loss of TRL's SFT score every position, as on devices without Triton, until engine.destroy().

    With Triton it picks those that have labels by a mask, whose number a CUDA graph cannot read.
    """
    losses = sys.modules.get("trl.trainer.utils")
    if "trl.trainer.sft_trainer" in sys.modules and hasattr(losses, "_use_triton"):
        replace(engine, losses, "_use_triton", lambda device: False)
