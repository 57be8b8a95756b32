"""All-gathers of FP8 shards, their two transports, and the count of what travels between ranks.

FP8 shards travel by collectives, or lie in memory that all ranks of a host map and are copied by copy engines. NCCL's
all-gather runs as a kernel next to the products and takes some of their multiprocessors; where all ranks of a group can
map each other's memory (one host, NVLink or PCIe peers), a gather needs no collective: every rank copies the others'
shards out of symmetric memory, at any time between two barriers.

Both keep one promise: what `gather` delivers was written, on every rank, before the last `written` that lies before the
gather, and no `write` lies in between. Ranks may be late at any point.

The weights of one fused product (`GROUP`: q, k, v; gate, up) adjoin in the buffer that they are all-gathered into. Then
a product reads them as one weight, which is a view. DeepSpeed may fetch them one by one, as its prefetch does where its
bucket ends between them: the first all-gather allocates the buffer for all of them. Data that padding parts are
copied: of a fetch of all of them when they arrive, else by the product.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d

from ds_fp8.config.errors import first_line
from ds_fp8.layers.attention import sequence_parallel as exchanges
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.parameters import is_gathered
from ds_fp8.zero.deepspeed.patches import environment
from ds_fp8.zero.hosts import identity
from ds_fp8.zero.param import FP8Param, Stack, in_runs, stacks_of

GATHER, GRADIENT, EXCHANGE = "all_gather_bytes", "grad_bytes", "exchange_bytes"

# Bytes from the beginning of all shards that a product's weight may lie at a multiple of; elsewhere it is copied.
# cuBLASLt chooses its kernel, and with it the last bits, by the alignment of addresses.
ALIGNMENT = 256

_live: weakref.WeakSet[PeerMemory] = weakref.WeakSet()


def allocated_bytes() -> int:
    """Return the bytes of all peer memory of this process: torch.cuda's statistics do not count them."""
    return sum(memory.local.nbytes for memory in _live)


# ---------------------------------------------------------------- transports of FP8 shards


Wait = Callable[[], None]  # lets the current stream wait for gathers in flight; on a device without streams, the host


def all_gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Wait:
    """Begin to gather flat [n_i] into flat [ranks * n_i], in the order of the ranks, all in one launch of NCCL."""
    # torch has no public name for this; DeepSpeed's all_gather_coalesced loses the handle.
    # NCCL begins all of them in one launch, on its own stream behind the current one. The tensors live at least until
    # the wait: whoever gathers holds outputs in the handle, and inputs are views of the buffer of all shards.
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for output, shard in zip(outputs, inputs, strict=True):
            distributed_c10d.all_gather_into_tensor(output, shard, group=group, async_op=True)
    return manager.wait


class Transport:
    """Carries the shards of all ranks, by collectives of NCCL or gloo. All methods but `allocate` are collective."""

    local: torch.Tensor  # this rank's shards, uint8 [numel], zeros at first
    description: str  # how they are carried, and why not faster

    def __init__(self, numel: int, device: torch.device, why: str | None = None):
        """Allocate `local`; `why` nothing faster carries the shards."""
        self.local = torch.zeros(numel, dtype=torch.uint8, device=device)
        self.description = "by collectives" + (f": {why}" if why else "")
        self._readers: list[object] = []  # streams that gathers have begun on

    def allocate(self, numel: int) -> torch.Tensor:
        """Return memory for outputs of `gather`, uint8 [numel], uninitialised, on the current stream."""
        return torch.empty(numel, dtype=torch.uint8, device=self.local.device)

    def write(self) -> None:
        """Let the current stream wait until no rank reads shards for the gathers so far.

        For this rank's own gathers, those too that were fetched ahead and that no product has waited for.
        """
        # The other ranks have read from a gather's input once it has ended here, for it is a collective. It runs on
        # NCCL's own stream. But every handle is waited for on the stream that it began on, that of a prefetch which
        # nobody used by DeepSpeed: behind that stream all of them have ended.
        for stream in self._readers:
            streams.wait_stream(stream)

    def written(self) -> None:
        """Let the current stream wait until all ranks have written what they were writing."""
        # For nothing: a gather of another rank reads nothing here before it begins here, behind the writing.

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Wait:
        """Begin to gather every input, a view of `local`, into its output, behind what the current stream holds.

        Inputs are uint8 [n_i], the other ranks' at the same places of theirs; they land in outputs, uint8
        [ranks * n_i], in the order of the ranks of `group`, that of the weights.
        """
        stream = streams.current_stream()
        if stream not in self._readers:
            self._readers.append(stream)
        return all_gather(outputs, inputs, group)


