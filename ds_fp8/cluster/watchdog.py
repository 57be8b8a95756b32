"""The rank's side of the watchdog: reports progress to its guardian, and ends on the guardian's order.

`ds-fp8 train` calls `start` at the beginning of a rank's process, `beat` after progress, `fail` or `leave` at the end.
For other programs ds_fp8.initialize calls `join`: their progress is unknown, and a hanging rank that is not stopped is
left to the timeout of its process group.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed

from ds_fp8.cluster.guardian import ERROR
from ds_fp8.cluster.hosts import host_names, this_host
from ds_fp8.config.errors import EXIT_LOST, UserError
from ds_fp8.config.log import logger

DEFAULT_TIMEOUT = 300.0  # seconds without progress that end a job, before `set_timeout` by train.timeout
# Environment: seconds for which a rank of another program may be stopped; 0: no guardians.
VARIABLE = "DS_FP8_TIMEOUT"
SLOW = 6  # multiple of the timeout in slow phases: preparing data and model, the first step, saving
# Seconds without a message after which a host counts as lost: half the timeout, within these limits.
MAX_SILENCE, MIN_SILENCE = 30.0, 5.0
_MEETING = 10.0  # seconds that `join` waits for all guardians to connect
_VERDICT = 20.0  # seconds for the guardian's answer to a failed rank
_FRAMES = 8

_watchdog: _Watchdog | None = None


def start(timeout: float = DEFAULT_TIMEOUT) -> torch.distributed.Store | None:
    """Start this rank's guardian, connect it to rank 0's, and wait for all ranks. Collective.

    Every rank must arrive within `timeout` seconds. Returns a store of all ranks, without a process group; None for one
    rank, which has no guardian.
    """
    global _watchdog
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    _watchdog = _Watchdog(rank, world, timeout, launched=True)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # torchrun keeps its store over restarts: keys have the number of the attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # multi_tenant: the process group uses the same server later.
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not agent,
        timeout=timedelta(seconds=2 * timeout),  # the judge reports missing ranks before
        wait_for_workers=False,
        multi_tenant=True,
    )
    store = torch.distributed.PrefixStore(f"ds_fp8/{attempt}", store)
    _watchdog.store = store  # rank 0's is the server
    _watchdog.meet(store)
    # An atomic counter: the last rank opens the gate.
    if store.add("arrived", 1) == world:
        store.set("complete", "")
    store.get("complete")
    return store


def join() -> None:
    """Start a guardian for this rank of another program, unless it has one or there is no process group."""
    global _watchdog
    try:
        limit = float(os.environ.get(VARIABLE, DEFAULT_TIMEOUT))
    except ValueError:
        raise UserError(f"{VARIABLE} is not a number of seconds", key=VARIABLE, remedy="300; 0 for none") from None
    if _watchdog is not None or limit <= 0 or not torch.distributed.is_initialized():
        return
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world == 1:
        return
    try:
        # Cloned: a thread that waits on the group's connection would block the main thread's use of it.
        store = torch.distributed.distributed_c10d._get_default_store().clone()
    except (AttributeError, RuntimeError) as error:
        logger.info("note: a rank that is lost is found by collectives' timeouts alone (%s)", error)
        return
    _watchdog = watchdog = _Watchdog(rank, world, limit, launched=False)
    meeting = threading.Thread(target=watchdog.meet_all, args=(store,), name="guardian", daemon=True)
    meeting.start()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        sys.stderr.flush()
        watchdog.failed(error)

    sys.excepthook = hook
    # multiprocessing's atexit: its child processes run no functions of atexit.
    Finalize(None, _at_exit, exitpriority=0)
    meeting.join(_MEETING)  # from here on a failed rank ends the others


def _at_exit() -> None:
    error = sys.exc_info()[1]  # in a process of multiprocessing, without sys.excepthook
    if error is not None:
        _watchdog.failed(error)
    leave()


def set_timeout(seconds: float) -> None:
    if _watchdog is not None:
        _watchdog.timeout = seconds


def slowest() -> float | None:
    """Return an upper bound of waits in a healthy job, in seconds, for the timeout of collectives; None unguarded."""
    return None if _watchdog is None else (SLOW + 1) * _watchdog.timeout


def beat(doing: str, slow: bool = False) -> None:
    """Report progress and the next phase; a `slow` one may take SLOW times the timeout."""
    if _watchdog is not None and _watchdog.launched:
        timeout = _watchdog.timeout
        patience = timeout * (SLOW if slow else 1)
        _watchdog.send({"doing": doing, "patience": patience, "limit": timeout, "silence": _silence(timeout)})


def fail(kind: str, text: str, code: int) -> None:
    """Report the failure of this rank and exit as the judge decides, or with `code`; return without a guardian."""
    if _watchdog is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        _watchdog.send({"finding": [kind, text]})
        time.sleep(_VERDICT)
        # Without cleanup: atexit handlers and process groups may wait for lost ranks.
        os._exit(code)


def leave() -> None:
    if _watchdog is not None:
        _watchdog.send({"leaving": True})


def _silence(timeout: float) -> float:
    return min(MAX_SILENCE, max(MIN_SILENCE, timeout / 2))


class _Watchdog:
    def __init__(self, rank: int, world: int, timeout: float, launched: bool) -> None:
        self.timeout, self.launched = timeout, launched
        self.store: torch.distributed.Store | None = None
        self._rank, self._world = rank, world
        self._main = threading.main_thread().ident
        about: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "host": this_host(),
            "hosts": host_names(),
            "pid": os.getpid(),
            "limit": timeout,
            "name": "train.timeout" if launched else VARIABLE,
            "silence": _silence(timeout),
            "arrival": timeout if launched else None,
            "launched": launched,
        }
        self._guardian = subprocess.Popen(
            # The standard library alone, without PYTHONPATH and the working folder.
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C and a closed terminal are the launcher's to handle
        )

    def meet(self, store: torch.distributed.Store) -> None:
        """Connect to the guardian of rank 0, at the address in the store."""
        master = os.environ.get("MASTER_ADDR", "")
        if self._rank == 0:
            token = secrets.token_hex(16)
            self.send({"serve": [_address_of_all(master, self._world), token]})
            served = json.loads(self._guardian.stdout.readline())
            store.set("ds_fp8/guardian", json.dumps([served["address"], served["port"], token]))
        address, port, token = json.loads(store.get("ds_fp8/guardian"))
        # From here on a hanging guardian must not block training.
        os.set_blocking(self._guardian.stdin.fileno(), False)
        self.send({"connect": [address or ("127.0.0.1" if self._rank == 0 else master), port, token]})
        threading.Thread(target=self._obey, name="guardian", daemon=True).start()

    def meet_all(self, store: torch.distributed.Store) -> None:
        with suppress(RuntimeError):  # rank 0, which serves the store, is gone
            self.meet(store)
            if store.add("ds_fp8/met", 1) == self._world:
                store.set("ds_fp8/all_met", "")
            store.get("ds_fp8/all_met")

    def send(self, message: dict[str, Any]) -> None:
        """Write to the guardian; the other thread handles a pipe that is full or without a reader."""
        with suppress(OSError):
            os.write(self._guardian.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, (SystemExit, KeyboardInterrupt)):
            text = (error.problem if isinstance(error, UserError) else str(error)).strip().splitlines() or [""]
            self.send({"finding": [ERROR, f"{type(error).__name__}: {text[0]}"]})

    def _obey(self) -> None:
        orders: dict[str, Callable[[Any], None]] = {
            "stop": lambda _: os.kill(os.getpid(), signal.SIGTERM),
            "show": lambda _: self._show(),
            "end": os._exit,
        }
        for line in self._guardian.stdout:
            for order, value in json.loads(line).items():
                orders[order](value)
        os._exit(EXIT_LOST)  # nothing else would end a rank without a guardian

    def _show(self) -> None:
        """Print the place of the main thread: one line in a collective, else its stack."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])[-_FRAMES:]
        inside = ("/torch/distributed/", "/deepspeed/comm/")
        waits = any(part in frame.filename for frame in frames[-4:] for part in inside)
        what = f"waits in {frames[-1].name}" if waits else "in no collective: the others wait for it"
        stack = "" if waits else "\n" + "".join(traceback.format_list(frames)).rstrip()
        print(f"{this_host()} (rank {self._rank}): {what}{stack}", file=sys.stderr, flush=True)


def _address_of_all(master: str, world: int) -> str | None:
    """Return the address of rank 0's host for all ranks, None if hosts may resolve its name differently."""
    if (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")) == str(world):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(master))
    except ValueError:
        return None
