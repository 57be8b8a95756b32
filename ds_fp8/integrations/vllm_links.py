"""vLLM's calls for an update of its weights: to an LLM of this process, and to a server at an address."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist

from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from vllm import LLM

VERSIONS = "vLLM 0.22 or later has these calls; 0.24.0 was tried"
ABANDONING = 30
"""Seconds that a server has for an answer after an update has failed."""


class Link:
    """Calls of one update in their order: open, compare, start, update ..., finish, close; or abandon where one fails.

    As it is: a rank that takes part in the gathers while rank 0 speaks with the server.
    """

    by_handle = True
    """Whether the model lies in another process, which opens a buffer of this one."""

    def _nothing(self, *_: Any) -> None:
        pass

    open = compare = start = update = finish = close = abandon = _nothing


def link_to(server: LLM | str, pause: str | None, timeout: float) -> Link:
    """Return this rank's link to its own LLM, or to a server, which rank 0 alone speaks with."""
    if not isinstance(server, str):
        return _Own(server)
    return _Address(server.rstrip("/"), pause, timeout) if dist.get_rank() == 0 else Link()


def _start(start: Callable[[], None], finish: Callable[[], None]) -> None:
    try:
        start()
    except Exception as error:
        if "already active" not in str(error):
            raise
        # A trainer has ended in the middle of its update, which `compare` has undone: it is closed, and this one begun.
        finish()
        start()


def _abandon(link: Link, finish: Callable[[], None]) -> None:
    # The first call puts the tensors in place that vLLM computed with, the second makes it ready for another update.
    # What failed before counts, not that these fail too.
    for call in (lambda: link.update({"abandon": True}), finish):
        with contextlib.suppress(Exception):
            call()


class _Own(Link):
    """An LLM of this process."""

    def __init__(self, llm: LLM):
        self.llm = llm
        executor = getattr(getattr(llm, "llm_engine", None), "model_executor", None)
        # Tensors can be handed over as they are where the model lies in this very process.
        self.by_handle = getattr(executor, "driver_worker", None) is None

    def open(self) -> None:
        calls = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
        absent = [call for call in calls if not hasattr(self.llm, call)]
        if absent:
            raise UserError(f"this vLLM has no LLM.{absent[0]}", remedy=f"another vLLM: {VERSIONS}")
        if self.llm.llm_engine.has_unfinished_requests():
            raise UserError("a generation runs on this vLLM", remedy="sync between two calls of generate()")

    def compare(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start(self) -> None:
        _start(lambda: self.llm.start_weight_update(is_checkpoint_format=True), self.llm.finish_weight_update)

    def update(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish(self) -> None:
        self.llm.finish_weight_update()
        self.compare({"outcome": True})
        # Keys and values in it were computed from the old weights.
        self.llm.reset_prefix_cache()

    def abandon(self) -> None:
        _abandon(self, self.llm.finish_weight_update)


class _Address(Link):
    """A server at an address, which rank 0 speaks with."""

    def __init__(self, url: str, pause: str | None, timeout: float):
        self.url, self.pause, self.timeout = url, pause, timeout
        self.paused = False

    def open(self) -> None:
        answer = self.ask("GET", "/is_paused")
        if not isinstance(answer, dict) or "is_paused" not in answer:
            raise UserError(f"the server at {self.url} is not vLLM", remedy="check the address")
        if answer["is_paused"]:
            return  # by the caller, who resumes it
        if self.pause is None:
            raise UserError(
                f"requests may run on {self.url}",
                remedy='POST /pause first, or give pause="wait", "abort", "keep"',
            )
        # Before the answer: a server takes no more requests as soon as it is asked, and answers when the others end.
        self.paused = True
        self.ask("POST", f"/pause?mode={self.pause}")

    def compare(self, init_info: dict[str, Any]) -> None:
        self.ask("POST", "/init_weight_transfer_engine", init_info=init_info)

    def start(self) -> None:
        _start(lambda: self.ask("POST", "/start_weight_update", is_checkpoint_format=True), self._end)

    def update(self, update_info: dict[str, Any]) -> None:
        self.ask("POST", "/update_weights", update_info=update_info)

    def finish(self) -> None:
        self._end()
        self.compare({"outcome": True})

    def close(self) -> None:
        if self.paused:
            try:
                self.ask("POST", "/resume")
            except Exception as error:
                problem = getattr(error, "problem", error)
                raise UserError(f"{self.url} stays paused: {problem}", remedy="POST /resume to it") from None

    def abandon(self) -> None:
        # It stays paused: some of its weights may be new ones and some old.
        self.timeout = min(self.timeout, ABANDONING)
        _abandon(self, self._end)

    def _end(self) -> None:
        self.ask("POST", "/finish_weight_update")

    def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                    return json.loads(answer.read() or b"{}")
            except urllib.error.HTTPError as error:
                code, text = error.code, error.read().decode(errors="replace")
        # HTTPException: an answer that is none of HTTP's, or cut off. ValueError: no address, or no JSON.
        except (OSError, HTTPException, ValueError) as error:
            raise UserError(
                f"the server at {self.url} does not answer {path.partition('?')[0]}: {getattr(error, 'reason', error)}",
                remedy="check the address and the server's log",
            ) from None
        if code in (404, 405):
            raise UserError(
                f"the server at {self.url} has no {path.partition('?')[0]}",
                remedy=f"start it with VLLM_SERVER_DEV_MODE=1 in its environment ({VERSIONS})",
            )
        raise RuntimeError(_message(text) or f"HTTP status {code}")


def _message(text: str) -> str:
    """Return the message in an error that vLLM's server answers with."""
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
