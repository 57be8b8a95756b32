"""Hosts of a job: hostfiles, one line a host, `NAME slots=N`, as DeepSpeed's launcher reads them; names; ports."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_fp8.config.errors import UserError

MAX_BYTES = 1 << 20
MAX_SLOTS = 1024
"""More GPUs than any host has: a number above is a slip, and a launcher would start as many processes."""
# What ssh, pdsh and a shell take for one name: no lists ([1-4] or commas), no options, no quoting.
_NAME = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_SLOTS = re.compile(r"slots=([0-9]{1,9})")
_EXAMPLE = '"node1 slots=8"'
_LINE = f"write one line a host: {_EXAMPLE}"


@dataclass(frozen=True)
class Host:
    """A host of a job."""

    name: str
    """Name or address for ssh."""
    slots: int
    """Ranks to start there: one a GPU."""


def read_hostfile(path: str | os.PathLike) -> list[Host]:
    """Read a hostfile, or refuse it by file and line where DeepSpeed's launcher would fail at it or misread it."""
    file = Path(path)
    try:
        with file.open("rb") as content:
            # One byte more than is allowed tells a file that is too large, without reading all of it.
            data = content.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("the hostfile is not a text file", file=file, remedy=_LINE) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the hostfile cannot be read ({reason})", file=file, remedy=_LINE) from None
    if len(data) > MAX_BYTES:
        raise UserError(f"the hostfile has more than {MAX_BYTES} bytes", file=file, remedy=_LINE)
    return parse_hostfile(text, file)


def parse_hostfile(text: str, file: Path) -> list[Host]:
    """Parse the text of the hostfile `file`; empty lines and everything after "#" are skipped."""
    # With line numbers, for the message about a host listed twice.
    hosts: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"line {number}", file)
        if host.name in hosts:
            problem = f"line {number}: {host.name} is already in line {hosts[host.name][0]}"
            raise UserError(problem, file=file, remedy="give each host one line with all of its slots")
        hosts[host.name] = number, host
    if not hosts:
        raise UserError("the hostfile lists no hosts", file=file, remedy=_LINE)
    return [host for _, host in hosts.values()]


def _host(words: list[str], line: str, file: Path) -> Host:
    name, *rest = words
    slots = _SLOTS.fullmatch(rest[0]) if len(rest) == 1 else None
    problem = None
    if not _NAME.fullmatch(name):
        problem = f"{_shown(name)} is not a host name"
    elif not rest:
        problem = "slots=N is missing after the name"
    elif slots is None:
        problem = f"{_shown(' '.join(rest))} after the name is not slots=N"
    elif not 0 < int(slots[1]) <= MAX_SLOTS:
        problem = f"{slots[1]} slots, and not 1 to {MAX_SLOTS}"
    if problem is not None:
        remedy = f"a name as for ssh and slots=N, the GPUs of that host, one host a line: {_EXAMPLE}"
        raise UserError(f"{line}: {problem}", file=file, remedy=remedy)
    return Host(name, int(slots[1]))


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def host_names() -> list[str]:
    """Return the name of each rank's host as the hostfile has it; empty where DeepSpeed's launcher did not start us."""
    try:
        launcher = psutil.Process().parent()
        arguments = launcher.cmdline() if launcher else []
        encoded = [part.removeprefix("--world_info=") for part in arguments if part.startswith("--world_info=")]
        slots = json.loads(base64.urlsafe_b64decode(encoded[0])) if encoded else {}
    except (psutil.Error, ValueError):
        return []
    return [host for host, numbers in slots.items() for _ in numbers]


def this_host() -> str:
    """Return the name of this rank's host: the hostfile's where there is one, else the system's."""
    names, rank = host_names(), int(os.environ.get("RANK", "0"))
    return names[rank] if rank < len(names) else socket.gethostname()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
