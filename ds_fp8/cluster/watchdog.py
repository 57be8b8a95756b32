"""The rank's side of the watchdog: says that it makes progress, and ends when its guardian says so.

`start` at the beginning of a rank's process, `beat` wherever the job has moved, `fail` or `leave` at its end. Without
`start` all of them do nothing, so that training as a library has no process beside it.
"""

from __future__ import annotations

import faulthandler
import ipaddress
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed

from ds_fp8.cluster.exit_codes import EXIT_LOST
from ds_fp8.cluster.guardian.messages import encode
from ds_fp8.cluster.hosts import host_names, this_host

DEFAULT_TIMEOUT = 300.0
"""Seconds without progress that end a job, until `set_timeout` is told train.timeout."""
SLOW = 6
"""Multiple of the timeout that slow phases get: preparing data and model, the first step, saving."""
MAX_SILENCE, MIN_SILENCE = 30.0, 5.0
"""Seconds without a word from a host after which it counts as lost: half the timeout within these limits."""
_VERDICT = 20.0
"""Seconds in which the guardian answers a rank that failed."""

_watchdog: _Watchdog | None = None


def start(timeout: float = DEFAULT_TIMEOUT) -> torch.distributed.Store | None:
    """Start this rank's guardian, introduce it to that of rank 0, and wait for all ranks. Collective.

    The environment is a launcher's: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Args:
        timeout: seconds in which every rank must arrive, and without progress until `set_timeout` says otherwise.

    Returns:
        A store that all ranks share, without any process group. None in a world of one, which has no guardian.
    """
    global _watchdog
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    _watchdog = _Watchdog(rank, world, timeout)
    return _watchdog.meet()


def set_timeout(seconds: float) -> None:
    """Set the seconds without progress after which the job is ended."""
    if _watchdog is not None:
        _watchdog.timeout = seconds


def slowest() -> float | None:
    """Return seconds that no wait of a healthy job exceeds, for collectives' own timeout; None without a guardian."""
    return None if _watchdog is None else (SLOW + 1) * _watchdog.timeout


def beat(doing: str, slow: bool = False) -> None:
    """Say that the job has moved, and what it does next.

    Args:
        doing: for the message if nothing comes after it, such as "step 12".
        slow: whether what comes next may take SLOW times the timeout.
    """
    if _watchdog is not None:
        timeout = _watchdog.timeout
        patience = timeout * (SLOW if slow else 1)
        _watchdog.tell({"doing": doing, "patience": patience, "silence": _silence(timeout)})


def fail(kind: str, text: str, code: int) -> None:
    """Report what ended this rank, and exit as the judge of the job decides. Returns only without a guardian.

    Args:
        kind: one of guardian.messages' findings.
        text: what to print.
        code: exit code if the guardian does not answer.
    """
    if _watchdog is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        _watchdog.tell({"finding": [kind, text]})
        time.sleep(_VERDICT)
        # Without cleaning up: atexit handlers and destructors of process groups may wait for ranks that are gone.
        os._exit(code)


def leave() -> None:
    """Say that this rank has done its work and its process is about to end."""
    if _watchdog is not None:
        _watchdog.tell({"leaving": True})


def _silence(timeout: float) -> float:
    return min(MAX_SILENCE, max(MIN_SILENCE, timeout / 2))


class _Watchdog:
    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.timeout = timeout
        self._rank, self._world = rank, world
        self._dump: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, written until the process ends
        # In C, without the interpreter: it also shows the stack of a rank that is stuck in a collective or a kernel.
        faulthandler.register(signal.SIGUSR2, file=self._dump, all_threads=True)
        about: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "host": this_host(),
            "hosts": host_names(),
            "pid": os.getpid(),
            "main_thread": threading.main_thread().ident,
            "dump": self._dump.fileno(),
            "silence": _silence(timeout),
            "arrival": timeout,
        }
        entry = "import sys; sys.path.insert(0, sys.argv[1]); from guardian.member import main; main()"
        self._guardian = subprocess.Popen(
            # Alone with the standard library, and out of reach of PYTHONPATH and the working folder.
            [sys.executable, "-I", "-S", "-c", entry, str(Path(__file__).parent), json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._dump.fileno()],
            start_new_session=True,  # Ctrl-C and a closed terminal are the launcher's to handle
        )

    def meet(self) -> torch.distributed.Store:
        """Meet the guardians of the other ranks over a store at the launcher's address."""
        master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        # torchrun keeps its store over restarts: the keys of the attempt before must not be found.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # The process group meets at the same address later: multi_tenant lets both use one server.
        store = torch.distributed.TCPStore(
            master,
            port,
            is_master=self._rank == 0 and not agent,
            timeout=timedelta(seconds=2 * self.timeout),  # the judge names who is missing before
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._store = store = torch.distributed.PrefixStore(f"ds_fp8/{attempt}", store)  # rank 0's is the server
        if self._rank == 0:
            token = secrets.token_hex(16)
            self.tell({"serve": {"address": _address_of_all(master, self._world), "token": token}})
            served = json.loads(self._guardian.stdout.readline())
            store.set("guardian", json.dumps([served["address"], served["port"], token]))
        address, port, token = json.loads(store.get("guardian"))
        # From here on a guardian that hangs must not block training.
        os.set_blocking(self._guardian.stdin.fileno(), False)
        self.tell({"connect": [address or ("127.0.0.1" if self._rank == 0 else master), port, token]})
        threading.Thread(target=self._obey, name="guardian", daemon=True).start()
        # An atomic counter: exactly one rank, the last, opens the gate that all wait at.
        if store.add("arrived", 1) == self._world:
            store.set("complete", "")
        store.get("complete")
        return store

    def tell(self, message: dict[str, Any]) -> None:
        """Write to the guardian; a pipe that is full, or has no reader any more, is the other thread's business."""
        with suppress(OSError):
            os.write(self._guardian.stdin.fileno(), encode(message))

    def _obey(self) -> None:
        for line in self._guardian.stdout:
            order = json.loads(line)
            if "stop" in order:
                os.kill(os.getpid(), signal.SIGTERM)
            elif "end" in order:
                os._exit(order["end"])
        os._exit(EXIT_LOST)  # without a guardian nothing would end this rank


def _address_of_all(master: str, world: int) -> str | None:
    """Return the address of rank 0's host that all ranks use, None where hosts may resolve a name in different ways."""
    if (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")) == str(world):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(master))
    except ValueError:
        return None
