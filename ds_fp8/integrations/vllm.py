"""Update a running vLLM with the weights of a live engine: the quantized weights of training, unchanged.

vLLM is an LLM of this process, or a server at an address.
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
from ds_fp8.export.engines import served_plan, unsharded_entries
from ds_fp8.export.on_all_ranks import on_all_ranks
from ds_fp8.export.plan import Plan, named_tensors
from ds_fp8.integrations.vllm_backend import BACKEND, transfer_config

if TYPE_CHECKING:
    from vllm import LLM

Named = list[tuple[str, torch.Tensor]]
CHUNK_BYTES = 256 << 20
VERSIONS = "vLLM 0.22 or later has these calls; 0.24.0 was tried"
ABANDONING = 30  # seconds for a server's answers after an update has failed

__all__ = ["CHUNK_BYTES", "Sent", "sync_weights", "transfer_config"]


@dataclass(frozen=True)
class Sent:
    """An update of a server's weights."""

    tensors: int
    bytes: int
    seconds: float
    chunks: int
    layout: str  # "fp8" or "compressed-tensors"; "bf16" if no layout of servers holds the weights of training


def sync_weights(
    engine: deepspeed.DeepSpeedEngine,
    server: LLM | str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    pause: Literal["wait", "abort", "keep"] | None = "wait",
    timeout: float = 300,
) -> Sent:
    """Send the weights of an engine to a running vLLM, between two steps. Collective.

    FP8 weights are sent as the quantized weights of training, others in BF16. Names, types and shapes are compared with
    the server's model before the first tensor is sent.

    Args:
        engine: An engine of ds_fp8.initialize.
        server: This rank's own LLM, started with weight_transfer_config=transfer_config(); or the address of a server
            on the trainer's GPUs (vllm serve FOLDER --weight-transfer-config '{"backend": "ds_fp8"}').
        chunk_bytes: Unsharded, sent and freed at a time, about; a larger tensor is a chunk by itself.
        pause: Running requests of a server at an address: "wait" for their end, "abort" them, or "keep" their tokens
            and compute the rest with the new weights. None: the caller has paused the server.
        timeout: Seconds for an answer of a server at an address.

    Returns:
        The tensors, bytes and chunks of this rank.

    Raises:
        UserError: on all ranks, if the server refuses or a rank fails. A server at an address stays paused if it may
            hold a part of the weights.
    """
    link = link_to(server, pause, timeout)
    if hasattr(engine.module, "peft_config"):
        raise UserError(
            "this model has adapters, and the weights below them do not change in training",
            remedy="serve the folder of the base with --enable-lora, and load what model.save_pretrained wrote",
        )
    plan, start = served_plan(engine), time.perf_counter()
    announced, buffer_bytes = announcement(plan), _buffer_bytes(plan, chunk_bytes)
    begun = False
    try:
        _on_all_ranks(link.open)
        announced["gpus"] = [gpu for gpu in _on_all_ranks(_gpu) if gpu] if link.by_handle else []
        _on_all_ranks(lambda: link.compare(announced))
        begun = True
        _on_all_ranks(link.start)
        tensors = size = chunks = 0
        for chunk, failure in _chunks(engine, plan, chunk_bytes):
            _send(link, chunk, buffer_bytes, failure)
            tensors, chunks = tensors + len(chunk), chunks + 1
            size += sum(tensor.nbytes for _, tensor in chunk)
            del chunk  # before the next one is unsharded
        _on_all_ranks(link.finish)
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
    _on_all_ranks(link.close)
    return Sent(tensors, size, time.perf_counter() - start, chunks, plan.layout)


def announcement(plan: Plan) -> dict[str, Any]:
    """Return name, type and shape of all tensors to be sent, and the granularity and scale of FP8 weights."""
    tensors = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for entry in plan.entries
        for name, tensor in entry.tensors(plan).items()
    ]
    granularity = plan.cast.granularity if plan.quantized else ""  # "": no FP8 weights to check
    return {"tensors": tensors, "granularity": granularity, "scale": plan.cast.scale}


def _buffer_bytes(plan: Plan, chunk_bytes: int) -> int:
    sizes = [padded(tensor) for entry in plan.entries for tensor in entry.tensors(plan).values()]
    return min(sum(sizes), max(chunk_bytes, *sizes))


def _on_all_ranks(call: Callable[[], Any]) -> list[Any]:
    return on_all_ranks(call, _as_user_error)


def _as_user_error(error: Exception) -> UserError:
    """Return the refusal of a worker of vLLM with its remedy, or another error of vLLM."""
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


def _chunks(engine: deepspeed.DeepSpeedEngine, plan: Plan, limit: int) -> Iterator[tuple[Named, Exception | None]]:
    """Yield chunks of tensors, and this rank's first error while they were unsharded. Collective.

    Chunks follow the sizes of the plan: with an error, too, all ranks have the same chunks.
    """
    chunk: Named = []
    failure: Exception | None = None
    size = 0
    for entry, unsharded in unsharded_entries(engine, plan):
        tensors: dict[str, torch.Tensor] = {}
        try:
            if isinstance(unsharded, Exception):
                raise unsharded
            for name, part in entry.stored(unsharded).items():
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


