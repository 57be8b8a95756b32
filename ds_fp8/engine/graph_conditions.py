"""Conditions under which a micro-step can run as a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.known_code import code_of_others, text_config
from ds_fp8.layers import documents
from ds_fp8.layers.linear import FP8Linear
from ds_fp8.layers.loss import LossFusion
from ds_fp8.monitor.cast_monitor import CastMonitor

MEASURED = "casts are measured"
COMPILED = "the module is compiled"
SEVERAL_HOSTS = 'the ranks are on several hosts, where graphs have not been tried; to do so set "graph": "on"'
SAVED_ELSEWHERE = "what backward needs is saved by hooks of the caller's"
ITEMS = "num_items_in_batch"
COPIED = frozenset({"input_ids", "labels", "shift_labels", "inputs_embeds", "position_ids", ITEMS})
"""Tensors of a batch whose values decide nothing but numbers, once it is known what documents its rows hold."""
PACKED = "packed"
"""The attention implementation that reads on the device where documents end. "fp8_packed" computes rows of one document
in FP8 and others in BF16, which a graph could not tell apart."""
LEAST_DOCUMENTS = 16


def why_no_graphs(
    engine: deepspeed.DeepSpeedEngine, fp8: FP8Config, loss: LossFusion | None, why_no_step: str | None, hosts: int = 1
) -> str | None:
    """Return what keeps this engine from capturing any micro-step, or None.

    Args:
        engine: Engine of any ZeRO stage.
        fp8: Its "fp8" section.
        loss: How its loss was fused.
        why_no_step: Why DeepSpeed's optimizer step stays, or None.
        hosts: Number of hosts that the ranks are on.
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
        COMPILED: is_compiled(engine.module),
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    if found is None and fp8.graph == "auto":
        found = SEVERAL_HOSTS if hosts > 1 else why_not_by_itself(engine.module)
    return found


def why_not_by_itself(module: nn.Module) -> str | None:
    """Return why "auto" captures nothing of a model, or None."""
    why = code_of_others(module)
    return why and f'{why}; if nothing but the shape of a batch decides what it does, set "graph": "on"'


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of a module runs what torch.compile made of it (Module.compile, engine.compile)."""
    return module._compiled_call_impl is not None


def why_eager(
    modules: Sequence[nn.Module], monitor: CastMonitor, device: torch.device, args: tuple, kwargs: Mapping[str, Any]
) -> str | None:
    """Return why a call of a model in training cannot be a graph whatever its rows hold, or None.

    Args:
        modules: All modules of the model.
        monitor: Says whether casts are measured.
        device: Device of the model.
        args: Positional arguments of the call.
        kwargs: Its arguments by name.
    """
    if monitor.active:
        return MEASURED
    if args:
        return "the batch is passed by position"
    why = why_not_recomputed(modules)
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
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return SAVED_ELSEWHERE
    return None


def why_not_recomputed(modules: Sequence[nn.Module]) -> str | None:
    """Return why a graph cannot recompute the activations of a model as Python does, or None; None where none are."""
    # Looked up where transformers sets it: asking a module for what it lacks is slow.
    recomputed = [part for part in modules if vars(part).get("gradient_checkpointing")]
    if not recomputed:
        return None
    functions = [getattr(part, "_gradient_checkpointing_func", None) for part in recomputed]
    if any(getattr(function, "func", function) is not checkpoint for function in functions):
        return "activations are recomputed by a function of the model's own, or kept on the host"
    for part in modules:
        dropout = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "attention_dropout", 0)
        if part.training and dropout:
            return "activations are recomputed with dropout, whose random numbers the host repeats"
    return None


def rows_in_a_graph(module: nn.Module, batch: Mapping[str, Any]) -> tuple[int, str | None]:
    """Return what the graph of a batch must know of its rows, and why there can be none; the host waits for the device.

    It does not wait for what was noted of mask and positions (layers/documents.py). transformers waits as well when it
    builds the mask of such a batch.

    Args:
        module: Module of the engine.
        batch: Its arguments.

    Returns:
        The number of documents of packed rows, or 0 where every row is one sequence; and the reason, or None.
    """
    mask, positions = (batch.get(name) for name in ("attention_mask", "position_ids"))
    if mask is not None and not documents.whole(mask):
        return 0, "rows are padded: what attention computes differs from batch to batch"
    if positions is None:
        return 0, None
    held = documents.count(positions)
    if held == positions.shape[:-1].numel():
        return 0, None
    if not held:
        return 0, "positions do not count from 0 in every document"
    if positions.dim() != 2:
        return 0, "rows hold several documents, and tokens several positions"
    if mask is not None:
        return 0, "rows hold several documents, and a mask says that they are one"
    implementation = _attention_of(module)
    if implementation != PACKED:
        return 0, f'rows hold several documents, and attention is "{implementation}", not "{PACKED}"'
    given = next(value for name in ("input_ids", "inputs_embeds") if (value := batch.get(name)) is not None)
    return held * (len(given) // len(positions)), None


def _attention_of(module: nn.Module) -> str | None:
    """Return the attention implementation of a Hugging Face model."""
    return getattr(text_config(getattr(module, "config", None)), "_attn_implementation", None)


class Capacities:
    """For how many documents the graphs of packed rows are captured.

    Attention kernels take a little time for documents that are not there, and a graph is captured anew for more.
    """

    def __init__(self):
        """Begin with rows that are one sequence each."""
        self._seen: dict[object, int] = {}

    def take(self, kind: object, held: int) -> int:
        """Return for how many documents a micro-step is captured now; 0 where every row has always been one.

        Args:
            kind: Kind of micro-steps.
            held: Documents of this batch, the most of any rank; 0 where every row of all ranks is one.
        """
        seen = self._seen[kind] = max(held, self._seen.get(kind, 0))
        return max(LEAST_DOCUMENTS, 1 << (2 * seen - 1).bit_length()) if seen else 0
