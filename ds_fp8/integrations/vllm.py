"""Weights of a live engine into a running vLLM: the codes and scales of training, nowhere cast again.

The calls of an update go to an LLM of this process, or to a server at an address.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Literal

import deepspeed
import torch
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.export.engines import gathered, served_plan
from ds_fp8.export.plan import Plan, named_tensors
from ds_fp8.export.together import together
from ds_fp8.integrations.vllm_backend import BACKEND, transfer_config

if TYPE_CHECKING:
    from vllm import LLM

Named = list[tuple[str, torch.Tensor]]
CHUNK_BYTES = 256 << 20
VERSIONS = "vLLM 0.22 or later has these calls; 0.24.0 was tried"
ABANDONING = 30  # Seconds that a server has for an answer after an update has failed

__all__ = ["CHUNK_BYTES", "Sent", "sync_weights", "transfer_config"]


@dataclass(frozen=True)
class Sent:
    """An update of a server's weights."""

    tensors: int
    bytes: int
    seconds: float
    chunks: int
    layout: str  # "fp8" or "compressed-tensors"; "bf16" where servers have no layout for the weights of training


def sync_weights(
    engine: deepspeed.DeepSpeedEngine,
    server: LLM | str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    pause: Literal["wait", "abort", "keep"] | None = "wait",
    timeout: float = 300,
) -> Sent:
    """Give a running vLLM the weights that an engine trains, as they are between two steps. Collective.

    Weights of FP8 layers travel as the codes that training multiplies by, the others in BF16. Names, types and shapes
    are compared with the server's model before the first tensor is sent.

    Args:
        engine: An engine of ds_fp8.initialize.
        server: This rank's own LLM, started with weight_transfer_config=transfer_config(); or the address of a server
            on the trainer's GPUs (vllm serve FOLDER --weight-transfer-config '{"backend": "ds_fp8"}').
        chunk_bytes: About how much is gathered, sent and freed at a time; a larger tensor goes alone.
        pause: How a server at an address treats running requests: "wait" for their end, "abort" them, or "keep" them
            for later: their tokens stay, and the rest is computed by the new weights. None: it must have been paused
            before.
        timeout: Seconds that a server at an address has for an answer.

    Returns:
        What was sent by this rank.

    Raises:
        UserError: on all ranks alike, what is refused or fails on the way. A server at an address then stays paused if
            it may hold a part of the weights.
    """
    link = link_to(server, pause, timeout)
    _refuse_adapters(engine)
    plan, start = served_plan(engine), time.perf_counter()
    announced, room = announcement(plan), _room(plan, chunk_bytes)
    begun = False
    try:
        _together(link.open)
        announced["gpus"] = [gpu for gpu in _together(_gpu) if gpu] if link.by_handle else []
        _together(lambda: link.compare(announced))
        begun = True
        _together(link.start)
        tensors = size = chunks = 0
        for chunk, failure in _chunks(engine, plan, chunk_bytes):
            _send(link, chunk, room, failure)
            tensors, chunks = tensors + len(chunk), chunks + 1
            size += sum(tensor.nbytes for _, tensor in chunk)
            del chunk  # before the next one is gathered
        _together(link.finish)
    except BaseException as error:
        if begun:
            link.abandon()
        else:
            with contextlib.suppress(Exception):
                link.close()
        if begun and isinstance(error, UserError):
            resume = f"; {server} stays paused: POST /resume then" if isinstance(server, str) else ""
            mixed = f"vLLM may hold a part of the new weights: call sync_weights again before it generates{resume}"
            error.remedy = f"{error.remedy}; {mixed}"
        raise
    _together(link.close)
    return Sent(tensors, size, time.perf_counter() - start, chunks, plan.layout)


def announcement(plan: Plan) -> dict[str, Any]:
    """Return all tensors that will be sent, by name, type and shape, and how weights were cast."""
    tensors = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for entry in plan.entries
        for name, tensor in entry.tensors(plan).items()
    ]
    # Without FP8 weights no cast of theirs can stand in the way.
    granularity = plan.cast.granularity if plan.quantized else ""
    return {"tensors": tensors, "granularity": granularity, "scale": plan.cast.scale}


def _room(plan: Plan, chunk_bytes: int) -> int:
    sizes = [padded(tensor) for entry in plan.entries for tensor in entry.tensors(plan).values()]
    return min(sum(sizes), max(chunk_bytes, *sizes))


def _together(call: Callable[[], Any]) -> list[Any]:
    return together(call, _as_user_error)


