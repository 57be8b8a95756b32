"""Sources of examples: local files, or a Hugging Face dataset, read as a stream."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import fsspec

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.data.chat import MAX_CHARACTERS, MEANT, RESERVED, Chat, Message, check_text
from ds_fp8.data.config import DataConfig

ROLES = ("system", "developer", "user", "assistant", "tool")
LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
ACCESS = "make accessible what is named; the folder of Hugging Face's caches is HF_HOME"
# What to do, by words of a reader's error
REMEDIES = {
    "zstd not supported": "pip install zstandard",
    "Couldn't cast": "give all rows the same columns, with values of one kind: what is first read decides for all",
    "Permission denied": ACCESS,
    "Read-only": ACCESS,
}
# Other forms of chats: the columns that a row of it has, and those that it may have besides
FORMS = {
    "ShareGPT": (("conversations",), ("system",)),
    "prompt and completion": (("prompt", "completion"), ()),
    "Alpaca": (("instruction", "output"), ("input", "history", "system")),
}
# ShareGPT's names of roles
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
UNREAD = ("tool_defs", "functions", "function_call", "system", "system_prompt", "enable_thinking", "thinking")
UNREAD += (IMAGES := ("image", "images", "videos", "audio", "audios"))
"""Columns beside messages that would change what is learnt."""
UNREAD_KEYS = ("function_call", "train", "loss", "mask", "loss_mask", *IMAGES)  # The same of keys of a message
EMPTY = (None, "", [], {})
ELSE = 'write it as "tools", "tool_calls", "chat_template_kwargs", the first message, or "weight": 0, or leave it out'
ELSE += ": docs/configuration.md, Chats"


def read_examples(config: DataConfig) -> Iterator[str | Chat]:
    """Yield the examples of one source in order: texts for format "documents", Chats for "chat".

    Empty texts are left out. Raises UserError for a source that cannot be read and for malformed rows.
    """
    chat = config.format == "chat"
    name, key = (config.messages_key, "data.messages_key") if chat else (config.text_key, "data.text_key")
    check = _checked_chat if chat else _checked_text
    form = None
    for number, row in enumerate(_rows(config.path), 1):
        where = f"row {number} of {config.path}"
        own = _form_of(row, name) if chat or name in row else None
        form = form or own
        if own is None or own != form:
            columns = ", ".join(row)
            remedy = f"set {key} to one of: {columns}" if number == 1 else f'give it a "{name}"; it has: {columns}'
            problem = f'{where if number > 1 else config.path} has no column "{name}"'
            if form not in (None, name):
                problem, remedy = f"{where} is not {form}, as row 1 is", f"give all rows one form; it has: {columns}"
            raise UserError(problem, key=key, remedy=remedy)
        if example := check(row if own == name else _as_messages(row, own, name, where), where, config):
            yield example


def recognise(path: str, messages_key: str) -> tuple[dict[str, str], str]:
    """Return the keys of "data" with which the source at `path` is read, by its first row, and what it is in words."""
    row = next(_rows(path), None)
    if row is None:
        raise empty(path)
    if form := _form_of(row, messages_key):
        return {"format": "chat"}, f"chats ({form})"
    texts = [column for column, value in row.items() if isinstance(value, str)]
    if "text" in texts or len(texts) == 1:
        key = "text" if "text" in texts else texts[0]
        return {"format": "documents"} | ({} if key == "text" else {"text_key": key}), f"text ({key})"
    pairs = "pairs of preference, which are not trained on" if "chosen" in row else "nothing that is known"
    raise UserError(
        f"the columns of {path} are {pairs}: {', '.join(row)}",
        key="data.path",
        remedy='name the text, --set data.text_key=COLUMN, or write {"messages": [{"role": ..., "content": ...}]}',
    )


def _form_of(row: Mapping[str, Any], messages_key: str) -> str | None:
    """Return the form of chat that a row has: the column of its messages, a name of FORMS, or None."""
    if messages_key in row:
        return messages_key
    return next((form for form, (columns, _) in FORMS.items() if all(column in row for column in columns)), None)


def _as_messages(row: dict[str, Any], form: str, key: str, where: str) -> dict[str, Any]:
    """Return a row of another form with its conversation in the column `key`, and its other columns."""
    first = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    try:
        if form == "ShareGPT":
            turns = map(_turn_of_sharegpt, row["conversations"])
        elif form == "Alpaca":
            before = [
                turn for asked, said in row.get("history") or () for turn in (*_user(asked), *_assistant(said, 0))
            ]
            question = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
            turns = [*before, *_user(question), *_assistant(row["output"])]
        else:  # plain texts are turns; the turns of a prompt carry no loss
            prompt, said = row["prompt"], row["completion"]
            prompt = _user(prompt) if isinstance(prompt, str) else prompt
            prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]
            turns = [*prompt, *(_assistant(said) if isinstance(said, str) else said)]
        messages = [*first, *turns]
    except (TypeError, ValueError, LookupError, AttributeError):
        problem, remedy = f"{where} is not {form}, as its columns say", "repair it: docs/configuration.md, Chats"
        raise UserError(problem, key="data.path", remedy=remedy) from None
    return {column: value for column, value in row.items() if column not in sum(FORMS[form], ())} | {key: messages}


def _user(said: str) -> list[Message]:
    return [{"role": "user", "content": said}]


def _assistant(said: str, weight: int = 1) -> list[Message]:
    return [{"role": "assistant", "content": said} | ({} if weight else {"weight": 0})]


def _turn_of_sharegpt(said: Mapping[str, Any]) -> Message:
    if "role" in said:  # a conversation of this package's form in ShareGPT's column
        return dict(said)
    rest = {key: value for key, value in said.items() if key not in ("from", "value")}
    if said["from"] != "function_call":
        return {**rest, "role": SPEAKERS.get(said["from"], said["from"]), "content": said["value"]}
    found = json.loads(said["value"])
    calls = [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found])]
    return {**rest, "role": "assistant", "content": None, "tool_calls": calls}


def empty(path: str) -> UserError:
    return UserError(f"{path} holds no examples", key="data.path", remedy="give data that is not empty")


def source_identity(path: str) -> list[Any]:
    """Return a key of a source's content: its name, and size and time of change of local files.

    A dataset of the Hugging Face hub is known by its name alone.
    """
    local = Path(path).expanduser()
    if not local.exists():
        return [path]
    # Not hashed: hundreds of gigabytes would be read at every start.
    facts = [(file, file.stat()) for file in _files(local)]
    return [path, [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in facts]]


def _json_rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON files, one a line or all in one list: without the keys that only other rows have."""
    for file in files:
        with fsspec.open(str(file), "rt", encoding="utf-8-sig", compression=COMPRESSIONS.get(file.suffix)) as text:
            pieces = iter(partial(text.readline, MAX_CHARACTERS + 1), "")
            lines = ((number, line) for number, line in enumerate(pieces, 1) if line.strip())
            number, first = next(lines, (1, "[]"))
            kind, rows = "line", chain([(number, first)], lines)
            if first.lstrip().startswith("["):
                kind, rows = "row", enumerate(json.loads(first + text.read()), 1)
            for number, row in rows:
                try:
                    if isinstance(row, str) and len(row) > MAX_CHARACTERS:
                        raise ValueError(f"line {number} of {file.name} has more than {MAX_CHARACTERS:,} characters")
                    row = json.loads(row) if isinstance(row, str) else row
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} of {file.name}: {error.msg} at column {error.colno}") from None
                except RecursionError:
                    raise ValueError(f"line {number} of {file.name} is nested too deep") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{kind} {number} of {file.name} is of type {type(row).__name__} and no object")
                yield row


