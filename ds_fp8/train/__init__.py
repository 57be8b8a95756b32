"""The stage runner: one JSON in, one trained model, its metrics and its result out.

The public names load what they need when they are first used: a stage that is checked loads no model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_fp8.train.run import train
    from ds_fp8.train.stage import Lora, ModelConfig, Stage, TrainConfig, learning_rate_factor, load_stage

__all__ = ["Lora", "ModelConfig", "Stage", "TrainConfig", "learning_rate_factor", "load_stage", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ds_fp8.train' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"ds_fp8.train.{'run' if name == 'train' else 'stage'}"), name)
    return value