def _as_user_error(error: Exception) -> UserError:
    """Return what a worker of vLLM refused, with its remedy; any other of vLLM's errors in its own words."""
    refused = re.search(r"\[ds_fp8\] (.*) \[remedy: (.*?)\]", str(error), re.DOTALL)
    if refused:
        return UserError(refused[1], remedy=refused[2])
    if "Weight transfer not configured" in str(error):
        return UserError(
            "this vLLM was started without weight transfer",
            remedy="LLM(..., weight_transfer_config=ds_fp8.integrations.vllm.transfer_config()), or vllm serve ... "
            f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
        )
    return UserError(
        f"vLLM did not take the weights: {clipped(f'{type(error).__name__}: {error}', 500)}",
        remedy="read vLLM's own log",
    )


def _refuse_adapters(engine: deepspeed.DeepSpeedEngine) -> None:
    if hasattr(engine.module, "peft_config"):
        raise UserError(
            "this model has adapters, and the codes below them do not change in training",
            remedy="serve the folder of the base with --enable-lora, and load what model.save_pretrained wrote",
        )


def _chunks(engine: deepspeed.DeepSpeedEngine, plan: Plan, limit: int) -> Iterator[tuple[Named, Exception | None]]:
    """Yield tensors that are sent together, and what failed on this rank while they were gathered. Collective.

    By the sizes of the plan: whatever fails, all ranks have equally many chunks, and raise at the same one.
    """
    chunk: Named = []
    failure: Exception | None = None
    size = 0
    for entry, numbers in gathered(engine, plan):
        tensors: dict[str, torch.Tensor] = {}
        try:
            if isinstance(numbers, Exception):
                raise numbers
            for name, part in entry.stored(numbers).items():
                tensors |= named_tensors(name, part, plan.layout)
        except Exception as error:
            failure = failure or error
        for name, planned in entry.tensors(plan).items():
            if size and size + padded(planned) > limit:
                yield chunk, failure
                chunk, size = [], 0
            if name in tensors:
                chunk.append((name, tensors[name]))
            size += padded(planned)
    if size:
        yield chunk, failure


def _send(link: Link, chunk: Named, room: int, failure: Exception | None) -> None:
    def fill() -> dict[str, Any]:
        if failure is not None:
            raise UserError(
                f"rank {dist.get_rank()} failed while weights were gathered: {type(failure).__name__}: {failure}",
                remedy="make memory free on its GPU, or give smaller chunk_bytes",
            ) from failure
        return _buffer.filled(chunk, room) if link.by_handle else {"weights": chunk}

    if not link.by_handle:
        _together(lambda: link.update(fill()))
        return
    # Every rank packs: a worker of the server opens the buffer that lies on its own GPU.
    filled = _together(fill)
    handles = {gpu: handle for own in filled for gpu, handle in own["handles"].items()}
    _together(lambda: link.update({**filled[0], "handles": handles}))


class SharedBuffer:
    """Memory of this process's GPU, shared by one handle of CUDA that is made once and sent with every chunk.

    torch counts the processes that may open shared memory, and frees it when they have: memory that nobody opens, on a
    GPU without a worker of the server, is never freed. So there is one buffer, which stays.
    """

    memory: torch.Tensor | None = None
    handles: dict[str, list[Any]]

    def filled(self, chunk: Named, room: int) -> dict[str, Any]:
        parts, size = [], 0
        for name, tensor in chunk:
            parts.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
            size += padded(tensor)
        device = chunk[0][1].device
        if self.memory is None or self.memory.numel() < size or self.memory.device != device:
            self.memory = None
            self.memory = torch.empty(max(size, room), dtype=torch.uint8, device=device)
            self.handles = _handles(self.memory)
        for (_, tensor), (*_, start) in zip(chunk, parts, strict=True):
            self.memory[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return {"parts": parts, "size": size, "handles": self.handles}


def padded(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer: any type can begin at a multiple of 16."""
    return -(-tensor.nbytes // 16) * 16


def _gpu() -> str | None:
    return _name_of(torch.cuda.current_device()) if torch.cuda.is_available() else None


def _name_of(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _handles(buffer: torch.Tensor) -> dict[str, list[Any]]:
    from torch.multiprocessing.reductions import reduce_tensor

    # The last value asks a reader to wait for an event, which would be the buffer's making: `filled` waits itself.
    rest = [*reduce_tensor(buffer)[1][7:-1], False]
    fit = [{"bytes": b64encode(value).decode()} if isinstance(value, bytes) else value for value in rest]
    return {_name_of(buffer.device): fit}


_buffer = SharedBuffer()


class Link:
    """Calls of one update in their order: open, compare, start, update ..., finish, close; or abandon where one fails.

    As it is: a rank that takes part in the gathers while rank 0 speaks with the server.
    """

    by_handle = True  # Whether the model lies in another process, which opens a buffer of this one

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
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
