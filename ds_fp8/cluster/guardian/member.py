"""A guardian's main loop: watch one rank, report on it to the judge, and end it when the judge says so or is lost."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import Any

from . import messages
from .judge import TICK, Judge
from .messages import DIED, encode, escaped, received
from .stacks import main_thread

_OBEYS = 3.0
"""Seconds in which the rank ends itself when told to; after them it is killed."""
_LEAVES = 120.0
"""Seconds from the rank's word that it is done to the end of its process."""
_LOST = 75


class Member:
    """The guardian of one rank.

    about: `rank`, `world`, `host`; `pid` and `main_thread` of the rank; `dump`, the descriptor of the file into which
    the rank writes its stacks on SIGUSR2; `silence`, seconds without a word from the judge after which it is lost,
    until the rank says otherwise; `arrival` and `hosts` as of the judge.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._state = {"doing": "starting", "patience": about["arrival"], "silence": about["silence"]}
        self._moved = time.monotonic()
        self._leaving = self._stopped = False
        self._judge_task: asyncio.Task | None = None
        self._judge: asyncio.StreamWriter | None = None
        self._judge_heard = time.monotonic()
        self._unsent: list[dict[str, Any]] = []
        self._told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit code that the rank gets."""
        self._tasks: set[asyncio.Task] = set()

    async def run(self) -> None:
        """Return once the rank is gone, and for rank 0 once all are."""
        reader = asyncio.StreamReader(limit=messages.LIMIT)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        # Kept in a set: the event loop itself holds tasks weakly.
        self._spawn(self._obey(reader))
        while not self._told.done() and self._lives():
            self._look()
            await asyncio.wait([self._told], timeout=TICK)
        if self._told.done():
            await self._end(self._told.result())
        else:
            if not self._leaving:
                # That word may have come together with the end, and `_obey` is yet to read it.
                await asyncio.sleep(TICK)
            if not self._leaving:
                self._report({"finding": (DIED, "its process ended without a message (killed, or out of memory)")})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._told), 10)
        self._report({"gone": True})
        if self._judge is not None:
            with suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._judge.drain(), 1)
        if self._judge_task is not None and self._judge is not None:
            await self._judge_task  # other ranks may need it still

    def _spawn(self, work: Any) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    def _lives(self) -> bool:
        # The guardian is the rank's child, and gets another parent when the rank dies; a pid could be given out again.
        return os.getppid() == self._about["pid"]

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        """Follow what the rank writes."""
        async for message in received(reader):
            self._moved = time.monotonic()
            if "doing" in message:
                self._state = message
            elif "serve" in message:
                about, wanted = self._about, message["serve"]
                judge = Judge(about["world"], about["hosts"], about["arrival"], wanted["token"])
                address, port = await judge.serve(wanted["address"])
                self._judge_task = self._spawn(judge.judge())
                self._answer({"address": address, "port": port})
            elif "connect" in message:
                self._spawn(self._connect(*message["connect"]))
            elif "finding" in message:
                self._report(message)
            elif "leaving" in message:
                self._leaving = True
                self._state = {**self._state, "doing": "leaving", "patience": 2 * _LEAVES}

    async def _connect(self, host: str, port: int, token: str) -> None:
        """Join the judge, who asks for the job's token, and do as it says."""
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port, limit=messages.LIMIT), self._about["silence"]
            )
        except (OSError, asyncio.TimeoutError) as error:
            self._give_up(f"the guardian of rank 0 cannot be reached at {host}:{port} ({error or 'timeout'})")
            return
        self._judge, self._judge_heard = writer, time.monotonic()
        unsent, self._unsent = self._unsent, []
        greeting = {"rank": self._about["rank"], "host": self._about["host"], "token": token}
        for message in (greeting, *unsent):
            self._report(message)
        self._look()
        async for message in received(reader):
            self._judge_heard = time.monotonic()
            if "show" in message:
                self._report({"stack": await self._stack()})
            elif "end" in message and not self._told.done():
                self._told.set_result(message["end"])
        if not self._told.done() and not self._leaving:
            self._give_up("the connection to rank 0's guardian was closed")

    def _look(self) -> None:
        """Report the rank's state; give up where the judge, the launcher or the rank has been silent for too long."""
        now = time.monotonic()
        if self._leaving and now - self._moved > _LEAVES:
            self._give_up("the rank had finished, but its process did not exit")
            return
        if self._judge is None:
            if now - self._moved > self._state["patience"]:
                self._give_up(f"no progress for {now - self._moved:.0f} s in {self._state['doing']}")
            return
        self._report({"state": {**self._state, "age": now - self._moved}})
        if now - self._judge_heard > self._state["silence"]:
            self._give_up(f"no message from rank 0's host for {now - self._judge_heard:.0f} s")
        elif not (self._stopped or self._leaving) and _hung_up(2):
            # Nobody reads the job's output: its launcher was killed, or the link to it is down. As SIGTERM by hand.
            self._stopped = True
            self._answer({"stop": True})

    def _give_up(self, why: str) -> None:
        """End the rank without the judge."""
        if self._told.done():
            return
        self._told.set_result(_LOST)
        about = self._about
        with suppress(OSError):
            os.set_blocking(2, False)  # the output may lead to a host that is gone
            line = escaped(f"error: {about['host']} (rank {about['rank']}) was ended: {why}")
            print(f"\n{line}\n", file=sys.stderr, flush=True)

    def _report(self, message: dict[str, Any]) -> None:
        if self._judge is None:
            self._unsent.append(message)
        elif not self._judge.is_closing():
            self._judge.write(encode(message))

    def _answer(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            os.write(1, encode(message))

    async def _stack(self) -> str:
        """Return the stack of the rank's main thread, "" from a process that is stopped or gone."""
        dump = self._about["dump"]
        if not self._lives() or self._leaving:  # at its end Python gives the signal back, which then kills
            return ""
        before = os.fstat(dump).st_size
        os.kill(self._about["pid"], signal.SIGUSR2)
        size = before
        for _ in range(20):
            await asyncio.sleep(TICK / 5)
            previous, size = size, os.fstat(dump).st_size
            # Two looks with the same size: the rank has written all of its stacks.
            if previous == size > before:
                break
        text = os.pread(dump, size - before, before).decode(errors="replace")
        return main_thread(text, self._about["main_thread"])

    async def _end(self, code: int) -> None:
        """Have the rank exit with `code`; kill it where it does not."""
        self._answer({"end": code})
        # The rank exits by itself where it can: a thread of it calls os._exit. One that is stopped cannot.
        deadline = time.monotonic() + _OBEYS
        while self._lives() and time.monotonic() < deadline:
            await asyncio.sleep(TICK / 10)
        if self._lives():
            os.kill(self._about["pid"], signal.SIGKILL)


def _hung_up(descriptor: int) -> bool:
    """Return whether the reader of a pipe, or the other end of a socket, is gone."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


async def _run(about: dict[str, Any]) -> None:
    await Member(about).run()


def main() -> None:
    """Guard the rank that the command line's last argument, a JSON object, describes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # what ends the rank, politely or not, must find its guardian alive
    asyncio.run(_run(json.loads(sys.argv[-1])))
