"""Collect what must be the same on every rank of a job: versions, configuration and files, each as a short text."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ds_fp8

_PACKAGES = ("torch", "deepspeed", "transformers", "triton", "datasets", "safetensors")
_ENDS = 1 << 16
"""Bytes of a file's head and of its tail that are compared; data files are too large to be read whole."""
_FILES = 1000
"""Files of a folder that are compared; the rest are counted."""
MISSING = "missing"

Facts = dict[str, str]


def versions() -> Facts:
    """Return the versions of what computes, and of this package's own source files."""
    facts = {"python": platform.python_version(), "ds_fp8": f"source {_source_digest()}"}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = MISSING
    if torch.cuda.is_available():
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["GPU"] = torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", "0")))
    return facts


def configuration(raw: dict[str, Any]) -> Facts:
    """Return every key of a stage's JSON with its value, dotted."""
    facts: Facts = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            facts[prefix] = repr(value)

    flatten("", raw)
    return facts


def files(paths: Mapping[str, str]) -> Facts:
    """Return size and a hash of head and tail of every file at `paths`, which are by configuration key."""
    facts: Facts = {}
    for key, text in paths.items():
        path = Path(text).expanduser()
        if not path.is_dir():  # a file, or the name of something on a hub: missing everywhere
            facts[f"{key}: {text}"] = fingerprint(path)
            continue
        inside = sorted(
            file for file in path.rglob("*") if file.is_file() and "checkpoints" not in file.relative_to(path).parts
        )
        for file in inside[:_FILES]:
            facts[f"{key}: {text}/{file.relative_to(path)}"] = fingerprint(file)
        if len(inside) > _FILES:
            facts[f"{key}: {text}"] = f"{len(inside)} files"
    return facts


def fingerprint(file: Path) -> str:
    """Return a file's size in bytes and a short hash of its first and last 64 KiB; "missing" where there is none."""
    try:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            digest = hashlib.sha256(content.read(_ENDS))
            # Appending and truncating change the tail, headers of formats the head; with the size that finds other
            # files, not flipped bits.
            content.seek(max(0, size - _ENDS))
            digest.update(content.read(_ENDS))
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"{size} bytes, {digest.hexdigest()[:8]}"


def _source_digest() -> str:
    root = Path(ds_fp8.__file__).parent
    digest = hashlib.sha256()
    # The sources and not the version: a checkout that was edited on one host has the same version.
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]
