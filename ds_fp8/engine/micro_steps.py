"""Micro-steps of an engine as CUDA graphs: which ones are captured, when, and why others are not.

All ranks do the same: a graph's collectives are NCCL's, and nobody says that a captured one may meet one that is not.
So before every micro-step they compare what they are about to run, on the host and beside the device.
"""

from __future__ import annotations

import os
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch

from ds_fp8.engine.capture import before_process_groups_end, end_failed_capture, random_numbers_drawn
from ds_fp8.engine.captured_graphs import MOST_EVICTIONS, CapturedGraphs
from ds_fp8.engine.eager_forwards import EagerForwards
from ds_fp8.engine.graph_conditions import (
    COMPILED,
    ITEMS,
    MEASURED,
    SAVED_ELSEWHERE,
    Capacities,
    is_compiled,
    rows_in_a_graph,
    why_eager,
    why_not_by_itself,
)
from ds_fp8.engine.health import Health
from ds_fp8.engine.known_code import fingerprint
from ds_fp8.engine.micro_step_graph import MicroStepGraph
from ds_fp8.engine.rank_agreement import RankAgreement
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.zero import seams
from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.parameter_gather import ParameterGather
from ds_fp8.zero.seams.micro_step import MicroStep
from ds_fp8.zero.wire import WireMeter

