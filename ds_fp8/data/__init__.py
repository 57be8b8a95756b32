"""Data of a stage: sources, tokens on disk, packing into rows, order of the rows."""

from ds_fp8.data.chat import IGNORED, stop_tokens
from ds_fp8.data.config import DataConfig
from ds_fp8.data.rows import PackedDataset
from ds_fp8.data.stage import StageData, build_data
from ds_fp8.data.tokenizer import build_tokenizer, check_embeddings, load_tokenizer, save_tokenizer

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
