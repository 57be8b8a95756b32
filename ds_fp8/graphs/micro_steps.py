"""Micro-steps of an engine as CUDA graphs: choose which to capture and when, and report reasons against it.

All ranks do the same: NCCL does not document that a captured collective may match an eager one on another rank. So
before every micro-step they compare facts, on the host and beside the device; agreement.py decides from them.
"""

from __future__ import annotations

import functools
import os
import types
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import deepspeed
import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_fp8.graphs.agreement import Action, Facts, GraphChecks, RankAgreement, decide, outputs_of
from ds_fp8.graphs.capture import (
    before_process_groups_end,
    end_failed_capture,
    in_one_line,
    without_frames,
)
from ds_fp8.graphs.conditions import (
    COMPILED,
    ITEMS,
    SAVED_ELSEWHERE,
    Call,
    Capacities,
    by_name,
    code_of_others,
    fingerprint,
    is_compiled,
    rows_in_a_graph,
    why_auto_disabled,
    why_eager,
)
from ds_fp8.graphs.eager_forwards import EagerForwards
from ds_fp8.graphs.replay import CapturedGraphs, MicroStepGraph
from ds_fp8.layers.attention import documents
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.deepspeed.methods import before_load, on_destroy, on_step, replace
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from ds_fp8.zero.gradients import GradientShards
from ds_fp8.zero.group import FP8ParamGroup

EAGER_STEPS = 2
"""Micro-steps of a signature that run eagerly before one is captured: kernels are compiled, memory is allocated."""

UNORDERED_STEPS = 6
"""The same where DeepSpeed never learns the order of modules, because forwards without gradients come between."""

MAX_GRAPHS = 8
"""Signatures that are captured: every graph keeps separate buffers."""

MAX_CHANGES = 3
"""Changes of a captured model's hooks or settings, or signatures that cannot be captured, after which nothing is."""

PAID_AFTER = 50
"""Replays that save more time than a capture takes; graphs freed sooner for memory are not captured again."""

UNCHECKED = "CUDA graphs go on unchecked: no memory is free beside them for what Python computes"

MANY_SHAPES = f"without CUDA graphs: batches have more than {MAX_GRAPHS} shapes; one that comes often is captured"

OTHERS_DIFFER = "other ranks have batches of other shapes, or run eagerly"


class _Differentiates(Exception):
    """A forward reads what it has saved: it computes gradients of its own."""


