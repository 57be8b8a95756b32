"""Forward and backward of a micro-batch as two CUDA graphs, all-gathers and reduce-scatters included.

Launched one by one, the kernels of a small model take the GPU less time than Python needs to launch them. A graph is
launched at once. What it reads and writes must stay where it was captured:

    batch                    copied into buffers of the graph
    FP8 shards, gradients    where they always are; the driver compares their addresses before every replay
    scales                   pinned (zero/quantizer.py)
    persistent parameters    copied into buffers of the graph, for every step gathers them elsewhere
    unsharded weights,
    activations              memory of the graph

DeepSpeed's hooks run at the capture alone, and so does all other Python. The kernels are the eager ones, and so are
their results bit for bit; the driver checks that now and then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_fp8.graphs.agreement import State
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from ds_fp8.zero.streams import profiled

MIN_DOCUMENTS = 16
MAX_INTERVAL = 512  # replays after which a graph is checked at the latest
OFF = 'a CUDA graph keeps the activations of one forward; set "graph": "off"'


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


class Shape:
    """Micro-batches that one graph can run, as this rank knows them."""

    def __init__(self) -> None:
        self.graph: MicroBatchGraph | None = None
        self.reason: str | None = None  # why its capture failed
        self.eager_runs = [0, 0]  # since the last reset, of plain and of packed rows: these have other kernels
        self.most_documents = 0  # of packed rows, of any rank, so far
        self.used: set[int] = set()  # places of the outputs that have received a gradient
        self.spread: list[float] = []  # largest distances between the outputs of replays of one micro-batch
        self.check_bytes = 0  # memory of a check next to the graph, as measured before its capture

    def agree(self, most_documents: int, held: int, runs: tuple[int, int], needed: int) -> State:
        """Return the state on all ranks: from the most documents of any, and the least that their graphs hold."""
        self.most_documents = max(most_documents, self.most_documents)
        if held >= most_documents:  # a graph that one rank must capture again, all do
            return State.CAPTURED
        return State.READY if runs[self.packed] >= needed else State.WARM

    @property
    def packed(self) -> bool:
        return self.most_documents > 0

    def capacity(self) -> int:
        """Return for how many documents it is captured; 0 where every row has always been one."""
        # A power of two at least twice the largest number seen: few captures are repeated as batches vary, and
        # attention kernels take little time for documents that are not there.
        seen = self.most_documents
        return max(MIN_DOCUMENTS, 1 << (2 * seen - 1).bit_length()) if seen else 0


@dataclass
class Call:
    """A call of the module in training, and what this rank knows of it."""

    args: tuple
    kwargs: dict[str, Any]
    outstanding: bool  # another forward may still get its backward
    why: str | None = None  # why this rank cannot run it as a graph
    batch: Mapping[str, Any] = field(default_factory=dict)  # arguments of a graph, with the mask of padded rows
    signature: object = None
    shape: Shape = field(default_factory=Shape)
    documents: int = 0  # of packed rows; 0 where every row is one
    ordered: bool = True  # on all ranks DeepSpeed knows the order of modules

    @property
    def padded(self) -> bool:
        return "attention_mask" in self.batch


class Forward:
    """A forward whose backward may still come: held by the autograd graph of its outputs and by nobody else."""

    def __init__(self, used: set[int] | None = None):
        self.used = set() if used is None else used  # places of the outputs that have received a gradient
        self.done = False


class _Watched(torch.autograd.Function):
    """Notes the gradient of an output at a place: a hook would be lost where it is a view, and changed in place."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, forward: Forward, place: int) -> torch.Tensor:
        ctx.of, ctx.place = forward, place
        return output.detach()  # and not the output itself, of which autograd makes a view

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.of.used.add(ctx.place)
        ctx.of.done = True
        return gradient, None, None


def watched(output: Any, used: set[int]) -> tuple[Any, weakref.ref[Forward]]:
    """Return the outputs of an eager forward, and the forward, which is gone with them or done after their backward.

    Outputs with gradients are aliases: an output may be what another one is computed from, and gets a gradient from
    that as well, or a view. Places of those that receive a gradient are added to `used`.
    """
    forward = Forward(used)
    leaves, structure = tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if torch.is_tensor(leaf) and leaf.requires_grad:
            leaves[place] = _Watched.apply(leaf, forward, place)
    return tree_unflatten(leaves, structure), weakref.ref(forward)


