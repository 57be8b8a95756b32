"""The guardian: a small process for every rank that ends the rank when the job cannot continue.

A rank stuck in a collective or kernel, or stopped, cannot end itself, and an unreachable host receives no orders. No
GPU, lock of Python or collective blocks a guardian. Guardians report twice a second to rank 0's, which judges the job:
a rank that failed, died or is stopped, a silent host, a job without progress. They end their ranks on its order, or
when it is silent.

Run by path, with the standard library alone: a few MiB. Messages are lines of JSON.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import select
import selectors
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

TICK = 0.5  # seconds between two messages of a guardian, and between two checks of the judge
# Seconds for further ranks to report failures: the first report is not always the cause.
MORE_FINDINGS = 2.0
OBEYS = 3.0  # seconds for a rank to print its stack and end itself on order; then it is killed
FAREWELL = 8.0
LEAVES = 120.0  # seconds from a rank's message that it is done to the end of its process
LIMIT = 1 << 20
# Seconds for a connection to show the token, and the number of such connections besides the ranks'.
GREETS, STRANGERS = 5.0, 64

# Failure kinds by severity, with the exit code of all ranks.
DIED, SILENT, ABSENT, STOPPED, HUNG = "died", "silent", "absent", "stopped", "hung"
USER, ERROR, LOST = "user", "error", "lost"
CODES = {DIED: 75, SILENT: 75, ABSENT: 75, STOPPED: 75, HUNG: 75, USER: 2, ERROR: 1, LOST: 75}
AFTER = {75: "the same command resumes from the last checkpoint", 1: "a rank failed: see its traceback above"}


class Lines:
    """Lines of JSON over a pipe or socket, without blocking."""

    def __init__(self, reads: int, writes: int | None = None) -> None:
        self.reads, self._writes = reads, reads if writes is None else writes
        self.open = True
        self._read = self._unsent = b""
        for descriptor in {self.reads, self._writes}:
            os.set_blocking(descriptor, False)

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._unsent = self._unsent[os.write(self._writes, self._unsent) :]
        except BlockingIOError:
            self.open = self.open and len(self._unsent) < LIMIT
        except OSError:
            self.open = False

    def received(self) -> list[dict[str, Any]]:
        """Return the received messages; `open` becomes False at the end, or at a line that is not a message."""
        try:
            data = os.read(self.reads, 1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._read = (self._read + data).split(b"\n")
        messages: list[dict[str, Any]] = []
        try:
            for line in lines:
                message = json.loads(line)
                messages += [message] if isinstance(message, dict) else []
                data = data if isinstance(message, dict) else b""
        except (ValueError, RecursionError):
            data = b""
        self.open = self.open and bool(data) and len(self._read) < LIMIT
        return messages


@dataclass
class Rank:
    """A rank as reported to the judge.

    `heard` and `moved`: times of its last message and progress; `silence` and `patience`: seconds until the next is
    overdue; `stopped`: seconds for which a signal has stopped it, at most `limit`.
    """

    host: str
    lines: Lines
    heard: float
    doing: str = "starting"
    moved: float = 0.0
    patience: float = float("inf")
    silence: float = float("inf")
    stopped: float = 0.0
    limit: float = float("inf")
    gone: bool = False


class Judge:
    """Decides in rank 0's guardian when, and why, the job ends."""

    def __init__(self, about: dict[str, Any], selector: selectors.BaseSelector) -> None:
        self._about, self._selector = about, selector
        self._ranks: dict[int, Rank] = {}
        self._findings: dict[int, tuple[str, str]] = {}  # rank -> (failure kind, details), in order of arrival
        self._strangers: dict[socket.socket, float] = {}  # connection without a token -> its deadline, oldest first
        self._started = self._looked = self._paused = time.monotonic()
        self._phase, self._until = "watch", 0.0
        self.done = False

    def serve(self, address: str | None, token: str) -> int:
        """Listen for guardians with the token at an address of this host, None for all; return the port."""
        both = address is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
        # A long queue: the guardians of thousands of ranks connect within the same second.
        listener = socket.create_server((address or "", 0), family=family, dualstack_ipv6=both, backlog=4096)
        self._token = token
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        return listener.getsockname()[1]

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # closed already, or no descriptor is free: close strangers
            none_left = error.errno in (errno.EMFILE, errno.ENFILE)
            return self._close_strangers(len(self._strangers) if none_left else 0)
        lines, number = Lines(connection.fileno()), None

        def hear() -> None:
            nonlocal number
            if connection.fileno() < 0:  # closed since the selector returned it
                return
            try:
                for message in lines.received():
                    if number is None:
                        number = self._greeted(message, lines)
                        self._strangers.pop(connection)
                    else:
                        self._note(number, message)
            except (LookupError, TypeError, ValueError):  # not a guardian's
                lines.open = False
            if not lines.open:
                self._close(connection)
                if number is not None and not self._ranks[number].gone:
                    self._ranks[number].gone = True
                    self._findings.setdefault(number, (SILENT, "the connection to its guardian was closed"))

        self._selector.register(connection, selectors.EVENT_READ, hear)
        self._strangers[connection] = time.monotonic() + GREETS
        self._close_strangers(len(self._strangers) - self._about["world"] - STRANGERS)

    def _close_strangers(self, number: int) -> None:
        """Close the `number` oldest connections without a token, and those past their deadline."""
        now = time.monotonic()
        for place, (connection, deadline) in enumerate(list(self._strangers.items())):
            if place < number or now > deadline:
                self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._strangers.pop(connection, None)

    def _greeted(self, message: dict[str, Any], lines: Lines) -> int:
        # In constant time: anybody may reach the port.
        if not hmac.compare_digest(str(message.get("token")).encode(errors="replace"), self._token.encode()):
            raise ValueError("no token")
        number, host = message["rank"], escaped(str(message["host"]).replace("\n", " "))
        if type(number) is not int or not 0 <= number < self._about["world"] or number in self._ranks:
            raise ValueError("no rank")
        self._ranks[number] = Rank(host, lines, time.monotonic())
        return number

    def _note(self, number: int, message: dict[str, Any]) -> None:
        rank, now = self._ranks[number], time.monotonic()
        rank.heard = now
        if "state" in message:
            state = message["state"]
            rank.doing = str(state["doing"])
            for key in ("patience", "silence", "limit", "stopped"):
                setattr(rank, key, float(state[key]))
            # Ages, not times: clocks of hosts differ.
            rank.moved = now - float(state["age"])
            rank.lines.send({"alive": True})
        elif "finding" in message:
            kind, details = message["finding"]
            self._findings.setdefault(number, (kind if kind in CODES else ERROR, str(details)))
        elif "gone" in message:
            rank.gone = True

    @property
    def present(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if not rank.gone]

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked > 10 * TICK:
            # This host was suspended: messages of the meantime are not read yet.
            for rank in self._ranks.values():
                rank.heard = now
        self._looked = now
        self._close_strangers(0)
        present = self.present
        if self._phase == "watch":
            self._find(now)
            if self._findings:
                self._phase, self._until = "more", now + MORE_FINDINGS
            elif not present and len(self._ranks) == self._about["world"]:
                self.done = True
        elif self._phase == "more" and (now > self._until or len(self._findings) == self._about["world"]):
            kinds = {kind for kind, _ in self._findings.values()}
            cause = next(kind for kind in CODES if kind in kinds)
            if said := escaped(self._verdict(cause)):
                with suppress(OSError):
                    print(f"\n{said}\n", file=sys.stderr, flush=True)
            for rank in present:
                rank.lines.send({"end": CODES[cause], "show": cause == HUNG})
            self._phase, self._until = "farewell", now + FAREWELL
        elif self._phase == "farewell":
            # Silent ranks will not answer.
            self.done = now > self._until or all(now - rank.heard > 2.0 for rank in present)

    def _find(self, now: float) -> None:
        """Find silent, absent and stopped ranks, and a job without progress."""
        present = {number: rank for number, rank in self._ranks.items() if not rank.gone}
        # The smallest: all ranks have one timeout, set at different times.
        silence = min((rank.silence for rank in self._ranks.values()), default=float("inf"))
        if all(rank.stopped for rank in present.values()):
            self._paused = now  # stopped by the user (Ctrl-Z)
        for number, rank in present.items():
            if now - rank.heard > silence:
                self._findings.setdefault(number, (SILENT, f"no message for {now - rank.heard:.0f} s"))
            elif rank.stopped > rank.limit and now - self._paused > 10 * TICK:
                details = f"stopped by a signal for {rank.stopped:.0f} s: limit {self._about['name']}"
                self._findings.setdefault(number, (STOPPED, details))
        if now - self._started > (self._about["arrival"] or float("inf")):
            for number in set(range(self._about["world"])) - set(self._ranks):
                details = f"did not arrive within {self._about['arrival']:.0f} s"
                self._findings.setdefault(number, (ABSENT, details))
        if not present or self._findings or len(self._ranks) < self._about["world"]:
            return
        # One rank may work for long while the others wait for it (tokenizing): the last to make progress counts.
        number, last = max(present.items(), key=lambda item: item[1].moved)
        # Earlier by the time that ending takes: the job is gone when the timeout is over.
        if now - last.moved > last.patience - min(15.0, last.patience / 5) > 0:
            details = f"no progress for {now - last.moved:.0f} s in {last.doing}: limit {self._about['name']}"
            self._findings[number] = (HUNG, details)

    def _verdict(self, cause: str) -> str:
        """Return the message on the end of the job: cause, ranks, remedy."""
        guilty: dict[str, list[int]] = {}
        for number, (kind, details) in self._findings.items():
            if kind == cause:
                guilty.setdefault(details, []).append(number)
        if cause == USER:
            lines = []
            for details, ranks in guilty.items():
                lines += [details, *([f"  where:  {self._place(ranks)}"] if len(ranks) < self._about["world"] else [])]
            return "\n".join(lines)
        asked = ("was ended by SIGTERM", *(() if self._about["launched"] else ("ended without a message",)))
        were_asked = all(any(words in details for words in asked) for details in guilty)
        all_died = all(kind == DIED for kind, _ in self._findings.values())
        # A rank's death is reported before it is gone.
        if all_died and were_asked and all(rank.gone or n in self._findings for n, rank in self._ranks.items()):
            return ""  # all were asked to end, and have
        code, after = CODES[cause], AFTER[CODES[cause]]
        if code == 75 and not self._about["launched"]:  # its ranks may end with their own codes
            after = "a rank was lost; go on from the last checkpoint"
        lines = [f"error: the job was ended on all hosts (exit code {code}: {after})"]
        # In order of arrival: later deaths may follow from the first.
        lines += [f"  {self._place(ranks)}: {details}" for details, ranks in guilty.items()]
        return "\n".join(lines)

    def _place(self, ranks: list[int]) -> str:
        names = self._about["hosts"]
        known = {number: names[number] for number in ranks if number < len(names)}
        known |= {number: self._ranks[number].host for number in ranks if number in self._ranks}
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


