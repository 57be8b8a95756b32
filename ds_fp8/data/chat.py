"""Conversations as tokens, with the loss on the assistant's turns only."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ds_fp8.errors import UserError

IGNORED = -100
"""Label of a token that carries no loss, as in Hugging Face and torch's cross entropy."""

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and its labels, both of the same length.

    A label is the token id itself inside an assistant turn, its end-of-turn token included, and -100 elsewhere.
    Raises UserError when the tokenizer's template renders a turn differently once another follows it.
    """
    return tokenize_chats(tokenizer, [messages])[0]


def tokenize_chats(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, Any]]]
) -> list[tuple[list[int], list[int]]]:
    """`tokenize_chat` of many conversations at once, which is several times faster."""
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()):
        encoded = tokenizer.apply_chat_template(
            conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return [
            (ids, [token if kept else IGNORED for token, kept in zip(ids, mask, strict=True)])
            for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        ]
    return [_tokenize_by_prefixes(tokenizer, messages) for messages in conversations]


def _tokenize_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """An assistant turn is what the conversation up to it has more than the prompt for it."""

    def encode(count: int, prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=True, return_dict=True, add_generation_prompt=prompt
        )["input_ids"]

    ids = encode(len(messages), prompt=False)
    labels = [IGNORED] * len(ids)
    special = set(tokenizer.all_special_ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = encode(index, prompt=True), encode(index + 1, prompt=False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise UserError(
                f"the chat template of this tokenizer rewrites turn {index + 1} when the conversation goes on",
                key="data.tokenizer",
                remedy="use a chat template that marks the assistant's words with {% generation %}",
            )
        # What a template writes after the end-of-turn token (ChatML: a line break) is not the model's to say.
        ends = [place for place in range(len(before), len(after)) if after[place] in special]
        stop = ends[-1] + 1 if ends else len(after)
        labels[len(before) : stop] = ids[len(before) : stop]
    return ids, labels
