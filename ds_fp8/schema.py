"""Strict configuration sections: unknown keys are errors that name the nearest right key."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_fp8.errors import UserError


class Section(BaseModel):
    """Base of every section of the JSON that belongs to this package: immutable, typed, unknown keys rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


def read_json(file: str | os.PathLike) -> dict[str, Any]:
    """The object in the JSON `file`; raises UserError with line and column for bad JSON or a key given twice."""
    try:
        raw = json.loads(Path(file).read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise UserError("the configuration file does not exist", file=file, remedy="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file cannot be read: {error}", file=file, remedy="check the path") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON: {error.msg}", file=f"{file}, line {error.lineno}, column {error.colno}", remedy="mend it"
        ) from None
    if not isinstance(raw, dict):
        raise UserError("the configuration must be a JSON object", file=file, remedy='{"model": {...}, ...}')
    return raw


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UserError(f'the key "{key}" is given twice in one object', key=key, remedy="remove one of them")
        values[key] = value
    return values


SectionType = TypeVar("SectionType", bound=Section)


def nearest(key: str, choices: Iterable[str]) -> str:
    """` Did you mean "x"?` for the closest of `choices`, or the list of them when none is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(key, choices, n=1, cutoff=0.5)
    if close:
        return f'Did you mean "{close[0]}"?'
    return "Known keys: " + ", ".join(choices) + "." if choices else ""


def parse_section(
    section: type[SectionType], values: Any, *, key: str, file: str | os.PathLike | None = None
) -> SectionType:
    """Validate the mapping `values` found under `key` into `section`.

    Raises UserError for the first mistake, with its dotted key and what would be right.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f'"{key}" must be a JSON object, got {values!r}', key=key, file=file, remedy=f'"{key}": {{...}}'
        )
    try:
        return section.model_validate(dict(values))
    except UserError as error:  # a section's own check, which names its keys itself
        raise error.located(file) from None
    except ValidationError as error:
        first = error.errors()[0]
        path = [part for part in first["loc"] if isinstance(part, (str, int))]
        dotted = ".".join([key, *map(str, path)])
        if first["type"] == "extra_forbidden":
            known = _fields_at(section, path[:-1])
            raise UserError(
                f'unknown key "{path[-1]}" in "{".".join([key, *map(str, path[:-1])])}"',
                key=dotted,
                file=file,
                remedy=nearest(str(path[-1]), known),
            ) from None
        given = first.get("input")
        shown = "" if first["type"] == "missing" else f" (got {given!r})"
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{dotted}: {message}{shown}", key=dotted, file=file, remedy=f'change the value of "{dotted}"'
        ) from None


def _fields_at(section: type[BaseModel], path: list) -> Iterable[str]:
    """Field names of the section reached by following `path` from `section`."""
    for name in path:
        field = section.model_fields.get(str(name))
        if field is None:
            return []
        options = [field.annotation, *get_args(field.annotation)]
        inner = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        if not inner:
            return []
        section = inner[0]
    return section.model_fields.keys()
