"""Optimizer steps, and their figures.

A step enqueues work and reads nothing back. Its loss stays on the device until `Steps.read`, which costs a few small
reductions over all ranks and one wait for the device, however many steps were done since the last.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import psutil
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fp8.data import StageData
from ds_fp8.monitor.energy import energy_counter
from ds_fp8.monitor.records import Record
from ds_fp8.train.batches import BatchesAhead
from ds_fp8.train.stage import Stage
from ds_fp8.zero.collectives import allocated_bytes

# After about so long losses are read, and signals looked for, even where nothing is logged: from a signal on, a
# launcher gives ranks 30 s, checkpoint included
SECONDS_UNREAD = 2.0


@dataclass(frozen=True)
class Reading:
    """Figures of the steps since the last reading."""

    losses: list[float]  # Mean loss per label token of every step, in nats, oldest first
    record: Record  # Figures of the last of them; seconds and bytes on the wire are means over all of them


class Steps:
    """Does optimizer steps, and reads their figures when asked to."""

    def __init__(self, stage: Stage, data: StageData, engine: deepspeed.DeepSpeedEngine):
        self._stage, self._engine = stage, engine
        self._batches = BatchesAhead(stage, data, engine.device)
        self._losses: list[torch.Tensor] = []
        self._tokens, self._learning_rate, self._started = 0, 0.0, 0.0
        self._joules = energy_counter(engine.device)
        self._longest_unread = 1

    @property
    def unread(self) -> int:
        return len(self._losses)

    @property
    def overdue(self) -> bool:
        """Return whether steps have gone unread for about SECONDS_UNREAD, by the last reading: as on all ranks."""
        return self.unread >= self._longest_unread

    def do(self, data_step: int) -> None:
        """Do the optimizer step over the batch of a step of the data. Collective; nothing of it is read."""
        engine = self._engine
        if not self._losses:
            self._tokens, self._started = 0, time.perf_counter()
            if engine.fp8.wire is not None:
                engine.fp8.wire.take()  # bytes sent by evaluation do not belong to a step
        step = self._batches.take(data_step)
        # A seed per step, so that a resumed run draws what an uninterrupted one does.
        torch.manual_seed((self._stage.train.seed * 1_000_003 + data_step) * dist.get_world_size() + dist.get_rank())
        self._learning_rate = engine.get_lr()[0]
        # FP64: the sum over micro-batches rounds nothing that shows.
        loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        # Steps made by tokens have as many micro-batches as they need, and DeepSpeed divides by the configured number.
        # What a model adds to the loss of the labels (mixtures) is averaged over micro-batches, too.
        count = len(step.batches)
        share = engine.gradient_accumulation_steps() / count
        for index, batch in enumerate(step.batches, start=1):
            engine.set_gradient_accumulation_boundary(index == count)
            micro_loss = engine(**batch, use_cache=False, num_items_in_batch=step.items).loss
            engine.backward(micro_loss if share == 1 else micro_loss * share)
            engine.step()
            loss += micro_loss.detach().double()
        if not self._losses:
            # A call takes 4 ms: here the device works meanwhile.
            self._drawn = self._joules and self._joules()
        # Kept on the device: `.item()` here would make the host wait for the step before it enqueues the next.
        self._losses.append(loss / (count * dist.get_world_size()))
        self._tokens += step.tokens

    def read(self) -> Reading:
        """Return the figures of the steps since the last reading; there must be one. Collective."""
        engine, count = self._engine, self.unread
        losses = torch.stack(self._losses)
        # One collective for the losses of all steps since the last reading.
        dist.all_reduce(losses)
        # The losses are read first: the clock stops when all of the steps is done.
        means = losses.tolist()
        seconds = (time.perf_counter() - self._started) / count
        # A place for each rank's joules, which the maximum over ranks fills. inf: the rank has no counter.
        drawn = [0.0] * dist.get_world_size()
        drawn[dist.get_rank()] = self._joules() - self._drawn if self._joules else math.inf
        # In FP64, for bytes of memory exceed the integers that FP32 holds exactly.
        most = torch.tensor([*peak_memory(engine.device), seconds, *drawn], dtype=torch.float64, device=engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        memory, reserved, slowest, *drawn = most.tolist()
        # By the slowest rank, agreed above: all ranks read after the same number of steps.
        self._longest_unread = max(1, int(SECONDS_UNREAD / slowest))
        # Reading the meter empties it: what is taken here belongs to the steps since the last reading.
        sent = {} if engine.fp8.wire is None else engine.fp8.wire.take()
        record = {
            "loss": means[-1],
            "learning_rate": self._learning_rate,
            "gradient_norm": float(engine.get_global_grad_norm()),
            "memory_bytes": int(memory),
            "reserved_bytes": int(reserved),
            "skipped_steps": engine.skipped_steps,
            "tokens": self._tokens // count,
            "step_seconds": seconds,
            "tokens_per_second": self._tokens / count / seconds,
            # Of the GPUs of all ranks
            **({"millijoules_per_token": 1e3 * sum(drawn) / self._tokens} if math.isfinite(sum(drawn)) else {}),
            **(engine.fp8.saturation() or {}),
            **{key: value // count for key, value in sent.items()},
        }
        self._losses.clear()
        return Reading(means, record)


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the most bytes so far that this process allocated and that its allocator held; resident ones on a CPU."""
    if device.type != "cpu":
        accelerator, more = get_accelerator(), allocated_bytes()
        return accelerator.max_memory_allocated() + more, accelerator.max_memory_reserved() + more
    # Not getrusage: its peak begins at what the process that started this one held.
    resident = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return resident, resident


def begin_peak_memory() -> int:
    """On a CPU let peak_memory begin anew, and return the bytes of the process without its tensors; else 0."""
    if get_accelerator().device_name() != "cpu":
        return 0
    with contextlib.suppress(OSError):
        # 5 resets the peak of resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    gc.collect()
    # By storage: views of one storage share its bytes, which are counted once.
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu"
    }
    return psutil.Process().memory_info().rss - sum(storages.values())
