"""Weights of a live engine into a running vLLM: the codes and scales of training, nowhere cast again."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import deepspeed
import torch
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.export.engines import served_plan, served_tensors
from ds_fp8.export.plan import Plan
from ds_fp8.integrations.vllm_backend import BACKEND, transfer_config

if TYPE_CHECKING:
    from vllm import LLM

CHUNK_BYTES = 256 << 20
VERSIONS = "vLLM 0.22 or later has these calls; 0.24.0 was tried"
Named = list[tuple[str, torch.Tensor]]

__all__ = ["CHUNK_BYTES", "Sent", "sync_weights", "transfer_config"]


@dataclass(frozen=True)
class Sent:
    """An update of a server's weights."""

    tensors: int
    bytes: int
    seconds: float
    chunks: int


def sync_weights(
    engine: deepspeed.DeepSpeedEngine,
    server: LLM | str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    pause: Literal["wait", "abort", "keep"] | None = "wait",
    timeout: float = 300,
) -> Sent:
    """Give a running vLLM the weights that an engine trains, as they are between two steps. Collective.

    Weights of FP8 layers travel as the codes that training multiplies by, gathered from the shards in one byte; the
    others in BF16. Every rank takes part in the gathers. Names, types and shapes are compared with the server's model
    before the first tensor is sent.

    Args:
        engine: An engine of ds_fp8.initialize.
        server: This rank's own LLM, started with weight_transfer_config=transfer_config(); or the address of a server
            on the trainer's GPUs (vllm serve FOLDER --weight-transfer-config '{"backend": "ds_fp8"}').
        chunk_bytes: About how much is gathered, sent and freed at a time; a larger tensor goes alone.
        pause: How a server at an address treats running requests: "wait" for their end, "abort" them, or "keep" them
            for later, with what they have computed from the old weights. None: it must have been paused before.
        timeout: Seconds that a server at an address has for an answer.

    Returns:
        What was sent by this rank.

    Raises:
        UserError: another model, a server without these calls or whose kernels would cast the codes again, a
            generation that runs, or adapters. On all ranks alike.
    """
    if not isinstance(server, str):
        link: _Link = _Own(server)
    elif dist.get_rank() == 0:
        link = _Address(server.rstrip("/"), pause, timeout)
    else:
        link = _Beside()
    _refuse_adapters(engine)
    plan, start = served_plan(engine), time.perf_counter()
    together(link.open)
    try:
        together(lambda: link.compare(announcement(plan)))
        together(link.start)
        tensors = size = chunks = 0
        for chunk in _chunks(served_tensors(engine, plan), chunk_bytes):
            _send(link, chunk)
            tensors, chunks = tensors + len(chunk), chunks + 1
            size += sum(tensor.nbytes for _, tensor in chunk)
        together(link.finish)
    finally:
        link.close()
    return Sent(tensors, size, time.perf_counter() - start, chunks)


def announcement(plan: Plan) -> dict[str, Any]:
    """Return all tensors that `served_tensors` will yield, by name, type and shape, and how weights were cast."""
    tensors = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for entry in plan.entries
        for name, tensor in entry.tensors(plan).items()
    ]
    return {"tensors": tensors, "granularity": plan.cast.granularity, "scale": plan.cast.scale}


def together(call: Callable[[], Any]) -> None:
    """Call on every rank, and raise on all of them what failed on one: none is left waiting in a gather."""
    error = None
    try:
        call()
    except UserError as raised:
        error = raised
    except Exception as raised:
        error = _as_user_error(raised)
    errors: list[UserError | None] = [error]
    if dist.get_world_size() > 1:
        errors = [None] * dist.get_world_size()
        told = None if error is None else (error.problem, error.remedy, error.key)
        torch.distributed.all_gather_object(errors, told)
        errors = [None if told is None else UserError(told[0], remedy=told[1], key=told[2]) for told in errors]
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        raise first


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
        remedy="the server may hold a part of them: call sync_weights again, or start it anew",
    )


def _refuse_adapters(engine: deepspeed.DeepSpeedEngine) -> None:
    if hasattr(engine.module, "peft_config"):
        raise UserError(
            "this model has adapters, and the codes below them do not change in training",
            remedy="serve the folder of the base with --enable-lora, and load what model.save_pretrained wrote",
        )


