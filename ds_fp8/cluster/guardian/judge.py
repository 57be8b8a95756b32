"""The judge: rank 0's guardian hears from all guardians and decides when, and why, the job ends."""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from . import messages
from .messages import ABSENT, DIED, ERROR, HUNG, LOST, SILENT, USER, encode, escaped, receive, received
from .stacks import grouped, spans, waits_for_others

TICK = 0.5
"""Seconds between two messages of a guardian, and between two looks of the judge."""
_MORE_FINDINGS = 2.0
"""Seconds in which other ranks report what befell them too: the first to report is not always the cause."""
_STACKS = 3.0
_ENDING = 15.0
"""Seconds from the verdict on a job that hangs until its processes are gone: they are part of its timeout."""
_GREETING = 10.0
"""Seconds in which a connection must show the job's token."""
_FAREWELL = 5.0
"""Seconds in which guardians hang up once they have been told to end their ranks."""

# What ends the job, worst first, with the exit code of all ranks.
_CODES = {DIED: 75, SILENT: 75, ABSENT: 75, HUNG: 75, USER: 2, ERROR: 1, LOST: 75}
_AFTER = {75: "the same command resumes from the last checkpoint", 1: "a rank failed: see its traceback above"}


@dataclass
class _Rank:
    host: str
    writer: asyncio.StreamWriter
    heard: float
    doing: str = "starting"
    moved: float = 0.0
    """Time of its last progress."""
    patience: float = 0.0
    """Seconds until the progress after that is overdue."""
    silence: float = float("inf")
    """Seconds without a word after which it counts as lost."""
    gone: bool = False
    stack: str | None = None


