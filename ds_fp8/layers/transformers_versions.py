"""The versions of transformers that were tested; functions of it that matter: tests/test_pinned_sources.py."""

from __future__ import annotations

import os

from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError

# 5.24 calls decoder layers with `cache` in place of `past_key_values`: fused layers would generate wrong text
KNOWN = ">=5.0,<5.24"
TRY = "DS_FP8_TRY_TRANSFORMERS"  # environment variable: the one version outside of them that a user wants to try


def check_version(version: str) -> None:
    if not SpecifierSet(KNOWN).contains(version, prereleases=True) and os.environ.get(TRY) != version:
        remedy = f"pip install 'transformers{KNOWN}', or set {TRY}={version} to try it"
        raise UserError(f"transformers {version} is not supported: {KNOWN} is", remedy=remedy)
