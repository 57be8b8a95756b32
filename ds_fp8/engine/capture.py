"""Circumstances of the capture of a CUDA graph: memory, and decisions that others take from what they see."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_fp8.layers import documents

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_before_the_end: list[Callable[[], None]] = []


def before_process_groups_end(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` before torch.distributed ends process groups, and before the process ends.

    NCCL ends no communicator while a graph that it is captured in exists: it would wait for ever.

    Returns:
        What takes this back.
    """
    if not hasattr(torch.distributed.destroy_process_group, "calls_first"):
        torch.distributed.destroy_process_group = _calling_first(torch.distributed.destroy_process_group)
    _before_the_end.append(callback)
    atexit.register(callback)

    def take_back() -> None:
        _before_the_end.remove(callback)
        atexit.unregister(callback)

    return take_back


def _calling_first(destroy_process_group: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy_process_group)
    def destroy(*args: Any, **kwargs: Any) -> None:
        for callback in list(_before_the_end):
            callback()
        destroy_process_group(*args, **kwargs)

    destroy.calls_first = True
    return destroy


def end_failed_capture(device: torch.device) -> None:
    """Bring torch back to work after a capture that ended in an error."""
    torch.cuda.synchronize(device)
    # Its random numbers are left in the state of a capture that never ends.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside: what frees memory of the driver may end a capture."""
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
    torch.Tensor.record_stream = lambda tensor, stream: None
    try:
        yield
    finally:
        torch.Tensor.record_stream = record_stream


@contextlib.contextmanager
def random_states_unread() -> Iterator[None]:
    """Keep torch's activation checkpointing from reading the device's random state, which waits for the device.

    For models that draw no random numbers in what is recomputed.
    """
    from torch.utils import checkpoint

    get_device_states = checkpoint.get_device_states
    checkpoint.get_device_states = lambda *_: ([], [])
    try:
        yield
    finally:
        checkpoint.get_device_states = get_device_states


@contextlib.contextmanager
def masks_as_outside(most: int = 0) -> Iterator[None]:
    """Let transformers build the attention mask that it builds without a graph.

    It would make masks of all tokens by all tokens, lest a graph bake in what it reads of a batch. Here every row is
    known to be one causal sequence, or to hold documents whose positions count from 0.

    Args:
        most: A bound of the number of documents of a batch, which "packed" attention reads from the positions at every
            replay; 0 where every row is one.
    """
    from transformers import masking_utils

    def which_document(positions: torch.Tensor) -> torch.Tensor | None:
        return (positions == 0).cumsum(-1) if most else None

    names = {"is_tracing": lambda *_: False, "find_packed_sequence_indices": which_document}
    before = {name: getattr(masking_utils, name) for name in names}
    for name, value in names.items():
        setattr(masking_utils, name, value)
    try:
        with documents.fixed(most):
            yield
    finally:
        for name, value in before.items():
            setattr(masking_utils, name, value)


@contextlib.contextmanager
def memory_of_other_streams_reused() -> Iterator[None]:
    """Let a capture use memory again that another stream has read meanwhile, which it otherwise keeps to its end."""
    given = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    setting = "graph_capture_record_stream_reuse"
    if setting in given or not hasattr(torch.cuda.memory, "_set_allocator_settings"):
        yield
        return
    before = f"{given}," * bool(given)
    try:
        torch.cuda.memory._set_allocator_settings(f"{before}{setting}:True")
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"CUDA graphs take more memory with this torch: {error}", stacklevel=2)
        yield
        return
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(f"{before}{setting}:False")
