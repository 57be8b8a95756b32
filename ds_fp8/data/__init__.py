"""Data of a stage: sources, tokenisation, packing into rows, order of the rows, and the built-in corpus."""

from ds_fp8.data.chat import IGNORED, tokenize_chat, tokenize_chats
from ds_fp8.data.config import DataConfig
from ds_fp8.data.order import local_micro_batches, rows_of_step
from ds_fp8.data.packing import PackedDataset, pack
from ds_fp8.data.sources import read_examples
from ds_fp8.data.stage import StageData, build_data
from ds_fp8.data.synthetic import Problem, chat_prompt, document_prompt, extract_answer, problems
from ds_fp8.data.tokenizer import build_tokenizer, encode_documents, encode_prompts

__all__ = [
    "IGNORED",
    "DataConfig",
    "PackedDataset",
    "Problem",
    "StageData",
    "build_data",
    "build_tokenizer",
    "chat_prompt",
    "document_prompt",
    "encode_documents",
    "encode_prompts",
    "extract_answer",
    "local_micro_batches",
    "pack",
    "problems",
    "read_examples",
    "rows_of_step",
    "tokenize_chat",
    "tokenize_chats",
]
