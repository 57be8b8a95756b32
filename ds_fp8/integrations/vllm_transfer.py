"""The receiving end of `sync_weights`, which vLLM runs in each of its workers."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ds_fp8.integrations.vllm_model import check_same_model, check_scales, refuse

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Announced(WeightTransferInitInfo):
    """All tensors of an update, before the first of them is sent."""

    tensors: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """(name, type, shape) of each."""
    granularity: str = "128x128"
    scale: str = "pow2"


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """Some tensors of an update: themselves within one process, else in one buffer that other processes open."""

    weights: Named | None = None
    parts: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    """(name, type, shape, first byte) of each tensor in the buffer."""
    size: int = 0
    """Bytes of the buffer."""
    handles: dict[str, list[Any]] = field(default_factory=dict)
    """GPU -> CUDA's handle of the buffer there."""


class WeightTransfer(WeightTransferEngine[Announced, Chunk]):
    """Takes codes and scales as training cast them, and refuses weights that the model does not hold."""

    init_info_cls = Announced
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: Announced) -> None:
        """Compare what will be sent with the model. vLLM itself takes missing and unknown names without a word."""
        check_same_model(self.model, init_info.tensors, self.parallel_config.tensor_parallel_size)
        check_scales(self.model, init_info.granularity, init_info.scale)

    def receive_weights(self, update_info: Chunk, load_weights: Callable[[Named], None]) -> None:
        """Load the tensors of a chunk."""
        if update_info.weights is not None:
            load_weights(update_info.weights)
            return
        buffer = _opened(update_info)
        load_weights(
            [
                (name, _view(buffer, getattr(torch, dtype), shape, start))
                for name, dtype, shape, start in update_info.parts
            ]
        )

    def shutdown(self) -> None:
        """Hold nothing."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used: `sync_weights` sends."""
        raise NotImplementedError("call ds_fp8.integrations.vllm.sync_weights")


def _opened(chunk: Chunk) -> torch.Tensor:
    """Return a copy of the trainer's buffer on this worker's GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = torch.accelerator.current_device_index()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    if gpu not in chunk.handles:
        refuse(
            f"the trainer's weights lie on the GPUs {', '.join(chunk.handles)}, a worker of the server on {gpu}",
            "start the server on the trainer's GPUs: CUDA IPC reaches no others",
        )
    rest = [b64decode(value["bytes"]) if isinstance(value, dict) else value for value in chunk.handles[gpu]]
    shared = rebuild_cuda_tensor(torch.Tensor, (chunk.size,), (1,), 0, torch.UntypedStorage, torch.uint8, device, *rest)
    # vLLM keeps tensors until their layer is complete, and the trainer frees its buffer after this call.
    return shared.clone()


def _view(buffer: torch.Tensor, dtype: torch.dtype, shape: list[int], start: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return buffer[start : start + numel * dtype.itemsize].view(dtype).view(shape)
