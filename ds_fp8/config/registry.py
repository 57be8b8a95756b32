"""What ds_fp8.research adds to core's names. It registers itself when a configuration names what core does not know.

Formats and scale types go into FORMATS and SCALE_TYPES (formats.py), refusals of pairs into TABLE (refusals.py).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}  # besides those of presets.py
OPTIMIZERS: dict[str, type] = {}  # besides DeepSpeed's and torch's, by the "type" of "optimizer" in lower case


def load() -> ModuleType:
    """Import ds_fp8.research, which registers what core does not know; its FP8Config has the keys of both."""
    # By name, and nowhere else: the package stands above all that quantizes, multiplies and shards.
    return importlib.import_module("ds_fp8.research")
