"""Checks before the first step: versions, configuration and files of all ranks must equal rank 0's.

Each is compared as a short text. A file written by rank 0 must appear in the run folder on all hosts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

import ds_fp8
from ds_fp8.cluster.guardian import spans
from ds_fp8.cluster.hosts import this_host
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import flat

MISSING = "missing"
_SHARED_SECONDS = 5.0  # for a file written on one host to appear on another (NFS)
_ROWS = 30
_PACKAGES = ("torch", "deepspeed", "transformers", "triton", "datasets", "safetensors")
_ENDS = 1 << 16  # bytes of a file's head and of its tail to compare
_FILES = 1000  # files of a folder to compare; the rest are counted

Facts = dict[str, str]


@dataclass(frozen=True)
class Job:
    """Properties of the job that must be equal on all ranks, besides versions."""

    configuration: Mapping[str, Any]
    file: Path  # of the configuration
    paths: Mapping[str, str]  # files, folders or names on a hub, by configuration key
    run_dir: Path  # shared by all hosts


def check_ranks(store: Store, job: Job | None = None) -> str:
    """Compare versions, configuration and files of all ranks; without a job versions and machines alone. Collective.

    Returns a line on what was compared.
    """
    started = time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"facts/{rank}", json.dumps(_about_this_rank(job)))
    if rank == 0:
        every = [json.loads(value) for value in store.multi_get([f"facts/{number}" for number in range(world)])]
        store.set("compared", _difference(every))
    # All ranks raise the same error: none waits in the first collective.
    if difference := store.get("compared").decode():
        raise UserError(difference, remedy="make these the same on all hosts", file=job and job.file)
    if job is not None:
        _check_shared(store, job.run_dir)
    compared = "versions, configuration, data and model files" if job is not None else "versions"
    return f"{world} ranks have the same {compared} ({time.monotonic() - started:.1f} s)"


def _about_this_rank(job: Job | None) -> dict[str, Any]:
    known = versions()
    files = None
    if job is not None:
        known |= {key: repr(value) for key, value in flat(job.configuration)}
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a host reads them
            files = _files(job.paths)
    return {"host": this_host(), "facts": known, "files": files}


def _difference(every: list[dict[str, Any]]) -> str:
    """Return the differences from rank 0, ranks with equal ones together; "" if none."""
    reference = every[0]["facts"] | (every[0]["files"] or {})
    kinds: dict[tuple[str, ...], list[int]] = {}
    for rank, about in enumerate(every):
        # Files are compared between hosts: ranks that have read none do not count.
        own = about["facts"] | (about["files"] or {})
        names = sorted(own.keys() | (reference if about["files"] is not None else every[0]["facts"]).keys())
        rows = [(name, reference.get(name, MISSING), own.get(name, MISSING)) for name in names]
        if lines := tuple(f"  {name}: {ours} -> {theirs}" for name, ours, theirs in rows if ours != theirs):
            kinds.setdefault(lines, []).append(rank)
    text = []
    # A thousand ranks of two kinds make two parts.
    for lines, ranks in kinds.items():
        place = f"{', '.join(dict.fromkeys(every[rank]['host'] for rank in ranks))} ({spans(ranks)})"
        text += [f"{place} differs from {every[0]['host']} (rank 0):", *lines[:_ROWS]]
        text += [f"  ({len(lines) - _ROWS} more differ)"] if len(lines) > _ROWS else []
    return "\n".join(text)


def _check_shared(store: Store, run_dir: Path) -> None:
    """Raise UserError on all ranks if a file written by rank 0 does not appear in the run folder on all hosts."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made: list[Path] = []
    if rank == 0:
        made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
        probe = run_dir / f".shared-{uuid.uuid4().hex}"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            store.set("probe", json.dumps([None, f"{run_dir} cannot be written ({error.strerror})"]))
        else:
            store.set("probe", json.dumps([probe.name, ""]))
    name, problem = json.loads(store.get("probe"))
    if name is not None:
        # One rank of each host looks; the others see the same file system.
        found = os.environ.get("LOCAL_RANK", "0") != "0" or _appears(run_dir, name)
        store.set(f"shared/{rank}", json.dumps(None if found else this_host()))
        if rank == 0:
            blind = [json.loads(value) for value in store.multi_get([f"shared/{other}" for other in range(world)])]
            probe.unlink(missing_ok=True)
            with suppress(OSError):  # another process has written into it
                for folder in made:
                    folder.rmdir()
            missing = ", ".join(host for host in blind if host)
            store.set("unshared", f"what rank 0 writes into {run_dir} is not seen on {missing}" if missing else "")
        problem = store.get("unshared").decode()
    if problem:
        problem = f"the run folder is not shared: {problem}" if name else problem
        raise UserError(
            problem, key="train.run_dir", remedy="give a folder that all hosts mount under the same path, such as NFS"
        )


def _appears(folder: Path, name: str) -> bool:
    """Return whether a file appears in a folder within _SHARED_SECONDS; listing the folder renews NFS's cache."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if name in os.listdir(folder):
                return True
        time.sleep(0.2)
    return False


# ---------------------------------------------------------------- facts of a rank


def versions() -> Facts:
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


def _files(paths: Mapping[str, str]) -> Facts:
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
            # Size, head and tail find other files, not flipped bits.
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
    # Sources, not the version: an edited checkout has the same version.
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]
