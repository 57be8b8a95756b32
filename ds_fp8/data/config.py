"""The "data" section of a stage's JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from ds_fp8.data.tokenizer import SMALLEST_VOCABULARY
from ds_fp8.schema import Section


class DataConfig(Section):
    """What a stage trains on, how it is tokenised and how it is cut into rows."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    path: str = "synthetic"
    """"synthetic" for the built-in corpus; a .txt, .jsonl, .json or .parquet file, or a folder of one such kind; or a
    Hugging Face datasets name ("owner/name", or "owner/name:subset"). A .txt file holds documents parted by blank
    lines."""

    format: Literal["documents", "chat"] = "documents"
    """"documents": loss on every token of a text. "chat": loss on the assistant's turns of a list of messages."""

    text_key: str = "text"
    """Column that holds the text of a document."""

    messages_key: str = "messages"
    """Column that holds a conversation: a list of {"role": ..., "content": ...}."""

    tokenizer: str = "synthetic"
    """"synthetic" for a sentencepiece model trained on the built-in corpus on first use; a sentencepiece .model file;
    or a Hugging Face tokenizer folder or name."""

    vocab_size: int = Field(default=640, ge=SMALLEST_VOCABULARY, le=2048)
    """Number of tokens of the "synthetic" tokenizer, special tokens and the 256 bytes included."""

    sequence_length: int = Field(default=512, ge=8)
    """Tokens in a row of a batch; several examples are packed into one row."""

    examples: int = Field(default=20_000, ge=2)
    """Number of documents or conversations of the "synthetic" corpus."""

    difficulty: Literal["basic", "mixed"] = "basic"
    """"basic": one step, numbers up to 9. "mixed": half of the problems have numbers up to 19 or two steps."""

    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Part of the examples that is held back to measure the validation loss."""

    seed: int = Field(default=1236, ge=0)
    """Seed of the synthetic corpus and of the choice of validation examples."""
