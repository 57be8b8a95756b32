"""Conversations as tokens, with the loss on the assistant's turns only."""

from __future__ import annotations

import inspect
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_fp8.config.errors import UserError, clipped

IGNORED = -100  # Label of a token that carries no loss, as in Hugging Face and torch's cross entropy
# One turn, as OpenAI's: "role", "content" (text, or a list of text parts; None beside "tool_calls"), and "weight" 0 for
# a turn without loss
Message = dict[str, Any]

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
# Keys of a message that hold words of it: a template that reads none of them would leave these out
MEANT = ("reasoning_content", "reasoning", "thinking", "refusal", "citations")
# Names that are no variables of templates, or not those of "chat_template_kwargs"
RESERVED = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
MAX_CHARACTERS = 1 << 26  # Most of an example: some 2^24 tokens, which is the longest row
SECONDS = 10.0  # Processor time of one rendering, or of one search for an answer


class Chat(NamedTuple):
    """A conversation as a file has it."""

    messages: list[Message]
    # What the template gets beside them: "tools", "documents", and what the row's "chat_template_kwargs" name
    arguments: Mapping[str, Any] = {}
    where: str = "a trial"  # Its row and file


class Tokenized(NamedTuple):
    """A conversation as tokens."""

    ids: list[int]
    labels: list[int]  # The token itself inside an assistant turn, its end included, and IGNORED elsewhere
    ends: bool  # Whether the end of the last turn, where that is the assistant's, carries loss


def stop_tokens(tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """Return the ids of the tokens that end an answer: for chats the one that closes a turn, and the end of text."""
    stops = [tokenizer.eos_token_id]
    if chat:
        # Found out by trial: a template does not name the token that closes a turn. It is the last that carries loss,
        # whatever is answered; where a template closes no turn the last token is the answer's own.
        trials = [Chat([{"role": "user", "content": "1"}, {"role": "assistant", "content": answer}]) for answer in "23"]
        one, two = ([n for n in chat.labels if n != IGNORED][-1:] for chat in tokenize_chats(tokenizer, trials))
        stops = (one if one == two else []) + stops
    return list(dict.fromkeys(stops))


def tokenize_chats(tokenizer: PreTrainedTokenizerBase, conversations: list[Chat]) -> list[Tokenized]:
    """Tokenize conversations at once, which is several times faster than one by one.

    Raises UserError, with the row, for one that the template cannot render, or of which it would leave words out.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "the loss on assistant turns needs the offsets of tokens, which this tokenizer does not return",
            key="data.tokenizer",
            remedy="use a tokenizer that has a tokenizer.json",
        )
    rendered = [_text_and_turns(tokenizer, chat) for chat in conversations]
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
        last = conversations[index].messages[-1]
        is_judged = last["role"] == "assistant" and last.get("weight", 1)
        ends = not is_judged or (learnt.any() and stops[learnt].max() >= len(text.rstrip()))
        found.append(Tokenized(ids, np.where(learnt, ids, IGNORED).tolist(), bool(ends)))
    return found


def check_text(text: str, where: str) -> None:
    """Raise UserError for a text that cannot be made tokens of."""
    problem = f"has {len(text):,} characters, {MAX_CHARACTERS:,} are allowed" if len(text) > MAX_CHARACTERS else ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"has half a surrogate pair, {text[error.start]!a}, which is no character"
    if problem:
        raise UserError(f"{where} {problem}", key="data.path", remedy="repair or split this row, or leave it out")


# The text of a conversation, and where in it the assistant's words begin and end
Turns = tuple[str, list[tuple[int, int]]]
# Takes messages, and whether the prompt for the next turn follows them; of turns it finds those that are marked
Render = Callable[..., Turns]


def _text_and_turns(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> Turns:
    tools = chat.arguments.get("tools")
    try:
        with template_explained():
            template = tokenizer.get_chat_template(None, tools)
        messages = [_as_read(tokenizer, template, message) for message in chat.messages]
        spoken = _marked_turns if _is_marked(template) else _turns_by_prefixes
        text, turns = spoken(partial(_render, tokenizer, template, chat.arguments), messages)
        given = {name for name, value in chat.arguments.items() if value not in (None, [], {})}
        given |= {key for message in messages for key in MEANT if message.get(key)}
        unread = [name for name in sorted(given) if not re.search(rf"\b{re.escape(name)}\b", template)]
        names = [str((tool.get("function") or tool).get("name", "")) for tool in tools or []]
        if unread := unread + [f'"{name}" of tools' for name in names if name not in text]:
            raise UserError(
                f"{_named(template)} leaves out {unread[0]}",
                key="data.chat_template",
                remedy="give a template that renders it, or rows without it",
            )
    except UserError as error:
        raise UserError(f"{chat.where}: {error.problem}", key=error.key, remedy=error.remedy) from None
    check_text(text, chat.where)
    return text, turns


def _named(template: str) -> str:
    is_ours = template == CHATML_TEMPLATE
    return "ChatML, taken where the tokenizer has no chat template," if is_ours else "the chat template"


def _marked_turns(render: Render, messages: list[Message]) -> Turns:
    """Find assistant turns by the marks of the template."""
    text, turns = render(messages)
    silent = [index for index, message in enumerate(messages) if not message.get("weight", 1)]
    # Marks are counted, since a turn may have several of them, or none.
    marks = {index: len(render(messages[:index])[1]) if index else 0 for n in silent for index in (n, n + 1)}
    gone = {mark for index in silent for mark in range(marks[index], marks[index + 1])}
    return text, [turn for mark, turn in enumerate(turns) if mark not in gone]


def _turns_by_prefixes(render: Render, messages: list[Message]) -> Turns:
    """Find assistant turns: one is the text that the conversation up to it has more than the prompt for it."""
    text, turns, close = render(messages)[0], [], None
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("weight", 1):
            continue
        if index == 0:
            raise UserError(
                "a conversation begins with an assistant turn, whose first word the chat template does not show",
                key="data.tokenizer",
                remedy="begin with a user turn, or use a chat template that has {% generation %}",
            )
        before, after = render(messages[:index], prompt=True)[0], render(messages[: index + 1])[0]
        # Templates that drop earlier reasoning or change the last turn do not render prefixes of the conversation.
        if not (after.startswith(before) and text.startswith(after)):
            how = "when the conversation goes on"
            if not after.startswith(before):  # R1's opens thoughts, and keeps none of them in a turn
                how = f"that its own prompt begins, which ends in {before[-40:]!r}"
            raise UserError(
                f"the chat template of this tokenizer rewrites turn {index + 1} {how}",
                key="data.tokenizer",
                remedy="use a chat template that marks the assistant's words with {% generation %}",
            )
        if close is None:
            # What the template writes behind any answer: the common end of two.
            said = ([*messages[:index], {"role": "assistant", "content": answer}] for answer in ("2", "3"))
            one, two = (render(each)[0] for each in said)
            same = next((n for n, (a, b) in enumerate(zip(one[::-1], two[::-1], strict=False)) if a != b), 0)
            close = one[len(one) - same :]
        # White space that a template writes behind what closes a turn (ChatML: a line break) is not the model's to
        # say. All else is: also a close that no special token is part of, and white space that closes a turn alone.
        extra = len(close) - len(close.rstrip()) if close.strip() and after.endswith(close) else 0
        turns.append((len(before), len(after) - extra))
    return text, turns


def _render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    arguments: Mapping[str, Any],
    messages: list[Message],
    prompt: bool = False,
) -> Turns:
    # Not by apply_chat_template's own mask: where a turn begins with a character of which the tokenizer makes no token,
    # as sentencepiece with spaces, it has neither this turn nor those after it.
    with template_explained():
        texts, turns = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=_is_marked(template),
            **{**tokenizer.special_tokens_map, **arguments},
        )
    return texts[0], turns[0] if turns else []


@lru_cache(maxsize=8)
def _is_marked(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _as_read(tokenizer: PreTrainedTokenizerBase, template: str, message: Message) -> Message:
    if isinstance(message["content"], list) and not _takes_parts(tokenizer, template):
        # Joined as vLLM joins them for templates that take text.
        message = {**message, "content": "\n".join(str(part.get("text", "")) for part in message["content"])}
    return _call(message, *_form_of_calls(tokenizer, template)) if message.get("tool_calls") else message


@lru_cache(maxsize=8)
def _takes_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the template makes text of a list of text parts, in which others see no text or Python's list."""
    parts = [{"type": "text", "text": text} for text in ("part-1", "part-2")]
    try:
        text, _ = _render(tokenizer, template, {}, [{"role": role, "content": parts} for role in ("user", "assistant")])
    except UserError:
        return False
    return text.count("part-1") == text.count("part-2") == 2 and "'text'" not in text


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
        except (ValueError, RecursionError):
            pass  # no JSON, or none that can be read: the template gets what the data has
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls, "content": content if message["content"] is None else message["content"]}


