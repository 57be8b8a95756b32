"""The guardian: a small process for every rank that ends the rank when the job cannot continue.

A rank stuck in a collective or kernel, or stopped, cannot end itself, and an unreachable host receives no orders. No
GPU, lock of Python or collective blocks a guardian. Guardians report twice a second to rank 0's, which judges the job:
a rank that failed, died or is stopped, a silent host, a job without progress. They end their ranks on its order, or
when it is silent.

Their connections are their own: torch's TCPStore stops with rank 0, and whoever reaches its port may delete keys, while
a silent host must end the job. Rank 0's guardian listens until all are connected, and no longer. Run by path, with the
standard library alone: 20 MiB, where torch takes 220. Messages are lines of JSON.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

TICK, LOOK = 0.5, 0.1  # seconds between two messages of a guardian, and between two checks of the judge
# Seconds for further ranks to report failures: the first report is not always the cause.
MORE_FINDINGS = 2.0
OBEYS = 3.0  # seconds for a rank to print its stack and end itself on order; then it is killed
FAREWELL = 8.0
LEAVING, LEAVES = "leaving", 120.0  # of a rank that is done, and seconds until its process must have ended
LIMIT = 1 << 20  # bytes of a message
# Seconds for a connection to show the token, and the number of such connections besides the ranks'.
GREETS, STRANGERS = 5.0, 64
MOVES = 1 << 16  # bytes that a rank reads and writes between two messages, in a slow phase, where that is progress
# Seconds without a message after which a host counts as lost: half the timeout, within these limits.
MAX_SILENCE, MIN_SILENCE = 30.0, 5.0

# Failure kinds by severity, with the exit code of all ranks.
DIED, SILENT, ABSENT, STOPPED, HUNG = "died", "silent", "absent", "stopped", "hung"
USER, ERROR, LOST = "user", "error", "lost"
CODES = {DIED: 75, SILENT: 75, ABSENT: 75, STOPPED: 75, HUNG: 75, USER: 2, ERROR: 1, LOST: 75}
AFTER = {75: "the same command resumes from the last checkpoint", 1: "a rank failed: see its traceback above"}


def encoded(**message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def silence_of(state: dict[str, Any]) -> float:
    return min(MAX_SILENCE, max(MIN_SILENCE, state["timeout"] / 2))


@dataclass
class Rank:
    """A rank as its guardian reports it; `heard`, `moved`, `ran`: when there last was a message, progress, no stop."""

    host: str
    writer: asyncio.StreamWriter
    state: dict[str, Any]  # Guardian.state
    heard: float
    moved: float
    ran: float


class Judge:
    """Decides in rank 0's guardian when, and why, the job ends."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about, self._world = about, about["world"]
        self._ranks: dict[int, Rank] = {}
        self._findings: dict[int, tuple[str, str]] = {}  # rank -> (failure kind, details), in order of arrival
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # connections without the token, oldest first
        self._started = self._looked = self._ran = self._present = time.monotonic()

    async def run(self) -> None:
        """Listen for the guardians; return when the job has ended."""
        # asyncio calls this when no descriptor is free for a connection, and goes on after a second.
        asyncio.get_running_loop().set_exception_handler(lambda *_: self._close(*self._strangers))
        # A long queue: the guardians of thousands of ranks connect within the same second.
        listener = socket.socket(fileno=self._about["listener"])
        self._server = await asyncio.start_server(self._hear, sock=listener, limit=LIMIT, backlog=4096)
        while not self._findings:
            await asyncio.sleep(LOOK)
            now, present = time.monotonic(), self._ranks_present()
            self._find(now, present)
            if present or not self._ranks:
                self._present = now
            elif not self._findings and (len(self._ranks) == self._world or now - self._present > FAREWELL):
                return
        await self._until(MORE_FINDINGS, lambda: len(self._findings) == self._world)
        kinds = {kind for kind, _ in self._findings.values()}
        cause = next(kind for kind in CODES if kind in kinds)
        if verdict := self._verdict(cause):
            say(verdict)
        present = self._ranks_present().values()
        for rank in present:
            rank.writer.write(encoded(end=CODES[cause], show=cause == HUNG))
        # Silent ranks will not answer.
        await self._until(FAREWELL, lambda: all(r.state["gone"] or time.monotonic() - r.heard > 2 for r in present))

    def _ranks_present(self) -> dict[int, Rank]:
        return {number: rank for number, rank in self._ranks.items() if not rank.state["gone"]}

    async def _until(self, seconds: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not condition():
            await asyncio.sleep(LOOK)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > self._world + STRANGERS:
            self._close(next(iter(self._strangers)))
        rank = None
        # Whatever a stranger sends: the connection is closed.
        with suppress(OSError, LookupError, TypeError, ValueError, RecursionError, asyncio.TimeoutError):
            number, rank = self._greeted(json.loads(await asyncio.wait_for(reader.readline(), GREETS)), writer)
            while line := await reader.readline():
                self._note(number, rank, json.loads(line))
        self._close(writer)
        if rank is not None and not rank.state["gone"]:
            rank.state["gone"] = True
            self._findings.setdefault(number, (SILENT, "the connection to its guardian was closed"))

    def _close(self, *connections: asyncio.StreamWriter) -> None:
        for writer in connections:
            self._strangers.pop(writer, None)
            writer.transport.abort()

    def _greeted(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> tuple[int, Rank]:
        # In constant time: anybody may reach the port.
        if not hmac.compare_digest(str(message["token"]).encode(errors="replace"), self._about["token"].encode()):
            raise ValueError("no token")
        number, now = message["rank"], time.monotonic()
        if type(number) is not int or not 0 <= number < self._world or number in self._ranks:
            raise ValueError("no rank")
        self._ranks[number] = Rank(message["host"], writer, self._about["state"].copy(), now, now, now)
        self._strangers.pop(writer, None)
        writer.write(encoded(alive=True))
        if len(self._ranks) == self._world:
            self._server.close()
            self._close(*self._strangers)
        return number, self._ranks[number]

    def _note(self, number: int, rank: Rank, state: dict[str, Any]) -> None:
        rank.heard = now = time.monotonic()
        if state["stopped"] or state["beats"] != rank.state["beats"]:
            rank.moved = now  # a stop has its own limit
        rank.ran = rank.ran if state["stopped"] else now
        rank.state = state
        if state["finding"]:
            self._findings.setdefault(number, tuple(state["finding"]))
        rank.writer.write(encoded(alive=True))

    def _find(self, now: float, present: dict[int, Rank]) -> None:
        """Find silent, absent and stopped ranks, and a job without progress."""
        if now - self._looked > 10 * TICK:
            # This host was suspended: messages of the meantime are not read yet.
            for rank in present.values():
                rank.heard = rank.ran = now
        self._looked = now
        if all(rank.state["stopped"] for rank in present.values()):
            self._ran = now  # stopped by the user (Ctrl-Z)
        name = self._about["name"]
        for number, rank in present.items():
            stopped = now - rank.ran if rank.state["stopped"] else 0
            if now - rank.heard > silence_of(rank.state):
                self._findings.setdefault(number, (SILENT, f"no message for {now - rank.heard:.0f} s"))
            elif stopped > rank.state["timeout"] and now - self._ran > 10 * TICK:
                self._findings[number] = (STOPPED, f"stopped by a signal for {stopped:.0f} s: limit {name}")
        if now - self._started > self._about["arrival"]:
            for number in set(range(self._world)) - set(self._ranks):
                self._findings[number] = (ABSENT, f"did not arrive within {self._about['arrival']:.0f} s")
        if not present or self._findings or len(self._ranks) < self._world:
            return
        # One rank may work for long while the others wait for it (tokenizing): the last to make progress counts.
        number, last = max(present.items(), key=lambda item: item[1].moved)
        patience, still = last.state["patience"], now - last.moved
        # Earlier by the time that ending takes: the job is gone when the timeout is over.
        if still > patience - min(15.0, patience / 5) > 0:
            self._findings[number] = (HUNG, f"no progress for {still:.0f} s in {last.state['doing']}: limit {name}")

    def _verdict(self, cause: str) -> str:
        """Return the message on the end of the job: cause, ranks, remedy."""
        guilty: dict[str, list[int]] = {}
        for number, (kind, details) in self._findings.items():
            if kind == cause:
                guilty.setdefault(details, []).append(number)
        if cause == USER:
            lines = []
            for details, ranks in guilty.items():
                lines += [details, *([f"  where:  {self._place(ranks)}"] if len(ranks) < self._world else [])]
            return "\n".join(lines)
        launched = self._about["launched"]
        asked = ("was ended by SIGTERM", *(() if launched else ("ended without a message",)))
        were_asked = all(any(words in details for words in asked) for details in guilty)
        all_died = all(kind == DIED for kind, _ in self._findings.values())
        # A rank's death is reported before it is gone.
        if all_died and were_asked and self._ranks_present().keys() <= self._findings.keys():
            return ""  # all were asked to end, and have
        code, after = CODES[cause], AFTER[CODES[cause]]
        if code == 75 and not launched:  # its ranks may end with their own codes
            after = "a rank was lost; go on from the last checkpoint"
        lines = [f"error: the job was ended on all hosts (exit code {code}: {after})"]
        # In order of arrival: later deaths may follow from the first.
        lines += [f"  {self._place(ranks)}: {details}" for details, ranks in guilty.items()]
        return "\n".join(lines)

    def _place(self, ranks: list[int]) -> str:
        known = dict(enumerate(self._about["hosts"])) | {number: rank.host for number, rank in self._ranks.items()}
        hosts = dict.fromkeys(known.get(number, "a host that never reported") for number in ranks)
        return f"{', '.join(hosts)} ({spans(ranks)})"


def spans(ranks: list[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0-7, 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def say(text: str) -> None:
    """Print with control characters escaped, except line breaks."""
    escaped = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
    with suppress(OSError):
        print(f"\n{escaped}\n", file=sys.stderr, flush=True)


class Guardian:
    """The guardian of one rank.

    about: `rank`, `world`, `host`, `hosts`; `pid` of the rank; `name` of the limit of a stop; `arrival`, seconds for
    all ranks to report; `launched`, whether the rank must end with its launcher; the first `state`; of rank 0
    also `listener`, a descriptor, and `token`.
    state: what the rank is `doing`, for at most `patience` seconds; `timeout`, for which it may be stopped; its number
    of messages, `beats`; whether it is `stopped` or `gone`; its `finding`, [failure kind, details].
    """

    async def run(self) -> None:
        """Return once the rank is gone, and for rank 0 once all are."""
        loop = asyncio.get_running_loop()
        orders, self._rank = await asyncio.open_connection(sock=socket.socket(fileno=0), limit=LIMIT)
        self._about = about = json.loads(await orders.readline())
        self._state = about["state"].copy()
        self._link: asyncio.StreamWriter | None = None
        self._heard = self._looked = time.monotonic()
        self._ordered = self._connecting = None
        self._moved = 0
        judge = asyncio.ensure_future(Judge(about).run()) if "listener" in about else None
        obeying = asyncio.ensure_future(self._obey(orders))
        self._tasks = [obeying, *([judge] if judge else [])]
        self._output = select.poll() if about["launched"] else None
        if self._output and any(kind(os.fstat(2).st_mode) for kind in (stat.S_ISFIFO, stat.S_ISSOCK)):
            self._output.register(2, 0)  # for errors alone: a socket may have input
        ended = asyncio.Event()
        if hasattr(os, "pidfd_open"):  # wakes this process at the rank's end, to report its exit status
            with suppress(OSError):
                died = os.pidfd_open(about["pid"])
                loop.add_reader(died, lambda: (ended.set(), loop.remove_reader(died)))
        # The guardian is the rank's child: its parent changes when the rank dies, while a pid could be reused.
        while os.getppid() == about["pid"]:
            self._look(time.monotonic())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), TICK)
            for task in self._tasks:
                if task.done():
                    task.result()  # raises its error
        status = _exit_status(about["pid"])
        await asyncio.wait([obeying], timeout=TICK)  # its last messages
        if self._connecting is not None:
            await self._connecting
        self._rank_ended(status)
        if self._link is not None and judge is not None:
            await judge

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        while line := await orders.readline():
            self._state |= json.loads(line)
            self._state["beats"] += 1
            if connect := self._state.pop("connect", None):
                self._connecting = asyncio.ensure_future(self._connect(*connect))

    async def _connect(self, host: str, port: int, token: str) -> None:
        """Connect to the judge with the job's token; again, if it had no descriptor free."""
        about, silence, error = self._about, silence_of(self._state), None
        deadline = time.monotonic() + silence
        while time.monotonic() < deadline:
            try:
                answers, link = await asyncio.wait_for(asyncio.open_connection(host, port, limit=LIMIT), silence)
                link.write(encoded(token=token, rank=about["rank"], host=about["host"]))
                if await asyncio.wait_for(answers.readline(), silence):
                    self._link, self._heard = link, time.monotonic()
                    self._tasks.append(asyncio.ensure_future(self._follow(answers)))
                    return
            except (OSError, asyncio.TimeoutError) as raised:
                error = raised
            await asyncio.sleep(TICK)
        self._give_up(f"the guardian of rank 0 cannot be reached at {host}:{port} ({error!r})")

    async def _follow(self, answers: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await answers.readline():
                self._heard, answer = time.monotonic(), json.loads(line)
                if "end" in answer:
                    self._order(answer)
        if self._state["doing"] != LEAVING:
            self._give_up("the connection to rank 0's guardian was closed")

    def _look(self, now: float) -> None:
        """Report the rank's state; end the rank if the judge or the rank is overdue."""
        if now - self._looked > 10 * TICK:
            self._heard = now  # this host was suspended
        self._looked = now
        if self._ordered is not None:
            # A thread of the rank calls os._exit, unless the rank is stopped.
            if self._state["stopped"] or now - self._ordered > OBEYS:
                os.kill(self._about["pid"], signal.SIGKILL)
            return
        self._state["stopped"] = _stat(self._about["pid"])[:1] == ["T"]
        before, self._moved = self._moved, _bytes_moved(self._about["pid"])
        # However large the files and slow their system: a save, or a model that is read, ends well.
        if self._state["patience"] > self._state["timeout"] and self._moved - before > MOVES:
            self._state["beats"] += 1
        if self._link is not None and not self._link.is_closing():
            self._link.write(encoded(**self._state))
        if self._link is not None and now - self._heard > silence_of(self._state):
            self._give_up(f"no message from rank 0's host for {now - self._heard:.0f} s")
        elif self._output is not None and self._output.poll(0):
            # The job's output has no reader: the launcher was killed, or its link is down. As SIGTERM by hand.
            self._output = None
            os.kill(self._about["pid"], signal.SIGTERM)

    def _rank_ended(self, status: int | None) -> None:
        how = "ended without a message (killed, crashed or out of memory)"
        if status:
            code = os.waitstatus_to_exitcode(status)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if self._state["doing"] != LEAVING and self._ordered is None and status != 0 and self._state["finding"] is None:
            self._state["finding"] = [DIED, f"its process {how}"]
        self._state["gone"] = True
        if self._link is not None:
            self._link.write(encoded(**self._state))

    def _give_up(self, why: str) -> None:
        if self._ordered is None and not self._state["gone"]:
            self._order({"end": CODES[LOST], "show": False})
            os.set_blocking(2, False)  # the output may lead to an unreachable host
            say(f"error: {self._about['host']} (rank {self._about['rank']}) was ended: {why}")

    def _order(self, order: dict[str, Any]) -> None:
        if self._ordered is None:
            self._ordered = time.monotonic()
            self._rank.write(encoded(**order))


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _bytes_moved(pid: int) -> int:
    """Return how many bytes a process has read and written; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/io") as file:
            return sum(int(line.split()[1]) for line in file if not line.startswith("sys"))
    except OSError:
        return 0


def _exit_status(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[49]) if fields[:1] == ["Z"] else None


if __name__ == "__main__":
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)  # signals that end the rank must not end its guardian
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # of rank 0: a connection for every rank
    asyncio.run(Guardian().run())