def escaped(text: str) -> str:
    """Return `text` with control characters escaped, except line breaks."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


class Guardian:
    """The guardian of one rank.

    about: `rank`, `world`, `host`, `hosts`; `pid` of the rank; `limit`, seconds for which it may be stopped, and `name`
    of that limit; `silence`, seconds without a message after which another rank is lost; `arrival`, seconds for all
    ranks to report, or None; `launched`, whether the rank must end with its launcher, and within LEAVES.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._state = {"doing": "starting", "patience": about["arrival"] or float("inf"), "limit": about["limit"]}
        self._state["silence"] = about["silence"]
        self._selector = selectors.DefaultSelector()
        self._rank = Lines(0, 1)
        self._judge: Judge | None = None
        self._link: Lines | None = None
        self._unsent: list[dict[str, Any]] = []
        self._moved = self._heard = self._looked = time.monotonic()
        self._reported = 0.0
        self._stopped_since = self._ended = self._ordered = None
        self._leaving = self._asked = self._over = False
        self._selector.register(0, selectors.EVENT_READ, self._obey)
        self._died: int | None = None
        if hasattr(os, "pidfd_open"):  # wakes this process at the rank's end, to report its exit status
            with suppress(OSError):
                self._died = os.pidfd_open(about["pid"])
                self._selector.register(self._died, selectors.EVENT_READ, self._look)

    def run(self) -> None:
        """Return once the rank is gone, and for rank 0 once all are."""
        while not (self._over and (self._judge is None or self._judge.done)):
            for key, _ in self._selector.select(TICK):
                key.data()
            self._look()
            if self._judge is not None:
                self._judge.look()
                if self._over and time.monotonic() - self._ended > FAREWELL and not self._judge.present:
                    return  # no other rank

    def _obey(self) -> None:
        for message in self._rank.received():
            self._moved = time.monotonic()
            if "doing" in message:
                self._state = message
            elif "serve" in message:
                self._judge = Judge(self._about, self._selector)
                address, token = message["serve"]
                try:
                    port = self._judge.serve(address, token)
                except OSError:
                    # Not an address of this host, as behind a relay.
                    address, port = None, self._judge.serve(None, token)
                self._rank.send({"address": address, "port": port})
            elif "connect" in message:
                self._connect(*message["connect"])
            elif "leaving" in message:
                self._leaving = True
                self._state = {**self._state, "doing": "leaving", "patience": 2 * LEAVES}
            else:
                self._report(message)
        if not self._rank.open:
            self._selector.unregister(0)

    def _connect(self, host: str, port: int, token: str) -> None:
        """Connect to the judge with the job's token, and follow its orders."""
        try:
            self._socket = socket.create_connection((host, port), timeout=self._about["silence"])
        except OSError as error:
            return self._give_up(f"the guardian of rank 0 cannot be reached at {host}:{port} ({error})")
        self._link, self._heard = Lines(self._socket.fileno()), time.monotonic()
        self._selector.register(self._socket, selectors.EVENT_READ, self._hear)
        self._link.send({"rank": self._about["rank"], "host": self._about["host"], "token": token})
        for message in self._unsent:
            self._link.send(message)

    def _hear(self) -> None:
        for message in self._link.received():
            self._heard = time.monotonic()
            if "end" in message:
                self._order(message["end"], bool(message["show"]))
        if not self._link.open:
            self._selector.unregister(self._socket)
            if not self._leaving:
                self._give_up("the connection to rank 0's guardian was closed")

    def _look(self) -> None:
        """Report the rank's state; end the rank if the judge or the rank is overdue."""
        now = time.monotonic()
        if self._over:
            return
        if now - self._looked > 10 * TICK:
            self._heard = now  # this host was suspended
        self._looked = now
        # The guardian is the rank's child: its parent changes when the rank dies, while a pid could be reused.
        if os.getppid() != self._about["pid"] or _zombie(self._about["pid"]) is not None:
            self._rank_ended(now)
        elif self._ordered is not None:
            if now - self._ordered_at > OBEYS:
                # A thread of the rank calls os._exit, unless the rank is stopped.
                os.kill(self._about["pid"], signal.SIGKILL)
        elif self._leaving:
            if self._about["launched"] and now - self._moved > LEAVES:
                self._give_up("the rank had finished, but its process did not exit")
            self._report_state(now)
        else:
            self._report_state(now)
            if self._link is None and now - self._moved > self._state["patience"]:
                self._give_up(f"no progress for {now - self._moved:.0f} s in {self._state['doing']}")
            elif self._link is None and now - (self._stopped_since or now) > self._state["limit"]:
                self._give_up(f"stopped by a signal: limit {self._about['name']}")
            elif self._link is not None and now - self._heard > self._state["silence"]:
                self._give_up(f"no message from rank 0's host for {now - self._heard:.0f} s")
            elif self._about["launched"] and not self._asked and _hung_up(2):
                # The job's output has no reader: the launcher was killed, or its link is down. As SIGTERM by hand.
                self._asked = True
                self._rank.send({"stop": True})

    def _report_state(self, now: float) -> None:
        stopped = _stat(self._about["pid"])[:1] == ["T"]
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if stopped:
            self._moved = now  # a stop has its own limit
        # Every TICK, not each iteration: rank 0's guardian wakes itself by its messages to the judge.
        if self._link is not None and now - self._reported >= TICK:
            self._reported = now
            since = self._stopped_since or now
            self._link.send({"state": {**self._state, "age": now - self._moved, "stopped": now - since}})

    def _rank_ended(self, now: float) -> None:
        """Report the rank's exit, and stay until rank 0's guardian has decided whether the job ends."""
        if self._ended is None:
            self._ended = now
            if self._died is not None:  # readable from now on: the loop would not sleep
                self._selector.unregister(self._died)
            status = _zombie(self._about["pid"])
            if self._rank.open:
                self._obey()  # its last messages
            how = "ended without a message (killed, crashed or out of memory)"
            if status:
                ended = os.waitstatus_to_exitcode(status)
                how = f"was ended by {signal.Signals(-ended).name}" if ended < 0 else f"exited with code {ended}"
            if not self._leaving and self._ordered is None and status != 0:
                self._report({"finding": [DIED, f"its process {how}"]})
            self._report({"gone": True})
        self._over = self._judge is not None or now - self._ended > TICK

    def _give_up(self, why: str) -> None:
        if self._ordered is None and self._ended is None:
            self._order(CODES[LOST])
            with suppress(OSError):
                os.set_blocking(2, False)  # the output may lead to an unreachable host
                line = escaped(f"error: {self._about['host']} (rank {self._about['rank']}) was ended: {why}")
                print(f"\n{line}\n", file=sys.stderr, flush=True)

    def _order(self, code: int, show: bool = False) -> None:
        if self._ordered is None:
            self._ordered, self._ordered_at = code, time.monotonic()
            self._rank.send({"show": True, "end": code} if show else {"end": code})

    def _report(self, message: dict[str, Any]) -> None:
        if self._link is None:
            self._unsent.append(message)
        else:
            self._link.send(message)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _zombie(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[49]) if fields[:1] == ["Z"] else None


def _hung_up(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


if __name__ == "__main__":
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)  # signals that end the rank must not end its guardian
    Guardian(json.loads(sys.argv[-1])).run()
