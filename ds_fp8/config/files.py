"""Reading configurations: JSON, also with comments or trailing commas or in base64 as DeepSpeed does, and --set.

At the end: writes that last, for files that a run or a cache relies on.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.presets import AXES, as_section
from ds_fp8.config.schema import clipped_repr

MAX_BYTES = 4 << 20
MAX_DEPTH = 32  # nesting levels: Python copies and prints recursively
MAX_INTEGER = 2**63 - 1


class _NotJson(ValueError):
    """A number that JSON does not have."""


def read_config(config: str | os.PathLike | Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a private copy of a DeepSpeed configuration, and the name of its file."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config)), None
    if isinstance(config, str) and not os.path.exists(config):
        try:
            # DeepSpeed accepts base64 in place of a file name.
            return parse_json(base64.urlsafe_b64decode(config).decode()), None
        except (ValueError, UserError):
            pass  # not base64: the name of a missing file
    return read_json(config), os.fspath(config)


def read_json(file: str | os.PathLike) -> dict[str, Any]:
    """Return the object in a JSON file; comments and trailing commas are read as DeepSpeed reads them."""
    try:
        path = Path(file)
        if path.exists() and not path.is_file():
            raise UserError("the configuration is not a file", file=file, remedy="give a JSON file")
        # First: a wrong path may be a checkpoint of many GB.
        if path.stat().st_size > MAX_BYTES:
            raise UserError(
                f"the configuration has more than {MAX_BYTES:,} bytes", file=file, remedy="give a DeepSpeed JSON"
            )
        # "utf-8-sig" drops the byte-order mark that some editors write, which JSON refuses.
        return parse_json(path.read_text(encoding="utf-8-sig"), file)
    except FileNotFoundError:
        raise UserError(
            "the configuration file does not exist", file=clipped(os.fspath(file)), remedy="check the path"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or an invalid file name
        raise UserError(
            f"the configuration file cannot be read: {clipped(str(error))}",
            file=clipped(os.fspath(file)),
            remedy="give a JSON file in UTF-8",
        ) from None


def parse_json(text: str, file: str | os.PathLike | None = None) -> dict[str, Any]:
    """Return the object that `text` holds, as `read_json` does."""
    try:
        raw = _parse(text)
    except UserError as error:
        raise error.located(file) from None
    except (ValueError, RecursionError) as error:
        # DeepSpeed reads Hjson: comments and trailing commas are no mistakes.
        raw = _parse_hjson(text, error, file)
    if not isinstance(raw, dict):
        raise UserError("the configuration must be a JSON object", file=file, remedy='{"model": {...}, ...}')
    try:
        check_plain(raw)
    except UserError as error:
        raise error.located(file) from None
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in `raw`; the value is JSON where it parses as JSON, otherwise a string."""
    dotted, equals, text = override.partition("=")
    path = dotted.strip().split(".")
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise UserError(f"--set {clipped_repr(override)} is not KEY=VALUE", remedy="--set train.steps=50")
    try:
        value = _parse(text)
    except _NotJson:
        value = text
    except RecursionError:
        raise UserError("the value of --set is nested too deeply", key=dotted, remedy="give a plain value") from None
    except json.JSONDecodeError:
        value = text
    except ValueError:  # an integer of thousands of digits
        raise UserError("the value of --set is too large a number", key=dotted, remedy="give a smaller one") from None
    check_plain(value, dotted)
    # The key, too: it is user input, and printed in errors.
    check_plain(path)
    if path[0] == "fp8" and len(path) > 1:
        raw["fp8"] = _opened(raw.get("fp8", {}), path[1:])
    inner = raw
    for depth, name in enumerate(path[:-1]):
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(
                f'--set {dotted}: "{".".join(path[: depth + 1])}" is {clipped_repr(inner)}, which has no keys',
                key=dotted,
                remedy="set the value itself, or give the section as JSON",
            )
    inner[path[-1]] = value


def _opened(section: Any, path: list[str]) -> Any:
    section = as_section(section)
    if path[0] == "preset" and len(path) == 2 and isinstance(section, dict) and isinstance(section.get("preset"), str):
        return {**section, "preset": dict.fromkeys(AXES, section["preset"])}
    return section


