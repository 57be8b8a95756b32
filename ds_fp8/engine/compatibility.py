"""Checks that DeepSpeed's own sections can be combined with the "fp8" section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_fp8.config.deepspeed_json import ACCUMULATION, Configuration
from ds_fp8.config.errors import UserError, refusal_in
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.zero import deepspeed_versions


def check_deepspeed(configuration: Configuration) -> None:
    """Raise UserError where DeepSpeed's own sections contradict the fp8 section. Does nothing when FP8 is disabled."""
    fp8 = configuration.fp8
    if not fp8.enabled:
        return
    try:
        deepspeed_versions.check(deepspeed.__version__)
    except UserError as error:
        raise error.located(configuration.file) from None
    refuse = refusal_in(configuration.file)

    bf16, zero = configuration.bf16, configuration.zero
    # "auto" is filled in by Accelerate, before training.
    if not bf16.enabled and configuration.given("bf16", "enabled") != "auto":
        refuse("bf16.enabled", "fp8 trains BF16 models, but bf16 is not enabled", '"bf16": {"enabled": true}')
    if zero.zenflow is not None:
        refuse("zero_optimization.zenflow", "ZenFlow selects gradient columns before they are reduced", "remove it")
    if fp8.optimizer.precision().compressed:
        _check_compressed_state(configuration, refuse)
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if getattr(bf16, key):
            refuse(
                f"bf16.{key}",
                f"{key} makes DeepSpeed keep state that fp8.optimizer keeps",
                f'"{key}": false; "fp8": {{"optimizer": ...}} has smaller moments (preset "coat")',
            )
    _check_zero(configuration, refuse)
    parsed = configuration.deepspeed
    if parsed.torch_autocast_enabled:
        refuse(
            "torch_autocast.enabled",
            "fp8 does not work with torch_autocast, which casts weights too",
            'remove "torch_autocast"',
        )
    if parsed.compile_config.deepcompile:
        refuse(
            "compile.deepcompile",
            "DeepCompile gathers parameters in its own graph and bypasses the FP8 all-gather",
            '"deepcompile": false, or "fp8": {"enabled": false}',
        )

    if parsed.tensor_parallel_config.autotp_size > 1:
        refuse(
            "tensor_parallel.autotp_size",
            "FP8 with linears that are split over ranks is untested",
            'remove "tensor_parallel", or "fp8": {"enabled": false}',
        )
    if parsed.expert_parallel_config.enabled:
        refuse(
            "expert_parallel.enabled",
            "FP8 with experts that are spread over ranks is untested",
            'remove "expert_parallel", or "fp8": {"enabled": false}',
        )
    if configuration.stage != 3:
        return
    accumulation = parsed.grad_accum_dtype
    if accumulation in ("bf16", "bfloat16"):
        # The FP32 sum over ranks is rounded once, to the accumulator. A second micro-batch would be added in BF16.
        if configuration.given(ACCUMULATION) != 1:
            refuse(
                "data_types.grad_accum_dtype",
                f"gradients of several micro-batches are summed in FP32, but grad_accum_dtype is {accumulation}",
                '"gradient_accumulation_steps": 1, or "data_types": {"grad_accum_dtype": "fp32"}',
            )
    elif accumulation not in (None, "fp32", "float32"):
        refuse(
            "data_types.grad_accum_dtype",
            f"gradients are summed in FP32, but grad_accum_dtype is {accumulation}",
            '"data_types": {"grad_accum_dtype": "fp32"}, or "bf16" with "gradient_accumulation_steps": 1',
        )


