"""Reject combinations of DeepSpeed's own values that it accepts and fails with later."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

from ds_fp8.config.deepspeed_json import Configuration, DeepSpeedValues
from ds_fp8.config.errors import refusal_in

MAX_BUCKET = 2**33
"""Elements: DeepSpeed allocates a bucket before the first step, and this is 16 GiB in BF16."""

_BF16 = (None, "bf16", "bfloat16")
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_values(configuration: Configuration) -> None:
    """Check DeepSpeed's own sections of a configuration, but for its optimizer and its batch sizes.

    Raises:
        UserError: DeepSpeed refuses a value, or would fail at it later. It names file, key and remedy.
    """
    parsed, zero, refuse = configuration.deepspeed, configuration.zero, refusal_in(configuration.file)
    accumulation = parsed.grad_accum_dtype
    if not zero.stage and configuration.bf16.enabled and accumulation not in _BF16:
        refuse(
            "data_types.grad_accum_dtype",
            f"without ZeRO gradients of a BF16 model are summed in BF16, but grad_accum_dtype is {accumulation}",
            '"bf16", or a "zero_optimization.stage" of at least 1',
        )
    quantized = next((key for key in _QUANTIZED if getattr(zero, key)), None)
    if quantized is not None and _is_missing("QuantizerBuilder"):
        refuse(
            f"zero_optimization.{quantized}",
            f"DeepSpeed cannot quantise on {get_accelerator().device_name()}s",
            f'"{quantized}": false',
        )
    if zero.stage and zero.reduce_scatter:
        for key in ("prescale_gradients", "gradient_predivide_factor"):
            if getattr(parsed, key) != DeepSpeedValues.model_fields[key].default:
                refuse(
                    key,
                    f"{key} does not go with ZeRO's reduce-scatter, which divides by the number of ranks itself",
                    f'remove "{key}"',
                )
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if getattr(zero, key) > MAX_BUCKET:
            refuse(
                f"zero_optimization.{key}",
                f"zero_optimization.{key} {getattr(zero, key):,} is a buffer larger than a device's memory",
                f'"{key}": 500000000, DeepSpeed\'s default, or less',
            )
    if zero.sub_group_size == 0:
        refuse(
            "zero_optimization.sub_group_size",
            "zero_optimization.sub_group_size 0 leaves no room for a parameter",
            '"sub_group_size": 1000000000, DeepSpeed\'s default',
        )
    for key in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, key)
        if offload is not None and offload.device == "nvme" and not offload.nvme_path:
            refuse(
                f"zero_optimization.{key}.nvme_path",
                f"zero_optimization.{key} swaps to NVMe, but has no nvme_path",
                '"nvme_path": "/local_nvme"',
            )


def _is_missing(operation: str) -> bool:
    """Return whether DeepSpeed has no such operation for this accelerator."""
    return get_accelerator().get_op_builder(operation).__name__ == "NotImplementedBuilder"
