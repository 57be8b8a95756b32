"""Data of a stage: sources, tokens on disk, packing into rows, order of the rows.

The public names load what they need when they are first used: a section that is parsed reads no data.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_fp8.data.chat import IGNORED, stop_tokens
    from ds_fp8.data.config import DataConfig
    from ds_fp8.data.rows import PackedDataset
    from ds_fp8.data.stage import StageData, build_data
    from ds_fp8.data.tokenizer import build_tokenizer, check_embeddings, load_tokenizer, save_tokenizer

_HOMES = {
    **dict.fromkeys(("IGNORED", "stop_tokens"), "chat"),
    "DataConfig": "config",
    "PackedDataset": "rows",
    **dict.fromkeys(("StageData", "build_data"), "stage"),
    **dict.fromkeys(("build_tokenizer", "check_embeddings", "load_tokenizer", "save_tokenizer"), "tokenizer"),
}
__all__ = [
    "IGNORED",
    "DataConfig",
    "PackedDataset",
    "StageData",
    "build_data",
    "build_tokenizer",
    "check_embeddings",
    "load_tokenizer",
    "save_tokenizer",
    "stop_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_fp8.data' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"ds_fp8.data.{_HOMES[name]}"), name)
    return value