def check_plain(value: Any, key: str = "") -> None:
    """Refuse JSON values that no setting accepts.

    Raises:
        UserError: a number that is not finite or takes more than 64 bits, text that is not Unicode or has a NUL, or
            more than MAX_DEPTH levels. It names the key.
    """
    # An explicit stack: no recursion limit.
    waiting: list[tuple[str, Any, int]] = [(key, value, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise UserError(
                    f"the configuration has more than {MAX_DEPTH} levels", key=clipped(key), remedy="nest less deeply"
                )
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for name, inner in items:
                inside = f"{key}.{name}" if key else str(name)
                waiting.append((inside, inner, depth + 1))
                if isinstance(name, str):
                    waiting.append((inside, name, depth + 1))
            continue
        if isinstance(value, str):
            wrong = "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value)
            remedy = "give text in Unicode"
        else:
            wrong = isinstance(value, float) and not math.isfinite(value)
            wrong = wrong or (isinstance(value, int) and abs(value) > MAX_INTEGER)
            remedy = "give a finite number of at most 64 bits"
        if wrong:
            raise UserError(
                f"{clipped_repr(value)} is not a valid value", key=ascii(clipped(key)).strip("'"), remedy=remedy
            )


def _parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)


def _parse_hjson(text: str, json_error: Exception, file: str | os.PathLike | None) -> dict[str, Any]:
    """Return the object that DeepSpeed's parser finds in text that is not strict JSON."""
    try:
        raw = hjson.loads(text, object_pairs_hook=_without_duplicates)
        if isinstance(raw, dict) and raw:
            return raw
    except UserError as error:
        raise error.located(file) from None
    except hjson.HjsonDecodeError as error:
        if isinstance(json_error, json.JSONDecodeError) and text[json_error.pos : json_error.pos + 1] in ("/", "#"):
            json_error = error
    except (ValueError, ArithmeticError, LookupError, TypeError, RecursionError):
        pass  # json's error is clearer than hjson's
    raise _explained(json_error, file) from None


def _explained(error: Exception, file: str | os.PathLike | None) -> UserError:
    if isinstance(error, json.JSONDecodeError | hjson.HjsonDecodeError):
        place = f"line {error.lineno}, column {error.colno}"
        where = f"{os.fspath(file)}, {place}" if file else place
        return UserError(f"not valid JSON: {error.msg}", file=where, remedy="fix the JSON at this position")
    if isinstance(error, RecursionError):
        return UserError(f"the configuration has more than {MAX_DEPTH} levels", file=file, remedy="nest less deeply")
    return UserError(
        f"not valid JSON: {clipped(str(error))}", file=file, remedy="give finite numbers of at most 64 bits"
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UserError(
                f'the key "{clipped(key)}" appears twice in one object', key=clipped(key), remedy="remove one of them"
            )
        values[key] = value
    return values


def _refuse_constant(name: str) -> Any:
    raise _NotJson(f"{name} is not a JSON number")


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested section with their values."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_writable(folder: Path, key: str = "") -> None:
    """Check that `folder` exists or can be created, and is writable, without creating it."""
    try:
        there = folder
        # By its nearest existing parent.
        while not there.exists():
            os.fsencode(there)
            if there.is_symlink():  # to nowhere, or to itself
                raise OSError
            there = there.parent
        fits = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (OSError, ValueError):
        fits, there = False, folder
    if not fits:
        raise UserError(
            f"the folder {clipped(str(folder))} cannot be written to",
            key=key,
            remedy="give another folder, or its rights",
        )


def model_of_run(folder: Path) -> Path | None:
    """Return the model folder in a run folder of `ds-fp8 train` (train/run_folder.py); None for other folders."""
    model = folder / "model"
    return model if (folder / "run.lock").is_file() and (model / "config.json").is_file() else None


# ---------------------------------------------------------------- durable writes


def write_atomically(file: Path, text: str) -> None:
    """Write `file` so that a reader, also one after a power loss, sees the old content or the new, never a part."""
    part = file.with_name(file.name + ".part")
    remove(part)  # a named pipe would be waited for, and a link followed
    with part.open("x") as stream:
        stream.write(text)
        # Python's buffer first, then the system's: after the rename the content must be on the disk.
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    # The rename is an entry of the folder, which the disk may write later than the file.
    flush(file.parent)


def remove(path: Path) -> None:
    """Delete a file, a link (not what it leads to) or a folder with all that is in it; nothing where there is none."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder: without it a power loss may undo renames and new files in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        flush(path)