def _check_zero(configuration: Configuration, refuse: Callable[..., None]) -> None:
    """Reject what of ZeRO replaces or bypasses the FP8 all-gather and reduction."""
    zero, fp8 = configuration.zero, configuration.fp8
    gathers, reduces = fp8.param_gather.format != "bf16", fp8.grad_reduce.format != "bf16"
    if configuration.stage != 3:
        if gathers:
            refuse(
                "zero_optimization.stage",
                f"FP8 parameter all-gather exists in ZeRO stage 3 only, but the stage is {configuration.stage}",
                '"stage": 3, or "fp8": {"param_gather": {"format": "bf16"}}',
            )
        if reduces:
            refuse(
                "zero_optimization.stage",
                f"FP8 gradient reduce-scatter exists in ZeRO stage 3 only, but the stage is {configuration.stage}",
                '"stage": 3, or "fp8": {"grad_reduce": {"format": "bf16"}}',
            )
        return

    if zero.zero_hpz_partition_size != 1:
        refuse(
            "zero_optimization.zero_hpz_partition_size",
            "hpZ keeps a second BF16 copy of the weights inside each node, which FP8 gathers do not fill",
            "remove the key: the FP8 all-gather already halves the bytes",
        )
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, key):
            refuse(f"zero_optimization.{key}", f"{key} quantises what fp8 already sends in FP8", f'"{key}": false')
    offload = configuration.parameter_device
    if gathers and offload != "none":
        refuse(
            "zero_optimization.offload_param.device",
            f"parameter offload to {offload} moves BF16 shards, and the FP8 gather keeps FP8 shards on the device",
            'remove "offload_param" (offload_optimizer works), or "fp8": {"param_gather": {"format": "bf16"}}',
        )
    if configuration.optimizer_device == "nvme":
        refuse(
            "zero_optimization.offload_optimizer.device",
            "the FP8 shards are cast from the FP32 master shards after every step, which NVMe offload swaps out",
            '"device": "cpu"',
        )
    if reduces and not zero.reduce_scatter:
        refuse(
            "zero_optimization.reduce_scatter",
            "reduce_scatter false makes DeepSpeed all-reduce gradients and never reach the FP8 reduction",
            '"reduce_scatter": true, or "fp8": {"grad_reduce": {"format": "bf16"}}',
        )


def check_parallelism(model: nn.Module, mpu: Any, fp8: FP8Config) -> None:
    """Reject models and process groups of DeepSpeed's that have not been tried with FP8.

    Sequence parallelism (Ulysses) has been.

    Args:
        model: what initialize was given.
        mpu: object that tells DeepSpeed its model-parallel groups, or None.
        fp8: nothing is rejected when it is disabled.

    Raises:
        UserError: the model is a pipeline or has DeepSpeed's MoE layers, or `mpu` splits tensors over ranks.
    """
    if not fp8.enabled:
        return
    remedy = 'use ZeRO stage 3 alone, or "fp8": {"enabled": false}'
    if isinstance(model, PipelineModule):
        raise UserError("FP8 with pipeline parallelism is untested", key="fp8.enabled", remedy=remedy)
    if any(isinstance(module, MoE) for module in model.modules()):
        raise UserError("FP8 with DeepSpeed's MoE layers is untested", key="fp8.enabled", remedy=remedy)
    splits = ["get_tensor_model_parallel_world_size", "get_slice_parallel_world_size"]
    if not hasattr(mpu, "get_sequence_parallel_world_size"):  # whose "model parallel" ranks share a sequence
        splits.append("get_model_parallel_world_size")
    size = next((getattr(mpu, name)() for name in splits if hasattr(mpu, name)), 1)
    if size > 1:
        raise UserError(
            f"tensor parallelism (mpu, {size} ranks) is untested with FP8", key="fp8.enabled", remedy=remedy
        )


def _check_compressed_state(configuration: Configuration, refuse: Callable[..., None]) -> None:
    """Reject DeepSpeed features that manage optimizer state, which they expect in FP32."""
    offload = configuration.zero.offload_optimizer
    fp32 = '"fp8": {"optimizer": {"exp_avg": "fp32", "exp_avg_sq": "fp32"}}'
    if offload is None:
        return
    if configuration.optimizer_device == "nvme":
        refuse(
            "zero_optimization.offload_optimizer.device",
            "NVMe offload swaps FP32 moments, but fp8.optimizer compresses them",
            f'"device": "cpu", or {fp32}',
        )
    if offload.ratio != 1.0:
        refuse(
            "zero_optimization.offload_optimizer.ratio",
            "partial offload steps a part of the parameters with another Adam, whose state is FP32",
            f'"ratio": 1.0, or {fp32}',
        )
    if offload.super_offload:
        refuse(
            "zero_optimization.offload_optimizer.super_offload",
            "SuperOffload steps with its own Adam, whose state is FP32",
            f'"super_offload": false, or {fp32}',
        )
