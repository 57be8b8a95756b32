"""FP8 shards in memory that all ranks of a host map, gathered by copy engines without multiprocessors.

NCCL's all-gather runs as a kernel beside the products and takes some of their multiprocessors. Where all ranks of a
group can map each other's memory (one host, NVLink or PCIe peers), a gather needs no collective: every rank copies the
others' shards out of symmetric memory, at any time between two barriers: `written`, behind which all have written
theirs, and `write`, before which all have read.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from deepspeed import comm as dist

from ds_fp8.zero import streams
from ds_fp8.zero.hosts import identity

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
    """Transport in which every rank reads the buffers of all others of its group."""

    description = "by copy engines"

    def __init__(self, numel: int, device: torch.device, group: object):
        """Allocate uint8 [numel], zeros, and exchange addresses. Collective.

        Raises:
            RuntimeError: The ranks cannot share memory.
        """
        self.group = group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        # Begin with the next rank, so that not all read from the same.
        self._order = [(rank + i) % world for i in range(world)]
        self._of_rank = self._map(numel, device)
        self.local: torch.Tensor = self._of_rank[rank]
        self._stream, self._done = streams.new_stream(), None
        _live.add(self)

    def allocate(self, numel: int) -> torch.Tensor:
        """Return memory for outputs of `gather`: other ranks do not read it."""
        return torch.empty(numel, dtype=torch.uint8, device=self.local.device)

    def _map(self, numel: int, device: torch.device) -> list[torch.Tensor]:
        """Return the memory of every rank, this rank's zeroed. Collective."""
        from torch.distributed import _symmetric_memory as symmetric

        # Nothing here needs multicast, whose set-up fails on some hosts.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._own = symmetric.empty(numel, dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric.rendezvous(self._own, self.group)
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return [self._own if i == rank else self._handle.get_buffer(i, (numel,), torch.uint8) for i in range(world)]

    def why_wrong(self) -> str | None:
        """Return that some memory is not the rank's that it should be, or None; the memory is zeros again. Collective.

        The host waits.
        """
        self.local[:1] = dist.get_rank(self.group) + 1
        self.barrier()
        read = [int(memory[0]) for memory in self._of_rank]
        self.barrier()
        self.local[:1] = 0
        return None if read == list(range(1, len(read) + 1)) else "a read of another rank's memory returned wrong bytes"

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object = None) -> Copies:
        """Begin to copy all ranks' shards into every output, behind what the current stream holds.

        Args:
            outputs: uint8 [ranks * n_i], where the shards land in the order of the ranks.
            inputs: uint8 [n_i], views of `local`; those of the other ranks lie at the same places of theirs.
            group: The group of this memory.
        """
        before = streams.current_stream()
        # One stream for all copies of this rank: they share the copy engines anyway, and one event behind the last is
        # enough for `write` to know that all have read.
        with streams.on_stream(self._stream):
            # The shards of this rank were cast, and the outputs allocated, in the order of that stream.
            streams.wait_stream(before)
            for output, shard in zip(outputs, inputs, strict=True):
                start, numel = shard.storage_offset(), shard.numel()
                # Each rank begins with itself and goes on with the next one: all at once would read from rank 0 first.
                for rank in self._order:
                    peer = self._of_rank[rank][start : start + numel]
                    output[rank * numel : (rank + 1) * numel].copy_(peer, non_blocking=True)
            self._done = streams.record_event()
        return Copies(self._done)

    def write(self) -> None:
        """Let the current stream wait until all ranks have read all that they began to. Collective."""
        # The last copy's event stands for all of them: they run on one stream.
        # [Note: who may write] This rank's copies out of the others' memory must have ended before it says so in the
        # barrier; after it, every rank has said so, and nobody reads what is about to be written. The barrier without
        # the event would only order the hosts' launches: copies run on a stream of their own.
        streams.wait_event(self._done)
        self.barrier()

    def written(self) -> None:
        """Let the current stream wait until all ranks have written their shards. Collective."""
        # Every rank's cast lies before it on this stream: behind the barrier the bytes of all ranks are there.
        self.barrier()

    def barrier(self) -> None:
        """Let the current stream wait until those of all ranks have come to this point. Collective."""
        dist.all_reduce(torch.zeros(1, device=self.local.device), group=self.group)


@dataclass(frozen=True)
class _Place:
    """The GPU that a rank computes on."""

    host: str
    index: int
    """Number that its process calls it by."""
    gpu: str
    """Its UUID."""


def share(numel: int, device: torch.device, group: object) -> PeerMemory | str:
    """Return memory that the ranks of a group share, or why they cannot. Collective, with one answer on all ranks."""
    if device.type != "cuda":
        return "there is no CUDA device"
    visible = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    places: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, _Place(identity(), device.index, visible[device.index]), group=group)
    if len(places) == 1 or len({place.host for place in places}) > 1:
        return "the ranks are on several hosts, or there is one rank only"
    gpus = {place.gpu for place in places}
    if len(gpus) < len(places):
        return "several ranks share a GPU"
    problem = _of_any(_why_unreadable(device.index, visible, gpus), group)
    if problem is not None:
        return problem
    memory, alike = None, len({place.index for place in places}) < len(places)
    try:
        with _equal_numbers() if alike else nullcontext():
            memory = PeerMemory(numel, device, group)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    problem = _of_any(problem, group)
    if problem is None:
        problem = _of_any(memory.why_wrong(), group)
    return memory if problem is None else problem


def _of_any(problem: str | None, group: object) -> str | None:
    """Return the problem of the first rank that has one. Collective."""
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return next(filter(None, problems), None)


def _why_unreadable(device: int, visible: tuple[str, ...], gpus: set[str]) -> str | None:
    """Return why this rank's GPU cannot read the memory of one of the others, or None.

    CUDA answers for GPUs that this process sees only; whether the memory of others can be mapped, mapping it tells.
    """
    for index, uuid in enumerate(visible):
        if index != device and uuid in gpus and not torch.cuda.can_device_access_peer(device, index):
            return "the GPUs cannot read each other's memory"
    return None


@contextmanager
def _equal_numbers() -> Iterator[None]:
    """Let torch share memory of ranks that call their GPUs by one number, as those do that each see one GPU only.

    torch takes equal numbers for one GPU, and refuses. CUDA maps memory of GPUs that a process does not see, too.
    """
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