class _Replay(torch.autograd.Function):
    """A replayed forward, as autograd sees it: outputs, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, graph: MicroBatchGraph, forward: Forward) -> tuple[torch.Tensor, ...]:
        ctx.graph, ctx.of = graph, forward
        # None for outputs that the loss does not depend on, and not zeros: `replay_backward` must know them.
        ctx.set_materialize_grads(False)
        return graph.copies(graph.differentiable)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: torch.Tensor | None):
        ctx.graph.replay_backward(gradients, ctx.of)
        return None, None, None


class MicroBatchGraph:
    """The graphs of forward and backward of one shape, and the memory between them and their callers."""

    def __init__(
        self,
        call_module: Callable[..., Any],
        call: Call,
        micro_step: MicroStep,
        capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager],
    ):
        """Capture both graphs, each inside `capturing`; nothing is computed."""
        self.max_documents = call.shape.capacity()
        self.addresses = micro_step.addresses()  # of what both graphs read and write outside of their own memory
        self.schedule = CheckSchedule()
        self.kept_bytes = 0  # growth of the pool by this graph: later graphs reuse what earlier ones hold
        self._micro_step = micro_step
        # Values of tensors are copied at every replay; plain values are part of the graph.
        self._batch = {name: x.detach().clone() if torch.is_tensor(x) else x for name, x in call.batch.items()}
        self._persistent = [(p, p.data.clone()) for p in micro_step.persistent]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._last: weakref.ref[Forward] | None = None  # the last replay; weak, for autograd alone keeps it alive
        self._progress: object = None  # what had been reduced when it was launched
        # An input that requires a gradient: without one autograd would not call the backward of _Replay.
        self._anchor = torch.zeros((), device=micro_step.device, requires_grad=True)
        state, outside = micro_step.remember(), [p.data for p, _ in self._persistent]
        try:
            for parameter, static in self._persistent:
                # Kernels are captured with these addresses. Between graphs DeepSpeed gathers persistent parameters
                # elsewhere after every step, so that a replay first copies them here.
                parameter.data = static
            with capturing(self._forward):
                output = call_module(**self._batch)
                leaves, self._structure = tree_flatten(output)
                self.differentiable = differentiable(leaves)
                self._used = [place for place in self.differentiable if place in call.shape.used]
                if not self._used:
                    raise ValueError("no output of the model has received a gradient")
                # Memory of the pool, rewritten by the next replay: callers get copies, these stay inside.
                self._leaves = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in leaves]
                # Prefetched all-gathers must join the capture before it ends; the backward graph gathers again.
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
                parameter.data = data  # where DeepSpeed left it
            # Nothing has been computed: what the hooks counted is taken back, and counted at every replay.
            self._counted = micro_step.restore(state)

    def close(self) -> None:
        """Free the graphs; NCCL ends no communicator while one that it is captured in exists."""
        self._last = None
        self._forward.reset()
        self._backward.reset()
        for held in (self._output_gradients, self._leaves, self._batch, self._persistent):
            held.clear()

    @property
    def pending(self) -> bool:
        """Return whether the last forward may still get its backward: its activations must stay."""
        return self._last is not None and self._last() is not None

    def replay(self, batch: Mapping[str, Any]) -> Any:
        self.launch_forward(batch)
        # By reference counting `pending` is False as soon as the caller drops the loss.
        forward = Forward()
        self._last = weakref.ref(forward)
        # The backward adds to the shards or overwrites them, as captured. Whatever changes that between forward and
        # backward (another backward, a step) makes the replay wrong, and it is refused.
        self._progress = self._micro_step.progress
        with_gradient = iter(_Replay.apply(self._anchor, self, forward))
        others = iter(self.copies([place for place in range(len(self._leaves)) if place not in self.differentiable]))
        leaves = [next(with_gradient if place in self.differentiable else others) for place in range(len(self._leaves))]
        return tree_unflatten(leaves, self._structure)

    def launch_forward(self, batch: Mapping[str, Any]) -> None:
        """Compute the outputs of a batch in the memory of the graph; they are `copies`."""
        for name, static in self._batch.items():
            if torch.is_tensor(static):
                # On the current stream, the one that the replay is launched on: the copy lies before the graph.
                static.copy_(batch[name], non_blocking=True)
        if self._persistent:
            torch._foreach_copy_([static for _, static in self._persistent], [p.data for p, _ in self._persistent])
        with profiled("graph"):
            self._forward.replay()

    def copies(self, places: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Return the outputs of the last forward, all or those at some places, in memory of their own."""
        chosen = self._leaves if places is None else [self._leaves[place] for place in places]
        return tuple(leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in chosen)

    def replay_backward(self, gradients: Sequence[torch.Tensor | None], forward: Forward) -> None:
        """Add the gradients of a replayed forward to the shards; RuntimeError if another forward came between."""
        if self._last is None or self._last() is not forward:
            raise RuntimeError(f"this forward has had its backward, or another forward has followed it: {OFF}")
        if self._progress != self._micro_step.progress or self._micro_step.reducing:
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
        self._last = None  # the activations may be overwritten: a second backward is refused above
        for place, static in zip(self._used, self._output_gradients, strict=True):
            if place in given:
                static.copy_(given[place])
            else:
                static.zero_()  # captured as used, and this loss leaves it out
        with profiled("graph"):
            self._backward.replay()
        self._micro_step.count(self._counted)


def differentiable(leaves: Sequence[Any]) -> list[int]:
    for leaf in leaves:
        if not (leaf is None or torch.is_tensor(leaf) or isinstance(leaf, (bool, int, float, str))):
            raise ValueError(f'the model returns a {type(leaf).__name__}: pass "use_cache": False, if it is a cache')
    places = [place for place, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if not places:
        raise ValueError("the model returns no tensor with a gradient")
    return places
