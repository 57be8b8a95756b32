"""Capture of CUDA graphs: their memory pool, and everything of the process that is replaced for it.

The graphs of an engine are captured on one stream into one pool, which keeps the activations of one micro-batch: only
one is under way at a time. Nothing outside of a graph is allocated there, so eager work (evaluation, measured steps)
needs other memory. Where that is short the driver frees the graphs, and captures them again behind it.

[Note: process-wide patches] All that this file replaces outside of an engine, and when that is undone:

    what                               why                                                 undone when
    ProcessGroup.shutdown, atexit      NCCL waits for ever for graphs with its collectives the last engine is destroyed
    Tensor.record_stream               it would keep memory to the end of a dry run        the dry run ends
    cuda.Stream.synchronize            captured work does not run, so waits do not return  the capture ends
    checkpoint.get_device_states       it copies from the device, which captures forbid    the capture ends
    masking_utils.is_tracing,          masks of tokens x tokens at every layer, or a wait  the capture ends
      find_packed_sequence_indices     for the device
    the allocator's setting            memory that a side stream has read is used again    the capture ends
      graph_capture_record_stream_reuse
    garbage collection                 memory of the driver that it frees ends a capture   the capture ends
    NCCL_GRAPH_REGISTER=0, unless set  ranks would exchange addresses in a capture, where  never: NCCL reads it once
                                       one may fail
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_fp8.graphs.replay import Call, MicroBatchGraph
from ds_fp8.layers.attention import documents
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.micro_step import MicroStep

HEADROOM = 0.03  # share of the GPU's memory that must be free next to graphs, or there are none


class GraphPool:
    """Memory that the graphs of one engine share, and the stream on which they are captured."""

    def __init__(self, micro_step: MicroStep):
        self.stream = torch.cuda.Stream(micro_step.device)
        self.groups = {group.group_name for group in micro_step.groups}  # names of those with collectives in graphs
        self.needs_dry_run = True  # the next capture is tried out first
        self._micro_step = micro_step
        self._id: object | None = None
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")

    def forget(self) -> None:
        """Begin another pool with the next capture: the memory of this one goes back with its last graph."""
        self._id = None

    def try_to_capture(self, call_module: Callable[..., Any], call: Call, draws: bool) -> MicroBatchGraph | Exception:
        """Return what `capture` does, or the error that ended it: then nothing has happened."""
        state = self._micro_step.remember()  # DeepSpeed's hooks count during the capture although nothing runs
        try:
            return self.capture(call_module, call, draws)
        except BaseException as found:  # also KeyboardInterrupt: DeepSpeed's state is put back before it propagates
            self.recover()
            self._micro_step.abandon()
            self._micro_step.restore(state)
            if not isinstance(found, Exception):
                raise
            error = found
        while error.__context__ is not None:  # what ended the capture, and not that it had ended
            error = error.__context__
        error.__traceback__ = None  # its frames hold activations in the pool
        return error

    def capture(self, call_module: Callable[..., Any], call: Call, draws: bool) -> MicroBatchGraph:
        """Capture forward and backward of a call; nothing is computed. `draws`: forwards draw random numbers."""
        make = functools.partial(
            MicroBatchGraph, call_module, call, self._micro_step, lambda graph: self._capturing(graph, call, draws)
        )
        with without_garbage_collection(), process_groups_used(self.groups):
            if not call.ordered:
                with self._micro_step.order_recorded():
                    self._dry_run(make)
            elif self.needs_dry_run:
                self._dry_run(make)
            self._id = self._id or torch.cuda.graph_pool_handle()
            # What the dry run left in the cache is not of the pool: memory that nobody could use.
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self.stream.device)
            with memory_of_other_streams_reused():
                graph = make()
        self._check_headroom(graph)
        graph.kept_bytes = torch.cuda.memory_reserved(self.stream.device) - before
        return graph

    def _dry_run(self, make: Callable[[], MicroBatchGraph]) -> None:
        """Capture into a pool that is thrown away: with stream reuse on, torch aborts if a backward capture fails."""
        before, self._id = self._id, torch.cuda.graph_pool_handle()
        try:
            # Memory may be reused at once: nothing of the dry run is ever read. In a capture, recorded memory is kept
            # to its end, which would be that of all layers.
            with replaced((torch.Tensor, "record_stream", lambda tensor, stream: None)):
                graph = make()
            if before is None:  # other graphs would share their memory with it
                self._check_headroom(graph)
            graph.close()
        finally:
            self._id = before

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, call: Call, draws: bool) -> Iterator[None]:
        """Capture what is enqueued inside, on DeepSpeed's streams too."""
        # [Note: fork and join] A capture begins on one stream. Others join it by waiting for that stream (fork), and
        # must be waited for before it ends (join), or CUDA refuses the graph. All-gathers and reductions run on these.
        sides = [side for side in self._micro_step.side_streams() if side is not None]
        ours = {side.cuda_stream for side in sides}
        synchronize = torch.cuda.Stream.synchronize

        def wait(stream: torch.cuda.Stream) -> None:  # an all-gather of one rank, which is a copy, calls it
            if stream.cuda_stream not in ours:
                synchronize(stream)

        # Other threads (NCCL's watchdog, the loader of batches) may go on calling CUDA.
        captured = torch.cuda.graph(graph, pool=self._id, stream=self.stream, capture_error_mode="thread_local")
        with (
            captured,
            streams.capture(),
            self._micro_step.unthrottled(),
            replaced((torch.cuda.Stream, "synchronize", wait)),
            masks_as_outside(call.shape.capacity(), call.padded),
            random_states_unread(draws),
        ):
            for side in sides:
                side.wait_stream(self.stream)
            yield
            for side in sides:
                self.stream.wait_stream(side)

    def _check_headroom(self, graph: MicroBatchGraph) -> None:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.stream.device)
        if free < HEADROOM * total:
            graph.close()
            raise torch.OutOfMemoryError(f"CUDA graphs would leave {free / 2**30:.2f} GiB of the GPU's memory free")

    def memory_of_check(self, compute: Callable[[], list[Any]]) -> int:
        """Return the bytes that an eager forward needs next to a graph, with two copies of its outputs.

        Those of the forward that is compared and of a replay that measures the spread of replays.
        """
        # Not by the peak of what is allocated: resetting it would change the user's own figures, and fragments between
        # blocks count, too.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.stream.device)
        copies = 2 * sum(output.nbytes for output in compute() if torch.is_tensor(output))
        return torch.cuda.memory_reserved(self.stream.device) - before + copies

    def has_room(self, needed: int, kept: int) -> bool:
        """Return whether so many bytes can be allocated next to graphs that keep `kept`."""
        device = self.stream.device
        # Eager kernels can use what the allocator has cached. The pool's blocks count as cached too, but only graphs
        # get them.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - kept
        return torch.cuda.mem_get_info(device)[0] + cached >= needed

    def recover(self) -> None:
        """Bring torch back to work after a capture that ended in an error."""
        # What was enqueued before the capture must have ended, and an error of it shows here.
        torch.cuda.synchronize(self.stream.device)
        # A capture marks the generator's state as captured until its end. A failed one never got there, so that a
        # copy of the state takes its place.
        generator = torch.cuda.default_generators[self.stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())


