"""The rank's side of the watchdog: reports progress to its guardian, and ends on the guardian's order.

`ds-fp8 train` calls `start` at the beginning of a rank's process, `beat` after progress, `fail` or `leave` at the end.
For other programs ds_fp8.initialize calls `join`: their progress is unknown, and a hanging rank that is not stopped is
left to the timeout of its process group. `wait_for_all` is for ranks that save, load or evaluate longer than that
timeout: the guardians end the job where one of them is lost meanwhile.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed
from torch.distributed.rendezvous import _create_c10d_store

from ds_fp8.cluster.guardian import ERROR, LEAVES, LEAVING
from ds_fp8.cluster.hosts import host_names, this_host
from ds_fp8.config.errors import EXIT_LOST, UserError
from ds_fp8.config.log import logger

DEFAULT_TIMEOUT = 300.0  # seconds without progress that end a job, before `set_timeout` by train.timeout
# Environment: seconds for which a rank of another program may be stopped; 0: no guardians.
VARIABLE = "DS_FP8_TIMEOUT"
SLOW = 6  # multiple of the timeout in slow phases: preparing data and model, the first step, saving
_MEETING = 10.0  # seconds that `join` waits for all guardians to connect
_VERDICT = 20.0  # seconds for the guardian's answer to a failed rank
_FRAMES = 8
LONGEST_WAIT = timedelta(hours=4)  # of ranks for the slowest of them, which reads or writes files

_watchdog: _Watchdog | None = None
_meetings: _Meetings | None = None


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
    # As the process group does later: served by torchrun's agent, or by rank 0. Without a number of ranks to wait for:
    # the judge reports missing ranks before.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = _create_c10d_store(address, port, rank, None, timedelta(seconds=2 * timeout))
    # torchrun keeps its store over restarts: keys have the number of the attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _watchdog.meet(torch.distributed.PrefixStore(f"ds_fp8/{attempt}", store))
    return _watchdog.store


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

    def meet() -> None:
        with suppress(RuntimeError):  # rank 0, which serves the store, is gone
            watchdog.meet(store)

    meeting = threading.Thread(target=meet, name="guardian", daemon=True)
    meeting.start()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        sys.stderr.flush()
        watchdog.failed(error)

    sys.excepthook = hook
    # multiprocessing's atexit: its child processes run no functions of atexit, and have no sys.excepthook.
    Finalize(None, lambda: (watchdog.failed(sys.exc_info()[1]), leave()), exitpriority=0)
    meeting.join(_MEETING)  # from here on a failed rank ends the others


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
        _watchdog.send(doing=doing, patience=timeout * (SLOW if slow else 1), timeout=timeout)


def wait_for_all() -> None:
    """Wait until every rank is here, at most for LONGEST_WAIT, whatever the timeout of the process group. Collective.

    A collective that follows begins on all ranks at nearly the same time. A rank without a guardian does not wait here:
    the timeout of the collective is all that finds a lost rank then. Before the process group: for `start`'s ranks.
    """
    global _meetings
    store, world = None, 1
    if torch.distributed.is_initialized():
        store, world = torch.distributed.distributed_c10d._get_default_store(), torch.distributed.get_world_size()
    elif _watchdog is not None:
        store, world = _watchdog.store, _watchdog.world
    if store is None or world == 1:
        return
    if _meetings is None or _meetings.of is not store:
        _meetings = _Meetings(store, world)
    _meetings.meet()


def wait_at_barriers() -> None:
    """Let barriers of all ranks, those of DeepSpeed and Trainer among them, begin with `wait_for_all` from now on."""
    stock = torch.distributed.barrier
    if stock.__module__ == __name__:
        return

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if group in (None, torch.distributed.group.WORLD) and not async_op:
            wait_for_all()
        return stock(group, async_op, device_ids)

    torch.distributed.barrier = barrier


class _Meetings:
    """Meetings of all ranks in a store, which know no timeout but their own."""

    def __init__(self, store: torch.distributed.Store, world: int) -> None:
        self.of, self._world, self._number = store, world, 0
        # Cloned: a wait on the group's own connection would block its use by another thread.
        self._store = store.clone() if hasattr(store, "clone") else store

    def meet(self) -> None:
        self._number += 1
        here, all_here = f"ds_fp8/here/{self._number}", f"ds_fp8/all_here/{self._number}"
        if self._store.add(here, 1) == self._world:
            self._store.set(all_here, "")
            # All have left the meeting before, for they are at this one.
            self._store.delete_key(f"ds_fp8/here/{self._number - 1}")
            self._store.delete_key(f"ds_fp8/all_here/{self._number - 1}")
        deadline, pause = time.monotonic() + LONGEST_WAIT.total_seconds(), 0.001
        # Not Store.wait: in one piece it holds back handlers of signals, and of shorter ones each ends in a warning.
        while _watchdog is not None and not self._store.check([all_here]) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)


def fail(kind: str, text: str, code: int) -> None:
    """Report the failure of this rank and exit as the judge decides, or with `code`; return without a guardian."""
    if _watchdog is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        _watchdog.send(finding=[kind, text])
        time.sleep(_VERDICT)
        # Without cleanup: atexit handlers and process groups may wait for lost ranks.
        os._exit(code)


def leave() -> None:
    if _watchdog is not None:
        _watchdog.send(doing=LEAVING, patience=LEAVES if _watchdog.launched else 2 * LEAVES)


class _Watchdog:
    def __init__(self, rank: int, world: int, timeout: float, launched: bool) -> None:
        self.timeout, self.launched = timeout, launched
        self.store: torch.distributed.Store | None = None  # rank 0's is the server
        self._rank, self.world = rank, world
        self._main = threading.main_thread().ident
        self._socket, theirs = socket.socketpair()
        patience = timeout if launched else float("inf")
        state = {"doing": "starting", "patience": patience, "timeout": timeout}
        about: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "host": this_host(),
            "hosts": host_names(),
            "pid": os.getpid(),
            "name": "train.timeout" if launched else VARIABLE,
            "arrival": patience,
            "launched": launched,
            "state": {**state, "beats": 0, "stopped": False, "gone": False, "finding": None},
        }
        passed = [_listener(world)] if rank == 0 else []
        for listener in passed:
            self._judge = [*listener.getsockname()[:2], secrets.token_hex(16)]
            about |= {"listener": listener.fileno(), "token": self._judge[2]}
        self._guardian = subprocess.Popen(
            # The standard library alone, without PYTHONPATH and the working folder.
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py"))],
            stdin=theirs,
            pass_fds=[each.fileno() for each in passed],
            start_new_session=True,  # Ctrl-C and a closed terminal are the launcher's to handle
        )
        for each in (theirs, *passed):
            each.close()
        self._socket.sendall(json.dumps(about).encode() + b"\n")
        threading.Thread(target=self._obey, name="guardian", daemon=True).start()

    def meet(self, store: torch.distributed.Store) -> None:
        """Connect to the guardian of rank 0, at the address in the store, and wait until all ranks have it."""
        self.store, key = store, "ds_fp8/guardian"
        if self._rank == 0:
            store.set(key, json.dumps(self._judge))
        address, port, token = json.loads(store.get(key))
        if address in ("0.0.0.0", "::"):
            address = "127.0.0.1" if self._rank == 0 else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.send(connect=[address, port, token])
        # An atomic counter: the last rank opens the gate. Nobody else reads the token from the store afterwards.
        if store.add("ds_fp8/met", 1) == self.world:
            store.delete_key(key)
            store.set("ds_fp8/all_met", "")
        store.get("ds_fp8/all_met")

    def send(self, **message: Any) -> None:
        """Write to the guardian without blocking; the other thread handles one that hangs or has ended."""
        with suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)

    def failed(self, error: BaseException | None) -> None:
        if not isinstance(error, (SystemExit, KeyboardInterrupt, type(None))):
            text = (error.problem if isinstance(error, UserError) else str(error)).strip().splitlines() or [""]
            self.send(finding=[ERROR, f"{type(error).__name__}: {text[0]}"])

    def _obey(self) -> None:
        # Nothing else would end a rank without a guardian.
        order = {"end": EXIT_LOST, "show": False}
        with suppress(OSError, ValueError):  # it was killed
            order = json.loads(self._socket.makefile().readline())
        if order["show"]:
            self._show()
        os._exit(order["end"])

    def _show(self) -> None:
        """Print the place of the main thread: one line in a collective, else its stack."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])[-_FRAMES:]
        inside = ("/torch/distributed/", "/deepspeed/comm/", __file__)
        waits = any(part in frame.filename for frame in frames[-4:] for part in inside)
        what = f"waits in {frames[-1].name}" if waits else "in no collective: the others wait for it"
        stack = "" if waits else "\n" + "".join(traceback.format_list(frames)).rstrip()
        print(f"{this_host()} (rank {self._rank}): {what}{stack}", file=sys.stderr, flush=True)


def _listener(world: int) -> socket.socket:
    """Return a socket at the address of rank 0's host for all ranks, or at all of its addresses."""
    here = (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")) == str(world)
    try:
        address = "127.0.0.1" if here else str(ipaddress.ip_address(os.environ.get("MASTER_ADDR", "")))
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except (ValueError, OSError):  # a name, which hosts may resolve differently, or an address behind a relay
        both = socket.has_dualstack_ipv6()
        return socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
