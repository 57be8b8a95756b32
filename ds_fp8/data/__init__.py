"""Data of a stage: sources, tokens on disk, packing into rows, order of the rows, and the built-in corpus."""

from ds_fp8.data.chat import IGNORED, stop_tokens, tokenize_chat, tokenize_chats
from ds_fp8.data.config import DataConfig, SourceConfig
from ds_fp8.data.order import budgeted_micro_batches, local_micro_batches, measured_rows, rows_of_step
from ds_fp8.data.packing import PackedDataset, Plan, plan_rows
from ds_fp8.data.questions import Question, extract_answer
from ds_fp8.data.sources import ExampleStream, read_examples
from ds_fp8.data.stage import StageData, build_data, default_cache_dir, describe
from ds_fp8.data.synthetic import Problem, chat_prompt, document_prompt, problems
from ds_fp8.data.token_store import TokenStore
from ds_fp8.data.tokenise import tokenise_source
from ds_fp8.data.tokenizer import (
    build_tokenizer,
    check_embeddings,
    embeddings_needed,
    encode_documents,
    encode_prompts,
    load_tokenizer,
    save_tokenizer,
)

__all__ = [
    "IGNORED",
    "DataConfig",
    "ExampleStream",
    "PackedDataset",
    "Plan",
    "Problem",
    "Question",
    "SourceConfig",
    "StageData",
    "TokenStore",
    "budgeted_micro_batches",
    "build_data",
    "build_tokenizer",
    "chat_prompt",
    "check_embeddings",
    "default_cache_dir",
    "describe",
    "document_prompt",
    "embeddings_needed",
    "encode_documents",
    "encode_prompts",
    "extract_answer",
    "load_tokenizer",
    "local_micro_batches",
    "measured_rows",
    "plan_rows",
    "problems",
    "read_examples",
    "rows_of_step",
    "save_tokenizer",
    "stop_tokens",
    "tokenise_source",
    "tokenize_chat",
    "tokenize_chats",
]
