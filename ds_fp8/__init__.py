"""FP8 training of Hugging Face language models on DeepSpeed ZeRO-3.

    engine, optimizer, _, scheduler = ds_fp8.initialize(model=model, config="ds_config.json")

The public names load what they need when they are first used, so that a cast does not import DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_fp8.casts import QuantizedTensor, quantize
    from ds_fp8.config.errors import UserError
    from ds_fp8.config.fp8 import FP8Config
    from ds_fp8.engine.initialize import convert, initialize
    from ds_fp8.integrations.install import install, uninstall
    from ds_fp8.memory import estimate
    from ds_fp8.optim import AdamW

__version__ = "0.1.0"

# No name here may be that of a module of this package: importing the module would replace the name.
_HOMES = {
    "AdamW": "ds_fp8.optim",
    "FP8Config": "ds_fp8.config.fp8",
    "QuantizedTensor": "ds_fp8.casts",
    "UserError": "ds_fp8.config.errors",
    "convert": "ds_fp8.engine.initialize",
    "estimate": "ds_fp8.memory",
    "initialize": "ds_fp8.engine.initialize",
    "install": "ds_fp8.integrations.install",
    "quantize": "ds_fp8.casts",
    "uninstall": "ds_fp8.integrations.install",
}
__all__ = [
    "AdamW",
    "FP8Config",
    "QuantizedTensor",
    "UserError",
    "convert",
    "estimate",
    "initialize",
    "install",
    "quantize",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_fp8' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
