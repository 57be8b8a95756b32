"""Conversations as tokens, with the loss on the assistant's turns only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_fp8.config.errors import UserError, clipped

IGNORED = -100
"""Label of a token that carries no loss, as in Hugging Face and torch's cross entropy."""
Message = dict[str, Any]
"""One turn, as OpenAI's: "role", "content" (text; None beside "tool_calls"), and "weight" 0 for a turn without loss."""

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


class Tokenized(NamedTuple):
    """A conversation as tokens."""

    ids: list[int]
    labels: list[int]
    """The token itself inside an assistant turn, its end included, and IGNORED elsewhere."""
    ends: bool
    """Whether the end of the last turn, where that is the assistant's, carries loss."""


def stop_tokens(tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """Return the ids of the tokens that end an answer: for chats the one that closes a turn, and the end of text."""
    stops = [tokenizer.eos_token_id]
    if chat:
        # Found out by trial: a template does not name the token that closes a turn. It is the last that carries loss,
        # whatever is answered; where a template closes no turn the last token is the answer's own.
        trials = [[{"role": "user", "content": "1"}, {"role": "assistant", "content": answer}] for answer in "23"]
        one, two = ([n for n in chat.labels if n != IGNORED][-1:] for chat in tokenize_chats(tokenizer, trials))
        stops = (one if one == two else []) + stops
    return list(dict.fromkeys(stops))


def tokenize_chats(tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]]) -> list[Tokenized]:
    """Tokenize conversations at once, which is several times faster than one by one."""
    if not tokenizer.is_fast:
        raise UserError(
            "the loss on assistant turns needs the offsets of tokens, which this tokenizer does not return",
            key="data.tokenizer",
            remedy="use a tokenizer that has a tokenizer.json",
        )
    conversations = _with_calls(tokenizer, conversations)
    marks = re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template())
    spoken = _marked_turns if marks else _turns_by_prefixes
    rendered = [spoken(tokenizer, messages) for messages in conversations]
    texts = [text for text, _ in rendered]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True) if texts else None
    found = []
    for index, (text, turns) in enumerate(rendered):
        ids = encoded["input_ids"][index]
        starts, stops = np.array(encoded["offset_mapping"][index], dtype=np.int64).reshape(-1, 2).T
        learnt = np.zeros(len(ids), dtype=bool)
        for start, stop in turns:
            # A token that begins before the turn and reaches into it (a space and the first word) belongs to it.
            learnt |= (stops > start) & (starts < stop)
        last = conversations[index][-1]
        is_judged = last["role"] == "assistant" and _weight(last)
        ends = not is_judged or (learnt.any() and stops[learnt].max() >= len(text.rstrip()))
        found.append(Tokenized(ids, np.where(learnt, ids, IGNORED).tolist(), bool(ends)))
    return found


Turns = tuple[str, list[tuple[int, int]]]
"""The text of a conversation, and where in it the assistant's words begin and end."""


def _marked_turns(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Turns:
    """Find assistant turns by the marks of the template."""

    # Not by apply_chat_template's own mask: where a turn begins with a character of which the tokenizer makes no token,
    # as sentencepiece with spaces, it has neither this turn nor those after it.
    def render(count: int) -> Turns:
        with template_explained():
            texts, turns = render_jinja_template(
                conversations=[messages[:count]],
                chat_template=tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
        return texts[0], turns[0]

    text, turns = render(len(messages))
    silent = [index for index, message in enumerate(messages) if not _weight(message)]
    # Marks are counted, since a turn may have several of them, or none.
    gone = {
        mark for index in silent for mark in range(len(render(index)[1]) if index else 0, len(render(index + 1)[1]))
    }
    return text, [turn for mark, turn in enumerate(turns) if mark not in gone]


def _turns_by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Turns:
    """Find assistant turns: one is the text that the conversation up to it has more than the prompt for it."""
    text, turns, close = _render(tokenizer, messages), [], None
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not _weight(message):
            continue
        if index == 0:
            raise UserError(
                "a conversation begins with an assistant turn, whose first word the chat template does not show",
                key="data.tokenizer",
                remedy="begin with a user turn, or use a chat template that has {% generation %}",
            )
        before, after = _render(tokenizer, messages[:index], prompt=True), _render(tokenizer, messages[: index + 1])
        # Templates that drop earlier reasoning or change the last turn do not render prefixes of the conversation.
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"the chat template of this tokenizer rewrites turn {index + 1} when the conversation goes on",
                key="data.tokenizer",
                remedy="use a chat template that marks the assistant's words with {% generation %}",
            )
        if close is None:
            close = _close_of_a_turn(tokenizer, messages[:index])
        # White space that a template writes behind what closes a turn (ChatML: a line break) is not the model's to
        # say. All else is: also a close that no special token is part of, and white space that closes a turn alone.
        extra = len(close) - len(close.rstrip()) if close.strip() and after.endswith(close) else 0
        turns.append((len(before), len(after) - extra))
    return text, turns


def _close_of_a_turn(tokenizer: PreTrainedTokenizerBase, before: list[Message]) -> str:
    """Return what the template writes behind any answer: the common end of two."""
    one, two = (_render(tokenizer, [*before, {"role": "assistant", "content": answer}]) for answer in ("2", "3"))
    same = next((n for n, (a, b) in enumerate(zip(reversed(one), reversed(two), strict=False)) if a != b), 0)
    return one[len(one) - same :]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: bool = False) -> str:
    with template_explained():
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def _weight(message: Message) -> bool:
    return bool(message.get("weight", 1))


def _with_calls(tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]]) -> list[list[Message]]:
    if not any("tool_calls" in message for messages in conversations for message in messages):
        return conversations
    content, form = _form_of_calls(tokenizer)
    return [
        [_call(message, content, form) if "tool_calls" in message else message for message in messages]
        for messages in conversations
    ]


def _call(message: Message, content: str | None, form: type) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        try:
            if form is dict and isinstance(arguments, str):
                function["arguments"] = json.loads(arguments)
            elif form is str and isinstance(arguments, dict):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        except ValueError:
            pass  # no JSON: the template gets what the data has
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls, "content": content if message["content"] is None else message["content"]}


def _form_of_calls(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, type]:
    """Return the content beside calls, and the type of their arguments, that the template makes text of.

    Templates disagree: DeepSeek's ask for the content None and arguments as JSON, Qwen's for objects, and some write
    out "None". OpenAI's files have null and JSON.
    """
    for form, content in product((dict, str), (None, "")):
        function = {"name": "named_tool", "arguments": {"argument": 1}}
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        call["tool_calls"][0]["id"] = "callabcde"  # nine letters, as Mistral's templates demand
        try:
            text = _render(tokenizer, [{"role": "user", "content": "1"}, _call(call, content, form)])
        except UserError:
            continue
        if "named_tool" in text and "argument" in text and "None" not in text and '\\"' not in text:
            return content, form
    raise UserError(
        "the data has calls of tools, which the chat template leaves out or cannot render",
        key="data.chat_template",
        remedy="give a template that renders tool_calls, or data without them",
    )


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
