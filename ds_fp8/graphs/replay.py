"""Forward and backward of a micro-batch as two CUDA graphs, gathers and reductions included; all graphs of an engine.

Launched one by one, the kernels of a small model take the GPU less time than Python needs to launch them. A graph is
launched at once. What it reads and writes must stay where it was captured:

    batch                    copied into buffers of the graph
    FP8 shards, gradients    where they always are; their addresses are compared before every replay
    scales                   pinned (zero/masters.py)
    persistent parameters    copied into buffers of the graph, for every step gathers them elsewhere
    gathered weights,
    activations              memory of the graph

DeepSpeed's hooks run at the capture alone, and so does all other Python. A micro-step that Python would do in another
way the next time (a measured one, another shape, a layer that has moved to BF16) runs eagerly, or is captured again.
The kernels are the same, and so are their results bit for bit; agreement.py compares them now and then.

The graphs of an engine are captured on one stream into one pool, which keeps the activations of one micro-step. Nothing
outside of a graph is allocated there, so eager work beside them (evaluation, measured micro-steps) needs other memory.
Where that is short they are freed, and captured again behind it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_fp8.graphs.capture import (
    masks_as_outside,
    memory_of_other_streams_reused,
    process_groups_used,
    random_states_unread,
    streams_unrecorded,
    without_garbage_collection,
)
from ds_fp8.graphs.conditions import Call
from ds_fp8.zero import streams
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from ds_fp8.zero.gradients import GradientShards
from ds_fp8.zero.streams import profiled

MAX_INTERVAL = 512
"""Replays after which a graph is checked at the latest."""


class CheckSchedule:
    """Schedule of the checks of a graph: before its first replay, after 1, 2, 4, 8, ..., and every MAX_INTERVAL."""

    def __init__(self) -> None:
        self.replays = 0
        self._next = 0

    @property
    def due(self) -> bool:
        return self.replays >= self._next

    def checked(self) -> None:
        # Doubling: most values that go stale (warm-up of a schedule, a flag set after the first steps) do so early, and
        # the total cost of checks stays logarithmic until the interval reaches its limit.
        self._next = self.replays + min(max(self.replays, 1), MAX_INTERVAL)


OFF = 'a CUDA graph keeps the activations of one forward; set "graph": "off"'


class _Token:
    """Lives as long as the autograd graph of a replayed forward."""


class _Replay(torch.autograd.Function):
    """The forward that has been replayed, as autograd sees it: outputs, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, graph: MicroStepGraph, token: _Token) -> tuple[torch.Tensor, ...]:
        ctx.graph, ctx.token = graph, token
        # None for outputs that the loss does not depend on, and not zeros: `replay_backward` tells them apart.
        ctx.set_materialize_grads(False)
        return graph.copies(graph.differentiable)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: torch.Tensor | None):
        ctx.graph.replay_backward(gradients, ctx.token)
        return None, None, None