def _chunks(weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Named]:
    chunk: Named = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def _send(link: _Link, chunk: Named) -> None:
    # Every rank packs: a worker of the server opens the buffer that lies on its own GPU.
    handles: list[dict[str, Any]] = []
    buffer = None
    parts: list[list[Any]] = []
    if link.by_handle:
        buffer, parts = packed(chunk)
        handles = [_handle(buffer)]
        if dist.get_world_size() > 1:
            handles = [{}] * dist.get_world_size()
            torch.distributed.all_gather_object(handles, _handle(buffer))
    merged = {gpu: handle for own in handles for gpu, handle in own.items()}
    size = 0 if buffer is None else buffer.numel()
    update = {"parts": parts, "size": size, "handles": merged} if link.by_handle else {"weights": chunk}
    together(lambda: link.update(update))
    if buffer is not None:
        del buffer
        torch.cuda.ipc_collect()


def packed(chunk: Named) -> tuple[torch.Tensor, list[list[Any]]]:
    """Return the tensors of a chunk in one buffer, and (name, type, shape, first byte) of each."""
    parts, end = [], 0
    for name, tensor in chunk:
        parts.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.nbytes // 16) * 16  # a tensor of any type can begin at a multiple of 16
    buffer = torch.empty(end, dtype=torch.uint8, device=chunk[0][1].device)
    for (_, tensor), (*_, start) in zip(chunk, parts, strict=True):
        buffer[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return buffer, parts


def _handle(buffer: torch.Tensor) -> dict[str, list[Any]]:
    """Return this GPU's name and CUDA's handle of the buffer, fit for JSON."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.current_stream().synchronize()
    rest = reduce_tensor(buffer)[1][7:]
    fit = [{"bytes": b64encode(value).decode()} if isinstance(value, bytes) else value for value in rest]
    return {str(torch.cuda.get_device_properties(buffer.device).uuid): fit}


class _Link(Protocol):
    """vLLM's calls for an update of its weights, in their order."""

    by_handle: bool

    def open(self) -> None: ...
    def compare(self, init_info: dict[str, Any]) -> None: ...
    def start(self) -> None: ...
    def update(self, update_info: dict[str, Any]) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class _Own:
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
        self.llm.start_weight_update(is_checkpoint_format=True)

    def update(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish(self) -> None:
        self.llm.finish_weight_update()
        # Keys and values in it were computed from the old weights.
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        pass


class _Address:
    """A server at an address, which rank 0 speaks with."""

    by_handle = True

    def __init__(self, url: str, pause: str | None, timeout: float):
        self.url, self.pause, self.timeout = url, pause, timeout
        self.paused = False

    def open(self) -> None:
        if self.ask("GET", "/is_paused")["is_paused"]:
            return  # by the caller, who resumes it
        if self.pause is None:
            raise UserError(
                f"requests may run on {self.url}",
                remedy='POST /pause first, or give pause="wait", "abort", "keep"',
            )
        self.ask("POST", f"/pause?mode={self.pause}")
        self.paused = True

    def compare(self, init_info: dict[str, Any]) -> None:
        self.ask("POST", "/init_weight_transfer_engine", init_info=init_info)

    def start(self) -> None:
        self.ask("POST", "/start_weight_update", is_checkpoint_format=True)

    def update(self, update_info: dict[str, Any]) -> None:
        self.ask("POST", "/update_weights", update_info=update_info)

    def finish(self) -> None:
        self.ask("POST", "/finish_weight_update")

    def close(self) -> None:
        if self.paused:
            self.ask("POST", "/resume")

    def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code in (404, 405):
                raise UserError(
                    f"the server at {self.url} has no {path.partition('?')[0]}",
                    remedy=f"start it with VLLM_SERVER_DEV_MODE=1 in its environment ({VERSIONS})",
                ) from None
            raise RuntimeError(_message(text)) from None
        except (urllib.error.URLError, OSError) as error:
            raise UserError(
                f"the server at {self.url} does not answer {path.partition('?')[0]}: {getattr(error, 'reason', error)}",
                remedy="check the address and the server's log",
            ) from None


class _Beside:
    """A rank that takes part in the gathers while rank 0 speaks with the server."""

    by_handle = True

    def _nothing(self, *_: Any) -> None:
        pass

    open = compare = start = update = finish = close = _nothing


def _message(text: str) -> str:
    """Return the message in an error that vLLM's server answers with."""
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