class MicroStepGraphs:
    """Takes the place of calling an engine's module: eager at first, and replayed where a micro-step repeats."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        gradients: GradientShards,
        gather: FP8ParamGroup | None,
        wire: WireMeter,
        say: Callable[[str], None],
        monitor: CastMonitor,
        auto: bool,
    ):
        self._engine, self._gather, self._say, self._monitor = engine, gather, say, monitor
        self._device, self._auto = engine.device, auto
        self._micro_step = MicroStep(engine)
        self._gradients, self._wire = gradients, wire
        self._stock: Callable[..., Any] = engine.module._call_impl
        self.off: str | None = None
        """Reason for which nothing is captured any more."""
        self._graphs = CapturedGraphs(engine.device, self._micro_step)
        self._eager_runs: dict[object, int] = {}
        self._refused: dict[object, str] = {}
        """Signatures that could not be captured, on all ranks, and why."""
        self._capacities = Capacities()
        self._logged: set[str] = set()
        self._eager = EagerForwards(engine.module, self._stock, engine.device, self._graphs.stream)
        self._code = 0
        """Fingerprint of the model's code at the last micro-step that could be a graph."""
        self._code_of_others: str | None = None
        # NCCL would have all ranks exchange addresses in a capture, where one may fail.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        self._agreement = RankAgreement(engine.device)
        self._checks = GraphChecks(engine.module, engine.device, self._micro_step, self._agreement)
        replace(engine, engine.module, "_call_impl", self)
        self._evaluated = self._captured_once = self._gives_up = self._differentiates = False
        self._changes = 0
        on_step(engine, self._end_where_compiled)
        before_load(engine, self.reset)
        on_destroy(engine, self._destroy)
        before_process_groups_end(self._graphs.process_group_ends)

    def __reduce__(self) -> tuple:
        # A copy of a model under training has no engine, and computes by itself.
        return _plain_call, (self._engine.module,)

    @property
    def captured(self) -> int:
        return len(self._graphs)

    @property
    def kept_bytes(self) -> int:
        return self._graphs.kept_bytes

    def reset(self) -> None:
        """Forget all graphs: what they were captured from has changed, or is about to."""
        self._graphs.forget()
        self._eager_runs.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: computed by a graph, or eagerly where there is none for this call."""
        if torch.compiler.is_compiling() or self.off is not None:
            return self._stock(*args, **kwargs)
        # Evaluation runs eagerly, beside graphs that may leave it too little memory.
        if not (self._engine.module.training and torch.is_grad_enabled()):
            self._evaluated = True
            # It keeps nothing between layers, but has logits.
            self._give_way(self._graphs.kept_bytes // 4)
            return self._stock(*args, **kwargs)
        # Local knowledge only; no rank may act on it before `_decide` has compared it with the others'.
        here = self._look_at(args, kwargs)
        action, reason = self._decide(here)
        # The capture has computed nothing. Decided again, so that a new graph is checked against Python before its
        # first replay.
        if action is Action.CAPTURE and self._capture(here):
            action, reason = self._decide(here)
        if action is Action.END:
            self._end(reason)
        elif reason is not None:
            self._log(f"without CUDA graphs: {reason}")
        if action is Action.REPLAY:
            self._settle()
            # DeepSpeed's throughput timer is started by a hook of the module, which a replay does not run.
            self._micro_step.start_clock()
            return self._graphs.replay(self._graphs.get(here.signature), here.batch)
        if action is Action.CHECK:
            return self._launch_and_check(here)
        if self.off is not None:
            return self._stock(*args, **kwargs)
        self._give_way(self._graphs.kept_bytes)
        return self._launch(here)

    def _look_at(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Find out whether this rank could run a call as a graph, and of which signature."""
        module = self._engine.module
        args, kwargs = by_name(module, args, kwargs)
        if isinstance(kwargs.get(ITEMS), (int, float)):  # a number would be part of the graph
            kwargs[ITEMS] = torch.tensor(float(kwargs[ITEMS]))
        if torch.is_tensor(kwargs.get(ITEMS)):
            # As a tensor on the device it is copied into the graph's buffer at every replay: the loss divides by the
            # number of this batch, not of the captured one.
            kwargs[ITEMS] = kwargs[ITEMS].to(self._device)
        here = Call(args, kwargs, pending=self._graphs.pending or self._eager.pending)
        here.why = why_eager(self._micro_step.modules, self._device, args, kwargs)
        if here.why is None:
            here.documents, here.why = rows_in_a_graph(module, kwargs)
        if here.why is None and self._micro_step.reduced_later:
            here.why = "gradients are reduced later"
        if here.why is None and here.pending:
            # A replay adds its gradients to none of another forward's, and all graphs share their memory.
            here.why = "a forward ran before the backward of another"
        if here.why is None:
            # Only for calls that could be graphs: the fingerprint walks over all modules.
            self._forget_changed_code()
            # A mask of ones only is left out by transformers as well.
            mask = kwargs.get("attention_mask")
            padded = mask is not None and not documents.whole(mask)
            here.batch = {name: value for name, value in kwargs.items() if padded or name != "attention_mask"}
            here.signature = self._signature(here.batch)
            here.why = self._refused.get(here.signature)
        return here

    def _signature(self, kwargs: Mapping[str, Any]) -> object:
        """Return what micro-steps that one graph can run have in common, on all ranks alike."""
        batch = tuple(
            (name, tuple(value.shape), value.dtype, value.device.type) if torch.is_tensor(value) else (name, value)
            for name, value in sorted(kwargs.items())
        )
        accumulates = self._micro_step.accumulates
        # Gradients that arrive for the first time in a step are added to zeros, which clears them before.
        arrived = sorted(self._gradients.arrived) if accumulates else None
        # Each part changes the kernels: the first micro-batch of a step overwrites gradients and later ones add, frozen
        # parameters have no wgrad, and dropout depends on the mode of its module.
        return batch, accumulates, arrived and tuple(arrived), self._micro_step.trained, self._micro_step.training

    def _give_way(self, needed: int) -> None:
        """Free the graphs where they leave less memory to what runs beside them on this rank."""
        if len(self._graphs) and not self._graphs.pending and not self._graphs.has_room(needed):
            self._gives_up = self._gives_up or self._graphs.replays < PAID_AFTER
            self._graphs.forget()
            torch.cuda.empty_cache()

    def _decide(self, here: Call) -> tuple[Action, str | None]:
        """Return what all ranks do with a call, and a reason to log. Collective."""
        graph = self._graphs.get(here.signature)
        # The schedule counts replays and not steps: these are the same on all ranks.
        unchecked, unmeasured = graph is None or not graph.schedule.due, not self._monitor.active
        room = True
        if graph is not None and not unmeasured:
            self._give_way(self._graphs.kept_bytes)  # Python launches it beside the graph
        elif not unchecked and self._code_of_others is not None:
            self._give_way(self._graphs.check_bytes)  # it must be checked, or it has no graphs
        elif not unchecked:
            room = self._graphs.has_room(self._graphs.check_bytes)
        graph = self._graphs.get(here.signature)
        mine = Facts(
            alone=not here.pending or self._captured_once,
            usable=graph is not None and graph.addresses == self._addresses(),
            unmeasured=unmeasured,
            unchecked=unchecked,
            comparable=graph is not None and (here.documents > 0) == (graph.max_documents > 0),
            room=room,
            lasting=not self._gives_up,
            has_capacity=graph is not None or len(self._graphs) < MAX_GRAPHS,
        )
        # A number that stands for the signature, 0 for none: the ranks compare it in the same MIN all-reduce as the
        # facts. crc32 and not hash(), which differs between processes.
        number = 0 if here.why is not None else zlib.crc32(repr(here.signature).encode()) + 1
        runs = [self._eager_runs.get((here.signature, packed), 0) for packed in (False, True)]
        ordered = self._micro_step.ready and not self._evaluated
        names = [one.name for one in fields(Facts) if one.name not in ("alike", "ready")]
        # MIN of a number and of its negative: equal bounds mean that all ranks have the same signature.
        lowest, highest, documents, ordered, *others = self._agreement.least(
            number, -number, -here.documents, ordered, *runs, *(getattr(mine, name) for name in names)
        )
        runs, facts = others[:2], dict(zip(names, map(bool, others[2:]), strict=True))
        packed, alike = False, lowest > 0 and lowest == -highest
        if alike:
            here.ordered, here.max_documents = bool(ordered), self._capacities.take(here.signature, -documents)
            packed = here.max_documents > 0  # packed rows have other kernels
            # By the largest number of documents of any rank: a graph that one rank must capture again, all do.
            facts["usable"] = facts["usable"] and graph.max_documents >= -documents
        elif unmeasured and facts["alone"]:
            self._log(f"without CUDA graphs: {here.why or OTHERS_DIFFER}")
        ready = runs[packed] >= (EAGER_STEPS if ordered else UNORDERED_STEPS)
        action, reason = decide(Facts(alike=alike, ready=ready, **facts))
        if alike and unmeasured and action in (Action.EAGER, Action.CAPTURE):
            seen = here.signature, packed
            self._eager_runs[seen] = self._eager_runs.get(seen, 0) + 1
            if MANY_SHAPES not in self._logged and len({shape for (shape, *_), _ in self._eager_runs}) > MAX_GRAPHS:
                self._log(MANY_SHAPES)
            self._evaluated = False  # DeepSpeed may follow the order of an evaluation until then
        if action is Action.REPLAY and not facts["room"]:
            graph.schedule.checked()
            self._log(UNCHECKED)
        return action, reason

    def _addresses(self) -> tuple[int, ...]:
        gather = self._gather
        if gather is None:
            return self._micro_step.addresses(lambda parameter: False)
        return (*self._micro_step.addresses(gather.in_fp8), *gather.addresses())

    def _settle(self) -> None:
        self._micro_step.reset()
        gather = self._gather
        if gather is not None:
            gather.requantize_and_wait()

    def _capture(self, here: Call) -> bool:
        """Capture a micro-step; where a rank cannot, its signature is not captured again, on all ranks. Collective.

        Returns:
            Whether there is a graph now.
        """
        if self._graphs.get(here.signature) is not None:
            # Those that there are keep less memory than a second pool, or read elsewhere now.
            self._graphs.forget()
        why = (why_auto_disabled(self._engine.module) or self._eager.changes) if self._auto else None
        if not self._agreement.least(why is None)[0]:
            self._end(why or "another rank's model has hooks or attributes that graphs would leave out")
            return False
        gather = self._gather
        self._settle()
        # Now, before the graph takes what is free, a check can be tried out.
        before = self._checks.state()
        needed = self._graphs.memory_of_check(functools.partial(self._compute, here))
        self._graphs.check_bytes = max(self._graphs.check_bytes, needed)
        before.restore()
        if gather is not None:
            gather.pin_scales()
        # DeepSpeed's hooks count during the capture although nothing runs; a failed capture puts the counters back.
        state, error, used = self._micro_step.remember(), None, self._eager.used(here.signature)
        make = functools.partial(
            MicroStepGraph,
            self._stock,
            here.batch,
            here.max_documents,
            used,
            self._micro_step,
            self._gradients,
            self._wire,
            self._addresses(),
        )
        try:
            graph, kept = self._graphs.capture(make, here, self._eager.draws)
        # Also KeyboardInterrupt: DeepSpeed's state has to be put back before anything propagates.
        except BaseException as found:  # whatever cannot be captured: it is reported, and runs eagerly
            error = found
            while error.__context__ is not None:  # what ended the capture, and not that it had ended
                error = error.__context__
            end_failed_capture(self._device)
            if gather is not None:
                gather.forget_unsharded()
            self._micro_step.abandon()
            self._micro_step.restore(state)
            if not isinstance(found, Exception):  # the user's interrupt
                error = None
                raise
        # What is refused differs where the model has changed on one rank alone.
        others_fit = len(self._refused) + 1 < MAX_CHANGES and not isinstance(error, torch.OutOfMemoryError)
        captured, others_fit = self._agreement.least(error is None, others_fit)
        if not captured:
            why = "another rank failed" if error is None else in_one_line(error)
            # The traceback holds the frames of the forward, and with them activations in the pool.
            error = without_frames(error)
            self._refused[here.signature] = why
            if not others_fit:
                self._end(why)
            # They share their pool with what has failed, and are captured again; the next one is tried out.
            self._graphs.forget()
            self._graphs.needs_dry_run = True
            return False  # the reason is said when the signature comes again
        self._graphs.add(here.signature, graph, kept)
        # Code of others may fail in backward where it did not with another batch.
        self._graphs.needs_dry_run = self._code_of_others is not None or bool(self._refused)
        self._captured_once = True
        self._log(f"forward and backward now run as CUDA graphs, which keep {kept / 2**30:.2f} GiB")
        return True

    def _launch_and_check(self, here: Call) -> Any:
        """Compare a micro-step's graph with Python, and end the graphs where they differ. Collective.

        Returns:
            The outputs of the graph; where they differ, and where casts are measured, those of Python.
        """
        self._settle()
        graph, before, measured = self._graphs.get(here.signature), self._checks.state(), self._monitor.active
        launch = functools.partial(self._launch if measured else self._compute, here)
        output, difference = self._checks.launch(graph, here.signature, here.batch, launch)
        if difference is not None:
            self._end(
                f"in step {self._engine.global_steps + 1} the outputs of a graph and of Python differ ({difference}): "
                "Python values that the model reads have changed since the capture"
            )
        if measured:
            return output
        before.restore()
        return graph.replay(here.batch) if difference is None else self._stock(*here.args, **here.kwargs)

    def _compute(self, here: Call) -> list[Any]:
        """Return what Python computes, without what backward would read: graphs hold the memory of that already."""

        def never(_: object) -> torch.Tensor:
            raise _Differentiates

        # DeepSpeed's hooks wait for the backward.
        state, sent, before, output = self._micro_step.remember(), self._wire.sent(), self._checks.state(), None
        try:
            with nullcontext() if self._differentiates else saved_tensors_hooks(lambda tensor: None, never):
                output = outputs_of(self._launch(here))
        except _Differentiates:
            self._differentiates = True
        self._micro_step.restore(state)
        self._wire.subtract(self._wire.sent() - sent)
        self._settle()
        if output is None:
            before.restore()
            return self._compute(here)
        return output

    def _launch(self, here: Call) -> Any:
        watches = self._auto and self._code_of_others is not None
        return self._eager.launch(here.args, here.kwargs, here.signature, here.why == SAVED_ELSEWHERE, watches)

    def _forget_changed_code(self) -> None:
        """Free the graphs of a model whose hooks or settings have changed since the last call, on this rank."""
        module, step = self._engine.module, self._micro_step
        code = fingerprint(step.modules, step.parameters, getattr(module, "config", None))
        if code == self._code:
            return
        self._code, self._code_of_others = code, code_of_others(module)
        # A model that is changed before its first graph costs nothing; capturing again and again takes time.
        self._changes += len(self._graphs) > 0
        self._gives_up = self._gives_up or self._changes >= MAX_CHANGES
        self._graphs.forget()
        self._eager_runs.clear()
        self._refused.clear()
        self._graphs.needs_dry_run = True
        self._eager.draws, self._eager.changes = False, None

    def _end(self, why: str) -> None:
        self.reset()
        self.off = why
        self._say(f"CUDA graphs are off: {why}")

    def _end_where_compiled(self) -> None:
        if self.off is None and is_compiled(self._engine.module):
            self._end(COMPILED)

    def _destroy(self) -> None:
        self.reset()
        self._agreement.close()

    def _log(self, line: str) -> None:
        if line not in self._logged:  # once: it may be so at every step
            self._logged.add(line)
            self._say(line)


def _plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    return types.MethodType(torch.nn.Module._call_impl, module)
