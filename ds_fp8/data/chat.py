"""Conversations as tokens, with the loss on the assistant's turns only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_fp8.config.errors import UserError, clipped

IGNORED = -100
"""Label of a token that carries no loss, as in Hugging Face and torch's cross entropy."""

Message = dict[str, Any]
"""One turn: {"role": ..., "content": ...}."""

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


def stop_tokens(tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """Return the ids of the tokens that end an answer: for chats the one that closes a turn, and the end of text.

    Args:
        tokenizer: for chats one with a chat template.
        chat: whether the model answers in turns of a chat.
    """
    stops = [tokenizer.eos_token_id]
    if chat:
        # Found out by trial: a template does not name the token that closes a turn. It is the last that carries loss,
        # whatever is answered; where a template closes no turn the last token is the answer's own.
        last = [_learnt(tokenizer, answer)[-1:] for answer in ("2", "3")]
        stops = (last[0] if last[0] == last[1] else []) + stops
    return list(dict.fromkeys(stops))


def _learnt(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """Return the tokens that carry loss of a chat with this answer."""
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": answer}]
    return [label for label in tokenize_chat(tokenizer, turns)[1] if label != IGNORED]


def tokenize_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Return token ids of a conversation and its labels, both of the same length.

    A label is the token id itself inside an assistant turn, its end-of-turn token included, and -100 elsewhere.

    Raises:
        UserError: With the key data.tokenizer: the tokenizer cannot tell where in the text its tokens are, or its
            template has no {% generation %} mark and renders a turn differently once another follows it.
    """
    return tokenize_chats(tokenizer, [messages])[0]


def tokenize_chats(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]]
) -> list[tuple[list[int], list[int]]]:
    """Return `tokenize_chat` of many conversations at once, which is several times faster."""
    if not tokenizer.is_fast:
        raise UserError(
            "the loss on assistant turns needs the offsets of tokens, which this tokenizer does not return",
            key="data.tokenizer",
            remedy="use a tokenizer that has a tokenizer.json",
        )
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()):
        return _tokenize_marked(tokenizer, conversations)
    return [_tokenize_by_prefixes(tokenizer, messages) for messages in conversations]


def _tokenize_marked(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]]
) -> list[tuple[list[int], list[int]]]:
    """Find assistant turns by the marks of the template; a token that reaches into one belongs to it."""
    # Not by apply_chat_template's own mask: where a turn begins with a character of which the tokenizer makes no token,
    # as sentencepiece with spaces, it has neither this turn nor those after it.
    with template_explained():
        texts, turns = render_jinja_template(
            conversations=conversations,
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    found = []
    for ids, offsets, spans in zip(encoded["input_ids"], encoded["offset_mapping"], turns, strict=True):
        starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        spoken = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            spoken |= (stops > start) & (starts < stop)
        found.append((ids, np.where(spoken, ids, IGNORED).tolist()))
    return found


@contextmanager
def template_explained() -> Iterator[None]:
    """Turn what a chat template raises, a program in a sandbox that may raise anything, into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"the chat template fails at a conversation: {clipped(str(error).strip() or 'no reason')} "
            f"({type(error).__name__})",
            key="data.chat_template",
            remedy='correct the template, or give another: "chatml", or a file',
        ) from None


def _tokenize_by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Find assistant turns: one is the text that the conversation up to it has more than the prompt for it."""

    def render(count: int, prompt: bool) -> str:
        with template_explained():
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    text = render(len(messages), prompt=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    labels = [IGNORED] * len(ids)
    special = set(tokenizer.all_special_ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise UserError(
                "a conversation begins with an assistant turn, whose first word the chat template does not show",
                key="data.tokenizer",
                remedy="begin with a user turn, or use a chat template that has {% generation %}",
            )
        before, after = render(index, prompt=True), render(index + 1, prompt=False)
        # Templates that drop earlier reasoning or change the last turn do not render prefixes of the conversation.
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"the chat template of this tokenizer rewrites turn {index + 1} when the conversation goes on",
                key="data.tokenizer",
                remedy="use a chat template that marks the assistant's words with {% generation %}",
            )
        # A token that begins before the turn and reaches into it (a space and the first word) belongs to it.
        turn = [place for place, (start, stop) in enumerate(offsets) if stop > len(before) and start < len(after)]
        # What a template writes after the end-of-turn token (ChatML: a line break) is not the model's to say.
        while turn and ids[turn[-1]] not in special and special.intersection(ids[place] for place in turn):
            turn.pop()
        for place in turn:
            labels[place] = ids[place]
    return ids, labels