def random_numbers_drawn(device: torch.device) -> int:
    """Return how far the random numbers of a GPU are, which the host knows; 0 for other devices."""
    return torch.cuda.default_generators[device.index].get_offset() if device.type == "cuda" else 0


# ---------------------------------------------------------------- process groups that end

_shutdown: Callable[..., None] | None = None  # torch's, while it is replaced
_drivers: weakref.WeakSet = weakref.WeakSet()  # registration must not keep an engine and its graphs alive


def before_process_groups_end(driver: Any) -> None:
    """Call `driver.process_group_ends` before torch.distributed ends a process group, and with None at exit.

    NCCL ends no communicator while a graph that has captured it exists: it would wait for ever.
    """
    global _shutdown
    if _shutdown is None:
        # Callers that imported destroy_process_group by its name come here as well.
        _shutdown = vars(torch.distributed.ProcessGroup)["shutdown"]
        torch.distributed.ProcessGroup.shutdown = _call_and_shut_down
        atexit.register(_call_all)
    _drivers.add(driver)


def process_groups_may_end(driver: Any) -> None:
    global _shutdown
    _drivers.discard(driver)
    # It stays where somebody has replaced it since.
    if not _drivers and torch.distributed.ProcessGroup.shutdown is _call_and_shut_down:
        torch.distributed.ProcessGroup.shutdown, _shutdown = _shutdown, None
        atexit.unregister(_call_all)


