"""Tensors in a buffer on the trainer's GPU, which a server's worker on the same GPU opens."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import torch

Named = list[tuple[str, torch.Tensor]]


class SharedBuffer:
    """Memory of this process's GPU, shared by one handle of CUDA that is made once and sent with every chunk.

    torch counts the processes that may open shared memory, and frees it when they have: memory that nobody opens, on a
    GPU without a worker of the server, is never freed. So there is one buffer, which stays.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.handles: dict[str, list[Any]] = {}

    def filled(self, chunk: Named, room: int) -> dict[str, Any]:
        """Copy the tensors of a chunk into the buffer.

        Args:
            chunk: Tensors by name.
            room: Bytes of the buffer where it has to be made.

        Returns:
            What a worker needs to read them.
        """
        parts, size = places(chunk)
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


def places(chunk: Named) -> tuple[list[list[Any]], int]:
    """Return (name, type, shape, first byte) of each tensor in a buffer, and the bytes of all."""
    parts, end = [], 0
    for name, tensor in chunk:
        parts.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += padded(tensor)
    return parts, end


def padded(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer, where any type can begin at a multiple of 16."""
    return -(-tensor.nbytes // 16) * 16


def gpu_of_this_process() -> str | None:
    """Return the GPU's name that all processes know it by; None on a CPU."""
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
