"""What packages above add to core's names, by registering it when they are imported.

Core knows what models are trained with. `ds_fp8.research` has all else: emulated formats, rotations, second casts,
static scales, other optimizers. A name or key that core does not know is looked for there, in `load`: nobody imports it
by hand, and a run that needs nothing of it never does.

    FORMATS, SCALE_TYPES (formats.py), PRESETS, OPTIMIZERS      names and what they stand for
    extend(Cast, ResearchCast)                                  keys and values that a section takes beside core's
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

PACKAGE = "ds_fp8.research"

_Value = TypeVar("_Value")


def load() -> None:
    """Import the package that registers what core does not know."""
    # By name, and nowhere else: the package stands above all that casts, multiplies and shards.
    importlib.import_module(PACKAGE)


class Registry(dict[str, _Value]):
    """Names and what they stand for; one that is missing is looked for among those that `load` registers."""

    def __missing__(self, name: str) -> _Value:
        load()
        if name in self:
            return self[name]
        raise KeyError(name)

    def knows(self, name: str) -> bool:
        """Return whether a name is here, once everything is registered."""
        if name not in self:
            load()
        return name in self


PRESETS: Registry[dict[str, Any]] = Registry()
"""Presets of the "fp8" section beside those of presets.py."""
OPTIMIZERS: Registry[type] = Registry()
"""By the "type" of DeepSpeed's "optimizer" section, in lower case: optimizers beside DeepSpeed's and torch's."""
_EXTENSIONS: dict[type, type] = {}


def extend(section: type, extension: type) -> None:
    """Let a subclass of a section judge what the section itself refuses, in its place."""
    _EXTENSIONS[section] = extension


def extension_of(section: type) -> type | None:
    """Return the extension of a section, None if it has none or is one."""
    load()
    return _EXTENSIONS.get(section)