def _call_all(group: torch.distributed.ProcessGroup | None = None) -> None:
    for driver in list(_drivers):
        driver.process_group_ends(group)


def _call_and_shut_down(group: torch.distributed.ProcessGroup) -> None:
    # Order matters: NCCL's shutdown waits for the communicator's graphs, so these go first.
    _call_all(group)
    _shutdown(group)


@contextlib.contextmanager
def process_groups_used(names: set[str]) -> Iterator[None]:
    """Add the names of the process groups that ran a collective inside; the groups count them."""

    def collectives() -> dict[str, int]:
        if not torch.distributed.is_initialized():
            return {}
        groups = torch.distributed.distributed_c10d._world.pg_names
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}

    before = collectives()
    try:
        yield
    finally:
        names.update(name for name, number in collectives().items() if number != before.get(name))


# ---------------------------------------------------------------- replaced for a capture


@contextlib.contextmanager
def replaced(*patches: tuple[object, str, object]) -> Iterator[None]:
    """Set attributes (owner, name, value) until the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for patch in patches:
        setattr(*patch)
    try:
        yield
    finally:
        for patch in before:
            setattr(*patch)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside."""
    # Garbage may hold tensors whose destruction calls the driver (cudaFree, cudaEventDestroy): illegal while a capture
    # of this thread is under way.
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def random_states_unread(drawn: bool) -> AbstractContextManager:
    """Keep torch's activation checkpointing from reading the device's random state, which waits for the device."""
    from torch.utils import checkpoint

    def no_states(*_: object) -> tuple[list, list]:
        if drawn:  # without random numbers the state is not needed
            raise RuntimeError("activations are recomputed with random numbers, whose state the host repeats")
        return [], []

    return replaced((checkpoint, "get_device_states", no_states))


@contextlib.contextmanager
def masks_as_outside(max_documents: int = 0, padded: bool = False) -> Iterator[None]:
    """Let transformers build the attention mask that it builds without a graph.

    In a capture it would make masks of all tokens by all tokens, which fit any batch, and attention would read them at
    every layer. That is right for padded rows. Else every row is known to be one causal sequence, or to hold documents
    whose positions count from 0.
    """
    from transformers import masking_utils

    def which_document(positions: torch.Tensor) -> torch.Tensor | None:
        return (positions == 0).cumsum(-1) if max_documents else None

    tracing = masking_utils, "is_tracing", lambda *_: padded
    packed = masking_utils, "find_packed_sequence_indices", which_document
    with replaced(tracing, packed), documents.fixed(max_documents):
        yield


@contextlib.contextmanager
def memory_of_other_streams_reused() -> Iterator[None]:
    """Let a capture use memory again that another stream has read meanwhile, which it otherwise keeps to its end."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    given = next((os.environ[name] for name in names if os.environ.get(name)), "")
    setting = "graph_capture_record_stream_reuse"
    if setting in given:
        yield
        return
    # Settings replace each other as a whole: what the user gave in the environment has to be repeated.
    before, found = f"{given}," * bool(given), True
    try:
        torch._C._accelerator_setAllocatorSettings(f"{before}{setting}:True")
    except (RuntimeError, ValueError) as error:  # a graph is right without it
        found = False
        warnings.warn(f"CUDA graphs take more memory with this torch: {error}", stacklevel=2)
    try:
        yield
    finally:
        if found:
            # Captures of the user's own keep torch's default.
            torch._C._accelerator_setAllocatorSettings(f"{before}{setting}:False")
