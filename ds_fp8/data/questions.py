"""Held-out questions with known answers, for the exact match of what a model generates."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_fp8.data.chat import template_explained
from ds_fp8.data.config import DataConfig
from ds_fp8.data.synthetic import ANSWER_PATTERN, chat_prompt, document_prompt, problems
from ds_fp8.data.token_store import NO_LOSS, TokenStore
from ds_fp8.data.tokenizer import encode_prompts

MOST = 400
"""Questions that are collected; `train.exact_match_problems` says how many of them are asked."""


@dataclass(frozen=True)
class Question:
    """A prompt to be continued, and what must be found in the continuation."""

    prompt: tuple[int, ...]
    """Token ids."""
    answer: str


def extract_answer(pattern: str, text: str) -> str | None:
    """Return the first group of the first match of `pattern` in `text`, None without a match."""
    found = re.search(pattern, text)
    return found.group(1).strip() if found else None


def answer_pattern(config: DataConfig) -> str | None:
    """Return the pattern of answers: `data.answer_pattern`, or that of the built-in corpus."""
    return config.answer_pattern or (ANSWER_PATTERN if config.path == "synthetic" else None)


def synthetic_questions(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """Return questions of the built-in corpus whose like is nowhere in its training examples."""
    asked = problems("test", config.seed, MOST, config.difficulty)
    if config.format == "chat":
        with template_explained():
            prompts = tokenizer.apply_chat_template(
                [chat_prompt(problem) for problem in asked], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
    else:
        prompts = encode_prompts(tokenizer, list(map(document_prompt, asked)), config.add_bos)
    return [Question(tuple(ids), problem.answer) for ids, problem in zip(prompts, asked, strict=True)]


def held_out_questions(
    store: TokenStore, held_out: np.ndarray, pattern: str, tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[Question]:
    """Return the last assistant turns of held-out chats in which `pattern` finds an answer.

    All before the answer is its prompt.

    Prompts of `longest` tokens or more are left out.
    """
    questions: list[Question] = []
    for example in held_out.tolist():
        tokens = store[example]
        spoken = np.flatnonzero(tokens < NO_LOSS)
        if not len(spoken):
            continue
        # Runs of tokens with loss are the assistant's turns; the last run is the last turn.
        breaks = np.flatnonzero(np.diff(spoken) > 1)
        start, stop = int(spoken[breaks[-1] + 1] if len(breaks) else spoken[0]), int(spoken[-1]) + 1
        answer = extract_answer(pattern, tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=True))
        # Without a prompt there is nothing to continue; a longer one was never seen in training.
        if answer is not None and 0 < start < longest:
            questions.append(Question(tuple((tokens[:start] & ~NO_LOSS).tolist()), answer))
        if len(questions) == MOST:
            break
    return questions
