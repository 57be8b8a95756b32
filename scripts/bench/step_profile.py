"""Profiles of a training step: how often its host waits for the GPU, and what the GPU is busy with."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from common import device, print_table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

# Events of a profile in which the host waits for the GPU; the last is .item() and what reads a tensor like it
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
KERNELS = 15  # Kinds of kernels to list, by their time

Interval = tuple[float, float]

# Part of a step -> the range of the profile that its kernels lie in
MARKS = {"head and loss": "ds_fp8: head and loss", "optimizer": "ds_fp8: optimizer"}

# Part of a step -> what the names of its other kernels hold; the first that fits. This library's kernels in Triton have
# names that begin with an underscore.
NAMED = {
    "attention": r"fmha|flash|sdpa|attention",
    "products": r"nvjet|gemm|cutlass|cublas|splitk",
    "copies": r"memcpy|memset|copy|catarray|fill|elementwise",
    "casts, norms, rotary": r"^_|triton|quantize|cast|rms_norm|rotary|transpose",
}

PARTS = (*NAMED, *MARKS, "other")


def profiled(run: Callable[[], None], trace: str | None = None) -> dict[str, Any]:
    """Profile one run, which ends with the GPU: waits by kind and caller, and the GPU's time."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device().type == "cuda")
    with profile(activities=activities) as profiler, callers_of_waits() as callers:
        run()
    events = profiler.events()
    if trace:
        profiler.export_chrome_trace(trace)
    counts = Counter(event.name for event in events)
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels, marks = [], {part: [] for part in MARKS}
    for event in on_gpu:
        interval = event.time_range.start, event.time_range.end
        part = next((part for part, mark in MARKS.items() if event.name == mark), None)
        if part:
            marks[part].append(interval)
        elif not getattr(event, "is_user_annotation", False):
            kernels.append((event.name, *interval))
    return {
        "waits": {name: counts[name] for name in WAITS},
        "callers": dict(callers),
        "kernels": longest_kernels(kernels),
        "split": split_of_step(kernels, marks) if kernels else None,
    }


@contextlib.contextmanager
def marked(engine: Any) -> Iterator[None]:
    """Mark the head with its loss, and the optimizer step, of a DeepSpeed engine in profiles taken meanwhile."""
    head, stepping = engine.module.get_output_embeddings(), engine.step
    ranges = []

    def begin(*_: Any) -> None:
        ranges.append(record_function(MARKS["head and loss"]))
        ranges[-1].__enter__()

    def end(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    def step(*arguments: Any, **words: Any) -> Any:
        with record_function(MARKS["optimizer"]):
            return stepping(*arguments, **words)

    hooks = head.register_forward_pre_hook(begin), head.register_forward_hook(end)
    engine.step = step
    try:
        yield
    finally:
        engine.step = stepping
        for hook in hooks:
            hook.remove()


def split_of_step(kernels: list[tuple[str, float, float]], marks: Mapping[str, list[Interval]]) -> dict[str, float]:
    """Return the milliseconds of each part of a step, from kernels (name, start, end in microseconds).

    Kernels within a range of `marks` belong to its part, whatever their names. "exposed gather" and "exposed reduce":
    only NCCL runs (an all-gather, else anything else); "idle": nothing runs; "span": the whole. Parts that run at the
    same time are counted twice.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    gathers, reductions, others = [], [], []
    for name, start, end in kernels:
        if "nccl" in name.lower():
            (gathers if "allgather" in name.lower() else reductions).append((start, end))
            continue
        others.append((start, end))
        within = (part for part, ranges in marks.items() if any(low <= start < high for low, high in ranges))
        named = (part for part, pattern in NAMED.items() if re.search(pattern, name.lower()))
        parts[next(within, None) or next(named, "other")] += end - start
    computing, reducing = covered(others), covered([*others, *reductions])
    busy = covered([*others, *reductions, *gathers])
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    parts |= {"exposed gather": busy - reducing, "exposed reduce": reducing - computing, "idle": span - busy}
    return {part: microseconds / 1e3 for part, microseconds in {"span": span, **parts}.items()}


def longest_kernels(kernels: list[tuple[str, float, float]]) -> list[tuple[str, int, float]]:
    """Return name, calls and ms of the kernels (name, start, end in microseconds) that take most of the time."""
    by_name: dict[str, list[float]] = {}
    for name, start, end in kernels:
        short = name.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].removeprefix("void ")
        by_name.setdefault(short[:60], []).append(end - start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    return [(name, len(times), sum(times) / 1e3) for name, times in longest]


def covered(intervals: Iterable[Interval]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextlib.contextmanager
def callers_of_waits() -> Iterator[Counter[str]]:
    """Count each wait for an event, a stream or the device that Python code asks for, by the function that does."""
    callers: Counter[str] = Counter()
    waits = [(torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize")]
    before = [getattr(owner, name) for owner, name in waits]

    def counting(wait: Any) -> Any:
        def counted(*arguments: Any, **words: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back and frame.f_globals["__name__"].startswith(("torch", "deepspeed.accelerator")):
                frame = frame.f_back
            callers[f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"] += 1
            return wait(*arguments, **words)

        return counted

    try:
        for (owner, name), wait in zip(waits, before, strict=True):
            setattr(owner, name, counting(wait))
        yield callers
    finally:
        for (owner, name), wait in zip(waits, before, strict=True):
            setattr(owner, name, wait)


def print_profiles(profiles: Mapping[str, dict[str, Any]], layers: int) -> None:
    print_table(
        f"how often the host waits in one step ({layers} layers)",
        ("variant", *WAITS),
        [(variant, *found["waits"].values()) for variant, found in profiles.items()],
    )
    print_table(
        "who asks for waits in Python",
        ("variant", "function", "times"),
        [(variant, *caller) for variant, found in profiles.items() for caller in found["callers"].items()],
    )
    split = {variant: found["split"] for variant, found in profiles.items() if found["split"]}
    if not split:
        return
    print_table(
        "where the time of rank 0's GPU goes in one step, ms",
        ("variant", *next(iter(split.values()))),
        [(variant, *parts.values()) for variant, parts in split.items()],
    )
    print_table(
        "its kernels",
        ("variant", "kernel", "times", "ms"),
        [(variant, *kernel) for variant in split for kernel in profiles[variant]["kernels"]],
    )
