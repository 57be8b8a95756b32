"""Several collectives of one process group sent as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import distributed_c10d


class Work:
    """Collectives in flight."""

    def __init__(self, manager: object):
        self._manager = manager

    def wait(self) -> None:
        """Let the current stream wait for all of them; on a device without streams, the host."""
        self._manager.wait()


def all_gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Work:
    """Begin to gather every input into its output, all in one launch of NCCL.

    Args:
        outputs: flat [ranks * n_i], where the shards land in the order of the ranks.
        inputs: flat [n_i], this rank's shards.
        group: process group.
    """
    # torch has no public name for this; DeepSpeed's all_gather_coalesced loses the handle.
    # NCCL begins all of them in one launch, on its own stream behind the current one. The tensors live at least until
    # Work.wait: whoever gathers holds outputs in the handle, and inputs are views of the buffer of all shards.
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for output, shard in zip(outputs, inputs, strict=True):
            distributed_c10d.all_gather_into_tensor(output, shard, group=group, async_op=True)
    return Work(manager)
