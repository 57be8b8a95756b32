"""Micro-steps of an engine as CUDA graphs: which ones are captured, when, and why others are not.

All ranks do the same: a graph's collectives are NCCL's, and nobody says that a captured one may meet one that is not.
So before every micro-step they compare what they are about to run, on the host and beside the device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from ds_fp8.engine.capture import (
    before_process_groups_end,
    end_failed_capture,
    masks_as_outside,
    memory_of_other_streams_reused,
    random_states_unread,
    streams_unrecorded,
    without_garbage_collection,
)
from ds_fp8.engine.graph_conditions import (
    COMPILED,
    ITEMS,
    MEASURED,
    Capacities,
    is_compiled,
    rows_in_a_graph,
    why_eager,
    why_not_by_itself,
)
from ds_fp8.engine.health import Health
from ds_fp8.engine.micro_step_graph import MicroStepGraph
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.zero import seams, streams
from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.parameter_gather import ParameterGather
from ds_fp8.zero.seams.micro_step import MicroStep
from ds_fp8.zero.wire import WireMeter

EAGER_STEPS = 2
"""Micro-steps of a kind that run eagerly before one is captured: kernels are compiled, memory is allocated in them."""

HEADROOM = 0.03
"""Share of the GPU's memory that must be free beside graphs, or there are none."""

MOST_GRAPHS = 8
"""Kinds of micro-steps that are captured: every graph keeps buffers of its own."""


