"""Where examples come from: the built-in corpus, local files, or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets

from ds_fp8.data.config import DataConfig
from ds_fp8.data.synthetic import conversations, documents
from ds_fp8.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_examples(config: DataConfig, cache_dir: Path) -> list[str] | list[list[dict[str, Any]]]:
    """All examples that `config` names: texts for format "documents", lists of messages for "chat".

    Empty texts are left out. Raises UserError when nothing is left, the files cannot be read, the column is missing or
    a conversation is malformed.
    """
    if config.path == "synthetic":
        generate = documents if config.format == "documents" else conversations
        return list(generate("train", config.seed, config.examples, config.difficulty))
    table = _load(config.path, cache_dir / "datasets")
    if config.format == "documents":
        texts = _column(table, config.text_key, "data.text_key", config.path)
        examples = [_checked_text(text, row, config) for row, text in enumerate(texts)]
        examples = [text for text in examples if text]
    else:
        rows = _column(table, config.messages_key, "data.messages_key", config.path)
        examples = [_checked_messages(messages, row, config) for row, messages in enumerate(rows)]
    if not examples:
        raise _empty(config.path)
    return examples


def _empty(path: str) -> UserError:
    return UserError(f"{path} holds no examples", key="data.path", remedy="give data that is not empty")


def _load(path: str, cache_dir: Path) -> datasets.Dataset:
    local = Path(path).expanduser()
    if local.exists():
        files = _files(local)
        options = {"sample_by": "paragraph"} if files[0].suffix == ".txt" else {}
        name, subset, options = LOADERS[files[0].suffix], None, {"data_files": list(map(str, files)), **options}
    elif local.suffix in LOADERS or path.startswith(("/", "./", "../", "~")):
        raise UserError(f"no file or folder {path}", key="data.path", remedy="give the path of existing data")
    else:
        name, _, subset = path.partition(":")
        options = {}
    try:
        return datasets.load_dataset(name, subset or None, split="train", cache_dir=str(cache_dir), **options)
    except StopIteration:  # how datasets greets a .json file without a row
        raise _empty(path) from None
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        if local.exists():
            raise UserError(
                f"{path} cannot be read as {name} data ({reason})", key="data.path", remedy="mend the file"
            ) from None
        raise UserError(
            f"{path} is neither a local file nor a Hugging Face dataset that can be reached ({reason})",
            key="data.path",
            remedy='give an existing file, a datasets name ("owner/name" or "owner/name:subset"), or "synthetic"',
        ) from None


def _files(local: Path) -> list[Path]:
    """The data files at `local`, all of one kind."""
    files = [local] if local.is_file() else sorted(file for file in local.rglob("*") if file.suffix in LOADERS)
    endings = sorted({file.suffix for file in files})
    known = ", ".join(LOADERS)
    if not files:
        raise UserError(f"the folder {local} holds no {known} file", key="data.path", remedy=f"give {known} files")
    if not set(endings) <= set(LOADERS):
        raise UserError(f"{local} is of no known kind", key="data.path", remedy=f"give one of {known}")
    if len({LOADERS[ending] for ending in endings}) > 1:
        raise UserError(
            f"the folder {local} mixes {', '.join(endings)} files", key="data.path", remedy="keep one kind in a folder"
        )
    return files


def _column(table: datasets.Dataset, name: str, key: str, path: str) -> Iterable[Any]:
    if name not in table.column_names:
        if not table.column_names:
            raise _empty(path)
        columns = ", ".join(table.column_names)
        raise UserError(f'{path} has no column "{name}"', key=key, remedy=f"set {key} to one of: {columns}")
    return table[name]


def _checked_text(text: Any, row: int, config: DataConfig) -> str:
    """The text, "" for a row that has none."""
    if text is None or (isinstance(text, str) and not text.strip()):
        return ""
    if not isinstance(text, str):
        raise UserError(
            f'"{config.text_key}" of row {row} of {config.path} is no text but {type(text).__name__}',
            key="data.text_key",
            remedy="name the column that holds the text",
        )
    return text


def _checked_messages(messages: Any, row: int, config: DataConfig) -> list[dict[str, Any]]:
    def malformed(problem: str) -> UserError:
        return UserError(
            f'"{config.messages_key}" of row {row} of {config.path} {problem}',
            key="data.path",
            remedy='give a list of {"role": ..., "content": text}, roles '
            + ", ".join(ROLES)
            + ", with an assistant turn",
        )

    if not isinstance(messages, list) or not messages:
        raise malformed("is no list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise malformed('has a message without "role" and "content"')
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise malformed("has a role or a content that is no text")
        if message["role"] not in ROLES:
            raise malformed(f'has the unknown role "{message["role"]}"')
    if not any(message["role"] == "assistant" for message in messages):
        raise malformed("has no assistant turn")
    return messages
