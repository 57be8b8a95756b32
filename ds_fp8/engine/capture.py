"""Circumstances of the capture of a CUDA graph: memory, and decisions that others take from what they see."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator

import torch

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


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
def masks_as_outside() -> Iterator[None]:
    """Let transformers build the attention mask that it builds without a graph.

    It would make masks of all tokens by all tokens, lest a graph bake in what it reads of a batch. Here every row is
    known to be one causal sequence.
    """
    from transformers import masking_utils

    names = {"is_tracing": lambda *_: False, "find_packed_sequence_indices": lambda *_, **__: None}
    before = {name: getattr(masking_utils, name) for name in names}
    for name, value in names.items():
        setattr(masking_utils, name, value)
    try:
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
