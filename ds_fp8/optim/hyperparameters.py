"""Check of an optimizer's hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_fp8.config.errors import UserError


def check_hyperparameters(values: Mapping[str, tuple[Any, bool]], remedy: str) -> None:
    """Raise UserError for the first value that is out of range.

    Args:
        values: by name the value and whether it is in range.
        remedy: the ranges of all of them.
    """
    for name, (value, in_range) in values.items():
        if not in_range:
            raise UserError(f"{name} {value!r} is out of range", key=f"optimizer.params.{name}", remedy=remedy)
