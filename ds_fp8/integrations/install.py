"""`install`: deepspeed.initialize applies the "fp8" section of its configuration, in the whole process."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal

import deepspeed
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import read_config
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.log import logger
from ds_fp8.config.presets import as_section
from ds_fp8.engine.initialize import initialize
from ds_fp8.layers.attention import documents
from ds_fp8.zero.deepspeed.patches import disable_shm_build

VARIABLE = "DS_FP8"  # environment: the section of configurations without one, a preset's name or a JSON object

_replaced: list[tuple[Any, str, Callable]] = []  # (owner, name, original) of replaced functions
_default: dict[str, Any] | None = None
_without: Literal["accept", "say", "refuse"] = "accept"


def install(
    fp8: str | bool | Mapping[str, Any] | None = None, without_section: Literal["accept", "say", "refuse"] = "accept"
) -> None:
    """Apply "fp8" sections in deepspeed.initialize, for all callers in this process.

    Call it before training, and before any `from deepspeed import initialize`; a second call only changes `fp8`.
    Configurations without a section stay plain DeepSpeed.

    Args:
        fp8: Section for configurations without one, or the name of a preset. Default: the environment variable DS_FP8,
            for programs whose DeepSpeed configuration is not a file.
        without_section: Treatment of a configuration without a section if there is no default: "accept" it, "say" so
            in one line of rank 0, or "refuse" it with a UserError.
    """
    global _default, _without
    _without = without_section
    source = f"environment variable {VARIABLE}" if fp8 is None else None
    _default = _as_section(os.environ.get(VARIABLE) or None if fp8 is None else fp8, source)
    if _replaced:
        return
    disable_shm_build()  # here: Accelerate initializes the process group before deepspeed.initialize
    _replace(deepspeed, "initialize", _with_default)
    if find_spec("accelerate"):
        from accelerate import data_loader
        from accelerate.utils import DeepSpeedPlugin

        _replace(data_loader, "send_to_device", cache_on_batches)
        _replace(DeepSpeedPlugin, "deepspeed_config_process", _hide_section)


def uninstall() -> None:
    """Undo `install`. Engines that exist keep their FP8."""
    global _default, _without
    _default, _without = None, "accept"
    while _replaced:
        setattr(*_replaced.pop())


def _replace(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    _replaced.append((owner, name, original))


def with_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a DeepSpeed configuration with the default section of `install`, if it has none."""
    return raw if _default is None else {"fp8": _default} | raw


def _with_default(original: Callable) -> Callable:
    """Return ds_fp8.initialize with the default section for configurations without one."""

    @functools.wraps(original)
    def deepspeed_initialize(*args: Any, **keywords: Any) -> tuple:
        # By DeepSpeed's signature: callers pass the configuration by position, by two names, or in args.
        call = signature(original).bind(*args, **keywords).arguments
        in_args = getattr(call.get("args"), "deepspeed_config", None)
        given = next((c for c in (call.get("config"), call.get("config_params"), in_args) if c is not None), None)
        if _default is not None:
            call.pop("config_params", None)
            call["config"] = with_section(read_config({} if given is None else given)[0])
        elif _without != "accept" and given is not None:
            raw, file = read_config(given)
            if "fp8" not in raw:
                _note_without_section(file)
        return initialize(**call)

    return deepspeed_initialize


def _note_without_section(file: str | None) -> None:
    problem = 'the DeepSpeed configuration has no "fp8" section: training is without FP8'
    remedy = f'add "fp8": {{}} to it, or set the environment variable {VARIABLE} to a preset such as precise'
    if _without == "refuse":
        raise UserError(problem, key="fp8", file=file, remedy=remedy)
    logger.warning("ds_fp8: %s%s; %s", problem, f" ({file})" if file else "", remedy)


def _hide_section(original: Callable) -> Callable:
    """Return Accelerate's fill-in of "auto" values without the "fp8" section, whose "auto" it would refuse."""

    @functools.wraps(original)
    def deepspeed_config_process(self: Any, prefix: str = "", mismatches: Any = None, config: Any = None, **more: Any):
        raw = self.deepspeed_config if config is None else config
        section = {"fp8": raw.pop("fp8")} if not prefix and "fp8" in raw else {}
        try:
            return original(self, prefix, mismatches, config, **more)
        finally:
            raw.update(section)

    return deepspeed_config_process


def _as_section(fp8: str | bool | Mapping[str, Any] | None, source: str | None) -> dict[str, Any] | None:
    if fp8 is None:
        return None
    section = fp8
    if isinstance(fp8, str):
        try:
            section = json.loads(fp8) if fp8.lstrip().startswith("{") else {"preset": fp8}
        except json.JSONDecodeError as error:
            raise UserError(
                f"not valid JSON: {error}", file=source, remedy='a preset\'s name, or {"preset": "infir2", ...}'
            ) from None
    parse_fp8({"fp8": section}, source)
    return dict(as_section(section))


def cache_on_batches(send_to_device: Callable) -> Callable:
    """Return Accelerate's move of batches to a device, with facts on masks and positions cached on the result."""

    @functools.wraps(send_to_device)
    def send(batch: Any, *args: Any, **keywords: Any) -> Any:
        moved = send_to_device(batch, *args, **keywords)
        if isinstance(batch, Mapping) and isinstance(moved, Mapping):
            for name in ("attention_mask", "position_ids"):
                here, there = batch.get(name), moved.get(name)
                both = torch.is_tensor(here) and torch.is_tensor(there) and here.dim() == there.dim() == 2
                # Computed on the host in microseconds; on the device a host sync in every step.
                if both and here.device.type == "cpu" and not there.is_inference():
                    if name == "position_ids":
                        documents.note_as(here, there)
                    else:
                        documents.mark_full(there, bool(here.all()))
        return moved

    return send
