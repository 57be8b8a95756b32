"""Guardians of ranks without torch: what ends a job, what does not, and that strangers cannot end it nor be heard."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_fp8.cluster import guardian
from tests.cluster.conftest import at_once

RANK = """
import json, os, resource, socket, subprocess, sys
about, guardian, files = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
about["pid"] = os.getpid()
ours, theirs = socket.socketpair()
passed = [about["listener"]] if "listener" in about else []
subprocess.Popen([sys.executable, "-I", "-S", guardian], stdin=theirs, pass_fds=passed, start_new_session=True)
[os.close(each) for each in (theirs.detach(), *passed)]
ours.sendall(json.dumps(about).encode() + b"\\n")
for line in sys.stdin:  # of the test
    ours.sendall(line.encode())
    print(flush=True)
order = ours.makefile().readline()
os._exit(json.loads(order)["end"] if order else 76)
"""
AT_ONCE = 6
TOKEN = "secret"
LIMIT = 4  # Seconds without progress, and of a stop: more than a busy machine lets a process wait


class Job:
    """Two ranks that send to their guardians what a test wants."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.ranks: list[subprocess.Popen] = []
        self.guardians: list[psutil.Process] = []

    def start(self, timeout: float = 60, launched: bool = True, stderr: int | None = None, files: int = 1000) -> None:
        """Start the next rank, with so many descriptors, connect its guardian, and wait for the connection."""
        rank = len(self.ranks)
        state = {"doing": "step 7", "patience": timeout, "timeout": timeout, "beats": 0, "stopped": False}
        about = {"rank": rank, "world": 2, "host": "vm", "hosts": [], "name": "the limit", "arrival": timeout}
        about |= {"launched": launched, "state": {**state, "gone": False, "finding": None}}
        about |= {"listener": self.listener.fileno(), "token": TOKEN} if rank == 0 else {}
        command = [sys.executable, "-S", "-c", RANK, json.dumps(about), guardian.__file__, str(files)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.output.open("ab") as output:
            passed = [] if rank else [self.listener.fileno()]
            process = subprocess.Popen(command, stderr=stderr or output, pass_fds=passed, **pipes)
        self.ranks.append(process)
        self.send(rank, connect=["127.0.0.1", self.port, TOKEN])
        self.guardians += psutil.Process(process.pid).children()
        wait_until(lambda: psutil.CONN_ESTABLISHED in states(self.guardians[rank]))

    def send(self, rank: int, **message: Any) -> None:
        process = self.ranks[rank]
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        assert process.stdout.readline()

    def end(self) -> tuple[list[int], str]:
        """Return exit codes, and what the guardians printed, once all have ended."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.stdin.close()
        codes = [rank.wait(30) for rank in self.ranks]
        assert not psutil.wait_procs(self.guardians, 20)[1]
        return codes, self.output.read_text()

    def is_undisturbed(self) -> bool:
        """Return whether all ranks still run; end them, as ranks that are done."""
        running = [rank.poll() for rank in self.ranks] == [None, None]
        for number, rank in enumerate(self.ranks if running else []):
            self.send(number, doing=guardian.LEAVING, patience=240)
            rank.kill()
        return running and self.end()[1] == ""


def states(process: psutil.Process) -> set[str]:
    return {connection.status for connection in process.net_connections("inet")}


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def with_job(body: Callable) -> Callable:
    """Give the body of a test `at_once` a job, of which nothing is left."""

    @functools.wraps(body)
    def with_folder(folder: Path, **parameters: Any) -> None:
        made = Job(folder / "stderr")
        try:
            body(made, **parameters)
        finally:
            for process in [*made.ranks, *made.guardians]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for rank in made.ranks:
                rank.wait()

    return at_once(with_folder)


# ---------------------------------------------------------------- strangers


GREETING = {"rank": 1, "host": "h", "token": "guessed"}
SPOKEN = [
    [{"rank": 1, "host": "h"}, {"finding": ["error", "not so"]}],
    [GREETING, {"finding": ["error", "not so"]}],
    [{**GREETING, "rank": "x", "token": TOKEN}],
    [{**GREETING, "rank": 0, "token": TOKEN}],
    [b'["finding"]\n'],
    [b"[" * 100_000 + b"\n"],
    [b"x" * (guardian.LIMIT + 1)],
    [],
]


def hung_up_on(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(10) == b""
    except ConnectionResetError:
        return True


@with_job
def test_strangers_are_not_heard_and_nothing_listens_once_all_are_connected(job):
    job.start()
    strangers = [socket.create_connection(("127.0.0.1", job.port), timeout=2 * guardian.GREETS) for _ in SPOKEN]
    for stranger, lines in zip(strangers, SPOKEN, strict=True):
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"".join(line if isinstance(line, bytes) else guardian.encoded(**line) for line in lines))
    assert all(hung_up_on(stranger) for stranger in strangers)
    job.start()
    job.listener.close()
    wait_until(lambda: psutil.CONN_LISTEN not in states(job.guardians[0]))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", job.port))
    assert job.is_undisturbed()


@pytest.mark.parametrize("descriptors", [40, 1000])
@with_job
def test_a_flood_of_connections_ends_no_job(job, descriptors):
    """Before the second rank connects 300 others do, and say nothing."""
    job.start(files=descriptors)
    flood = [socket.create_connection(("127.0.0.1", job.port)) for _ in range(300)]
    time.sleep(0.5)
    # One more: the listener's number, which the job chose, may lie above the limit.
    assert job.guardians[0].num_fds() <= min(descriptors + 1, 100)
    job.start()
    job.listener.close()
    wait_until(lambda: psutil.CONN_LISTEN not in states(job.guardians[0]))
    assert hung_up_on(flood[0])
    assert hung_up_on(flood[-1])
    job.send(1, finding=["user", "error: \x1b[2J no file"])
    assert job.end() == ([2, 2], "\nerror: \\x1b[2J no file\n  where:  vm (rank 1)\n\n")


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(("stopped", "seconds"), [((1,), LIMIT / 2), ((0, 1), 3 * LIMIT)])
@with_job
def test_a_rank_that_is_continued_and_a_job_that_is_paused_go_on(job, stopped, seconds):
    for _ in range(2):
        job.start(LIMIT)
        job.send(len(job.ranks) - 1, patience=60)
    for number, wait in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 1)):
        for rank in stopped:
            job.ranks[rank].send_signal(number)
        time.sleep(wait)
    assert job.is_undisturbed()


@with_job
def test_the_last_rank_to_make_progress_counts(job):
    job.start(LIMIT)
    job.start(LIMIT)
    for count in range(8):
        job.send(1, doing=f"count {count}")
        time.sleep(LIMIT / 4)
    assert [rank.poll() for rank in job.ranks] == [None, None]
    codes, output = job.end()
    assert codes == [75, 75]
    assert "vm (rank 1): no progress for " in output
    assert "in count 7: limit the limit" in output


@with_job
def test_a_rank_that_never_arrives_is_named(job):
    job.start(LIMIT)
    codes, output = job.end()
    assert codes == [75]
    assert f"a host that never reported (rank 1): did not arrive within {LIMIT} s" in output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
@with_job
def test_a_rank_without_guardian_ends(job, how, rank):
    """Killed, or not heard of, as of a host whose link went down: the connections stay open."""
    job.start(2 * guardian.MIN_SILENCE)
    job.start(2 * guardian.MIN_SILENCE)
    job.guardians[rank].send_signal(how)
    for each in job.ranks:
        each.stdin.close()
    assert job.ranks[1 - rank].wait(30) == 75
    job.guardians[rank].resume() if how == signal.SIGSTOP else None
    codes, output = job.end()
    assert codes[rank] == (75 if how == signal.SIGSTOP else 76)
    if how == signal.SIGSTOP:
        assert (
            "vm (rank 1): no message for" if rank else "(rank 1) was ended: no message from rank 0's host"
        ) in output


@with_job
def test_ranks_whose_output_has_no_reader_are_asked_to_stop(job):
    """A socket, as of sshd, which may have input, too, and the end of it."""
    reader, writer = socket.socketpair()
    for _ in range(2):
        job.start(stderr=writer.fileno())
    writer.close()
    reader.send(b"input")
    reader.shutdown(socket.SHUT_WR)
    time.sleep(2)
    assert [rank.poll() for rank in job.ranks] == [None, None]
    reader.close()
    assert [rank.wait(20) for rank in job.ranks] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize(
    ("launched", "number", "words"),
    [
        (False, signal.SIGTERM, None),
        (True, signal.SIGSEGV, "the same command resumes from the last checkpoint"),
        (False, signal.SIGSEGV, "a rank was lost; go on from the last checkpoint"),
    ],
)
@with_job
def test_what_is_printed_of_deaths_holds_for_the_program(job, launched, number, words):
    """Nothing, where all ranks were asked to end."""
    job.start(launched=launched)
    job.start(launched=launched)
    for rank in job.ranks if words is None else job.ranks[1:]:
        rank.send_signal(number)
    codes, output = job.end()
    assert codes == [75 if words else -number, -number]
    if words is None:
        assert output == ""
    else:
        assert f"{words})\n  vm (rank 1): its process was ended by {number.name}\n" in output


@with_job
def test_guardians_sleep_while_nothing_happens(job):
    """Also that of a rank which has ended and takes its time: all take less than 0.1 s of CPU in 3 s."""
    job.start()
    job.start()
    job.send(0, doing=guardian.LEAVING, patience=240)
    job.ranks[0].kill()
    job.ranks[0].wait()
    time.sleep(1.5)
    before = [sum(process.cpu_times()[:2]) for process in job.guardians]
    time.sleep(3)
    assert all(sum(g.cpu_times()[:2]) - was < 0.1 for g, was in zip(job.guardians, before, strict=True))
    job.send(1, finding=["error", "ValueError: no"])
    codes, output = job.end()
    assert codes == [-9, 1]
    assert "vm (rank 1): ValueError: no" in output