class MicroStepGraphs:
    """Takes the place of calling an engine's module: eager at first, and replayed where a micro-step repeats."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        gradients: GradientShards,
        gather: ParameterGather | None,
        wire: WireMeter,
        health: Health,
        monitor: CastMonitor,
        known_only: bool,
    ):
        """Install the graphs; `why_no_graphs` must have returned None.

        Args:
            engine: Of ZeRO stage 3.
            gradients: What its reductions add to.
            gather: What gathers its weights in FP8, if anything does.
            wire: Counts the bytes.
            health: Says what there is to say.
            monitor: Measured steps run eagerly.
            known_only: Whether nothing is captured of models with code of others, also where it came later.
        """
        self._engine, self._gather, self._health, self._monitor = engine, gather, health, monitor
        self._device, self._known_only = engine.device, known_only
        self._micro_step = MicroStep(engine)
        self._gradients, self._wire = gradients, wire
        self._stock: Callable[..., Any] = engine.module._call_impl
        self.off: str | None = None
        """Why nothing is captured any more."""
        self._graphs: dict[object, MicroStepGraph] = {}
        self._seen: dict[object, int] = {}
        self._capacities = Capacities()
        self._said: set[str] = set()
        self._pool: object | None = None
        self.kept_bytes = 0
        """Memory of the graphs' own."""
        # NCCL would have all ranks exchange addresses in a capture, where one may fail.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        self._group = torch.distributed.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._stream = torch.cuda.Stream(engine.device)
        seams.replace(engine, engine.module, "_call_impl", self)
        self._evaluated = False
        seams.on_step(engine, self._end_where_compiled)
        seams.on_destroy(engine, self._destroy)
        self._ends_by_itself = before_process_groups_end(self._forget_graphs)

    def __reduce__(self) -> tuple:
        # A copy of a model under training has no engine, and computes by itself.
        return _plain_call, (self._engine.module,)

    @property
    def captured(self) -> int:
        """Return how many kinds of micro-steps are captured."""
        return len(self._graphs)

    @property
    def _pending(self) -> bool:
        return any(graph.pending for graph in self._graphs.values())

    def reset(self) -> None:
        """Forget all graphs: what they were captured from has changed."""
        self._forget_graphs()
        self._seen.clear()

    def _end_where_compiled(self) -> None:
        """Say after a step that a module compiled after the start leaves the graphs out."""
        if self.off is None and is_compiled(self._engine.module):
            self.reset()
            self.off = COMPILED
            self._health.say(f"CUDA graphs are off: {self.off}")

    def _forget_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._pool, self.kept_bytes = None, 0

    def _destroy(self) -> None:
        self.reset()
        self._ends_by_itself()
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: computed by a graph, or eagerly where there is none for this call."""
        if torch.compiler.is_compiling() or self.off is not None:
            return self._stock(*args, **kwargs)
        if not (self._engine.module.training and torch.is_grad_enabled()):
            self._evaluated = True
            self._make_room()
            return self._stock(*args, **kwargs)
        if isinstance(kwargs.get(ITEMS), (int, float)):  # a number would be part of the graph
            kwargs[ITEMS] = torch.tensor(float(kwargs[ITEMS]))
        if torch.is_tensor(kwargs.get(ITEMS)):
            kwargs[ITEMS] = kwargs[ITEMS].to(self._device)
        why, kind, graph, held = why_eager(self._engine, self._monitor, args, kwargs), None, None, 0
        if why is None:
            held, why = rows_in_a_graph(self._engine.module, kwargs)
        if why is None and self._micro_step.reduced_later:
            why = "gradients are reduced later"
        if why is None:
            # A mask is of ones only, and then transformers leaves it out as well.
            batch = {name: value for name, value in kwargs.items() if name != "attention_mask"}
            kind = self._kind(batch)
            graph = self._graphs.get(kind)
            if self._pending:  # all graphs share their memory
                why = "a forward ran before the backward of another"
        number = 0 if why is not None else zlib.crc32(repr(kind).encode()) + 1
        usable = graph is not None and graph.addresses == self._addresses()
        lowest, highest, usable, most_held = self._least(number, -number, usable, -held)
        if not number or lowest != -highest:
            if why != MEASURED:
                self._say(f"without CUDA graphs: {why or 'other ranks have batches of other shapes, or run eagerly'}")
            return self._aside(args, kwargs)
        most = self._capacities.take(kind, -most_held)
        if not (usable and graph.most >= -most_held):
            seen = kind, most > 0  # packed rows have kernels of their own
            self._seen[seen] = self._seen.get(seen, 0) + 1
            evaluated, self._evaluated = self._evaluated, False  # DeepSpeed may follow the order of that now
            if self._seen[seen] <= EAGER_STEPS or evaluated or not self._micro_step.ready:
                return self._aside(args, kwargs)
            if graph is None and len(self._graphs) == MOST_GRAPHS:
                self._say(f"without CUDA graphs: batches of {MOST_GRAPHS} shapes are captured already")
                return self._aside(args, kwargs)
            if graph is not None:  # more documents; or a checkpoint was loaded, and all of them read elsewhere now
                self._forget_graphs()
            graph = self._captured(kind, batch, most)
            if graph is None:
                return self._stock(*args, **kwargs)
        self._settle()
        self._micro_step.start_clock()
        return graph.replay(batch)

    def _least(self, *numbers: int) -> list[int]:
        """Return the least of every number over all ranks. The host waits for the other hosts, for no device."""
        if self._group is None:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return found.tolist()

    def _addresses(self) -> tuple[int, ...]:
        """Return where all lies that a graph reads and writes besides its own memory."""
        gather = self._gather
        if gather is None:
            return self._micro_step.addresses(lambda parameter: False)
        return (*self._micro_step.addresses(gather.gathers), *gather.addresses())

    @contextlib.contextmanager
    def _capturing(self, most: int, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is enqueued inside, on DeepSpeed's streams too; for up to `most` documents of packed rows."""
        sides = self._micro_step.side_streams()
        # Other threads (NCCL's watchdog, the loader of batches) may go on calling CUDA.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        unthrottled, masks = self._micro_step.unthrottled(), masks_as_outside(most)
        with captured, streams.capture(), unthrottled, masks, random_states_unread():
            for side in sides:
                side.wait_stream(self._stream)
            yield
            for side in sides:
                self._stream.wait_stream(side)

    def _settle(self) -> None:
        """Bring parameters and shards to the state in which graphs begin, on the current stream."""
        self._micro_step.settle()
        gather = self._gather
        if gather is not None:
            gather.settle()

    def _captured(self, kind: object, batch: Mapping[str, Any], most: int) -> MicroStepGraph | None:
        """Capture a kind of micro-step; where a rank cannot, nothing is captured any more, on all ranks."""
        gather = self._gather
        self._settle()
        if gather is not None:
            gather.pin_scales()
        state, error = self._micro_step.remember(), None
        try:
            why = why_not_by_itself(self._engine.module) if self._known_only else None
            if why is not None:
                raise ValueError(why)
            with without_garbage_collection():
                # Once in vain: with memory reused, torch ends the process where a capture of backward fails.
                pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
                with streams_unrecorded():
                    self._graph(batch, most).close()
                self._pool = pool
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved(self._device)
                with memory_of_other_streams_reused():
                    graph = self._graph(batch, most)
            kept = torch.cuda.memory_reserved(self._device) - before
            self._check_room(graph, kept)
        except Exception as found:  # whatever a model does that no graph can hold: it is said, and runs eagerly
            error = found
            while error.__context__ is not None:  # what ended the capture, and not that it had ended
                error = error.__context__
            end_failed_capture(self._device)
            if gather is not None:
                gather.forget_gathered()
            self._micro_step.abandon()
            self._micro_step.restore(state)
        if not self._least(error is None)[0]:
            self.reset()
            self.off = "another rank failed" if error is None else _in_one_line(error)
            error = _without_frames(error)
            self._health.say(f"CUDA graphs are off: {self.off}")
            return None
        self._graphs[kind] = graph
        self.kept_bytes += kept
        self._say(f"forward and backward run as CUDA graphs from here on, which keep {kept / 2**30:.2f} GiB")
        return graph

    def _graph(self, batch: Mapping[str, Any], most: int) -> MicroStepGraph:
        addresses, capturing = self._addresses(), functools.partial(self._capturing, most)
        return MicroStepGraph(
            self._stock, batch, most, self._micro_step, self._gradients, self._wire, addresses, capturing
        )

    def _kind(self, kwargs: Mapping[str, Any]) -> object:
        """Return what two micro-steps have in common that one graph can run."""
        batch = tuple(
            (name, tuple(value.shape), value.dtype, value.device.type) if torch.is_tensor(value) else (name, value)
            for name, value in sorted(kwargs.items())
        )
        accumulates = self._micro_step.accumulates
        # Gradients that arrive for the first time in a step are added to zeros, which clears them before.
        arrived = sorted(self._gradients.arrived) if accumulates else None
        return batch, accumulates, arrived and tuple(arrived), self._micro_step.trained, self._micro_step.training

    def _aside(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call the module on the stream that graphs are captured on.

        Autograd adds a gradient up on the stream that its parameter was first used on, and remembers that for as long
        as somebody holds the loss of an earlier step. A capture must not come upon another stream there.
        """
        self._make_room()
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            output = self._stock(*args, **kwargs)
        outside.wait_stream(self._stream)
        return output

    def _check_room(self, graph: MicroStepGraph, kept: int) -> None:
        """Raise torch.OutOfMemoryError where a new graph leaves little memory for what is not part of it: the step."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        if free < HEADROOM * total:
            graph.close()
            raise torch.OutOfMemoryError(
                f"graphs would keep {(self.kept_bytes + kept) / 2**30:.2f} GiB and leave {free / 2**30:.2f} free"
            )

    def _make_room(self) -> None:
        """Free the graphs where their memory is needed to compute eagerly what they compute. They are captured again.

        Their pool keeps the activations of one micro-step, and nothing outside of it is allocated there.
        """
        if not self._graphs or self._pending:
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        if free + reserved - allocated - self.kept_bytes < self.kept_bytes:
            self._forget_graphs()
            torch.cuda.empty_cache()

    def _say(self, line: str) -> None:
        if line not in self._said:  # once: it may be so at every step
            self._said.add(line)
            self._health.say(line)


def _plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    return types.MethodType(torch.nn.Module._call_impl, module)


def _without_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: the activations of a forward, for one."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
