"""Strict configuration sections: errors for unknown keys suggest the nearest known one."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ds_fp8.config.errors import UserError, clipped, joined
from ds_fp8.config.refusals import refusals


class Section(BaseModel):
    """Base of this package's sections of the JSON: immutable, typed, unknown keys rejected."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        revalidate_instances="subclass-instances",  # a dump would lose the keys that a subclass adds
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_words_for_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        # pydantic converts "yes" and 1 to true, and true to 1.
        if annotation is bool and not isinstance(value, bool):
            raise ValueError("is not true or false")
        kinds = _inside(annotation)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("is not a number")
        return value

    @model_validator(mode="after")
    def _check_refusals(self) -> Section:
        for refusal in refusals(self):
            raise refusal
        return self


Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""A seed valid for numpy, torch and the kernels, also with a rank or step added."""

SectionType = TypeVar("SectionType", bound=Section)


_LISTED = 600  # longest list in a message, in characters
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 120, 120, 40


def clipped_repr(value: Any) -> str:
    """Return the repr of a value for an error message, shortened if long or deep."""
    return _REPR.repr(value)


def nearest(key: str, choices: Iterable[str], otherwise: str = "Known keys") -> str:
    """Return `Did you mean "x"?` for the closest of `choices`, else the list of them if short."""
    choices = sorted(choices)
    # Cut: time is the product of lengths, and a key may be a pasted text.
    close = difflib.get_close_matches(key[:120], choices, n=1, cutoff=0.5)
    if close:
        return f'Did you mean "{close[0]}"?'
    listed = f"{otherwise}: {', '.join(choices)}."
    return listed if choices and len(listed) <= _LISTED else ""


def as_mapping(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Section) else value


def parse_section(
    section: type[SectionType], values: Any, *, key: str, file: str | os.PathLike | None = None
) -> SectionType:
    """Validate the mapping `values` of `key` as a `section`.

    Raises UserError for all mistakes, with dotted keys and remedies.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f'"{key}" must be a JSON object, got {clipped_repr(values)}', key=key, file=file, remedy=f'"{key}": {{...}}'
        )
    try:
        return section.model_validate(dict(values))
    except UserError as error:  # from a validator, with its key
        raise error.located(file) from None
    except ValidationError as error:
        raise joined([_explained(section, mistake, key, file) for mistake in error.errors()]) from None


def _explained(section: type[BaseModel], mistake: Any, key: str, file: str | os.PathLike | None) -> UserError:
    path = [clipped(part) if isinstance(part, str) else part for part in mistake["loc"]]
    dotted = ".".join(filter(None, [key, *map(str, path)]))
    if mistake["type"] == "extra_forbidden":
        known = _fields_at(section, path[:-1])
        return UserError(
            f'unknown key "{path[-1]}" in "{".".join(filter(None, [key, *map(str, path[:-1])]))}"',
            key=dotted,
            file=file,
            remedy=nearest(str(path[-1]), known),
        )
    return wrong_value(mistake, dotted, file)


def wrong_value(mistake: Any, key: str, file: str | os.PathLike | None = None) -> UserError:
    """Return an error of pydantic as UserError of a key."""
    if mistake["type"] == "missing":
        return UserError(f'"{key}" is missing', key=key, file=file, remedy=f'"{key.rpartition(".")[2]}": ...')
    given = mistake.get("input")
    # pydantic's prefix for errors of validators.
    message = mistake["msg"].removeprefix("Value error, ")
    # transformers fills in "auto" in DeepSpeed's sections, not in those of this package.
    filled_in = 'give a value: "auto" is for programs that fill it in'
    remedy = filled_in if given == "auto" else f'change the value of "{key}"'
    return UserError(f"{key}: {message} (got {clipped_repr(given)})", key=key, file=file, remedy=remedy)


def _fields_at(section: type[BaseModel], path: list) -> Iterable[str]:
    """Return the field names of the section reached by following `path` from `section`."""
    for name in path:
        if isinstance(name, int):  # index in a list of sections
            continue
        field = section.model_fields.get(str(name))
        if field is None:
            return []
        inner = [option for option in _inside(field.annotation) if issubclass(option, BaseModel)]
        if not inner:
            return []
        section = inner[0]
    return section.model_fields.keys()


def _inside(annotation: Any) -> list[type]:
    """Return the classes in an annotation: X and NoneType of `tuple[X, ...] | None`."""
    arguments = get_args(annotation)
    if not arguments:
        return [annotation] if isinstance(annotation, type) else []
    return [inner for argument in arguments for inner in _inside(argument)]
