"""Write docs/configuration.md's tables of keys from the sections' own types, defaults and docstrings.

python scripts/configuration_reference.py            # after a change of a section
python scripts/configuration_reference.py --check    # exit 1 if the file is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.data import DataConfig
from ds_fp8.train.schedules import Schedule
from ds_fp8.train.stage import ModelConfig, TrainConfig

FILE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: written by scripts/configuration_reference.py -->", "<!-- end of keys -->"
SECTIONS: dict[str, type[BaseModel]] = {
    "fp8": FP8Config,
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "train.schedule": Schedule,
}
NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null", Any: "anything"}


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a section and of the sections in it, in their order, each with its field."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def values(annotation: Any) -> str:
    """Return in words what a key may be set to."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (Union, UnionType):
        return ", ".join(values(one) for one in inner)
    if origin in (tuple, list):
        return f"list of {values(inner[0])}"
    if origin is dict:
        return f"object of {values(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return NAMES.get(annotation) or values(inner[0])  # Annotated


def row(key: str, field: FieldInfo) -> str:
    """Return a key's line of the table."""
    default = field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else f"`{json.dumps(default, default=lambda value: value.model_dump())}`"
    meaning = re.sub(r"\s+", " ", field.description or "")
    return " | ".join(["", f"`{key}`", values(field.annotation), shown, meaning.replace("|", "\\|"), ""]).strip()


def tables() -> str:
    """Return the tables of all sections."""
    parts = []
    for name, section in SECTIONS.items():
        about = re.sub(r"\s+", " ", (section.__doc__ or "").split("\n\n")[0])
        rows = "\n".join(row(key, field) for key, field in keys(section))
        parts.append(f"## `{name}`\n\n{about}\n\n| key | values | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = FILE.read_text()
    before, rest = text.split(BEGIN)
    written = f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}"
    if check:
        return int(text != written)
    FILE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