class PeerMemory(Transport):
    """Copy engines: every rank reads the buffers of all others of its group, out of symmetric memory."""

    description = "by copy engines"

    def __init__(self, numel: int, device: torch.device, group: object):
        """Allocate and exchange addresses; RuntimeError if the ranks cannot share memory. Collective."""
        self.group = group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        # Begin with the next rank, so that not all read from the same.
        self._order = [(rank + i) % world for i in range(world)]
        self._handle: object | None = None  # holds the mappings
        self._of_rank = self._map(numel, device)
        self.local: torch.Tensor = self._of_rank[rank]
        self._stream, self._done = streams.new_stream(), None
        _live.add(self)

    def _map(self, numel: int, device: torch.device) -> list[torch.Tensor]:
        """Return the memory of every rank, this rank's zeroed. Collective."""
        from torch.distributed import _symmetric_memory as symmetric

        # Nothing here needs multicast, whose set-up fails on some hosts.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        own = symmetric.empty(numel, dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric.rendezvous(own, self.group)
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return [own if i == rank else self._handle.get_buffer(i, (numel,), torch.uint8) for i in range(world)]

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

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object = None) -> Wait:
        before = streams.current_stream()
        # One stream for all copies of this rank: they share the copy engines anyway, and one event behind the last is
        # enough for `write` to know that all have read.
        with streams.on_stream(self._stream):
            # This rank's shards were quantized, and the outputs allocated, on that stream.
            streams.wait_stream(before)
            for output, shard in zip(outputs, inputs, strict=True):
                start, numel = shard.storage_offset(), shard.numel()
                # Each rank begins with itself and goes on with the next one: all at once would read from rank 0 first.
                for rank in self._order:
                    peer = self._of_rank[rank][start : start + numel]
                    output[rank * numel : (rank + 1) * numel].copy_(peer, non_blocking=True)
            self._done = streams.record_event()
        return functools.partial(streams.wait_event, self._done)

    def write(self) -> None:
        # The last copy's event stands for all of them: they run on one stream.
        # [Note: who may write] This rank's copies out of the others' memory must have ended before it says so in the
        # barrier; after it, every rank has said so, and nobody reads what is about to be written. The barrier without
        # the event would only order the hosts' launches: copies run on a stream of their own.
        streams.wait_event(self._done)
        self.barrier()

    def written(self) -> None:
        # Every rank has quantized before it on this stream: behind the barrier the bytes of all ranks are there.
        self.barrier()

    def barrier(self) -> None:
        """Let the current stream wait until those of all ranks have come to this point. Collective."""
        dist.all_reduce(torch.zeros(1, device=self.local.device), group=self.group)


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
    # CUDA answers for GPUs that this process sees only; whether the memory of others can be mapped, mapping it tells.
    others = [index for index, uuid in enumerate(visible) if index != device.index and uuid in gpus]
    readable = all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    problem = first_reason(None if readable else "the GPUs cannot read each other's memory", group)
    if problem is not None:
        return problem
    # torch takes equal numbers for one GPU, and refuses; each process may see one GPU, and call it 0. CUDA maps memory
    # of GPUs that a process does not see, too.
    memory, alike = None, len({place.index for place in places}) < len(places)
    try:
        with environment("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1") if alike else nullcontext():
            memory = PeerMemory(numel, device, group)
    except RuntimeError as error:
        problem = first_line(error)
    problem = first_reason(problem, group)
    if problem is None:
        problem = first_reason(memory.why_wrong(), group)
    return memory if problem is None else problem


def first_reason(reason: str | None, group: object = None) -> str | None:
    """Return the reason of the first rank that has one, on all ranks of a group. Collective."""
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), None)


def choose(numel: int, device: torch.device, groups: Sequence[object]) -> Transport:
    """Return what carries shards: copy engines if the ranks can share memory, otherwise collectives. Collective."""
    # Memory is mapped for one group; weights of experts with groups of their own would need one buffer each.
    shared = share(numel, device, groups[0]) if len(groups) == 1 else "the weights are sharded over several groups"
    return shared if isinstance(shared, PeerMemory) else Transport(numel, device, shared)


# ---------------------------------------------------------------- all-gather of weights


