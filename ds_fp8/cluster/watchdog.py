"""The rank's side of the watchdog: says that it makes progress, and ends when its guardian says so.

`ds-fp8 train` calls `start` at the beginning of a rank's process, `beat` wherever the job has moved, `fail` or `leave`
at its end. A program of one's own has `join` in ds_fp8.initialize: nothing is known of its progress there, so that a
rank that hangs without being stopped is left to the timeout of its process group.
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

DEFAULT_TIMEOUT = 300.0  # Seconds without progress that end a job, until `set_timeout` is told train.timeout
# Of the environment: seconds for which a rank may be stopped in a program of one's own; 0 for no guardians
VARIABLE = "DS_FP8_TIMEOUT"
SLOW = 6  # Multiple of the timeout that slow phases get: preparing data and model, the first step, saving
# Seconds without a word from a host after which it counts as lost: half the timeout within these limits
MAX_SILENCE, MIN_SILENCE = 30.0, 5.0
_MEETING = 10.0  # Seconds that a program of one's own waits for all guardians to have met
_VERDICT = 20.0  # Seconds in which the guardian answers a rank that failed
_FRAMES = 8

_watchdog: _Watchdog | None = None


def start(timeout: float = DEFAULT_TIMEOUT) -> torch.distributed.Store | None:
    """Start this rank's guardian, introduce it to that of rank 0, and wait for all ranks. Collective.

    Every rank must arrive in `timeout` seconds. Returns a store that all ranks share, without any process group; None
    in a world of one, which has no guardian.
    """
    global _watchdog
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    _watchdog = _Watchdog(rank, world, timeout, launched=True)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # torchrun keeps its store over restarts: the keys of the attempt before must not be found.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The process group meets at the same address later: multi_tenant lets both use one server.
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not agent,
        timeout=timedelta(seconds=2 * timeout),  # the judge names who is missing before
        wait_for_workers=False,
        multi_tenant=True,
    )
    store = torch.distributed.PrefixStore(f"ds_fp8/{attempt}", store)
    _watchdog.store = store  # rank 0's is the server
    _watchdog.meet(store)
    # An atomic counter: exactly one rank, the last, opens the gate that all wait at.
    if store.add("arrived", 1) == world:
        store.set("complete", "")
    store.get("complete")
    return store


def join() -> None:
    """Give this rank of a program of one's own a guardian, unless it has one or there is no process group yet."""
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
        # A connection of its own: a thread that waits on the group's would keep the main thread from it.
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
    # By multiprocessing: also in a process of its, which runs no functions of atexit.
    Finalize(None, _at_exit, exitpriority=0)
    meeting.join(_MEETING)  # a rank that fails after it ends the others


def _at_exit() -> None:
    error = sys.exc_info()[1]  # of a process of multiprocessing, which has no sys.excepthook
    if error is not None:
        _watchdog.failed(error)
    leave()


def set_timeout(seconds: float) -> None:
    if _watchdog is not None:
        _watchdog.timeout = seconds


def slowest() -> float | None:
    """Return seconds that no wait of a healthy job exceeds, for collectives' own timeout; None without a guardian."""
    return None if _watchdog is None else (SLOW + 1) * _watchdog.timeout


def beat(doing: str, slow: bool = False) -> None:
    """Say that the job has moved, and what comes next; it may take SLOW times the timeout if it is `slow`."""
    if _watchdog is not None and _watchdog.launched:
        timeout = _watchdog.timeout
        patience = timeout * (SLOW if slow else 1)
        _watchdog.tell({"doing": doing, "patience": patience, "limit": timeout, "silence": _silence(timeout)})


def fail(kind: str, text: str, code: int) -> None:
    """Report what ended this rank, a finding of the guardian's, and exit as the job's judge decides, or with `code`.

    Returns only without a guardian.
    """
    if _watchdog is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        _watchdog.tell({"finding": [kind, text]})
        time.sleep(_VERDICT)
        # Without cleaning up: atexit handlers and destructors of process groups may wait for ranks that are gone.
        os._exit(code)


def leave() -> None:
    if _watchdog is not None:
        _watchdog.tell({"leaving": True})


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
            # Alone with the standard library, and out of reach of PYTHONPATH and the working folder.
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C and a closed terminal are the launcher's to handle
        )

    def meet(self, store: torch.distributed.Store) -> None:
        """Meet the guardian of rank 0, whose address the store has."""
        master = os.environ.get("MASTER_ADDR", "")
        if self._rank == 0:
            token = secrets.token_hex(16)
            self.tell({"serve": [_address_of_all(master, self._world), token]})
            served = json.loads(self._guardian.stdout.readline())
            store.set("ds_fp8/guardian", json.dumps([served["address"], served["port"], token]))
        address, port, token = json.loads(store.get("ds_fp8/guardian"))
        # From here on a guardian that hangs must not block training.
        os.set_blocking(self._guardian.stdin.fileno(), False)
        self.tell({"connect": [address or ("127.0.0.1" if self._rank == 0 else master), port, token]})
        threading.Thread(target=self._obey, name="guardian", daemon=True).start()

    def meet_all(self, store: torch.distributed.Store) -> None:
        with suppress(RuntimeError):  # rank 0, which serves the store, is gone
            self.meet(store)
            if store.add("ds_fp8/met", 1) == self._world:
                store.set("ds_fp8/all_met", "")
            store.get("ds_fp8/all_met")

    def tell(self, message: dict[str, Any]) -> None:
        """Write to the guardian; a pipe that is full, or has no reader any more, is the other thread's business."""
        with suppress(OSError):
            os.write(self._guardian.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, (SystemExit, KeyboardInterrupt)):
            told = error.problem if isinstance(error, UserError) else str(error)
            text = told.strip().splitlines() or [""]
            self.tell({"finding": [ERROR, f"{type(error).__name__}: {text[0]}"]})

    def _obey(self) -> None:
        orders: dict[str, Callable[[Any], None]] = {
            "stop": lambda _: os.kill(os.getpid(), signal.SIGTERM),
            "show": lambda _: self._show(),
            "end": os._exit,
        }
        for line in self._guardian.stdout:
            for order, value in json.loads(line).items():
                orders[order](value)
        os._exit(EXIT_LOST)  # without a guardian nothing would end this rank

    def _show(self) -> None:
        """Print where the main thread is: one line in a collective, its stack where the others wait for it."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])[-_FRAMES:]
        inside = ("/torch/distributed/", "/deepspeed/comm/")
        waits = any(part in frame.filename for frame in frames[-4:] for part in inside)
        what = f"waits in {frames[-1].name}" if waits else "in no collective: the others wait for it"
        stack = "" if waits else "\n" + "".join(traceback.format_list(frames)).rstrip()
        print(f"{this_host()} (rank {self._rank}): {what}{stack}", file=sys.stderr, flush=True)


def _address_of_all(master: str, world: int) -> str | None:
    """Return the address of rank 0's host that all ranks use, None where hosts may resolve a name in different ways."""
    if (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")) == str(world):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(master))
    except ValueError:
        return None
