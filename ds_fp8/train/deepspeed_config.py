"""DeepSpeed's own sections in a stage: batch arithmetic, what a stage cannot do, and folders of monitors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_fp8.config.deepspeed_json import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import check_writable
from ds_fp8.config.schema import shown

MAX_ROWS = 1 << 24
"""Most rows of a step: more than any training uses, and few enough to be listed."""

_NOT_IN_A_STAGE = {
    "scheduler": "the learning-rate schedule belongs to the stage: set train.schedule",
    "fp16": "a stage trains in BF16",
    "torch_autocast": "a stage trains in BF16 as it is",
    "autotuning": "the autotuner starts other runs; `ds-fp8 sweep` tries settings of a stage",
    "data_efficiency": "a stage orders its data itself",
    "hybrid_engine": "a stage does not train on what it generates",
    "tensor_parallel": "a stage shards its model by ZeRO alone",
    "expert_parallel": "a stage shards its model by ZeRO alone",
    "pipeline": "a stage shards its model by ZeRO alone",
    "weight_quantization": "a stage trains all weights in the precision that the fp8 section gives them",
    "datastates_ckpt": "a stage writes its checkpoints with DeepSpeed's default engine",
}
"""Sections of DeepSpeed's that a stage has no use for, and what takes their place."""
_SWITCHED = ("fp16", "torch_autocast", "autotuning", "data_efficiency", "hybrid_engine", "expert_parallel")
"""Sections among them that "enabled" switches on."""
_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def resolve_batch(raw: dict, world: int) -> tuple[int, int, int]:
    """Return (global batch, micro-batch, accumulation) in rows, from the two or three that `raw` gives.

    Raises:
        UserError: they do not multiply up over `world` ranks; it shows the arithmetic.
    """
    given = {key: raw.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
    for key, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(
                f"{key} must be a whole number of at least 1, got {shown(value)}", key=key, remedy=f'"{key}": 8, say'
            )
        if value is not None and value > MAX_ROWS:
            raise UserError(f"{key} {value:,} is more than {MAX_ROWS:,}", key=key, remedy=f'"{key}": 8, say')
    total, micro, accumulation = given.values()
    if micro is None and total is None:
        raise UserError(
            "the batch size is missing", key=MICRO_BATCH, remedy=f'give "{MICRO_BATCH}", and "{ACCUMULATION}" if not 1'
        )
    if micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world) or 1
    elif accumulation is None:
        accumulation = 1 if total is None else total // (micro * world) or 1
    product = micro * accumulation * world
    if total is not None and total != product:
        raise UserError(
            f"the batch does not divide: {TRAIN_BATCH} {total} is not {micro} ({MICRO_BATCH}) x {accumulation} "
            f"({ACCUMULATION}) x {world} (ranks) = {product}",
            key=TRAIN_BATCH,
            remedy=f'set "{TRAIN_BATCH}" to {product} or leave it out, or change the number of ranks',
        )
    if product > MAX_ROWS:
        raise UserError(
            f"{micro} ({MICRO_BATCH}) x {accumulation} ({ACCUMULATION}) x {world} (ranks) = {product:,} rows a step, "
            f"more than {MAX_ROWS:,}",
            key=ACCUMULATION,
            remedy="give smaller ones",
        )
    return product, micro, accumulation


def ranks_of_batch(raw: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that the three sizes of a batch fix together, or None where they fix none."""
    sizes = [raw.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return None
    total, micro, accumulation = sizes
    ranks, rest = divmod(total, micro * accumulation)
    return None if rest else ranks


def check_sections(configuration: Configuration) -> None:
    """Check DeepSpeed's own sections of a stage, but for its optimizer.

    Raises:
        UserError: DeepSpeed refuses a value or would fail at it later, a stage has no use for a section, or a monitor
            cannot write.
    """
    raw = configuration.values
    for key, reason in _NOT_IN_A_STAGE.items():
        section = raw.get(key)
        is_off = isinstance(section, Mapping) and key in _SWITCHED and not section.get("enabled")
        if key in raw and not is_off:
            raise UserError(f'"{key}" does not go with a stage: {reason}', key=key, remedy=f'remove "{key}"')
    section = raw.get("activation_checkpointing")
    if isinstance(section, Mapping) and any(section.values()):
        raise UserError(
            '"activation_checkpointing" does not go with a stage: the model section says what is recomputed',
            key="activation_checkpointing",
            remedy='"model": {"activation_checkpointing": "offload"} keeps the inputs of layers on the host',
        )
    bf16 = raw.get("bf16", raw.get("bfloat16"))
    if not (isinstance(bf16, dict) and bf16.get("enabled") is True):
        raise UserError("the stage runner trains in BF16", key="bf16", remedy='"bf16": {"enabled": true}')
    monitors = configuration.deepspeed.monitor_config
    for key, package in _MONITOR_PACKAGES.items():
        if getattr(monitors, key).enabled and find_spec(package) is None:
            raise UserError(f"{key} is not installed", key=f"{key}.enabled", remedy=f"pip install {package}, or false")
    for key in ("tensorboard", "csv_monitor"):
        monitor = getattr(monitors, key)
        if monitor.enabled:
            check_writable(Path(monitor.output_path, monitor.job_name), f"{key}.output_path")
