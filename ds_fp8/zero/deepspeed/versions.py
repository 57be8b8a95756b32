"""Supported versions of DeepSpeed.

A version may keep every name and change behaviour: tests/test_pinned_sources.py has digests of the functions of TESTED
that are replaced, imitated or relied on.
"""

from __future__ import annotations

import os
import warnings

import deepspeed
from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError

SUPPORTED = ">=0.19.8,<0.20"
TESTED = "0.19.8"  # the newest version that the tests have run with
TRY = "DS_FP8_TRY_DEEPSPEED"  # environment variable with the one version beyond SUPPORTED that a user wants to try


def check(version: str) -> None:
    """Refuse a DeepSpeed, of this version, that is unsupported, and warn of one that is newer than TESTED.

    The environment variable DS_FP8_TRY_DEEPSPEED, set to its version, lets an unsupported one through with a warning.
    """
    compare = f"compare the losses with BF16's, or pip install 'deepspeed=={TESTED}'"
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        unknown = f"DeepSpeed {version} is not supported: FP8 in ZeRO-3 knows {SUPPORTED}"
        if os.environ.get(TRY) != version:
            remedy = f"pip install 'deepspeed{SUPPORTED}', or try it: {TRY}={version}"
            raise UserError(unknown, remedy=remedy)
        warnings.warn(f"{unknown}, and {TRY} lets it try: {compare}", stacklevel=2)
    elif SpecifierSet(f">{TESTED}").contains(version, prereleases=True):
        warnings.warn(f"DeepSpeed {version} is newer than {TESTED}, which was tested: {compare}", stacklevel=2)


def explain(error: AttributeError) -> None:
    """Raise UserError where the reason is that DeepSpeed, another than TESTED, lacks a name."""
    of_deepspeed = type(error.obj).__module__.startswith("deepspeed.") or str(error.name).startswith("ds_")
    if deepspeed.__version__ != TESTED and (of_deepspeed or "DeepSpeed" in str(error)):
        raise UserError(
            f"DeepSpeed {deepspeed.__version__} lacks a name that FP8 needs: {error}",
            remedy=f"pip install 'deepspeed=={TESTED}'",
        ) from error
