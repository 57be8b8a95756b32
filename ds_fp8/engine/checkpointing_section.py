"""DeepSpeed's section "activation_checkpointing", applied to models of transformers.

DeepSpeed reads it in `deepspeed.checkpointing.configure` alone, for layers that call its own `checkpoint`. transformers
recomputes layers by torch's checkpointing, and the section would have no effect without a word.
"""

from __future__ import annotations

import deepspeed
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.fp8 import section_of
from ds_fp8.config.log import logger
from ds_fp8.graphs.host_checkpoints import HostCheckpoints, keep_on_host, recomputed_by

SECTION, ON_HOST = "activation_checkpointing", "cpu_checkpointing"


def apply_checkpointing_section(configuration: Configuration, model: nn.Module | None) -> None:
    """Keep the inputs of recomputed layers on the host where DeepSpeed's section says so; warn of keys without effect.

    Args:
        configuration: DeepSpeed configuration; nothing is done without an "fp8" section.
        model: Model whose layers may be recomputed, by `gradient_checkpointing_enable`.
    """
    asked = [key for key, value in section_of(configuration.values, SECTION).items() if value]
    if "fp8" not in configuration.values or not asked or model is None or deepspeed.checkpointing.is_configured():
        return
    if ON_HOST in asked:
        asked.remove(ON_HOST)
        why = _why_not_on_host(model)
        if why is not None:
            logger.warning("warning: %s.%s has no effect: %s", SECTION, ON_HOST, why)
    if asked:
        keys = ", ".join(f"{SECTION}.{key}" for key in asked)
        logger.warning(
            "warning: %s has no effect: DeepSpeed reads it in deepspeed.checkpointing.configure alone, which was not "
            "called; remove it",
            keys,
        )


def _why_not_on_host(model: nn.Module) -> str | None:
    """Keep inputs on the host, or return why there are none to keep."""
    if keep_on_host(model):
        return None
    functions = [function for part in model.modules() if (function := recomputed_by(part)) is not None]
    if not functions:
        return "no layer of the model is recomputed; call model.gradient_checkpointing_enable() before initialize"
    if all(isinstance(function, HostCheckpoints) for function in functions):
        return None
    other = next(function for function in functions if function is not checkpoint)
    name = getattr(other, "__qualname__", type(other).__name__)
    return f"layers are recomputed by {name}, which decides itself where it keeps their inputs"