EAGER_STEPS = 2
"""Micro-steps of a kind that run eagerly before one is captured: kernels are compiled, memory is allocated in them."""

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
            engine: Engine of ZeRO stage 3.
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
        """Reason for which nothing is captured any more."""
        self._graphs = CapturedGraphs(engine.device, self._micro_step)
        self._seen: dict[object, int] = {}
        self._capacities = Capacities()
        self._said: set[str] = set()
        self._eager = EagerForwards()
        self._draws = False
        """True once a forward has drawn random numbers."""
        self._code = 0
        """Fingerprint of the model's code at the last micro-step that could be a graph."""
        # NCCL would have all ranks exchange addresses in a capture, where one may fail.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        self._agreement = RankAgreement(engine.device)
        seams.replace(engine, engine.module, "_call_impl", self)
        self._evaluated = self._captured_once = False
        seams.on_step(engine, self._end_where_compiled)
        seams.before_load(engine, self.reset)
        seams.on_destroy(engine, self._destroy)
        before_process_groups_end(self._graphs.forget)

    def __reduce__(self) -> tuple:
        # A copy of a model under training has no engine, and computes by itself.
        return _plain_call, (self._engine.module,)

    @property
    def captured(self) -> int:
        """Return how many kinds of micro-steps are captured."""
        return len(self._graphs)

    @property
    def kept_bytes(self) -> int:
        """Return the memory of the graphs' own."""
        return self._graphs.kept_bytes

    def reset(self) -> None:
        """Forget all graphs: what they were captured from has changed, or is about to."""
        self._graphs.forget()
        self._seen.clear()

    def _end(self, why: str) -> None:
        """Capture nothing any more, and say so. On all ranks alike."""
        self.reset()
        self.off = why
        self._health.say(f"CUDA graphs are off: {why}")

    def _end_where_compiled(self) -> None:
        """Say after a step that a module compiled after the start leaves the graphs out."""
        if self.off is None and is_compiled(self._engine.module):
            self._end(COMPILED)

    def _destroy(self) -> None:
        self.reset()
        self._agreement.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: computed by a graph, or eagerly where there is none for this call."""
        if torch.compiler.is_compiling() or self.off is not None:
            return self._stock(*args, **kwargs)
        if not (self._engine.module.training and torch.is_grad_enabled()):
            self._evaluated = True
            self._graphs.make_room(_tokens(kwargs), evaluates=True)
            return self._stock(*args, **kwargs)
        if isinstance(kwargs.get(ITEMS), (int, float)):  # a number would be part of the graph
            kwargs[ITEMS] = torch.tensor(float(kwargs[ITEMS]))
        if torch.is_tensor(kwargs.get(ITEMS)):
            kwargs[ITEMS] = kwargs[ITEMS].to(self._device)
        pending = self._graphs.pending or self._eager.pending
        why, held = self._why_eager(args, kwargs, pending)
        # A mask is of ones only, and then transformers leaves it out as well.
        batch = {name: value for name, value in kwargs.items() if name != "attention_mask"}
        kind, graph = None, None
        if why is None:
            self._forget_other_code()
            kind = self._kind(batch)
            graph = self._graphs.get(kind)
        number = 0 if why is not None else zlib.crc32(repr(kind).encode()) + 1
        usable = graph is not None and graph.addresses == self._addresses()
        one_by_one = not pending or self._captured_once
        lowest, highest, usable, most_held, one_by_one = self._agreement.least(
            number, -number, usable, -held, one_by_one
        )
        if not one_by_one:  # before anything is captured: it is how this training goes
            self._end("one backward has the losses of several forwards")
            return self._stock(*args, **kwargs)
        if not number or lowest != -highest:
            if why != MEASURED:
                self._say(f"without CUDA graphs: {why or 'other ranks have batches of other shapes, or run eagerly'}")
            return self._launched(args, kwargs, why == SAVED_ELSEWHERE)
        most = self._capacities.take(kind, -most_held)
        if not (usable and graph.most >= -most_held):
            if not self._to_be_captured(kind, most, graph):
                return self._launched(args, kwargs)
            # Those that there are keep less memory than a second pool, or read elsewhere now.
            if graph is not None:
                self._graphs.forget()
            graph = self._captured(kind, batch, most)
            if graph is None:
                return self._stock(*args, **kwargs)
        self._settle()
        self._micro_step.start_clock()
        return self._graphs.replay(graph, batch)

    def _why_eager(self, args: tuple, kwargs: Mapping[str, Any], pending: bool) -> tuple[str | None, int]:
        """Return why this rank cannot run a micro-step as a graph, or None; and the documents of packed rows."""
        module, held = self._engine.module, 0
        why = why_eager(self._micro_step.modules, self._monitor, self._device, args, kwargs)
        if why is None:
            held, why = rows_in_a_graph(module, kwargs)
        if why is None and self._micro_step.reduced_later:
            why = "gradients are reduced later"
        if why is None and pending:
            # A replay adds its gradients to none of another forward's, and all graphs share their memory.
            why = "a forward ran before the backward of another"
        return why, held

    def _to_be_captured(self, kind: object, most: int, graph: MicroStepGraph | None) -> bool:
        """Return whether a micro-step of a kind is captured now, for which all ranks must be ready."""
        seen = kind, most > 0  # packed rows have kernels of their own
        self._seen[seen] = self._seen.get(seen, 0) + 1
        evaluated, self._evaluated = self._evaluated, False  # DeepSpeed may follow the order of that now
        ready = self._seen[seen] > EAGER_STEPS and not evaluated and self._micro_step.ready
        room = graph is not None or len(self._graphs) < MOST_GRAPHS
        ready, room, memory = self._agreement.least(ready, room, self._graphs.evictions < MOST_EVICTIONS)
        if not memory:
            self._end("they were freed again and again, for memory that is short or a model that changes")
        elif not room:
            self._say(f"without CUDA graphs: batches of {MOST_GRAPHS} shapes are captured already")
        return bool(ready and room and memory)

    def _addresses(self) -> tuple[int, ...]:
        """Return where all lies that a graph reads and writes besides its own memory."""
        gather = self._gather
        if gather is None:
            return self._micro_step.addresses(lambda parameter: False)
        return (*self._micro_step.addresses(gather.gathers), *gather.addresses())

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

        def make(capturing: Callable) -> MicroStepGraph:
            addresses = self._addresses()
            return MicroStepGraph(
                self._stock, batch, most, self._micro_step, self._gradients, self._wire, addresses, capturing
            )

        try:
            why = why_not_by_itself(self._engine.module) if self._known_only else None
            if why is not None:
                raise ValueError(why)
            graph, kept = self._graphs.capture(make, most, self._draws)
        except BaseException as found:  # whatever a model does that no graph can hold: it is said, and runs eagerly
            error = found
            while error.__context__ is not None:  # what ended the capture, and not that it had ended
                error = error.__context__
            end_failed_capture(self._device)
            if gather is not None:
                gather.forget_gathered()
            self._micro_step.abandon()
            self._micro_step.restore(state)
            if not isinstance(found, Exception):  # the user's interrupt
                error = None
                raise
        if not self._agreement.least(error is None)[0]:
            why = "another rank failed" if error is None else _in_one_line(error)
            error = _without_frames(error)
            self._end(why)
            return None
        self._graphs.add(kind, graph, kept, _tokens(batch))
        self._captured_once = True
        self._say(f"forward and backward run as CUDA graphs from here on, which keep {kept / 2**30:.2f} GiB")
        return graph

    def _kind(self, kwargs: Mapping[str, Any]) -> object:
        """Return what two micro-steps have in common that one graph can run, on all ranks alike."""
        batch = tuple(
            (name, tuple(value.shape), value.dtype, value.device.type) if torch.is_tensor(value) else (name, value)
            for name, value in sorted(kwargs.items())
        )
        accumulates = self._micro_step.accumulates
        # Gradients that arrive for the first time in a step are added to zeros, which clears them before.
        arrived = sorted(self._gradients.arrived) if accumulates else None
        return batch, accumulates, arrived and tuple(arrived), self._micro_step.trained, self._micro_step.training

    def _forget_other_code(self) -> None:
        """Free the graphs of a model whose hooks or settings have been changed since, on this rank."""
        config = getattr(self._engine.module, "config", None)
        code = fingerprint(self._micro_step.modules, self._micro_step.parameters, config)
        if code != self._code:
            if len(self._graphs):
                self._graphs.evict()
            self._seen.clear()
            self._code, self._draws = code, False

    def _launched(self, args: tuple, kwargs: Mapping[str, Any], where_called: bool = False) -> Any:
        """Call the module, on the caller's stream if `where_called`; remember until its backward that it has run."""
        self._graphs.make_room(_tokens(kwargs), evaluates=False)
        drawn = random_numbers_drawn(self._device)
        output = self._stock(*args, **kwargs) if where_called else self._aside(args, kwargs)
        self._draws = self._draws or random_numbers_drawn(self._device) != drawn
        self._eager.add(output)
        return output

    def _aside(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call the module on the stream that graphs are captured on.

        Autograd adds a gradient up on the stream that its parameter was first used on, and remembers that for as long
        as somebody holds the loss of an earlier step. A capture must not come upon another stream there.
        """
        outside, stream = torch.cuda.current_stream(self._device), self._graphs.stream
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            output = self._stock(*args, **kwargs)
        outside.wait_stream(stream)
        return output

    def _say(self, line: str) -> None:
        if line not in self._said:  # once: it may be so at every step
            self._said.add(line)
            self._health.say(line)


def _plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    return types.MethodType(torch.nn.Module._call_impl, module)


def _tokens(kwargs: Mapping[str, Any]) -> int:
    """Return the tokens of a batch, 0 where that is not known."""
    given = (kwargs.get(name) for name in ("input_ids", "labels", "inputs_embeds"))
    return next((value.shape[:2].numel() for value in given if torch.is_tensor(value)), 0)


def _without_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: the activations of a forward, for one."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
