"""Rollouts of TRL with the quantized weights of training; TRL itself gathers weights in BF16."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import group_plan
from ds_fp8.export.engines import served_plan, served_tensors
from ds_fp8.export.plan import plan_to_serve, quantization_config
from ds_fp8.integrations.install import with_section
from ds_fp8.integrations.vllm import sync_weights, transfer_config
from ds_fp8.layers.experts.selection import experts_left
from ds_fp8.layers.selection import unconverted

_originals: dict[str, Callable] = {}


def install() -> None:
    """Send FP8 weights from TRL's trainers to their vLLM if the DeepSpeed configuration has an "fp8" section.

    Call it before the trainer is made, next to `ds_fp8.install()`. Colocated vLLMs start with the layout of the
    training. A server of its own (vllm_mode="server") must be started on a folder of the same layout, by `ds-fp8
    export`. Trainers without the section, and with adapters, which TRL merges and sends in BF16, are unchanged.
    """
    try:
        from trl.generation.vllm_generation import VLLMGeneration
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "trl":
            raise
        raise UserError(f"no {error.name} is installed here", remedy="pip install -U trl: 1.16.0 was tried") from None

    if _originals:
        return
    replacements = {"_init_vllm": _init_vllm, "sync_weights": _sync_weights, "_iter_named_params": _iter_named_params}
    for name, replacement in replacements.items():
        _originals[name] = original = getattr(VLLMGeneration, name)
        setattr(VLLMGeneration, name, functools.wraps(original)(replacement))


def uninstall() -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    for name, original in _originals.items():
        setattr(VLLMGeneration, name, original)
    _originals.clear()


def vllm_arguments(model: torch.nn.Module, fp8: FP8Config) -> dict[str, Any]:
    """Return the arguments of a vLLM for the weights of this model, trained with this section.

    vLLM starts on the model's own folder without reading its weights: `sync_weights` sends them.
    """
    # As in `served_plan`, before there is an engine.
    left = unconverted(model, group_plan(fp8)) | experts_left(model, group_plan(fp8))
    plan = plan_to_serve(model, left, fp8.linear)
    in_bf16 = "leave ds_fp8.integrations.trl.install() out, and TRL sends weights in BF16"
    if plan.quantized and plan.cast.granularity == "tensor":
        raise UserError(
            "vLLM quantizes weights with scales by tensor again",
            key="fp8.linear.weight.granularity",
            remedy=f'train with "128x128" or "row"; or {in_bf16}',
        )
    result: dict[str, Any] = {
        "load_format": "dummy",
        "weight_transfer_config": transfer_config(),
        "dtype": "bfloat16",  # of tensors not in FP8
    }
    if plan.layout != "bf16":
        result["hf_overrides"] = {"quantization_config": quantization_config(plan.layout, plan.cast, plan.left)}
    if plan.cast.scale != "pow2":
        # DeepGEMM would quantize again, with powers of two.
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
    return result


def _section(generation: Any) -> FP8Config | None:
    plugin = generation.accelerator.state.deepspeed_plugin
    if plugin is None or hasattr(generation.model, "peft_config"):
        return None
    raw = with_section(plugin.deepspeed_config)
    fp8 = parse_fp8(raw) if "fp8" in raw else None
    return fp8 if fp8 is not None and fp8.enabled else None


def _engine(generation: Any) -> Any:
    wrapped = generation.accelerator.deepspeed_engine_wrapped
    if wrapped is None or _section(generation) is None:
        return None
    if not hasattr(wrapped.engine, "fp8"):
        raise UserError(
            'the "fp8" section of the DeepSpeed configuration was not read',
            key="fp8",
            remedy="call ds_fp8.install() before the trainer is made",
        )
    return wrapped.engine


# Methods of TRL's VLLMGeneration that `install` replaces.


def _init_vllm(self: Any) -> None:
    from trl.generation import vllm_generation

    fp8 = _section(self)
    # Without vLLM TRL raises its own error.
    if fp8 is None or self.mode != "colocate" or find_spec("vllm") is None:
        return _originals["_init_vllm"](self)
    llm = vllm_generation.LLM
    vllm_generation.LLM = functools.partial(llm, **vllm_arguments(self.model, fp8))
    try:
        _originals["_init_vllm"](self)
    finally:
        vllm_generation.LLM = llm


def _sync_weights(self: Any) -> None:
    engine = _engine(self)
    if engine is None or self.mode != "colocate":
        return _originals["sync_weights"](self)
    if self.enable_sleep_mode:
        torch.cuda.empty_cache()
        self.llm.wake_up(tags=["weights"])
        self._llm_weights_sleeping = False
    sync_weights(engine, self.llm)


def _iter_named_params(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of a folder, for TRL's broadcast to a server on other GPUs."""
    engine = _engine(self)
    return _originals["_iter_named_params"](self) if engine is None else served_tensors(engine, served_plan(engine))
