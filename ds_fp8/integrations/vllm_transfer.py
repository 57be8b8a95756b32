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

from ds_fp8.integrations.vllm_model import check_same_model, check_scales, refuse, roll_back

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Announced(WeightTransferInitInfo):
    """All tensors of an update, before the first of them is sent."""

    tensors: list[tuple[str, str, list[int]]] = field(default_factory=list)  # (name, type, shape) of each
    granularity: str = "128x128"  # Empty: nothing is sent in FP8
    scale: str = "pow2"
    gpus: list[str] = field(default_factory=list)  # Of the trainer, where a worker has to open buffers on them
    outcome: bool = False  # Only say what failed in the update that has just ended


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """Some tensors of an update: themselves within one process, else in one buffer that other processes open."""

    weights: Named | None = None
    # (name, type, shape, first byte) of each tensor in the buffer
    parts: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    size: int = 0  # Bytes of the buffer
    handles: dict[str, list[Any]] = field(default_factory=dict)  # GPU -> CUDA's handle of the buffer there
    abandon: bool = False  # No more will come: put back what the model computed with


class WeightTransfer(WeightTransferEngine[Announced, Chunk]):
    """Takes codes and scales as training cast them, and refuses weights that the model does not hold."""

    init_info_cls = Announced
    update_info_cls = Chunk

    failure: str | None = None  # What failed in this worker since the update began

    def init_transfer_engine(self, init_info: Announced) -> None:
        """Compare what will be sent with the model. vLLM itself takes missing and unknown names without a word."""
        if not init_info.outcome:
            # An update that was never ended has left layers without memory.
            roll_back(self.model)
            self.failure = None
            try:
                self._check(init_info)
            except Exception as error:
                self.failure = _words(error)
        failure, self.failure = self.failure, None
        _raise_on_last_worker(failure)

    def _check(self, init_info: Announced) -> None:
        if self.parallel_config.pipeline_parallel_size > 1:
            refuse(
                "this server has pipeline parallelism, whose workers hold some of the layers each",
                "start it without --pipeline-parallel-size; --tensor-parallel-size spreads a model too",
            )
        if init_info.gpus and _own_gpu() not in init_info.gpus:
            refuse(
                f"the trainer's weights lie on the GPUs {', '.join(init_info.gpus)}, a worker of the server on "
                f"{_own_gpu()}",
                "start the server on the trainer's GPUs: CUDA IPC reaches no others",
            )
        check_same_model(self.model, init_info.tensors, self.parallel_config.tensor_parallel_size)
        check_scales(self.model, init_info.granularity, init_info.scale)

    def receive_weights(self, update_info: Chunk, load_weights: Callable[[Named], None]) -> None:
        """Load the tensors of a chunk. An error is kept until the trainer asks for the outcome of the update."""
        if self.failure is not None:
            return
        try:
            if update_info.abandon:
                roll_back(self.model)
            else:
                load_weights(_tensors(update_info))
        except Exception as error:
            roll_back(self.model)
            self.failure = _words(error)

    def shutdown(self) -> None:
        """Hold nothing."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("call ds_fp8.integrations.vllm.sync_weights")


def _words(error: Exception) -> str:
    return str(error) if str(error).startswith("[ds_fp8]") else f"{type(error).__name__}: {error}"


def _raise_on_last_worker(failure: str | None) -> None:
    """Raise what failed on any worker, once all have told.

    vLLM stops reading answers at the first error, and would take the answers of the workers behind it for those to its
    next call.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    failures = [failure] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(failures, failure, group=group.cpu_group)
    told = next((each for each in failures if each is not None), None)
    if told is not None and group.is_last_rank:
        raise ValueError(told)


def _own_gpu() -> str:
    return str(torch.cuda.get_device_properties(torch.accelerator.current_device_index()).uuid)


def _tensors(chunk: Chunk) -> Named:
    if chunk.weights is not None:
        return chunk.weights
    buffer = _opened(chunk)
    return [(name, _view(buffer, getattr(torch, dtype), shape, start)) for name, dtype, shape, start in chunk.parts]


def _opened(chunk: Chunk) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = torch.accelerator.current_device_index()
    rest = [b64decode(value["bytes"]) if isinstance(value, dict) else value for value in chunk.handles[_own_gpu()]]
    shared = rebuild_cuda_tensor(torch.Tensor, (chunk.size,), (1,), 0, torch.UntypedStorage, torch.uint8, device, *rest)
    # vLLM keeps tensors until their layer is complete, and the trainer fills its buffer anew after this call.
    return shared.clone()


def _view(buffer: torch.Tensor, dtype: torch.dtype, shape: list[int], start: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return buffer[start : start + numel * dtype.itemsize].view(dtype).view(shape)