@dataclass
class Judge:
    """Judges the job of `world` ranks."""

    world: int
    hosts: list[str]
    """Name of each rank's host, where the launcher tells."""
    arrival: float
    """Seconds in which all ranks must have reported for the first time."""
    token: str
    """Secret that a guardian must show: the ranks get it from the store that they share."""
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _findings: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank: what befell it, and the details."""

    async def serve(self, address: str | None) -> tuple[str | None, int]:
        """Listen for guardians.

        Args:
            address: where all of them reach this host; None where that is not known, for all of its addresses.

        Returns:
            The address and the port. None for all addresses: the one given may not be this host's own, as behind a
            relay.
        """
        self._started = time.monotonic()
        try:
            listener = _listen(address)
        except OSError:
            address, listener = None, _listen(None)
        # A long queue: the guardians of thousands of ranks connect within the same second.
        self._server = await asyncio.start_server(self._hear, sock=listener, limit=messages.LIMIT, backlog=4096)
        return address, listener.getsockname()[1]

    async def judge(self) -> None:
        """Return once all ranks have left, or the job is ended and everybody told."""
        while not self._findings:
            await asyncio.sleep(TICK)
            if len(self._ranks) == self.world and all(rank.gone for rank in self._ranks.values()):
                return
            self._look()
        # The cause may arrive after its consequences: when a rank dies, its neighbours see a broken connection first.
        deadline = time.monotonic() + _MORE_FINDINGS
        while time.monotonic() < deadline and len(self._findings) < self.world:
            await asyncio.sleep(TICK / 5)
            self._look()
        kinds = {kind for kind, _ in self._findings.values()}
        code = next(code for kind, code in _CODES.items() if kind in kinds)
        # Stacks show who waits for whom. After an error of a rank its own traceback says more.
        if code == 75:
            await self._ask_for_stacks()
        print(f"\n{escaped(self.verdict(code))}\n", file=sys.stderr, flush=True)
        for rank in self._present():
            self._tell(rank, {"end": code})
        deadline = time.monotonic() + _FAREWELL
        # Ranks that were not heard of will not say farewell.
        while time.monotonic() < deadline and any(time.monotonic() - r.heard < 2.0 for r in self._present()):
            await asyncio.sleep(TICK / 5)

    def _present(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if not rank.gone]

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        # The judge is done, or the message is missing or not a guardian's.
        with suppress(asyncio.CancelledError, asyncio.TimeoutError, LookupError, TypeError, ValueError):
            greeting = await asyncio.wait_for(receive(reader), _GREETING) or {}
            if self._knows(greeting):
                number, host = greeting["rank"], escaped(greeting["host"].replace("\n", " "))
                rank = self._ranks[number] = _Rank(host, writer, time.monotonic())
                async for message in received(reader):
                    self._note(number, message)
        writer.close()
        if rank is not None and not rank.gone:
            rank.gone = True
            self._findings.setdefault(number, (SILENT, "the connection to its guardian was closed"))

    def _knows(self, greeting: dict[str, Any]) -> bool:
        """Return whether a greeting is that of one of the job's guardians, and its first."""
        number, token = greeting.get("rank"), str(greeting.get("token"))
        # Compared in constant time: anybody who reaches the port may try.
        shown = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        fits = type(number) is int and 0 <= number < self.world and isinstance(greeting.get("host"), str)
        return shown and fits and number not in self._ranks

    def _note(self, number: int, message: dict[str, Any]) -> None:
        """Take in what a guardian says of its rank. Raises LookupError, TypeError or ValueError for anything else."""
        rank, now = self._ranks[number], time.monotonic()
        rank.heard = now
        if "state" in message:
            state = message["state"]
            rank.doing = str(state["doing"])
            rank.patience, rank.silence = float(state["patience"]), float(state["silence"])
            # Ages travel and not times: clocks of hosts differ, and monotonic ones begin anywhere.
            rank.moved = now - float(state["age"])
            self._tell(rank, {"alive": True})
        elif "finding" in message:
            kind, details = message["finding"]
            if kind not in _CODES:
                raise ValueError(f"no finding {kind!r}")
            self._findings.setdefault(number, (kind, str(details)))
        elif "stack" in message:
            rank.stack = str(message["stack"])
        elif "gone" in message:
            rank.gone = True

    def _tell(self, rank: _Rank, message: dict[str, Any]) -> None:
        if not rank.writer.is_closing():
            rank.writer.write(encode(message))

    def _look(self) -> None:
        """Note who is silent or absent, and whether nothing moves any more."""
        now = time.monotonic()
        # The smallest: all ranks have one timeout, and one that set it late must not delay the verdict.
        silence = min((rank.silence for rank in self._ranks.values()), default=float("inf"))
        for number, rank in self._ranks.items():
            if not rank.gone and now - rank.heard > silence:
                self._findings.setdefault(number, (SILENT, f"no message for {now - rank.heard:.0f} s"))
        if now - self._started > self.arrival:
            for number in set(range(self.world)) - set(self._ranks):
                self._findings.setdefault(number, (ABSENT, f"did not arrive within {self.arrival:.0f} s"))
        present = self._present()
        if not present or self._findings:
            return
        # One rank may work for long while the others wait for it, as in tokenising: only when all stand still ...
        last = max(present, key=lambda rank: rank.moved)
        # Earlier than the patience by the time that the end takes, so that the job is gone when the timeout is over.
        if now - last.moved > last.patience - min(_ENDING, last.patience / 5) > 0:
            number = next(number for number, rank in self._ranks.items() if rank is last)
            self._findings[number] = (HUNG, f"no progress for {now - last.moved:.0f} s in {last.doing}")

    async def _ask_for_stacks(self) -> None:
        asked = self._present()
        for rank in asked:
            self._tell(rank, {"show": True})
        deadline = time.monotonic() + _STACKS
        while time.monotonic() < deadline and any(rank.stack is None for rank in asked):
            await asyncio.sleep(TICK / 5)

    def verdict(self, code: int) -> str:
        """Return a report of why the job ended: the rank to blame, the stack of every rank, and what to do."""
        if code == 2:
            return self._mistake()
        lines = [f"error: the job was ended on all hosts (exit code {code}: {_AFTER[code]})"]
        cause = next(kind for kind in _CODES if any(found == kind for found, _ in self._findings.values()))
        if cause == HUNG:
            lines += self._blamed_for_hang()
        else:
            guilty: dict[tuple[str, str], list[int]] = {}
            for number, (kind, details) in sorted(self._findings.items()):
                if kind == cause:
                    guilty.setdefault((self._host(number), details), []).append(number)
            lines += [f"  {host} ({spans(ranks)}): {details}" for (host, details), ranks in guilty.items()]
        for ranks, stack in grouped({n: rank.stack for n, rank in self._ranks.items() if rank.stack}):
            lines += [f"  stack of {spans(ranks)}, innermost call first:", stack]
        return "\n".join(lines)

    def _blamed_for_hang(self) -> list[str]:
        lines = [f"  {details}: limit train.timeout" for kind, details in self._findings.values() if kind == HUNG]
        present = {number: rank for number, rank in self._ranks.items() if not rank.gone}
        mute = [number for number, rank in present.items() if not rank.stack]
        busy = [number for number, rank in present.items() if rank.stack and not waits_for_others(rank.stack)]
        now = time.monotonic()
        for number in mute:
            unheard = now - present[number].heard
            state = "stopped, or stuck in the system" if unheard < 4 * TICK else f"no message for {unheard:.0f} s"
            lines.append(f"  {self._host(number)} (rank {number}): {state}: shows no stack")
        if not mute and len(busy) < len(present):
            lines += [f"  {self._host(number)} (rank {number}): the others wait for it" for number in busy]
        return lines

    def _mistake(self) -> str:
        """Return a UserError as it is, and who found it where not all did."""
        told: dict[str, list[int]] = {}
        for number, (kind, details) in sorted(self._findings.items()):
            if kind == USER:
                told.setdefault(details, []).append(number)
        lines = []
        for details, ranks in told.items():
            lines.append(details)
            if len(ranks) < self.world:
                places = ", ".join(dict.fromkeys(self._host(number) for number in ranks))
                lines.append(f"  where:  {places} ({spans(ranks)})")
        return "\n".join(lines)

    def _host(self, number: int) -> str:
        if number in self._ranks:
            return self._ranks[number].host
        return self.hosts[number] if number < len(self.hosts) else "a host that never reported"


def _listen(address: str | None) -> socket.socket:
    """Return a socket that listens on an address of this host, or on all of them."""
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=4096)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)
