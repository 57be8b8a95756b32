"""Streams and events of the accelerator, no-ops on devices without streams; ranges of a step in torch's profiler.

A product waits for its all-gather in `finish` of AllGather.begin (collectives.py), called by Handle.wait (hooks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from deepspeed.accelerator import get_accelerator

_NO_RANGE = nullcontext()
_capture: object | None = None  # stands for the capture of a CUDA graph that is under way


@contextmanager
def capture() -> Iterator[None]:
    """Leave out waits for events from before, which a graph that is captured inside cannot wait for.

    The caller of the replay must let its stream wait for them.
    """
    # A wait for an event from before the capture would make the graph depend on what is not in it: CUDA ends the
    # capture. Inside, events are marked, and only those of the same capture are waited for.
    global _capture
    _capture = object()
    try:
        yield
    finally:
        _capture = None


def new_stream() -> object | None:
    """Return a stream other than the current one; None on a device without streams."""
    return None if get_accelerator().is_synchronized_device() else get_accelerator().Stream()


def current_stream() -> object | None:
    """Return the current stream; None on a device without streams."""
    return None if get_accelerator().is_synchronized_device() else get_accelerator().current_stream()


def on_stream(stream: object | None) -> AbstractContextManager:
    """Enqueue what is inside on `stream`; no-op on a CPU."""
    return nullcontext() if stream is None else get_accelerator().stream(stream)


def record_event() -> object | None:
    """Return an event on the current stream; None on a device without streams."""
    if get_accelerator().is_synchronized_device():
        return None
    event = get_accelerator().Event()
    event.record()
    # An event of a capture marks a place in the graph, and none in time: once the capture has ended nobody may wait for
    # it.
    event.capture = _capture
    return event


def wait_event(event: object | None) -> None:
    """Let the current stream wait for `event`."""
    if event is not None and event.capture is _capture:
        get_accelerator().current_stream().wait_event(event)


def wait_stream(stream: object | None) -> None:
    """Let the current stream wait for all that `stream` holds by now; for nothing where it is None or the same."""
    if stream is not None and stream != get_accelerator().current_stream():
        get_accelerator().current_stream().wait_stream(stream)


def used_by_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of `tensor` from reuse until the current stream has passed this point."""
    if not get_accelerator().is_synchronized_device():
        # [Note: lifetimes across streams] The allocator gives memory back to the stream it was allocated on, as soon as
        # Python drops the tensor: that stream's next kernels may write it while another stream still reads. Two ways
        # out are used here. Either the owner's stream waits for the reader before it reuses the memory (wait_stream),
        # or the tensor is marked as in use by the reader, and the allocator waits for an event there. The second keeps
        # memory longer.
        tensor.record_stream(get_accelerator().current_stream())


class Fetch:
    """A number on its way to the host, copied behind the current stream's work so far."""

    def __init__(self, value: torch.Tensor):
        """Begin to copy `value`, of one element; the host does not wait."""
        self._copied = None
        self._host = value
        if value.device.type == "cuda":
            # Pinned, or the copy would make the host wait. The tensor `value` may be dropped: it was allocated on this
            # stream.
            self._host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._copied = record_event()

    def get(self) -> float:
        """Return the number; the host waits for the copy, and for nothing enqueued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.item()


def profiled(name: str) -> AbstractContextManager:
    """Return a context that a running profiler shows as "ds_fp8: NAME"."""
    # record_function takes its time also where nobody profiles: 15 us on a CPU (torch 2.13), and 0.5 us asked first. A
    # step without graphs has three or four ranges for each module.
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"ds_fp8: {name}")
    return _NO_RANGE
