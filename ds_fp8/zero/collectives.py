"""What travels between ranks: FP8 shards, messages of gradients, and the count of their bytes.

FP8 shards travel by collectives, or lie in memory that all ranks of a host map and are copied by copy engines. NCCL's
all-gather runs as a kernel beside the products and takes some of their multiprocessors; where all ranks of a group can
map each other's memory (one host, NVLink or PCIe peers), a gather needs no collective: every rank copies the others'
shards out of symmetric memory, at any time between two barriers.

Both keep one promise: what `gather` delivers was written, on every rank, before the last `written` that lies before the
gather, and no `write` lies in between. Ranks may be late at any point.

A message of gradients is uint8 [rows, places * width * 33/32], one row for each rank it goes to: first the codes,
`width` for each of `places` slices, then one FP32 scale for every 128 of them. The slice of rank r lies in row r mod
rows, place r div rows; one flat exchange has as many rows as ranks and one place, the first of two levels has a place
for every node.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d

from ds_fp8.config.errors import first_line
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.attention import shared as exchanges
from ds_fp8.zero import streams
from ds_fp8.zero.hosts import identity

GATHER, GRADIENT, EXCHANGE = "all_gather_bytes", "grad_bytes", "exchange_bytes"

LIMIT = 1024
"""Items of a cache: buckets of gradients are far fewer where all steps have the same, and endless where they vary."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
SPAN = 4096
"""Elements of a gradient slice that share one sum of squares."""

_live: weakref.WeakSet[PeerMemory] = weakref.WeakSet()


def allocated_bytes() -> int:
    """Return the bytes of all peer memory of this process: torch.cuda's statistics do not count them."""
    return sum(memory.local.nbytes for memory in _live)


# ---------------------------------------------------------------- FP8 shards


@dataclass(frozen=True)
class Work:
    """Gathers in flight."""

    wait: Callable[[], None]
    """Lets the current stream wait for all of them; on a device without streams, the host."""


def all_gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Work:
    """Begin to gather flat [n_i] into flat [ranks * n_i], in the order of the ranks, all in one launch of NCCL."""
    # torch has no public name for this; DeepSpeed's all_gather_coalesced loses the handle.
    # NCCL begins all of them in one launch, on its own stream behind the current one. The tensors live at least until
    # Work.wait: whoever gathers holds outputs in the handle, and inputs are views of the buffer of all shards.
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for output, shard in zip(outputs, inputs, strict=True):
            distributed_c10d.all_gather_into_tensor(output, shard, group=group, async_op=True)
    return Work(manager.wait)


class Collectives:
    """NCCL or gloo: a gather is a collective, which no rank can run ahead of. Every method is called on all ranks."""

    def __init__(self, numel: int, device: torch.device, why: str | None = None):
        """Allocate `local`, this rank's shards, uint8 [numel], zeros; `why` nothing faster carries them."""
        self.local = torch.zeros(numel, dtype=torch.uint8, device=device)
        self.description = "by collectives" + (f": {why}" if why else "")
        self._readers: list[object] = []
        """Streams that gathers have begun on."""

    def allocate(self, numel: int) -> torch.Tensor:
        """Return memory for outputs of `gather`, uint8 [numel], uninitialised, on the current stream."""
        return self.local.new_empty(numel)

    def write(self) -> None:
        """Let the current stream wait until no rank reads shards that were gathered so far.

        For this rank's own gathers, those too that were fetched ahead and that no product has waited for: the other
        ranks have read from a gather's input once it has ended here, for it is a collective.
        """
        # A gather runs on NCCL's own stream. But every handle is waited for on the stream that it began on, that of a
        # prefetch which nobody used by DeepSpeed: behind that stream all of them have ended.
        for stream in self._readers:
            streams.wait_stream(stream)

    def written(self) -> None:
        """Let the current stream wait until all ranks have written what they were writing.

        For nothing: a gather of another rank reads nothing here before it begins here, behind the writing.
        """

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Work:
        """Begin to gather every input, a view of `local`, into its output, behind what the current stream holds.

        Args:
            outputs: uint8 [ranks * n_i], where the shards land in the order of the ranks.
            inputs: uint8 [n_i]; those of the other ranks lie at the same places of theirs.
            group: Process group of the weights.
        """
        stream = streams.current_stream()
        if stream not in self._readers:
            self._readers.append(stream)
        return all_gather(outputs, inputs, group)


class PeerMemory:
    """The same by copies: every rank reads the buffers of all others of its group, out of symmetric memory."""

    description = "by copy engines"

    def __init__(self, numel: int, device: torch.device, group: object):
        """Allocate and exchange addresses; RuntimeError if the ranks cannot share memory. Collective."""
        self.group = group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        # Begin with the next rank, so that not all read from the same.
        self._order = [(rank + i) % world for i in range(world)]
        self._of_rank = self._map(numel, device)
        self.local: torch.Tensor = self._of_rank[rank]
        self._stream, self._done = streams.new_stream(), None
        _live.add(self)

    def allocate(self, numel: int) -> torch.Tensor:
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

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object = None) -> Work:
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
        return Work(functools.partial(streams.wait_event, self._done))

    def write(self) -> None:
        # The last copy's event stands for all of them: they run on one stream.
        # [Note: who may write] This rank's copies out of the others' memory must have ended before it says so in the
        # barrier; after it, every rank has said so, and nobody reads what is about to be written. The barrier without
        # the event would only order the hosts' launches: copies run on a stream of their own.
        streams.wait_event(self._done)
        self.barrier()

    def written(self) -> None:
        # Every rank's cast lies before it on this stream: behind the barrier the bytes of all ranks are there.
        self.barrier()

    def barrier(self) -> None:
        """Let the current stream wait until those of all ranks have come to this point. Collective."""
        dist.all_reduce(torch.zeros(1, device=self.local.device), group=self.group)