@lru_cache(maxsize=8)
def _form_of_calls(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str | None, type]:
    """Return the content beside calls, and the type of their arguments, that the template makes text of.

    Templates disagree: DeepSeek's ask for the content None and arguments as JSON, Qwen's for objects, and some write
    out "None". OpenAI's files have null and JSON.
    """
    failed = []
    for form, content in product((dict, str), (None, "")):
        function = {"name": "named_tool", "arguments": {"argument": 1}}
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        call["tool_calls"][0]["id"] = "callabcde"  # nine letters, as Mistral's templates demand
        try:
            text, _ = _render(tokenizer, template, {}, [{"role": "user", "content": "1"}, _call(call, content, form)])
        except UserError as error:
            failed.append(error)
            continue
        if "named_tool" in text and "argument" in text and "None" not in text and '\\"' not in text:
            return content, form
    if len(failed) == 4:
        raise failed[-1]
    raise UserError(
        f"the data has calls of tools, which {_named(template)} leaves out or cannot render",
        key="data.chat_template",
        remedy="give a template that renders tool_calls, or data without them",
    )


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise TimeoutError in a block that takes more than SECONDS of processor time. In the main thread alone.

    Threads get no signals, and only a signal stops a regular expression or the power of large numbers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end after {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    # And again: where an error ends Jinja's folding of constants, it computes them when it renders.
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


@contextmanager
def template_explained() -> Iterator[None]:
    """Turn what a chat template raises, a program in a sandbox that may raise anything, into a UserError."""
    try:
        with time_limit():
            yield
    except Exception as error:
        raise UserError(
            f"the chat template fails: {clipped(str(error).strip() or 'no reason')} ({type(error).__name__})",
            key="data.chat_template",
            remedy='correct the template, or give another: "chatml", or a file',
        ) from None
