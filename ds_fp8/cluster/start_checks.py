"""Checks before the first step: every rank compares itself with rank 0, and a difference is an error within seconds."""

from __future__ import annotations

import io
import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import Store

from ds_fp8.cluster import facts
from ds_fp8.cluster.guardian import spans
from ds_fp8.cluster.hosts import this_host
from ds_fp8.config.errors import UserError

CLOCK_SECONDS = 5.0
"""Clocks further apart than this are pointed out: times of files and logs would mislead."""
FREE_MEMORY = 0.9
"""A GPU with less than this share of the freest one's free memory is pointed out: something else runs there."""
_SHARED_SECONDS = 5.0
"""Seconds in which a file written on one host must be seen on another, as on NFS."""
_ROWS = 30


@dataclass(frozen=True)
class Job:
    """Properties of the job that must be equal on all ranks, besides versions."""

    configuration: Mapping[str, Any]
    file: Path
    """File of the configuration."""
    paths: Mapping[str, str]
    """Local files or folders to read, by configuration key; a hub's names may be among them."""
    run_dir: Path
    """The folder that all hosts share."""


def check_ranks(store: Store, job: Job | None = None) -> str:
    """Compare versions, configuration, files, free memory and clocks of all ranks. Collective.

    Args:
        store: shared by all ranks.
        job: what is to be done; None compares versions and machines alone.

    Returns:
        One line, or several with warnings, that says what was compared.

    Raises:
        UserError: on all ranks alike, with a table that names the hosts that differ from rank 0's.
    """
    started = time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # All look at their clocks when rank 0 says so.
    if rank == 0:
        store.set("clock", str(time.time()))
    # `get` returns on all ranks as soon as rank 0 has written, within the latency of the network.
    behind = time.time() - float(store.get("clock"))
    store.set(f"facts/{rank}", json.dumps(_about_this_rank(job) | {"clock": behind}))
    if rank == 0:
        every = [json.loads(value) for value in store.multi_get([f"facts/{number}" for number in range(world)])]
        difference = _difference(every)
        store.set("compared", json.dumps([difference, _warnings(every)]))
    # Every rank raises the same error: none is left waiting in the first collective.
    difference, warnings = json.loads(store.get("compared"))
    if difference:
        raise UserError(
            difference, remedy="make these the same on all hosts", file=job.file if job is not None else None
        )
    if job is not None:
        _check_shared(store, job.run_dir)
    compared = "versions, configuration, data and model files" if job is not None else "versions"
    line = f"{world} ranks have the same {compared} ({time.monotonic() - started:.1f} s)"
    return "\n".join([line, *warnings])


def _about_this_rank(job: Job | None) -> dict:
    known = facts.versions()
    files = None
    if job is not None:
        known |= facts.configuration(job.configuration)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a host reads them
            files = facts.files(job.paths)
    free = 0
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info(int(os.environ["LOCAL_RANK"]))[0]
    return {"host": this_host(), "facts": known, "files": files, "free": free}


def _difference(every: list[dict]) -> str:
    """Return a table of the facts in which ranks differ from rank 0, a column for each kind of them; "" if none do."""
    reference = every[0]["facts"] | every[0]["files"] if every[0]["files"] else every[0]["facts"]
    columns: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, about in enumerate(every):
        names = every[0]["facts"].keys() | about["facts"].keys()
        own = about["facts"]
        # Files are compared between hosts only; ranks that read none must not count as lacking them.
        if about["files"] is not None:
            own = own | about["files"]
            names |= (every[0]["files"] or {}).keys() | about["files"].keys()
        values = [(name, own.get(name, facts.MISSING)) for name in sorted(names)]
        values = tuple((name, value) for name, value in values if value != reference.get(name, facts.MISSING))
        if values:
            columns.setdefault(values, []).append(rank)
    if not columns:
        return ""
    rows = sorted({name for values in columns for name, _ in values})
    first = f"{every[0]['host']} (rank 0)"
    places = [", ".join(dict.fromkeys(every[rank]["host"] for rank in ranks)) for ranks in columns.values()]
    # A column for each kind of difference, not for each rank: a thousand ranks of two kinds make two columns.
    table = Table("", first)
    for place, ranks in zip(places, columns.values(), strict=True):
        table.add_column(f"{place} ({spans(ranks)})", style="bold")
    for name in rows[:_ROWS]:
        own = reference.get(name, facts.MISSING)
        table.add_row(name, own, *(dict(values).get(name, own) for values in columns))
    text = io.StringIO()
    Console(file=text, width=160, highlight=False).print(table)
    more = f"\n({len(rows) - _ROWS} more differ)" if len(rows) > _ROWS else ""
    return f"{', '.join(dict.fromkeys(places))} differs from {first}:\n{text.getvalue().rstrip()}{more}"


def _warnings(every: list[dict]) -> list[str]:
    lines = []
    most = max(about["free"] for about in every)
    for rank, about in enumerate(every):
        if about["free"] < FREE_MEMORY * most:
            lines.append(
                f"warning: {about['host']} (rank {rank}): {about['free'] / 2**30:.1f} GiB of GPU memory are free, "
                f"elsewhere {most / 2**30:.1f}"
            )
        if abs(about["clock"]) > CLOCK_SECONDS:
            lines.append(f"warning: {about['host']} (rank {rank}): the clock is {about['clock']:+.0f} s from rank 0's")
    return lines


def _check_shared(store: Store, run_dir: Path) -> None:
    """Raise UserError on all ranks if a file that rank 0 writes into the run folder is not seen on another host."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made: list[Path] = []
    if rank == 0:
        # To be removed again: a check leaves no trace.
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
        raise UserError(
            f"the run folder is not shared: {problem}" if name else problem,
            key="train.run_dir",
            remedy="give a folder that all hosts mount under the same path, such as NFS",
        )


def _appears(folder: Path, name: str) -> bool:
    """Return whether a file appears in a folder within _SHARED_SECONDS. Listing it renews what NFS has cached."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while True:
        try:
            if name in os.listdir(folder):
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
