"""One launch that gathers the parameters ZeRO-3 keeps whole, after a step has written their shards.

DeepSpeed gathers them one collective each, and the host then waits for the device. With 28 layers of Qwen2.5 these are
141 launches a step, after which the GPU is idle until Python has issued the next kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fp8.zero import grouped

_ALIGNMENT = 512
"""Bytes that the beginning of every parameter is a multiple of, as if torch had allocated it by itself."""


def gather_together(engine: deepspeed.DeepSpeedEngine, parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Gather persistent parameters as one, and let the current stream wait for them in place of the host.

    For a ZeRO-3 engine whose gathers begin behind its steps.

    Returns:
        Whether that was done: not where one of those that are not gathered is not persistent, or there are none.
    """
    persistent = set(map(id, engine.optimizer.persistent_parameters))
    missing = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if not missing or not all(id(p) in persistent for p in missing) or not _alike(missing):
        return False
    _gather(missing)
    return True


def _alike(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether one group has plain shards of one dtype of all these parameters on the device."""
    first = parameters[0]
    return all(
        p.ds_process_group is first.ds_process_group
        and p.ds_secondary_tensor is None
        and p.ds_tensor.dtype == first.ds_tensor.dtype
        and p.ds_tensor.device == first.device == p.device
        and not hasattr(p.ds_tensor, "ds_quant_scale")
        for p in parameters
    )


@torch.no_grad()
def _gather(parameters: Sequence[torch.nn.Parameter]) -> None:
    group = parameters[0].ds_process_group
    shards, world = [p.ds_tensor.detach() for p in parameters], dist.get_world_size(group)
    if world == 1:
        wholes = shards
    else:
        # One allocation whose views the parameters share: it lives until all of them are partitioned or gathered again.
        wholes = _aligned([shard.numel() * world for shard in shards], shards[0])
        # The current stream waits, not the host; products read the parameters on this stream.
        grouped.all_gather(wholes, shards, group).wait()
    for parameter, whole in zip(parameters, wholes, strict=True):
        parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE


def _aligned(numels: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
    """Return flat tensors of one allocation, uninitialised."""
    step = _ALIGNMENT // like.element_size()
    starts = [0]
    for numel in numels:
        starts.append(starts[-1] + -(-numel // step) * step)
    memory = torch.empty(starts[-1], dtype=like.dtype, device=like.device)
    return [memory[start : start + numel] for start, numel in zip(starts, numels, strict=False)]
