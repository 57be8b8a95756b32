"""FP8 training of Hugging Face language models on DeepSpeed ZeRO-3.

    engine, optimizer, _, scheduler = ds_fp8.initialize(model=model, config="ds_config.json")

The public names load what they need when they are first used, so that a cast does not import DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "initialize": "ds_fp8.engine",
    "convert": "ds_fp8.modules.convert",
    "quantize": "ds_fp8.quantize",
    "QuantizedTensor": "ds_fp8.quantize",
    "FP8Config": "ds_fp8.config",
    "AdamW": "ds_fp8.optim",
}
__all__ = ["AdamW", "FP8Config", "QuantizedTensor", "convert", "initialize", "quantize"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_fp8' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