def _send(link: Link, chunk: Named, buffer_bytes: int, failure: Exception | None) -> None:
    def fill() -> dict[str, Any]:
        if failure is not None:
            raise UserError(
                f"rank {dist.get_rank()} failed while weights were unsharded: {type(failure).__name__}: {failure}",
                remedy="make memory free on its GPU, or give smaller chunk_bytes",
            ) from failure
        return _buffer.filled(chunk, buffer_bytes) if link.by_handle else {"weights": chunk}

    if not link.by_handle:
        _on_all_ranks(lambda: link.update(fill()))
        return
    # Every rank fills a buffer: a worker of the server opens the one on its own GPU.
    filled = _on_all_ranks(fill)
    handles = {gpu: handle for own in filled for gpu, handle in own["handles"].items()}
    _on_all_ranks(lambda: link.update({**filled[0], "handles": handles}))


class SharedBuffer:
    """Memory on this process's GPU, shared by one CUDA IPC handle for all chunks.

    torch frees shared memory after the processes expected to open it have done so: on a GPU without a worker of the
    server never. One buffer for the process bounds that leak.
    """

    memory: torch.Tensor | None = None
    handles: dict[str, list[Any]]

    def filled(self, chunk: Named, nbytes: int) -> dict[str, Any]:
        parts, size = [], 0
        for name, tensor in chunk:
            parts.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
            size += padded(tensor)
        device = chunk[0][1].device
        if self.memory is None or self.memory.numel() < size or self.memory.device != device:
            self.memory = None
            self.memory = torch.empty(max(size, nbytes), dtype=torch.uint8, device=device)
            self.handles = _handles(self.memory)
        for (_, tensor), (*_, start) in zip(chunk, parts, strict=True):
            self.memory[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return {"parts": parts, "size": size, "handles": self.handles}


def padded(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in a buffer: a multiple of 16, aligned for any type."""
    return -(-tensor.nbytes // 16) * 16


def _gpu() -> str | None:
    return str(torch.cuda.get_device_properties().uuid) if torch.cuda.is_available() else None


def _handles(buffer: torch.Tensor) -> dict[str, list[Any]]:
    from torch.multiprocessing.reductions import reduce_tensor

    rest = [*reduce_tensor(buffer)[1][7:-1], False]  # no event for readers to wait for: `filled` synchronizes
    fit = [{"bytes": b64encode(value).decode()} if isinstance(value, bytes) else value for value in rest]
    return {_gpu(): fit}


_buffer = SharedBuffer()


class Link:
    """Calls of vLLM's weight transfer, which an LLM and a server have by the same names.

    In order: open, compare, start, update ..., finish, close; or abandon after an error. This class calls nothing: the
    link of ranks that join the all-gathers while rank 0 calls a server.
    """

    by_handle = True  # the model is in another process, which opens a buffer of this one

    def call(self, name: str, **arguments: Any) -> None:
        pass

    def open(self) -> None:
        pass

    close = open

    def compare(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info=init_info)

    def start(self) -> None:
        try:
            self.call("start_weight_update", is_checkpoint_format=True)
        except Exception as error:
            if "already active" not in str(error):
                raise
            # A trainer ended within its update, which `compare` has undone.
            self.call("finish_weight_update")
            self.call("start_weight_update", is_checkpoint_format=True)

    def update(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info=update_info)

    def finish(self) -> None:
        self.call("finish_weight_update")
        self.compare({"outcome": True})

    def abandon(self) -> None:
        # The first call restores the tensors that vLLM computed with, the second ends the update. Their own errors do
        # not matter: the first error is reported.
        for call in (lambda: self.update({"abandon": True}), lambda: self.call("finish_weight_update")):
            with contextlib.suppress(Exception):
                call()


def link_to(server: LLM | str, pause: str | None, timeout: float) -> Link:
    """Return this rank's link to its own LLM, or rank 0's to a server."""
    if not isinstance(server, str):
        return _LocalLLM(server)
    return _Server(server.rstrip("/"), pause, timeout) if dist.get_rank() == 0 else Link()


class _LocalLLM(Link):
    """An LLM of this process."""

    def __init__(self, llm: LLM):
        self.llm = llm
        executor = getattr(getattr(llm, "llm_engine", None), "model_executor", None)
        self.by_handle = getattr(executor, "driver_worker", None) is None  # a worker in this process takes tensors

    def open(self) -> None:
        calls = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
        absent = [call for call in calls if not hasattr(self.llm, call)]
        if absent:
            raise UserError(f"this vLLM has no LLM.{absent[0]}", remedy=f"another vLLM: {VERSIONS}")
        if self.llm.llm_engine.has_unfinished_requests():
            raise UserError("a generation runs on this vLLM", remedy="sync between two calls of generate()")

    def call(self, name: str, **arguments: Any) -> None:
        method = getattr(self.llm, name)
        if name in ("init_weight_transfer_engine", "update_weights"):
            method(arguments)  # one request, a dict
        else:
            method(**arguments)

    def finish(self) -> None:
        super().finish()
        self.llm.reset_prefix_cache()  # keys and values of the old weights


class _Server(Link):
    """A server at an address, called by rank 0."""

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
        self.paused = True  # before the answer: a server pauses at once, and answers when its requests have ended
        self.ask("POST", f"/pause?mode={self.pause}")

    def call(self, name: str, **arguments: Any) -> None:
        self.ask("POST", f"/{name}", **arguments)

    def close(self) -> None:
        if self.paused:
            try:
                self.ask("POST", "/resume")
            except Exception as error:
                problem = getattr(error, "problem", error)
                raise UserError(f"{self.url} stays paused: {problem}", remedy="POST /resume to it") from None

    def abandon(self) -> None:
        self.timeout = min(self.timeout, ABANDONING)
        super().abandon()  # and stays paused: old and new weights may be mixed

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
        # HTTPException: not HTTP, or cut off. ValueError: no address, or no JSON.
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
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise RuntimeError(text or f"HTTP status {code}")