def _rows(path: str) -> Iterator[dict[str, Any]]:
    # Only the reading is explained: an error of the caller, between two rows, is not the source's.
    with _explained(path):
        local, options = Path(path).expanduser(), {}
        name, _, subset = path.partition(":")
        if local.exists():
            files = _files(local)
            # A file without a byte has no schema, and another's examples do not depend on it.
            name, subset, files = LOADERS[_ending(files[0])], "", [file for file in files if file.stat().st_size]
            if not files:
                raise empty(path)
            if name == "json":
                yield from _json_rows(files)
                return
            # Escaped: datasets takes names for patterns, and "part[1].jsonl" would match no file, or another.
            options = {"data_files": [glob.escape(str(file)) for file in files]}
            # A blank line parts documents in a text file; by lines, the default, each line would be one.
            options |= {"sample_by": "paragraph"} if name == "text" else {}
        # What looks like a path is not asked for on the hub: the error should be about the file.
        elif _ending(local) in LOADERS or path.startswith(("/", "./", "../", "~")):
            raise UserError(f"{path} does not exist", key="data.path", remedy="give the path of existing data")
        # Streamed: nothing is converted or cached.
        for row in datasets.load_dataset(name, subset or None, split="train", streaming=True, **options):
            # A table gives every message, tool and call all keys that any of them has: without nulls.
            yield {column: _without_none(value) for column, value in row.items()}


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn errors of opening or reading the data at `path` into a UserError."""
    try:
        yield
    except UserError:
        raise
    except StopIteration:  # how datasets greets a .json file without a row
        raise empty(path) from None
    except Exception as error:  # every decompressor and parser fails in its own way at damaged data
        reason, local = first_line(error.__cause__ or error), Path(path).expanduser()
        if isinstance(error, MemoryError):
            problem, remedy = f"a row of {path} does not fit into memory", "give shorter rows, one a line"
        elif local.exists():
            problem = f"{path} cannot be read as {LOADERS[_ending(_files(local)[0])]} data ({reason})"
            remedy = next((remedy for words, remedy in REMEDIES.items() if words in reason), "repair the file")
        else:
            problem = f"{path} is neither a local file nor a Hugging Face dataset that can be reached ({reason})"
            remedy = 'give an existing file, or a datasets name ("owner/name" or "owner/name:subset")'
        raise UserError(problem, key="data.path", remedy=remedy) from None


def _ending(file: Path) -> str:
    return file.with_suffix("").suffix if file.suffix in COMPRESSIONS else file.suffix


def _files(local: Path) -> list[Path]:
    files = [local] if local.is_file() else sorted(file for file in _inside(local) if _ending(file) in LOADERS)
    endings = sorted({_ending(file) for file in files})
    known = ", ".join(LOADERS)
    if not files:
        raise UserError(f"the folder {local} holds no {known} file", key="data.path", remedy=f"give {known} files")
    if not set(endings) <= set(LOADERS):
        raise UserError(f"{local} has no known file type", key="data.path", remedy=f"give one of {known}")
    if len({LOADERS[ending] for ending in endings}) > 1:
        raise UserError(
            f"the folder {local} mixes {', '.join(endings)} files", key="data.path", remedy="keep one kind in a folder"
        )
    return files


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, in those inside it, and in those that links in it lead to; of each folder once."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link back, or a second one
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(parent, name) for name in names)


def _checked_text(row: dict[str, Any], where: str, config: DataConfig) -> str:
    text = row[config.text_key]
    if text is None or (isinstance(text, str) and not text.strip()):
        return ""
    if not isinstance(text, str):
        raise UserError(
            f'"{config.text_key}" of {where} is not text but {type(text).__name__}',
            key="data.text_key",
            remedy="name the column that holds the text",
        )
    check_text(text, where)
    return text


def _checked_chat(row: dict[str, Any], where: str, config: DataConfig) -> Chat:
    def malformed(problem: str, column: str = config.messages_key, remedy: str = "") -> UserError:
        form = f'give a list of {{"role": ..., "content": text}}, roles {", ".join(ROLES)}, with an assistant turn'
        return UserError(f'"{column}" of {where} {problem}', key="data.path", remedy=remedy or form)

    if column := next((column for column in UNREAD if row.get(column) not in EMPTY), None):
        raise malformed("is not read", column, ELSE)
    given = {}
    for column in ("tools", "documents", "chat_template_kwargs"):
        value = row.get(column)
        with suppress(ValueError, RecursionError):  # text that is no JSON remains text, and is refused
            value = json.loads(value or "null") if isinstance(value, str) else value
        if value is not None and not _are_objects([value] if column == "chat_template_kwargs" else value):
            raise malformed("is no object", column, "give a list of objects, one object for the template's variables")
        given[column] = value
    variables = given.pop("chat_template_kwargs") or {}
    if own := sorted(RESERVED & variables.keys()):
        raise malformed(f'has "{own[0]}", which is no variable of a template', "chat_template_kwargs", "leave it out")
    arguments = {column: value for column, value in given.items() if value is not None} | variables
    return Chat(_checked_messages(row[config.messages_key], malformed), arguments, where)


def _checked_messages(messages: Any, malformed: Callable[..., UserError]) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise malformed("is not a list of messages")
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise malformed('has a message without "role" and "content"')
        if message["role"] not in ROLES:
            raise malformed(f'has the unknown role "{message["role"]}"')
        # Nulls inside calls of tools are their own.
        message = {key: value for key, value in message.items() if value is not None}
        if key := next((key for key in UNREAD_KEYS if message.get(key) not in EMPTY), None):
            raise malformed(f'has a message with "{key}", which is not read', remedy=ELSE)
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise malformed('has a message without "content" and without "tool_calls"')
        parts = content if isinstance(content, list) else []
        is_text = all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
        if not isinstance(content, str | list | None) or not is_text:
            raise malformed("has a content that is neither text nor a list of text parts")
        if not _are_objects(message.get("tool_calls", [])):
            raise malformed('has "tool_calls" that are no list of objects, each with an object as "function"')
        if message.get("weight", 1) not in (0, 1):
            raise malformed(f'has the "weight" {message["weight"]}, which is neither 0 nor 1')
        checked.append({**message, "content": content})
    spoken = [message for message in checked if message["role"] == "assistant"]
    if not any(message.get(key) for message in spoken for key in ("content", "tool_calls", *MEANT)):
        raise malformed("has no assistant turn" if not spoken else "has no word of the assistant")
    return checked


def _are_objects(values: Any) -> bool:
    """Return whether tools, calls of them and the like are a list of objects, with objects as functions."""
    return isinstance(values, list) and all(
        isinstance(each, Mapping) and isinstance(each.get("function") or {}, Mapping) for each in values
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
