"""Host-side MIN all-reduce over gloo; it does not synchronize the device."""

from __future__ import annotations

from datetime import timedelta

import torch
from deepspeed import comm as dist

LEAST_TIMEOUT = timedelta(minutes=30)
"""Least time for which ranks wait for the slowest of them: it may be saving or loading."""


class RankAgreement:
    """A process group of all ranks over gloo. Making one is collective."""

    def __init__(self, device: torch.device):
        """Make the group; its ranks wait for each other as long as in the collectives of `device`, if that is long."""
        self._group = None
        if dist.get_world_size() > 1:
            backend = torch.distributed.group.WORLD._get_backend(device)
            given = getattr(getattr(backend, "options", None), "_timeout", None)
            timeout = max(LEAST_TIMEOUT, given or LEAST_TIMEOUT)
            # A separate group: gloo's collectives are matched by their order within a group, and others use the default
            # one.
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
            self.least(0)  # a rank that closes it early must not leave another that is still connecting

    def least(self, *numbers: int) -> list[int]:
        """Return the least of every number over all ranks. Collective."""
        if self._group is None:
            return list(numbers)
        # Explicitly on the CPU: a default device of the user's would make gloo copy from the GPU, which waits for it.
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return found.tolist()

    def close(self) -> None:
        """End the group. Collective."""
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
        self._group = None