Transport = Collectives | PeerMemory


class _Place(NamedTuple):
    """The GPU that a rank computes on: its number in the process, and its UUID."""

    host: str
    index: int
    gpu: str


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
    problem = reason_of_any(_why_unreadable(device.index, visible, gpus), group)
    if problem is not None:
        return problem
    memory, alike = None, len({place.index for place in places}) < len(places)
    try:
        with _equal_numbers() if alike else nullcontext():
            memory = PeerMemory(numel, device, group)
    except RuntimeError as error:
        problem = first_line(error)
    problem = reason_of_any(problem, group)
    if problem is None:
        problem = reason_of_any(memory.why_wrong(), group)
    return memory if problem is None else problem


def reason_of_any(reason: str | None, group: object = None) -> str | None:
    """Return the reason of the first rank that has one, on all ranks of a group. Collective."""
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), None)


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


def choose(numel: int, device: torch.device, groups: Sequence[object]) -> Transport:
    """Return what carries shards: copy engines if the ranks can share memory, otherwise collectives. Collective."""
    # Memory is mapped for one group; weights of experts with groups of their own would need one buffer each.
    shared = share(numel, device, groups[0]) if len(groups) == 1 else "the weights are sharded over several groups"
    return shared if isinstance(shared, PeerMemory) else Collectives(numel, device, shared)


# ---------------------------------------------------------------- messages of gradients


@dataclass(frozen=True)
class Message:
    """The shape of a message; `width` is a multiple of 128."""

    rows: int
    places: int
    width: int

    @property
    def codes(self) -> int:
        return self.places * self.width

    @property
    def row_bytes(self) -> int:
        return self.codes + self.codes // BLOCK * torch.float32.itemsize

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of codes, uint8 [rows, places, width], and scales, FP32 [rows, places, width/128]."""
        codes = message[:, : self.codes].unflatten(1, (self.places, self.width))
        scales = message.view(torch.float32)[:, self.codes // 4 :].unflatten(1, (self.places, self.width // BLOCK))
        return codes, scales

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.rows, self.row_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Slices:
    """Offsets of one flat gradient in a message: rank r gets its elements [r * length, (r + 1) * length)."""

    length: int
    column: int
    """Column where its slice begins in the `width` codes of every place; a multiple of 128."""

    @property
    def padded(self) -> int:
        """Return the codes that a slice takes: whole groups."""
        return -(-self.length // BLOCK) * BLOCK


class Target(NamedTuple):
    """Offset of one gradient's slice in a message, and the destination of its sum."""

    column: int
    """First code in every row of the message; a multiple of 128."""
    start: int
    """First element in the flat gradient shards."""
    numel: int
    """Elements of the slice."""
    span: int
    """First of its sums of squares."""


def span_count(numel: int) -> int:
    """Return the number of sums of squares of a slice of `numel` elements."""
    return -(-numel // SPAN)


class Recent(Generic[K, V]):
    """The values of the keys that were used last, at most `limit`."""

    def __init__(self, limit: int = LIMIT):
        self._limit = limit
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value  # the last one now
        if len(self._values) > self._limit:
            del self._values[next(iter(self._values))]
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)


# ---------------------------------------------------------------- bytes on the wire

Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]

# Share of a collective's input that one rank sends to the others, as a function of the group's size (an all-reduce is a
# reduce-scatter and an all-gather).
_SHARES = {
    "all_gather": lambda world: world - 1,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_to_all": lambda world: (world - 1) / world,
    "all_reduce": lambda world: 2 * (world - 1) / world,
}


class WireMeter:
    """Counts the bytes this rank sends to other ranks for the parameters and gradients of one ZeRO-3 engine.

    Parameter gathers come with the amax all-reduce that FP8 adds to them. What attention exchanges where ranks share
    sequences is counted as well, of all engines of the process, if it is in FP8 or keeps to documents. What else a
    model sends by itself (a loss over all ranks) is not.
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._exchanged_before = exchanges.bytes_sent()

    def count(self, purpose: str, collective: Collective, nbytes: int, group: object) -> None:
        """Count one collective over `group` by a rank's input of `nbytes`, for GATHER or GRADIENT."""
        self._sent[purpose] += round(nbytes * _SHARES[collective](dist.get_world_size(group)))

    def sent(self) -> Counter[str]:
        """Return the bytes sent since the last `take`, by purpose."""
        return Counter({**self._sent, EXCHANGE: exchanges.bytes_sent() - self._exchanged_before})

    def add(self, sent: Counter[str]) -> None:
        """Count what a CUDA graph sends, of which Python sees nothing."""
        self._sent.update({purpose: sent[purpose] for purpose in (GATHER, GRADIENT)})
        exchanges.count_sent(sent[EXCHANGE])

    def subtract(self, sent: Counter[str]) -> None:
        """Take back what was counted and not sent."""
        self.add(Counter({purpose: -nbytes for purpose, nbytes in sent.items()}))

    def take(self) -> dict[str, int]:
        """Return the bytes sent since the last call, by purpose."""
        sent = {purpose: self._sent[purpose] for purpose in (GATHER, GRADIENT)}
        self._sent.clear()
        exchanged, self._exchanged_before = self._exchanged_before, exchanges.bytes_sent()
        return {**sent, EXCHANGE: self._exchanged_before - exchanged}
