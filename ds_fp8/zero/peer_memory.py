"""FP8 shards that the other ranks of a host read by themselves, with copy engines: gathers take no multiprocessor.

NCCL's all-gather runs as a kernel beside the products and takes some of their multiprocessors. Where all ranks of a
group can map each other's memory (one host, NVLink or PCIe peers), a gather needs no collective: every rank copies the
others' shards out of symmetric memory, whenever it likes. Two things must be agreed once a step instead: nobody reads
shards before all ranks have written theirs, and nobody writes while another reads.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence

import torch
from deepspeed import comm as dist

from ds_fp8.zero import streams

_live: weakref.WeakSet[PeerMemory] = weakref.WeakSet()


def allocated_bytes() -> int:
    """Return the bytes of all such memory of this process: torch.cuda's statistics do not count them."""
    return sum(memory.local.nbytes for memory in _live)


class Copies:
    """Copies in flight."""

    def __init__(self, done: object):
        self._done = done

    def wait(self) -> None:
        """Let the current stream wait for all of them."""
        streams.wait_event(self._done)


class PeerMemory:
    """A buffer of the same size on every rank of a group, each of which can read all others'."""

    def __init__(self, numel: int, device: torch.device, group: object):
        """Allocate uint8 [numel], zeros, and exchange addresses. Collective.

        Raises:
            RuntimeError: The ranks cannot share memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        # Nothing here needs multicast, whose set-up fails on some hosts.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.group = group
        self.local: torch.Tensor = symmetric.empty(numel, dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric.rendezvous(self.local, group)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        # Begin with the next rank, so that not all read from the same.
        self._order = [(rank + i) % world for i in range(world)]
        self._of_rank = [self._handle.get_buffer(i, (numel,), torch.uint8) for i in range(world)]
        self._stream, self._done = streams.new_stream(), None
        _live.add(self)

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Copies:
        """Begin to copy all ranks' shards into every output, behind what the current stream holds.

        Args:
            outputs: uint8 [ranks * n_i], where the shards land in the order of the ranks.
            inputs: uint8 [n_i], views of `local`; those of the other ranks lie at the same places of theirs.
        """
        before = streams.current_stream()
        with streams.on_stream(self._stream):
            streams.wait_stream(before)
            for output, shard in zip(outputs, inputs, strict=True):
                start, numel = shard.storage_offset(), shard.numel()
                for rank in self._order:
                    peer = self._of_rank[rank][start : start + numel]
                    output[rank * numel : (rank + 1) * numel].copy_(peer, non_blocking=True)
            self._done = streams.record_event()
        return Copies(self._done)

    def wait_for_reads(self) -> None:
        """Let the current stream wait until this rank has read all that it began to."""
        streams.wait_event(self._done)

    def barrier(self) -> None:
        """Let the current stream wait until those of all ranks have come to this point. Collective."""
        dist.all_reduce(torch.zeros(1, device=self.local.device), group=self.group)


def share(numel: int, device: torch.device, group: object) -> PeerMemory | str:
    """Return memory that the ranks of a group share, or why they cannot. Collective, with one answer on all ranks."""
    if device.type != "cuda":
        return "there is no CUDA device"
    names: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    if len(names) == 1 or len(set(names)) > 1:
        return "the ranks are not several of one host"
    memory, problem = None, None
    if not all(torch.cuda.can_device_access_peer(device.index, i) for i in range(len(names)) if i != device.index):
        problem = "the GPUs cannot read each other's memory"
    problems: list = [None] * len(names)
    dist.all_gather_object(problems, problem, group=group)
    if not any(problems):
        try:
            memory = PeerMemory(numel, device, group)
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        dist.all_gather_object(problems, problem, group=group)
    return next(filter(None, problems), None) or memory
