"""The driver of an engine's CUDA graphs: decides on all ranks what happens with each micro-batch.

    WARM ---> READY ---> CAPTURED      state of a shape, by facts of all ranks
      |                     |
      +------> EAGER <------+          a capture failed, or this call cannot be a graph: with the reason

A shape is WARM until enough of its micro-batches have run eagerly: kernels are compiled, memory is allocated. A graph
that is freed (memory, a load, code that has changed) leaves its shape READY or WARM again. The state is not stored but
found anew for each micro-batch (`Shape.agree`): what one rank frees by itself counts for all.

All ranks do the same: NCCL does not document that a captured collective may match an eager one on another rank. So
before each micro-batch they compare facts on the host, and `decide` acts on what holds on all of them. A replay passes
_describe (conditions.py), _agree, MicroBatchGraph.replay (replay.py), MicroStep (zero/deepspeed/micro_step.py).
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_fp8.graphs import agreement, conditions
from ds_fp8.graphs.agreement import Action, Facts, State
from ds_fp8.graphs.capture import GraphPool, before_process_groups_end, process_groups_may_end, random_numbers_drawn
from ds_fp8.graphs.replay import Call, Forward, MicroBatchGraph, Shape, watched
from ds_fp8.layers.attention import documents
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.zero.deepspeed.hooks import Hooks
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from ds_fp8.zero.deepspeed.patches import on_destroy, replace

EAGER_STEPS = 2  # micro-batches of a shape that run eagerly before one is captured
UNORDERED_STEPS = 6  # the same where DeepSpeed never learns the order of modules: forwards without gradients between
MAX_GRAPHS = 8  # shapes that are captured: every graph keeps separate buffers
MOST_SHAPES = 512  # shapes that are remembered before those without graphs are forgotten
MAX_CHANGES = 3  # changes of a captured model's code or settings, or failed captures, after which all graphs end
PAID_AFTER = 50  # replays that save more time than a capture takes; graphs freed sooner for memory end

UNCHECKED = "CUDA graphs continue unchecked: too little memory is free for an eager forward next to them"
MANY_SHAPES = f"without CUDA graphs: batches have more than {MAX_GRAPHS} shapes; one that comes often is captured"
OTHERS_DIFFER = "other ranks have batches of other shapes, or run eagerly"


class _Differentiates(Exception):
    """A forward reads what it has saved: it computes gradients of its own."""


class GraphDriver:
    """Takes the place of calling an engine's module: eager at first, and replayed where a micro-batch repeats."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        micro_step: MicroStep,
        say: Callable[[str], None],
        monitor: CastMonitor,
        auto: bool,
    ):
        self.off: str | None = None  # why nothing is captured any more
        self._engine, self._micro_step, self._say, self._monitor = engine, micro_step, say, monitor
        self._auto = auto
        self._call_module: Callable[..., Any] = engine.module._call_impl
        self._pool = GraphPool(micro_step)
        self._shapes: dict[object, Shape] = {}  # by the signature of their micro-batches
        self._eager_forwards: list[weakref.ref[Forward]] = []
        self._logged: set[str] = set()
        self._code = 0  # fingerprint of the model's code at the last call that could be a graph
        self._unknown_code: str | None = None
        self._changed_attribute: str | None = None  # of a module of unknown code, that a forward has changed
        self._draws = False  # a forward has drawn random numbers
        self._differentiates = False  # a forward computes gradients of its own
        # On this rank; all ranks end their graphs with the next micro-batch.
        self._changes = 0  # of a captured model's code or settings
        self._freed_too_soon = False  # a graph was freed for memory before it had paid for its capture
        self._evaluated = False  # since the last eager micro-batch
        self._captured_once = False
        self._group = agreement.group_of_all_ranks(engine.device)
        replace(engine, engine.module, "_call_impl", self)
        Hooks.of(engine).after_step.append(self._end_where_compiled)
        Hooks.of(engine).before_load.append(self.reset)
        on_destroy(engine, self._destroy)
        before_process_groups_end(self)

    def __reduce__(self) -> tuple:
        # A copy of a model under training has no engine, and computes by itself.
        return functools.partial, (torch.nn.Module._call_impl, self._engine.module)

    @property
    def captured(self) -> int:
        return len(self._graphs)

    @property
    def kept_bytes(self) -> int:
        return sum(graph.kept_bytes for graph in self._graphs)

    @property
    def replays(self) -> int:
        """Return the number of replays since graphs were last freed."""
        return sum(graph.schedule.replays for graph in self._graphs)

    @property
    def _graphs(self) -> list[MicroBatchGraph]:
        return [shape.graph for shape in self._shapes.values() if shape.graph is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: computed by a graph, or eagerly where there is none for this call."""
        if torch.compiler.is_compiling() or self.off is not None:
            return self._call_module(*args, **kwargs)
        if not (self._engine.module.training and torch.is_grad_enabled()):
            self._evaluated = True
            self._give_way(self.kept_bytes // 4)  # an evaluation keeps nothing between layers, but has logits
            return self._call_module(*args, **kwargs)
        call = self._describe(args, kwargs)
        action, reason = self._agree(call)
        # A capture computes nothing. Decided again: a new graph is checked before its first replay.
        if action is Action.CAPTURE and self._capture(call):
            action, reason = self._agree(call)
        if action is Action.END:
            self._end(reason)
        elif reason is not None:
            self._log(f"without CUDA graphs: {reason}")
        if action is Action.REPLAY:
            return self._replay(call)
        if action is Action.CHECK:
            return self._check(call)
        if self.off is not None:
            return self._call_module(*args, **kwargs)
        self._give_way(self.kept_bytes)
        return self._launch(call)

    # ------------------------------------------------------------ what this rank knows, and what all decide

    def _describe(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Find out whether this rank could run a call as a graph, and of which shape; no rank may act on it alone."""
        module, micro_step = self._engine.module, self._micro_step
        args, kwargs = conditions.by_name(module, args, kwargs)
        items = kwargs.get(conditions.ITEMS)
        if torch.is_tensor(items) or isinstance(items, (int, float)):
            # As a tensor on the device it is copied into the graph's buffer at every replay: the loss divides by the
            # number of this batch, not of the captured one.
            items = items if torch.is_tensor(items) else torch.tensor(float(items))
            kwargs[conditions.ITEMS] = items.to(micro_step.device)
        # An eager forward is over when its outputs are dropped, as after an evaluation with gradients enabled.
        forwards = (reference() for reference in self._eager_forwards)
        eager = any(forward is not None and not forward.done for forward in forwards)
        call = Call(args, kwargs, outstanding=eager or any(graph.pending for graph in self._graphs))
        call.why = conditions.why_eager(micro_step.modules, micro_step.device, args, kwargs)
        if call.why is None:
            call.documents, call.why = conditions.rows_in_a_graph(module, kwargs)
        if call.why is None and micro_step.reduced_later:
            call.why = "gradients are reduced later"
        if call.why is None and call.outstanding:
            # A replay adds its gradients to none of another forward's, and all graphs share their memory.
            call.why = "a forward ran before the backward of another"
        if call.why is None:
            self._forget_changed_code()  # here alone: the fingerprint walks over all modules
            call.batch = dict(kwargs)
            if (mask := kwargs.get("attention_mask")) is None or documents.is_full(mask):
                call.batch.pop("attention_mask", None)  # of ones only: transformers leaves it out as well
            batch = tuple(
                (name, tuple(x.shape), x.dtype, x.device.type) if torch.is_tensor(x) else (name, x)
                for name, x in sorted(call.batch.items())
            )
            call.signature = batch, *micro_step.kind
            if len(self._shapes) >= MOST_SHAPES:  # where lengths vary without end: on this rank, the least counts
                self._shapes = {key: one for key, one in self._shapes.items() if one.graph or one.reason}
            call.shape = self._shapes.setdefault(call.signature, call.shape)
            call.why = call.shape.reason
        return call

    def _agree(self, call: Call) -> tuple[Action, str | None]:
        """Return what all ranks do with a call, and a reason to log. Collective."""
        shape = call.shape
        # The schedule counts replays and not steps: these are the same on all ranks.
        unchecked, unmeasured = shape.graph is None or not shape.graph.schedule.due, not self._monitor.active
        room = True
        if shape.graph is not None and not unmeasured:
            self._give_way(self.kept_bytes)  # it runs eagerly
        elif not unchecked and self._unknown_code is not None:
            self._give_way(shape.check_bytes)  # it must be checked, or it has no graphs
        elif not unchecked:
            room = self._pool.has_room(shape.check_bytes, self.kept_bytes)
        graph = shape.graph
        ordered = self._micro_step.ready and not self._evaluated
        mine = Facts(
            state=State.EAGER,  # replaced below, when the ranks have compared the rest
            alone=not call.outstanding or self._captured_once,
            affordable=not self._freed_too_soon,
            constant=self._changes < MAX_CHANGES,
            unmeasured=unmeasured,
            unchecked=unchecked,
            comparable=graph is not None and (call.documents > 0) == (graph.max_documents > 0),
            room=room,
            has_capacity=graph is not None or self.captured < MAX_GRAPHS,
        )
        # A number that stands for the shape, 0 for none. crc32 and not hash(), which differs between processes.
        number = 0 if call.why is not None else zlib.crc32(repr(call.signature).encode()) + 1
        usable = graph is not None and graph.addresses == self._micro_step.addresses()
        # MIN of a number and of its negative: equal bounds mean that all ranks have the same one.
        held = graph.max_documents if usable else -1
        lowest, highest, most, held, call.ordered, *found = agreement.least(
            self._group, number, -number, -call.documents, held, ordered, *shape.eager_runs, *mine[1:]
        )
        state, needed = State.EAGER, EAGER_STEPS if call.ordered else UNORDERED_STEPS
        if lowest > 0 and lowest == -highest:
            state = shape.agree(-most, held, found[:2], needed)
        facts = Facts(state, *found[2:])
        if state is State.EAGER and unmeasured and facts.alone:
            self._log(f"without CUDA graphs: {call.why or OTHERS_DIFFER}")
        action, reason = agreement.decide(facts)
        if state is not State.EAGER and unmeasured and action in (Action.EAGER, Action.CAPTURE):
            shape.eager_runs[shape.packed] += 1
            shapes = (signature[0] for signature, one in self._shapes.items() if any(one.eager_runs))
            if MANY_SHAPES not in self._logged and len(set(shapes)) > MAX_GRAPHS:
                self._log(MANY_SHAPES)
            self._evaluated = False  # DeepSpeed may follow the order of an evaluation until then
        if action is Action.REPLAY and not facts.room:
            graph.schedule.checked()
            self._log(UNCHECKED)
        return action, reason

    # ------------------------------------------------------------ what they do

    def _replay(self, call: Call) -> Any:
        self._micro_step.reset()
        # DeepSpeed's throughput timer is started by a hook of the module, which a replay does not run.
        self._micro_step.start_clock()
        call.shape.graph.schedule.replays += 1
        return call.shape.graph.replay(call.batch)

    def _capture(self, call: Call) -> bool:
        """Capture a micro-batch, and return whether all ranks could: else its shape stays eager. Collective."""
        shape = call.shape
        if shape.graph is not None:
            self._free()  # graphs that exist keep less memory than a second pool, or have addresses of before
        why = (conditions.why_auto_disabled(self._engine.module) or self._changed_attribute) if self._auto else None
        if not self._all(why is None):
            self._end(why or "another rank's model has hooks or attributes that graphs would leave out")
            return False
        self._micro_step.reset()
        # A dry run of a check measures its memory now: once the graph exists, there may be too little to try.
        before = self._forward_state()
        shape.check_bytes = self._pool.memory_of_check(lambda: self._compute(call))
        before.restore()
        self._micro_step.pin_scales()
        graph = self._pool.try_to_capture(self._call_module, call, self._draws)
        error = graph if isinstance(graph, Exception) else None
        # A failure differs where the model has changed on one rank alone.
        failures = 1 + sum(one.reason is not None for one in self._shapes.values())
        others_fit = failures < MAX_CHANGES and not isinstance(error, torch.OutOfMemoryError)
        captured, others_fit = agreement.least(self._group, error is None, others_fit)
        if not captured:
            shape.reason = "another rank failed"  # logged when the shape comes again
            if error is not None:
                shape.reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if not others_fit:
                self._end(shape.reason)
            # The others share their pool with what has failed, and are captured again; the next one is tried out.
            self._free()
            self._pool.needs_dry_run = True
            return False
        shape.graph = graph
        # Unknown code may fail in backward where it did not with another batch.
        self._pool.needs_dry_run = self._unknown_code is not None or failures > 1
        self._captured_once = True
        self._log(f"forward and backward now run as CUDA graphs, which keep {graph.kept_bytes / 2**30:.2f} GiB")
        return True

    def _check(self, call: Call) -> Any:
        """Compare a replay with an eager run of the micro-batch, and end the graphs where they differ. Collective.

        The replay comes first; both have the same random states and buffers. Nothing of the eager run is kept for
        backward, unless its casts are measured.

        Returns:
            The outputs of a replay; where they differ, and where casts are measured, eager ones.
        """
        shape, graph, measured, output = call.shape, call.shape.graph, self._monitor.active, None
        self._micro_step.reset()
        before = self._forward_state()
        graph.launch_forward(call.batch)
        replayed = graph.copies()
        before.restore()
        if measured:
            output = self._launch(call)
        eager = agreement.outputs_of(output) if measured else self._compute(call)
        same = self._all(agreement.same(replayed, eager))
        if not same:
            # More replays distinguish kernels that sum in no fixed order from Python that has changed.
            shape.spread = self._spread(call, replayed, before)
            same = self._all(agreement.same(replayed, eager, shape.spread))
        if same:
            graph.schedule.checked()
        else:
            most = max(map(agreement.distance, replayed, eager), default=float("inf"))
            self._end(
                f"in step {self._engine.global_steps + 1} the outputs of a graph and of Python differ (on this rank by "
                f"up to {most:.3g}): Python values that the model reads have changed since the capture"
            )
        if measured:
            return output
        before.restore()
        return graph.replay(call.batch) if same else self._call_module(*call.args, **call.kwargs)

    def _spread(self, call: Call, first: tuple[Any, ...], before: agreement.ForwardState) -> list[float]:
        """Return the largest distances between replays of one micro-batch, by output, now and at earlier checks."""
        graph, after = call.shape.graph, self._forward_state()
        # All-gathers of the eager forward may be in flight; the replay reads shards on its own streams right away.
        self._micro_step.wait_for_sides()
        spread = call.shape.spread or [0.0] * len(first)
        for _ in range(agreement.SPREAD_REPLAYS):
            before.restore()
            graph.launch_forward(call.batch)
            spread = list(map(max, spread, map(agreement.distance, graph.copies(), first)))
        # Training goes on behind the eager forward, whose backward may draw random numbers of its own (recomputation).
        after.restore()
        return spread

    def _compute(self, call: Call) -> list[Any]:
        """Return eager outputs, without what backward would read: graphs hold the memory of that already."""

        def never(_: object) -> torch.Tensor:
            raise _Differentiates

        # DeepSpeed's hooks wait for the backward.
        state, before, output = self._micro_step.remember(), self._forward_state(), None
        try:
            with nullcontext() if self._differentiates else saved_tensors_hooks(lambda tensor: None, never):
                output = agreement.outputs_of(self._launch(call))
        except _Differentiates:
            self._differentiates = True
        self._micro_step.restore(state)
        self._micro_step.reset()
        if output is None:
            before.restore()
            return self._compute(call)
        return output

    def _launch(self, call: Call) -> Any:
        """Run a call eagerly, and watch its outputs until their backward: a capture must know which get gradients."""
        module, device = self._engine.module, self._micro_step.device
        watches = self._auto and self._unknown_code is not None  # comparing all attributes takes time
        attributes = conditions.attributes_of_unknown(module) if watches else {}
        drawn = random_numbers_drawn(device)
        output = self._call_aside(call)
        self._draws = self._draws or random_numbers_drawn(device) != drawn
        if watches and self._changed_attribute is None:
            self._changed_attribute = conditions.changed_attribute(attributes, conditions.attributes_of_unknown(module))
        output, forward = watched(output, call.shape.used)
        alive = [one for one in self._eager_forwards if (known := one()) is not None and not known.done]
        self._eager_forwards = [*alive, forward]
        return output

    def _call_aside(self, call: Call) -> Any:
        """Call the module on the stream that graphs are captured on.

        Autograd adds a gradient up on the stream that its parameter was first used on, and remembers that for as long
        as the user holds the loss of an earlier step. A capture must not come upon another stream there.
        """
        if call.why == conditions.SAVED_ELSEWHERE:  # the caller's hooks expect its own stream
            return self._call_module(*call.args, **call.kwargs)
        outside, stream = torch.cuda.current_stream(self._micro_step.device), self._pool.stream
        # Both waits: arguments were made outside, and outputs are read there. Memory needs no marks: both streams wait
        # for each other at every micro-batch before either reuses what the other has read.
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            output = self._call_module(*call.args, **call.kwargs)
        outside.wait_stream(stream)
        return output

    def _all(self, holds: bool) -> bool:
        return bool(agreement.least(self._group, holds)[0])

    def _forward_state(self) -> agreement.ForwardState:
        return agreement.ForwardState(self._engine.module, self._micro_step.device)

    # ------------------------------------------------------------ how graphs end

    def reset(self) -> None:
        """Forget all graphs: what they were captured from has changed, or is about to."""
        self._free()
        for shape in self._shapes.values():
            shape.eager_runs = [0, 0]

    def process_group_ends(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Free the graphs if their collectives use a process group that is about to end; None: the process ends."""
        if group is None or group.group_name in self._pool.groups:
            self._free()

    def _free(self) -> None:
        """Free all graphs, which share their memory."""
        for graph in self._graphs:
            graph.close()
        for shape in self._shapes.values():
            shape.graph = None
        self._pool.forget()

    def _give_way(self, needed: int) -> None:
        """Free the graphs where they leave less memory to what runs next to them on this rank."""
        graphs = self._graphs
        if graphs and not any(graph.pending for graph in graphs) and not self._pool.has_room(needed, self.kept_bytes):
            self._freed_too_soon = self._freed_too_soon or self.replays < PAID_AFTER
            self._free()
            torch.cuda.empty_cache()

    def _forget_changed_code(self) -> None:
        """Forget the graphs of a model whose hooks or settings have changed since the last call, on this rank."""
        module, step = self._engine.module, self._micro_step
        code = conditions.fingerprint(step.modules, step.parameters, getattr(module, "config", None))
        if code == self._code:
            return
        self._code, self._unknown_code = code, conditions.unknown_code(module)
        # A model that is changed before its first graph costs nothing; capturing again and again takes time.
        self._changes += self.captured > 0
        self.reset()
        for shape in self._shapes.values():
            shape.reason = None
        self._pool.needs_dry_run = True
        self._draws, self._changed_attribute = False, None

    def _end(self, why: str) -> None:
        self.reset()
        self.off = why
        self._say(f"CUDA graphs are off: {why}")

    def _end_where_compiled(self) -> None:
        if self.off is None and self._engine.module._compiled_call_impl is not None:
            self._end(conditions.COMPILED)

    def _destroy(self) -> None:
        self.reset()
        process_groups_may_end(self)
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
        self._group = None

    def _log(self, line: str) -> None:
        if line not in self._logged:  # once: it may be so at every step
            self._logged.add(line)
            self._say(line)
