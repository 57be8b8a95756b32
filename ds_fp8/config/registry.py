"""Names that ds_fp8.research registers, once a configuration has a name unknown to the core.

Formats and scale types go into FORMATS and SCALE_TYPES (formats.py), refusals of pairs into TABLE (refusals.py).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}  # in addition to presets.py
OPTIMIZERS: dict[str, type] = {}  # by the "type" of "optimizer" in lower case


def load() -> ModuleType:
    """Import ds_fp8.research, which registers its names; its FP8Config has the keys of core and research."""
    # Imported by name and only here: core does not depend on research.
    return importlib.import_module("ds_fp8.research")
