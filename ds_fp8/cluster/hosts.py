"""Names of the hosts of a job."""

from __future__ import annotations

import base64
import json
import os
import socket

import psutil


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
    """Return a port of this host that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
