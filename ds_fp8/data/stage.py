"""All the data of one stage: from its configuration to packed training and validation rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_fp8.data.chat import tokenize_chats
from ds_fp8.data.config import DataConfig
from ds_fp8.data.packing import Example, PackedDataset, pack
from ds_fp8.data.sources import read_examples
from ds_fp8.data.synthetic import Problem, problems
from ds_fp8.data.tokenizer import encode_documents
from ds_fp8.errors import UserError

HELD_OUT_PROBLEMS = 400
TOKENIZER_BATCH = 1000


@dataclass(frozen=True)
class StageData:
    """What a stage trains and is measured on."""

    train: PackedDataset
    validation: PackedDataset
    problems: list[Problem]
    """Held-out problems to generate answers for; empty unless the data is the built-in corpus."""
    report: dict[str, Any]
    """For "train" and "validation": the number of examples, tokens, rows and dropped examples."""


def build_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> StageData:
    """Read, split, tokenise and pack what `config` names. Deterministic, so that every rank may do it for itself.

    Raises UserError for data that is missing, malformed, or too little to hold back a validation example.
    """
    examples = read_examples(config, Path(cache_dir))
    if len(examples) < 2:
        raise UserError(
            f"{config.path} holds one example, and one more is needed for validation",
            key="data.path",
            remedy="give at least two examples; in a .txt file a blank line parts two documents",
        )
    order = np.random.default_rng(config.seed).permutation(len(examples))
    held_back = min(max(1, round(len(examples) * config.validation_fraction)), len(examples) - 1)
    parts = {"train": order[held_back:], "validation": order[:held_back]}
    packed, report = {}, {}
    for name, chosen in parts.items():
        tokenised = _tokenise([examples[index] for index in chosen], config, tokenizer)
        overlong = "split" if config.format == "documents" else "drop"
        packed[name] = pack(tokenised, config.sequence_length, tokenizer.pad_token_id, overlong)
        report[name] = {
            "examples": len(chosen),
            "tokens": packed[name].tokens,
            "rows": len(packed[name]),
            "dropped": packed[name].dropped,
        }
    synthetic = config.path == "synthetic"
    held_out = problems("test", config.seed, HELD_OUT_PROBLEMS, config.difficulty) if synthetic else []
    return StageData(packed["train"], packed["validation"], held_out, report)


def _tokenise(examples: Sequence, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    for start in range(0, len(examples), TOKENIZER_BATCH):
        batch = examples[start : start + TOKENIZER_BATCH]
        if config.format == "chat":
            yield from tokenize_chats(tokenizer, batch)
        else:
            yield from ((ids, ids) for ids in encode_documents(tokenizer, batch))
