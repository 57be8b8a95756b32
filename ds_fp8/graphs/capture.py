"""Context managers used during CUDA graph capture: allocator, RNG, GC, attention masks, process groups."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator

import torch

from ds_fp8.layers.attention import documents

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_at_the_end: list[weakref.WeakMethod] = []


def before_process_groups_end(method: Callable[[torch.distributed.ProcessGroup | None], None]) -> None:
    """Call a method before torch.distributed ends a process group, and before the process ends.

    NCCL ends no communicator while a graph that has captured it exists: it would wait for ever.
    """
    if not hasattr(torch.distributed.ProcessGroup.shutdown, "calls_first"):
        # Callers that imported destroy_process_group by its name come here as well.
        torch.distributed.ProcessGroup.shutdown = _calling_first(torch.distributed.ProcessGroup.shutdown)
        atexit.register(_call_all, None)
    # Weak: the registration must not keep an engine and its graphs alive.
    _at_the_end.append(weakref.WeakMethod(method))


def _call_all(group: torch.distributed.ProcessGroup | None) -> None:
    found = [reference() for reference in _at_the_end]
    _at_the_end[:] = [reference for reference, method in zip(_at_the_end, found, strict=True) if method]
    for method in filter(None, found):
        method(group)


def _calling_first(shutdown: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(shutdown)
    def after_calls(group: torch.distributed.ProcessGroup) -> None:
        # Order matters: NCCL's shutdown waits for the communicator's graphs, so these go first.
        _call_all(group)
        shutdown(group)

    after_calls.calls_first = True
    return after_calls


@contextlib.contextmanager
def process_groups_used(names: set[str]) -> Iterator[None]:
    """Add the names of the process groups that ran a collective inside; the groups count them."""
    before = _collectives()
    try:
        yield
    finally:
        names.update(name for name, number in _collectives().items() if number != before.get(name))


def _collectives() -> dict[str, int]:
    if not torch.distributed.is_initialized():
        return {}
    groups = torch.distributed.distributed_c10d._world.pg_names
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def end_failed_capture(device: torch.device) -> None:
    """Bring torch back to work after a capture that ended in an error; nothing to do but on a GPU."""
    if device.type != "cuda":
        return
    # What was enqueued before the capture must have ended, and an error of it shows here.
    torch.cuda.synchronize(device)
    # Its random numbers are left in the state of a capture that never ends.
    # A capture marks the generator's state as captured until its end. A failed one never got there, so that a fresh
    # copy of the state takes its place.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def random_numbers_drawn(device: torch.device) -> int:
    """Return how far the random numbers of a GPU are; the host does not wait. 0 for other devices."""
    return torch.cuda.default_generators[device.index].get_offset() if device.type == "cuda" else 0


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside: what frees memory of the driver may end a capture."""
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


@contextlib.contextmanager
def streams_unrecorded() -> Iterator[None]:
    """Let memory be reused at once, for a capture that is never replayed."""
    record_stream = torch.Tensor.record_stream
    # In a capture, recorded memory is kept to its end: a dry run would need the memory of all layers at once.
    torch.Tensor.record_stream = lambda tensor, stream: None
    try:
        yield
    finally:
        torch.Tensor.record_stream = record_stream


@contextlib.contextmanager
def random_states_unread(drawn: bool) -> Iterator[None]:
    """Keep torch's activation checkpointing from reading the device's random state, which waits for the device."""
    from torch.utils import checkpoint

    def no_states(*_: object) -> tuple[list, list]:
        if drawn:
            raise RuntimeError("activations are recomputed with random numbers, whose state the host repeats")
        return [], []

    # Reading the state of a CUDA generator copies it to the host, which a capture forbids. Without random numbers the
    # state is not needed, and with them the graph is refused.
    get_device_states = checkpoint.get_device_states
    checkpoint.get_device_states = no_states
    try:
        yield
    finally:
        checkpoint.get_device_states = get_device_states


@contextlib.contextmanager
def masks_as_outside(max_documents: int = 0, padded: bool = False) -> Iterator[None]:
    """Let transformers build the attention mask that it builds without a graph.

    It would make masks of all tokens by all tokens, so that no batch-dependent mask is baked into the graph. That is
    right for padded rows. Else every row is known to be one causal sequence, or to hold documents whose positions count
    from 0.
    """
    from transformers import masking_utils

    def which_document(positions: torch.Tensor) -> torch.Tensor | None:
        return (positions == 0).cumsum(-1) if max_documents else None

    # transformers asks is_tracing and then builds the mask that fits any batch: tokens x tokens booleans, which
    # attention would read at every layer. Told otherwise it drops the mask where rows are causal.
    names = {"is_tracing": lambda *_: padded, "find_packed_sequence_indices": which_document}
    before = {name: getattr(masking_utils, name) for name in names}
    for name, value in names.items():
        setattr(masking_utils, name, value)
    try:
        with documents.fixed(max_documents):
            yield
    finally:
        for name, value in before.items():
            setattr(masking_utils, name, value)


@contextlib.contextmanager
def memory_of_other_streams_reused() -> Iterator[None]:
    """Let a capture use memory again that another stream has read meanwhile, which it otherwise keeps to its end."""
    given = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    setting = "graph_capture_record_stream_reuse"
    # The second is the older name, which newer versions of torch warn of.
    functions = (torch._C, "_accelerator_setAllocatorSettings"), (torch.cuda.memory, "_set_allocator_settings")
    set_allocator = next((getattr(*function) for function in functions if hasattr(*function)), None)
    if setting in given or set_allocator is None:
        yield
        return
    # Settings replace each other as a whole: what the user gave in the environment has to be repeated.
    before = f"{given}," * bool(given)
    try:
        set_allocator(f"{before}{setting}:True")
    except (RuntimeError, ValueError) as error:
        # The setting saves memory only. A graph is right without it, so a torch that lacks it is no error.
        warnings.warn(f"CUDA graphs take more memory with this torch: {error}", stacklevel=2)
        yield
        return
    try:
        yield
    finally:
        # Off again: captures of the user's own keep torch's default.
        set_allocator(f"{before}{setting}:False")


def without_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: the activations of a forward, for one."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
