"""The receiver of `sync_weights`, in each worker of vLLM."""

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
    """Tensors of an update, announced before the first is sent."""

    tensors: list[tuple[str, str, list[int]]] = field(default_factory=list)  # (name, type, shape) of each
    granularity: str = "128x128"  # "": no FP8 tensors
    scale: str = "pow2"
    gpus: list[str] = field(default_factory=list)  # of the trainer, if workers open buffers on them
    outcome: bool = False  # only report the error of the update just ended


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """Some tensors of an update: `weights` within one process, else `parts` of a buffer shared between processes."""

    weights: Named | None = None
    parts: list[tuple[str, str, list[int], int]] = field(default_factory=list)  # (name, type, shape, first byte)
    size: int = 0  # bytes of the buffer
    handles: dict[str, list[Any]] = field(default_factory=dict)  # GPU -> CUDA IPC handle of its buffer
    abandon: bool = False  # the update ends here: restore the tensors before it


class WeightTransfer(WeightTransferEngine[Announced, Chunk]):
    """Loads the quantized weights of training; refuses tensors that the model lacks."""

    init_info_cls = Announced
    update_info_cls = Chunk

    failure: str | None = None  # the first error of this worker in the update

    def init_transfer_engine(self, init_info: Announced) -> None:
        """Compare the announced tensors with the model: vLLM itself ignores missing and unknown names."""
        if not init_info.outcome:
            roll_back(self.model)  # an unfinished update has left layers without memory
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
        """Load the tensors of a chunk; an error is kept until the trainer asks for the outcome."""
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
    """Raise the first error of all workers, on the last.

    vLLM stops reading answers at the first error, and would read those of later workers as answers to its next call.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    failures = [failure] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(failures, failure, group=group.cpu_group)
    first = next((each for each in failures if each is not None), None)
    if first is not None and group.is_last_rank:
        raise ValueError(first)


def _own_gpu() -> str:
    return str(torch.cuda.get_device_properties(torch.accelerator.current_device_index()).uuid)


def _tensors(chunk: Chunk) -> Named:
    if chunk.weights is not None:
        return chunk.weights
    buffer, tensors = _opened(chunk), []
    for name, dtype, shape, start in chunk.parts:
        dtype = getattr(torch, dtype)
        part = buffer[start : start + torch.Size(shape).numel() * dtype.itemsize]
        tensors.append((name, part.view(dtype).view(shape)))
    return tensors


def _opened(chunk: Chunk) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = torch.accelerator.current_device_index()
    rest = [b64decode(value["bytes"]) if isinstance(value, dict) else value for value in chunk.handles[_own_gpu()]]
    shared = rebuild_cuda_tensor(torch.Tensor, (chunk.size,), (1,), 0, torch.UntypedStorage, torch.uint8, device, *rest)
    # vLLM holds tensors until their layer is complete, and the trainer overwrites its buffer after this call.
    return shared.clone()
