"""Weights of a live engine into a running vLLM: the codes and scales of training, nowhere cast again."""

from __future__ import annotations

import contextlib
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import deepspeed
import torch
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.export.engines import served_plan
from ds_fp8.export.plan import Plan, named_tensors
from ds_fp8.export.together import gathered, together
from ds_fp8.integrations.vllm_backend import BACKEND, transfer_config
from ds_fp8.integrations.vllm_links import Link, link_to

if TYPE_CHECKING:
    from vllm import LLM

Named = list[tuple[str, torch.Tensor]]
CHUNK_BYTES = 256 << 20

__all__ = ["CHUNK_BYTES", "Sent", "sync_weights", "transfer_config"]


@dataclass(frozen=True)
class Sent:
    """An update of a server's weights."""

    tensors: int
    bytes: int
    seconds: float
    chunks: int
    layout: str
    """ "fp8" or "compressed-tensors"; "bf16" where servers have no layout for the weights of training."""


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
        UserError: another model, a server without these calls, on other GPUs or whose kernels would cast the codes
            again, a generation that runs, or adapters; and what fails on the way. A server at an address then stays
            paused if it may hold a part of the weights. On all ranks alike.
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
    """Return the bytes that the largest chunk can take."""
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
        """Copy tensors into the buffer, of `room` bytes where it has to be made; return what a worker needs to read."""
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
    """Return this process's GPU by the name that all processes know it by; None on a CPU."""
    return _name_of(torch.cuda.current_device()) if torch.cuda.is_available() else None


def _name_of(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _handles(buffer: torch.Tensor) -> dict[str, list[Any]]:
    """Return this GPU's name and CUDA's handle of the buffer, fit for JSON."""
    from torch.multiprocessing.reductions import reduce_tensor

    # The last value asks a reader to wait for an event, which would be the buffer's making: `filled` waits itself.
    rest = [*reduce_tensor(buffer)[1][7:-1], False]
    fit = [{"bytes": b64encode(value).decode()} if isinstance(value, bytes) else value for value in rest]
    return {_name_of(buffer.device): fit}


_buffer = SharedBuffer()