class MicroStepGraph:
    """The graphs of forward and backward of one signature, and the memory that connects them to the world."""

    def __init__(
        self,
        call: Callable[..., Any],
        batch: Mapping[str, Any],
        max_documents: int,
        used: Collection[int],
        micro_step: MicroStep,
        gradients: GradientShards,
        wire: WireMeter,
        addresses: tuple[int, ...],
        capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager],
    ):
        """Capture both graphs; nothing is computed.

        Args:
            call: The module, to be called with `batch` by name.
            batch: Tensors, whose values are copied at every replay, and plain values, which are part of the graph.
            max_documents: Documents that packed rows may hold; 0 where every row is one sequence.
            used: Places of the outputs that get a gradient.
            micro_step: DeepSpeed's part of it.
            gradients: Gradient shards that its reductions add to.
            wire: Counts the bytes.
            addresses: Addresses of the memory outside the graphs that they read and write.
            capturing: Captures what is enqueued inside of it.
        """
        self._gradients, self._wire, self.addresses, self._micro_step = gradients, wire, addresses, micro_step
        self.max_documents = max_documents
        self.schedule = CheckSchedule()
        self._batch = {
            name: value.detach().clone() if torch.is_tensor(value) else value for name, value in batch.items()
        }
        self._persistent = [(p, p.data.clone()) for p in micro_step.persistent]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Weak, so that only the autograd graph keeps the token alive.
        self._token: weakref.ref[_Token] | None = None
        # An input that requires a gradient: without one autograd would not call the backward of _Replay.
        self._anchor = torch.zeros((), device=gradients.device, requires_grad=True)
        arrived, sent = gradients.arrived, wire.sent()
        state, outside = micro_step.remember(), [p.data for p, _ in self._persistent]
        try:
            for parameter, static in self._persistent:
                # Kernels are captured with these addresses. Between graphs DeepSpeed gathers persistent parameters
                # elsewhere after every step, so that a replay first copies them here.
                parameter.data = static
            with capturing(self._forward):
                output = call(**self._batch)
                leaves, self._structure = tree_flatten(output)
                self.differentiable = differentiable(leaves)
                self._used = [place for place in self.differentiable if place in used]
                if not self._used:
                    raise ValueError("no output of the model has received a gradient")
                # Memory of the pool, rewritten by the next replay: callers get copies, these stay inside.
                self._leaves = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in leaves]
                # Gathers that were fetched ahead must join the capture before it ends; the backward graph gathers
                # again.
                micro_step.finish_gathers()
            roots = [leaves[place] for place in self._used]
            # Buffers that the backward graph reads. Allocated outside of it, hence not in memory that the pool reuses.
            self._output_gradients = [torch.ones_like(self._leaves[place]) for place in self._used]
            # Only `roots` may hold the autograd graph: it is freed with the backward below, and the pool reuses its
            # memory.
            del output, leaves
            with capturing(self._backward):
                torch.autograd.backward(roots, self._output_gradients)
                # Reductions of the last bucket run on a side stream, which has to join before the capture ends.
                micro_step.finish_backward()
        finally:
            for (parameter, _), data in zip(self._persistent, outside, strict=True):
                # The user's code sees the parameters where DeepSpeed left them.
                parameter.data = data
            # Nothing has been computed yet.
            self._arrives, self._sends = gradients.arrived, wire.sent() - sent
            gradients.arrived = arrived
            wire.subtract(self._sends)
            micro_step.restore(state)

    def close(self) -> None:
        """Free the graphs; NCCL ends no communicator while one that it is captured in exists."""
        self._token = None
        self._forward.reset()
        self._backward.reset()
        self._output_gradients = []
        self._leaves.clear()
        self._batch.clear()
        self._persistent.clear()

    @property
    def pending(self) -> bool:
        """Return whether the last forward may still get its backward: its activations must stay."""
        return self._token is not None and self._token() is not None

    def replay(self, batch: Mapping[str, Any]) -> Any:
        self.launch_forward(batch)
        # Held by the autograd graph of this forward and by nobody else: once the caller drops the loss the token dies,
        # and `pending` knows that no backward will come. Reference counting, so it is known at once.
        token = _Token()
        self._token = weakref.ref(token)
        # The backward adds to the shards or overwrites them, as captured. Whatever changes that between forward and
        # backward (another backward, a step) makes the replay wrong, and it is refused.
        self._before = self._micro_step.accumulates, self._gradients.arrived
        with_gradient = iter(_Replay.apply(self._anchor, self, token))
        others = iter(self.copies([place for place in range(len(self._leaves)) if place not in self.differentiable]))
        leaves = [next(with_gradient if place in self.differentiable else others) for place in range(len(self._leaves))]
        return tree_unflatten(leaves, self._structure)

    def launch_forward(self, batch: Mapping[str, Any]) -> None:
        """Compute the outputs of a batch in the memory of the graph; they are `copies`."""
        for name, mine in self._batch.items():
            if torch.is_tensor(mine):
                # On the current stream, the one that the replay is launched on: the copy lies before the graph.
                mine.copy_(batch[name], non_blocking=True)
        if self._persistent:
            torch._foreach_copy_([mine for _, mine in self._persistent], [p.data for p, _ in self._persistent])
        with profiled("graph"):
            self._forward.replay()

    def copies(self, places: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Return the outputs of the last forward, all or those at some places, in memory of their own."""
        chosen = self._leaves if places is None else [self._leaves[place] for place in places]
        return tuple(leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in chosen)

    def replay_backward(self, gradients: Sequence[torch.Tensor | None], token: _Token) -> None:
        """Add the gradients of a replayed forward to the shards.

        Raises:
            RuntimeError: The forward is not the last one, or has had its backward; another one came in between; or an
                output has a gradient that had none before the capture.
        """
        if self._token is None or self._token() is not token:
            raise RuntimeError(f"this forward has had its backward, or another forward has followed it: {OFF}")
        if self._before != (self._micro_step.accumulates, self._gradients.arrived) or self._micro_step.reducing:
            raise RuntimeError(
                f"gradients of another forward came between this one and its backward, as where one backward has the "
                f"losses of several forwards: {OFF}"
            )
        given = {place: x for place, x in zip(self.differentiable, gradients, strict=True) if x is not None}
        unexpected = sorted(given.keys() - set(self._used))
        if unexpected:
            raise RuntimeError(
                f"output {unexpected[0]} of the model has a gradient, and had none when its CUDA graph was captured; "
                'set "graph": "off"'
            )
        # From here on the activations may be overwritten: a second backward is refused above.
        self._token = None
        for place, mine in zip(self._used, self._output_gradients, strict=True):
            if place in given:
                mine.copy_(given[place])
            else:
                # The capture computes gradients of all used outputs; an output that this loss leaves out contributes
                # zero.
                mine.zero_()
        with profiled("graph"):
            self._backward.replay()
        # Bookkeeping that Python did at the capture and that a replay does not run: which gradients arrived, bytes
        # sent.
        self._gradients.arrived |= self._arrives
        self._wire.add(self._sends)


def differentiable(leaves: Sequence[Any]) -> list[int]:
    for leaf in leaves:
        if not (leaf is None or torch.is_tensor(leaf) or isinstance(leaf, (bool, int, float, str))):
            raise ValueError(f'the model returns a {type(leaf).__name__}: pass "use_cache": False, if it is a cache')
    places = [place for place, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if not places:
        raise ValueError("the model returns no tensor with a gradient")
    return places


HEADROOM = 0.03
"""Share of the GPU's memory that must be free beside graphs, or there are none."""

Make = Callable[[Callable[[torch.cuda.CUDAGraph], AbstractContextManager]], MicroStepGraph]


class CapturedGraphs:
    """Graphs by the signature of their micro-steps."""

    def __init__(self, device: torch.device, micro_step: MicroStep):
        self._device, self._micro_step = device, micro_step
        self.stream = torch.cuda.Stream(device)
        """Stream on which graphs are captured."""
        self._graphs: dict[object, MicroStepGraph] = {}
        self._pool: object | None = None
        self._groups = {group.group_name for group in micro_step.groups}
        """Names of the process groups whose collectives are in graphs."""
        self.needs_dry_run = True
        """True if the next capture is tried out first."""
        self.kept_bytes = 0
        """Memory of the graphs' own."""
        self.check_bytes = 0
        """Memory that a check takes beside them, as measured before they were captured."""
        self.replays = 0
        """Replays since graphs were last freed."""

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, signature: object) -> MicroStepGraph | None:
        return self._graphs.get(signature)

    @property
    def pending(self) -> bool:
        """Return whether a forward may still get its backward: its activations are in the memory of all graphs."""
        return any(graph.pending for graph in self._graphs.values())

    def forget(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        # The memory of a pool goes back with its last graph; the next capture begins another pool.
        self._pool, self.kept_bytes, self.replays = None, 0, 0

    def process_group_ends(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Free the graphs if their collectives use a process group that is about to end; None: the process ends."""
        if group is None or group.group_name in self._groups:
            self.forget()

    def replay(self, graph: MicroStepGraph, batch: Mapping[str, Any]) -> Any:
        self.replays += 1
        graph.schedule.replays += 1
        return graph.replay(batch)

    def capture(self, make: Make, call: Call, drawn: bool) -> tuple[MicroStepGraph, int]:
        """Return a graph and the bytes that it keeps; it is not known before `add`."""

        # Called twice by MicroStepGraph: forward and backward are two graphs of one pool.
        def capturing(graph: torch.cuda.CUDAGraph) -> AbstractContextManager:
            return self._capturing(graph, call, drawn)

        with without_garbage_collection(), process_groups_used(self._groups):
            if not call.ordered:
                with self._micro_step.order_recorded():
                    self._dry_run(make, capturing)
            elif self.needs_dry_run:
                self._dry_run(make, capturing)
            # One pool for all graphs: only one micro-step is under way at a time (`pending`), so their activations may
            # share it.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # What the dry run left in the cache is not of the pool, and would stand beside it as memory that nobody can
            # use.
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self._device)
            with memory_of_other_streams_reused():
                graph = make(capturing)
        self._check_headroom(graph)
        return graph, torch.cuda.memory_reserved(self._device) - before

    def _dry_run(self, make: Make, capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager]) -> None:
        """Capture into a pool that is thrown away: with stream reuse on, torch aborts if a backward capture fails."""
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        try:
            # Nothing of the dry run is ever read, so its memory may be overwritten while another stream would still use
            # it.
            with streams_unrecorded():
                graph = make(capturing)
            if not self._graphs:  # others would share their memory with it
                self._check_headroom(graph)
            graph.close()
        finally:
            self._pool = pool

    def add(self, signature: object, graph: MicroStepGraph, kept: int) -> None:
        self._graphs[signature] = graph
        # Growth of the pool by this graph alone: later graphs reuse what earlier ones hold, and keep little more.
        self.kept_bytes += kept

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, call: Call, drawn: bool) -> Iterator[None]:
        """Capture what is enqueued inside, on DeepSpeed's streams too."""
        # [Note: fork and join] A capture begins on one stream. Others join it by waiting for that stream (fork), and
        # must be waited for before it ends (join), or CUDA refuses the graph. Gathers and reductions run on these two.
        sides = self._micro_step.side_streams()
        # Other threads (NCCL's watchdog, the loader of batches) may go on calling CUDA.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        unthrottled, masks = self._micro_step.unthrottled(), masks_as_outside(call.max_documents, call.padded)
        with captured, streams.capture(), unthrottled, masks, random_states_unread(drawn):
            for side in sides:
                side.wait_stream(self.stream)
            yield
            for side in sides:
                self.stream.wait_stream(side)

    def _check_headroom(self, graph: MicroStepGraph) -> None:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        if free < HEADROOM * total:
            graph.close()
            raise torch.OutOfMemoryError(f"CUDA graphs would leave {free / 2**30:.2f} GiB of the GPU's memory free")

    def memory_of_check(self, compute: Callable[[], list[Any]]) -> int:
        """Return the bytes that Python needs beside a graph to compute its outputs, and for two copies of the graph's.

        Those of the forward that is compared and of a replay that tells how far apart replays are.
        """
        # Not by the peak of what is allocated: resetting it would change the user's own figures, and pieces between
        # blocks count, too.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        copies = 2 * sum(output.nbytes for output in compute() if torch.is_tensor(output))
        return torch.cuda.memory_reserved(self._device) - before + copies

    def has_room(self, needed: int) -> bool:
        """Return whether so many bytes can be had beside the graphs."""
        free, _ = torch.cuda.mem_get_info(self._device)
        # Eager kernels can use what the allocator has cached. The pool's blocks count as cached too, but only graphs
        # get them: kept_bytes is taken off.
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        return free + reserved - allocated - self.kept_bytes >= needed