class AllGather:
    """Gathers weights whose shards are views of the transport's `local`."""

    def __init__(self, stacks: Iterable[Stack], wire: WireMeter, transport: Transport):
        """Remember which weights make one product."""
        self._wire, self._transport = wire, transport
        self.ready: object | None = None  # event after the last write to shards and scales, which all-gathers wait for
        self._product = {weight: stack for stack in stacks for weight in stack}
        # Memory adjacent to unsharded weights of the same product, for those still sharded; and its stream.
        self._reserved: dict[FP8Param, tuple[torch.Tensor, object | None]] = {}

    def begin(self, weights: list[FP8Param], alone: bool = False) -> Callable[[], None]:
        """Begin one gather of weights of one process group, sorted by `start`; return what waits, and unshards them.

        `alone`: the rest of a product, where it is not there yet, does not follow.
        """
        streams.wait_event(self.ready)
        stream = streams.current_stream()
        stacks = stacks_of(weights)
        landed, sent = {}, []
        for stack in stacks:
            if stack[0].shard.world == 1 and stack[0].start % ALIGNMENT == 0:
                # One rank has all of the weight: its shard is what products read, and nothing is copied. Requantize
                # would overwrite it while a product reads; it copies what is unsharded at that moment.
                landed.update((weight, weight.data) for weight in stack)
            elif all(weight.kept_data is not None for weight in stack):
                landed.update((weight, weight.kept_data) for weight in stack)
            else:
                sent += stack
                landed.update(zip(stack, self.allocate(stack, alone), strict=True))
        for weight in weights:
            weight.unshard()  # behind the buffers, which are reserved for weights that are not on their way
        # All of the group's shards in one launch: the latency of a collective is paid once a fetch, not once a weight.
        wait = self._gather([landed[weight] for weight in sent], sent) if sent else None
        scales = {weight: weight.scale for weight in sent}  # those of the data just sent, also after requantize

        def finish() -> None:
            unsharded: dict[FP8Param, torch.Tensor] = {}
            # DeepSpeed waits for a prefetch that nobody used on the stream of the products. Waiting and copies stay on
            # the stream that the buffers were allocated on: there they are reused in order.
            with streams.on_stream(stream):
                if wait is not None:
                    wait()
                if len(sent) < len(weights):
                    streams.wait_event(
                        self.ready
                    )  # there may have been a requantize since; those in place are its result
                for stack in stacks:
                    data = [landed[weight][: weight.unsharded_numel] for weight in stack]  # views, without padding
                    if _padded(stack[:-1]):  # which parts them: copied, to adjoin
                        data = torch.cat(data).split([weight.unsharded_numel for weight in stack])
                    unsharded.update(zip(stack, data, strict=True))
            streams.wait_stream(stream)
            for weight, mine in unsharded.items():
                weight.finish_unshard(mine, scales.get(weight, weight.scale))

        return finish

    def gather_kept(self, weights: Iterable[FP8Param]) -> None:
        """Gather data that every rank keeps, after they were written; the current stream waits. Collective."""
        kept = sorted((weight for weight in weights if weight.kept_data is not None), key=lambda one: one.start)
        for some in in_runs(kept, lambda weight: id(weight.shard.group)):
            self._gather([weight.kept_data for weight in some], some)()

    def gather_again(self, weight: FP8Param) -> None:
        """Gather a weight that is unsharded once more, into the memory that it has. Collective."""
        self._gather([weight.unsharded_flat], [weight])()
        weight.finish_unshard(weight.unsharded_flat, weight.scale)

    def _gather(self, outputs: Sequence[torch.Tensor], weights: Sequence[FP8Param]) -> Wait:
        inputs, group = [weight.data for weight in weights], weights[0].shard.group
        self._wire.count(GATHER, "all_gather", sum(data.nbytes for data in inputs), group)
        return self._transport.gather(outputs, inputs, group)

    def allocate(self, stack: Stack, alone: bool = False) -> Sequence[torch.Tensor]:
        """Return memory for all ranks' shards [W * n] of each weight of a product, or of one of its weights.

        On the current stream: what was reserved on another one is not in the order of this.
        """
        stream, product = streams.current_stream(), stack
        if not alone:
            reserved, of_stream = self._reserved.pop(stack[0], (None, None))
            if len(stack) == 1 and reserved is not None and of_stream == stream:
                return [reserved]
            product = self._product[stack[0]]
        others = [weight for weight in product if weight not in stack]
        if _padded(product[:-1]) or any(
            is_gathered(w.parameter) or not w.in_fp8 or w.kept_data is not None for w in others
        ):
            product, others = stack, []  # not all would lie side by side
        lengths = [weight.shard.world * weight.data_numel for weight in product]
        buffers = dict(zip(product, self._transport.allocate(sum(lengths)).split(lengths), strict=True))
        self._reserved |= {weight: (buffers[weight], stream) for weight in others}
        return [buffers[weight] for weight in stack]

    def resharded(self, weight: FP8Param) -> None:
        """Reserve no memory next to a weight that is unsharded no longer."""
        for other in self._product[weight]:
            self._reserved.pop(other, None)


def _padded(weights: Iterable[FP8Param]) -> bool:
    return any(weight.shard.world * weight.data_numel > weight.unsharded_numel for weight in weights)


# ---------------------------------------------------------------- bytes on the wire

Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]


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
        world = dist.get_world_size(group)
        # Of its input a rank sends this share to the others; an all-reduce is a reduce-scatter and an all-gather.
        share = {"all_gather": world - 1, "all_reduce": 2 * (world - 1) / world}.get(collective, (world - 1) / world)
        self._sent[purpose] += round(nbytes * share)

    def sent(self) -> Counter[str]:
        """Return the bytes sent since the last `take`, by purpose."""
        return Counter({**self._sent, EXCHANGE: exchanges.bytes_sent() - self._exchanged_before})

    def add(self, sent: Counter[str]) -> None:
        """Count what a CUDA graph sends, of which Python sees nothing; negative: what was counted and not sent."""
        self._sent.update({purpose: sent[purpose] for purpose in (GATHER, GRADIENT)})
        exchanges.count_sent(sent[EXCHANGE])

    def take(self) -> dict[str, int]:
        """Return the bytes sent since the last call, by purpose."""
        sent = {purpose: self._sent[purpose] for purpose in (GATHER, GRADIENT)}
        self._sent.clear()
        exchanged, self._exchanged_before = self._exchanged_before, exchanges.bytes_sent()
        return {**sent, EXCHANGE: self._exchanged_before - exchanged}
