"""Hosts of a job: hostfiles as of DeepSpeed's launcher (`NAME slots=N`, one line a host), host names, ports."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
from pathlib import Path

import psutil

from ds_fp8.config.errors import UserError, clipped

# One name for ssh, pdsh and a shell: no lists ([1-4] or commas), options or quoting. At most 999 GPUs, against slips.
_LINE = re.compile(r"((?:[A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*)\s+slots=([1-9][0-9]{0,2})")
_REMEDY = 'write one line a host, its name as for ssh and its GPUs: "node1 slots=8"'


def read_hostfile(path: str | os.PathLike) -> dict[str, int]:
    """Return the GPUs of each host; raise UserError for a hostfile that DeepSpeed's launcher would misread."""
    file, hosts = Path(path), {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the hostfile cannot be read ({reason})", file=file, remedy=_REMEDY) from None
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        match = _LINE.fullmatch(entry)
        if entry and (match is None or match[1] in hosts):
            problem = "is not NAME slots=N" if match is None else "is a second line of this host"
            raise UserError(f"line {number}: {clipped(entry, 60)!a} {problem}", file=file, remedy=_REMEDY)
        if match is not None:
            hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError("the hostfile lists no hosts", file=file, remedy=_REMEDY)
    return hosts


def host_names() -> list[str]:
    """Return the host of each rank by the hostfile's name; [] without DeepSpeed's launcher."""
    try:
        launcher = psutil.Process().parent()
        arguments = launcher.cmdline() if launcher else []
        encoded = [part.removeprefix("--world_info=") for part in arguments if part.startswith("--world_info=")]
        slots = json.loads(base64.urlsafe_b64decode(encoded[0])) if encoded else {}
    except (psutil.Error, ValueError):
        return []
    return [host for host, numbers in slots.items() for _ in numbers]


def this_host() -> str:
    """Return the name of this rank's host: the hostfile's, else the system's."""
    names, rank = host_names(), int(os.environ.get("RANK", "0"))
    return names[rank] if rank < len(names) else socket.gethostname()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
