"""CUDA graphs of an engine and their shared memory pool.

They are captured on one stream into one pool, which keeps the activations of one micro-step. Nothing outside of a graph
is allocated there, so eager work beside them (evaluation, measured micro-steps, longer batches) needs other memory.
Where that is short the graphs are freed, and captured again later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_fp8.graphs.capture import (
    masks_as_outside,
    memory_of_other_streams_reused,
    process_groups_used,
    random_states_unread,
    streams_unrecorded,
    without_garbage_collection,
)
from ds_fp8.graphs.micro_step_graph import MicroStepGraph
from ds_fp8.zero import streams
from ds_fp8.zero.seams.micro_step import MicroStep

HEADROOM = 0.03
"""Share of the GPU's memory that must be free beside graphs, or there are none."""

MAX_EVICTIONS = 3
"""Times in a row that graphs are freed before they have paid, after which there are none: capturing takes time, too."""

PAID_AFTER = 100
"""Replays after which graphs have saved more time than their capture took."""

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
        self._tokens = 0
        """Tokens of the largest batch that is captured."""
        self.evictions = 0
        """Times in a row that they were freed, for what happened beside them, before they had paid."""
        self._replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, signature: object) -> MicroStepGraph | None:
        """Return the graph of a signature, if there is one."""
        return self._graphs.get(signature)

    @property
    def pending(self) -> bool:
        """Return whether a forward may still get its backward: its activations are in the memory of all graphs."""
        return any(graph.pending for graph in self._graphs.values())

    def forget(self) -> None:
        """Free all graphs and their memory."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        # The memory of a pool goes back with its last graph; the next capture begins another pool.
        self._pool, self.kept_bytes, self._tokens = None, 0, 0

    def process_group_ends(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Free the graphs if their collectives use a process group that is about to end; None: the process ends."""
        if group is None or group.group_name in self._groups:
            self.forget()

    def evict(self) -> None:
        """Free all graphs for what happens beside them."""
        # Graphs that were freed after many replays were worth their capture; only short-lived ones count against the
        # next.
        self.evictions = self.evictions + 1 if self._replays < PAID_AFTER else 0
        self._replays = 0
        self.forget()
        torch.cuda.empty_cache()

    def replay(self, graph: MicroStepGraph, batch: Mapping[str, Any]) -> Any:
        """Return what the model returns for a batch, by one of these graphs."""
        self._replays += 1
        graph.schedule.replays += 1
        return graph.replay(batch)

    def capture(self, make: Make, max_documents: int, drawn: bool, ordered: bool) -> tuple[MicroStepGraph, int]:
        """Return a graph and the bytes that it keeps; it is not known before `add`.

        Args:
            make: Makes it, with what captures.
            max_documents: Documents that packed rows may hold.
            drawn: Whether the model draws random numbers.
            ordered: Whether DeepSpeed knows the order of modules; otherwise it learns it from the dry run.

        Raises:
            torch.OutOfMemoryError: It leaves too little memory for the optimizer's step and what is beside it.
            Exception: What the model raises.
        """

        # Called twice by MicroStepGraph: forward and backward are two graphs of one pool.
        def capturing(graph: torch.cuda.CUDAGraph) -> AbstractContextManager:
            return self._capturing(graph, max_documents, drawn)

        with without_garbage_collection(), process_groups_used(self._groups):
            if not ordered:
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

    def add(self, signature: object, graph: MicroStepGraph, kept: int, tokens: int) -> None:
        """Keep a graph that `capture` returned.

        Args:
            signature: Signature of its micro-steps.
            graph: The graph.
            kept: Bytes that it keeps.
            tokens: Tokens of the batch that it was captured for.
        """
        self._graphs[signature] = graph
        # Growth of the pool by this graph alone: later graphs reuse what earlier ones hold, and keep little more.
        self.kept_bytes += kept
        self._tokens = max(self._tokens, tokens)

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, max_documents: int, drawn: bool) -> Iterator[None]:
        """Capture what is enqueued inside, on DeepSpeed's streams too."""
        # [Note: fork and join] A capture begins on one stream. Others join it by waiting for that stream (fork), and
        # must be waited for before it ends (join), or CUDA refuses the graph. Gathers and reductions run on these two.
        sides = self._micro_step.side_streams()
        # Other threads (NCCL's watchdog, the loader of batches) may go on calling CUDA.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        unthrottled, masks = self._micro_step.unthrottled(), masks_as_outside(max_documents)
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

    def make_room(self, tokens: int, evaluates: bool) -> None:
        """Free the graphs where they leave less memory than what comes beside them may need.

        What it needs is not known. Taken is as much as graphs keep, and of a batch with more tokens than theirs as many
        times more; of evaluation, which keeps nothing between layers but has logits, a quarter of that.

        Args:
            tokens: Tokens of its batch, 0 where that is not known.
            evaluates: Whether it needs no gradients.
        """
        if self._graphs and not self.pending and not self.has_room(tokens, evaluates):
            self.evict()

    def has_room(self, tokens: int, evaluates: bool = False) -> bool:
        """Return whether graphs leave the memory that `make_room` is for."""
        free, _ = torch.cuda.mem_get_info(self._device)
        # Eager kernels can use what the allocator has cached. The pool's blocks count as cached too, but only graphs
        # get them: kept_bytes is taken off.
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        # Activations grow with the tokens. The pool holds those of the largest captured batch, the only figure there
        # is.
        times = tokens / self._tokens if tokens and self._tokens else 1.0
        needed = self.kept_bytes * max(1.0, times / 4 if evaluates else times)
        return free + reserved - allocated - self.kept_bytes >= needed
