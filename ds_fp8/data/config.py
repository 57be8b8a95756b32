"""The "data" section of a stage's JSON."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from ds_fp8.config.errors import UserError
from ds_fp8.config.refusals import NAMED_DATA, refusals
from ds_fp8.config.schema import Section, Seed

MAX_TOKENS = 1 << 24
"""Most tokens of a micro-batch on one GPU."""


class SourceConfig(Section):
    """One of several sources of a mixture."""

    path: str = Field(min_length=1)
    """Like `data.path`."""
    weight: float = Field(1.0, gt=0)
    """This source's share of the rows of training, relative to the weights of the others."""
    text_key: str | None = None
    """Like `data.text_key`, which it replaces for this source."""
    messages_key: str | None = None
    """Like `data.messages_key`, which it replaces for this source."""


class DataConfig(Section):
    """The training data of a stage: sources, tokenizer, and the rows that examples are packed into."""

    path: str | None = Field(default=None, min_length=1)
    """A file or folder (.txt, .jsonl, .json, .parquet), or a Hugging Face data set: "owner/name", "owner/name:subset".

    Files may be compressed (.gz, .bz2, .xz, .zst); those of a folder are of one kind. A .txt file holds documents
    parted by blank lines."""

    sources: tuple[SourceConfig, ...] | None = None
    """Several paths with weights, in place of `path`."""

    format: Literal["documents", "chat"] = "documents"
    """documents: loss on every token of a text. chat: loss on the assistant's turns of a list of messages."""

    text_key: str = "text"
    """Column with the text of a document."""

    messages_key: str = "messages"
    """Column with a conversation: a list of {"role": ..., "content": ...}."""

    tokenizer: str | None = Field(default=None, min_length=1)
    """A Hugging Face folder or name."""

    tokenizer_revision: str | None = None
    """Branch, tag or commit; null: its main branch."""

    chat_template: str | None = None
    """"chatml", or a file with a Jinja template; null: the tokenizer's, or ChatML where it has none."""

    add_bos: bool = True
    """Begin documents with the tokenizer's beginning-of-text token, if any."""

    add_eos: bool = True
    """End documents with its end-of-text token."""

    sequence_length: int = Field(default=512, ge=8, le=MAX_TOKENS)
    """Tokens of a row, into which several examples are packed ([or one](training.md#one-example-a-row)); no example is
    longer."""

    tokens_per_gpu: int | None = Field(default=None, ge=8, le=MAX_TOKENS)
    """Batch sizes count examples, packed into micro-batches of at most so many tokens a GPU; null: they count rows.

    Each GPU packs its examples of a step into as few micro-batches as they need. GPUs that share sequences pack into
    this many tokens times their number. Rows are of `sequence_length` tokens."""

    overlong: Literal["split", "cut", "drop"] | None = None
    """Of examples longer than a row: "split" makes several, "cut" drops the end, "drop" the example. Null: split
    documents, drop chats."""

    answer_pattern: str | None = None
    """Regular expression whose first group is the answer, as "#### (.*)"; then exact match is measured on held-out
    chats.

    It is searched in the assistant's last turn."""

    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Part of the examples held back for the validation loss."""

    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Part held back for the test loss, after the last step."""

    seed: Seed = 1236
    """Of the choice of held-out examples."""

    workers: int | None = Field(default=None, ge=1, le=1024)
    """Processes that tokenise a large corpus; null: one per CPU core."""

    cache_dir: str | None = None
    """Of tokenised data, 4 bytes a token; null: DS_FP8_CACHE, or ~/.cache/ds_fp8."""

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_has_a_group(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"is not a valid regular expression: {error}") from None
            if groups < 1:
                raise ValueError("needs a group in parentheses around the answer")
        return pattern

    def check_named(self) -> None:
        for refusal in refusals(self, NAMED_DATA):
            raise refusal

    def check_budget(self, shared_by: int = 1) -> None:
        if self.tokens_per_gpu is not None and self.tokens_per_gpu * shared_by < self.sequence_length:
            over = f" over {shared_by} GPUs" if shared_by > 1 else ""
            raise UserError(
                f"an example of sequence_length {self.sequence_length} tokens does not fit into tokens_per_gpu "
                f"{self.tokens_per_gpu}{over}",
                key="data.tokens_per_gpu",
                remedy=f"at least {-(-self.sequence_length // shared_by)}, or a smaller sequence_length",
            )

    def each_source(self) -> list[DataConfig]:
        if self.sources is None:
            return [self]
        keys = ("path", "text_key", "messages_key")
        return [
            self.model_copy(update={"sources": None} | {k: getattr(each, k) or getattr(self, k) for k in keys})
            for each in self.sources
        ]

    def weights(self) -> list[float]:
        return [1.0] if self.sources is None else [source.weight for source in self.sources]

    @property
    def overlong_policy(self) -> Literal["split", "cut", "drop"]:
        return self.overlong or ("split" if self.format == "documents" else "drop")
