"""What ranks agree on around CUDA graphs: facts, the decision that follows from them, and checks against Python.

A graph keeps every Python value that its capture met: attributes, schedules by the number of steps, branches taken on
values of the host. When such a value changes, Python computes something else, and the outputs differ. A check runs the
forward of a graph beside Python's on one batch, which keeps nothing for backward: training goes on from the graph where
both agree. A measured micro-step is trained on as Python computes it, with activations beside those of the graph. The
replayed forward runs no Python, no hook of DeepSpeed and no autograd. Outside its own memory it changes random states
and buffers alone, which are put back, so that training has the same bits with and without checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_fp8.graphs.replay import MicroStepGraph
from ds_fp8.zero.deepspeed.micro_step import MicroStep

LEAST_TIMEOUT = timedelta(minutes=30)
"""Least time for which ranks wait for the slowest of them: it may be saving or loading."""


class RankAgreement:
    """A process group of all ranks over gloo. Making one is collective."""

    def __init__(self, device: torch.device):
        self._group = None
        if dist.get_world_size() > 1:
            backend = torch.distributed.group.WORLD._get_backend(device)
            given = getattr(getattr(backend, "options", None), "_timeout", None)
            timeout = max(LEAST_TIMEOUT, given or LEAST_TIMEOUT)
            # A separate group: gloo's collectives are matched by their order within a group, and others use the default
            # one.
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
            self.least(0)  # a rank that closes it early must not leave another that is still connecting

    def least(self, *numbers: int) -> list[int]:
        """Return the least of every number over all ranks. Collective."""
        if self._group is None:
            return list(numbers)
        # Explicitly on the CPU: a default device of the user's would make gloo copy from the GPU, which waits for it.
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return found.tolist()

    def close(self) -> None:
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
        self._group = None


class Action(Enum):
    """Things to do with a micro-step."""

    EAGER = "eager"
    """Python launches it."""
    CAPTURE = "capture"
    """A graph is captured, and the decision taken again."""
    REPLAY = "replay"
    """A graph runs it."""
    CHECK = "check"
    """The graph's forward is compared with Python's."""
    END = "end"
    """Graphs are freed, and none is captured any more."""


@dataclass(frozen=True)
class Facts:
    """Facts of a micro-step. Each holds only if it does on every rank."""

    alike: bool = False
    """Every rank could run it as a graph, and all of one signature."""
    alone: bool = False
    """No other forward waits for its backward, or graphs have been captured: this is how the training goes."""
    usable: bool = False
    """There is a graph of its signature, with capacity for its documents, whose addresses are still right."""
    unmeasured: bool = False
    """Its casts are not measured, which a graph cannot do."""
    unchecked: bool = False
    """The graph need not be checked now."""
    comparable: bool = False
    """The graph runs the same kernels as Python."""
    room: bool = False
    """A check that is due has memory beside the graph, or none is due; without it known code goes on unchecked."""
    lasting: bool = False
    """No rank gives graphs up: memory beside them suffices, and the model has not changed again and again."""
    has_capacity: bool = False
    """Fewer than MAX_GRAPHS graphs are captured."""
    ready: bool = False
    """Enough micro-steps of its signature have run eagerly."""


def decide(facts: Facts) -> tuple[Action, str | None]:
    """Return what is done with a micro-step, and a reason to log; a pure function of what all ranks know."""
    if not facts.alone:
        return Action.END, "one backward has the losses of several forwards"
    # From here on the order of the checks is part of the protocol: all ranks evaluate it on the same facts, and only
    # facts that hold on every rank may lead to a capture or a replay.
    if not facts.lasting:
        return Action.END, "memory beside them is short, or the model changes again and again"
    if not facts.alike:
        return Action.EAGER, None  # the reason is another one on every rank
    # Before `ready`, which only concerns graphs that are still to be captured.
    if facts.usable:
        # A measured micro-step must run eagerly, since the monitor's kernels are not in the graph; it is then used as a
        # check as well where that is possible.
        if facts.unmeasured and (facts.unchecked or not facts.comparable or not facts.room):
            return Action.REPLAY, None
        return (Action.CHECK if facts.comparable else Action.EAGER), None
    if not facts.unmeasured:
        return Action.EAGER, None
    if not facts.has_capacity:
        return Action.EAGER, "batches have too many shapes, and no more of them are captured"
    return (Action.CAPTURE if facts.ready else Action.EAGER), None


SPREAD_REPLAYS = 16
"""Replays of one batch that show how far apart kernels are that sum in no fixed order."""

SPREAD_FACTOR = 8
"""Times that spread by which a replay and Python may differ: a spread of few runs is a low guess."""


class ForwardState:
    """Random states and buffers of the model, which a forward can change beside its outputs."""

    def __init__(self, module: nn.Module, device: torch.device):
        self._device = device
        self._host = torch.get_rng_state()
        self._random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        # Clones on the current stream, on which both forwards run: no event is needed.
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def restore(self) -> None:
        """Put them back; autograd does not notice."""
        torch.set_rng_state(self._host)
        if self._random is not None:
            torch.cuda.set_rng_state(self._random, self._device)
        for buffer, value in self._buffers:
            # Through `.data`: an in-place write that autograd sees would raise the version of tensors saved for
            # backward.
            buffer.data.copy_(value)


class GraphChecks:
    """Compares the graphs of one engine with Python, with the same outcome on all ranks."""

    def __init__(self, module: nn.Module, device: torch.device, micro_step: MicroStep, agreement: RankAgreement):
        self._module, self._device = module, device
        self._micro_step, self._agreement = micro_step, agreement
        self._spread: dict[object, list[float]] = {}
        """By signature, how far apart replays of one batch have been."""

    def state(self) -> ForwardState:
        # Random states and buffers: both forwards must draw the same numbers, and a buffer that a forward updates (a
        # running mean) must be updated once.
        return ForwardState(self._module, self._device)

    def launch(
        self, graph: MicroStepGraph, signature: object, batch: Mapping[str, Any], launch: Callable[[], Any]
    ) -> tuple[Any, str | None]:
        """Launch a micro-step by Python, beside the forward of its graph. Collective.

        The graph's forward comes first, from the same random states and buffers. Where outputs differ, more replays
        tell kernels that sum in no fixed order from Python that computes something else by now.

        Returns:
            What `launch` returns, and how the outputs differ; None where they do not.
        """
        before = self.state()
        graph.launch_forward(batch)
        ours = graph.copies()
        before.restore()
        output = launch()
        theirs = outputs_of(output)
        if not self._agreement.least(same_bits(ours, theirs))[0]:
            spread = self._spread[signature] = self._replayed_spread(graph, signature, batch, ours, before)
            if not self._agreement.least(within(ours, theirs, spread))[0]:
                return output, first_difference(ours, theirs)
        graph.schedule.checked()
        return output, None

    def _replayed_spread(
        self,
        graph: MicroStepGraph,
        signature: object,
        batch: Mapping[str, Any],
        first: tuple[Any, ...],
        before: ForwardState,
    ) -> list[float]:
        """Return how far apart the outputs of replays of one batch are, now and at earlier checks."""
        after = self.state()
        # Python's forward may have left gathers in flight; the replay reads shards on its own streams right away.
        self._micro_step.wait_for_sides()
        spread = self._spread.get(signature) or [0.0] * len(first)
        for _ in range(SPREAD_REPLAYS):
            before.restore()
            graph.launch_forward(batch)
            # The largest distance over all checks so far: a spread seen once may be seen again.
            spread = list(map(max, spread, map(_distance, graph.copies(), first)))
        # Training goes on behind Python's forward, whose backward may draw random numbers of its own (recomputation).
        after.restore()
        return spread


def outputs_of(output: Any) -> list[Any]:
    return [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in tree_leaves(output)]


def same_bits(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Return whether two lists of outputs are equal bit for bit, NaN to NaN; the host waits for the device."""
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def within(ours: Sequence[Any], theirs: Sequence[Any], spread: Sequence[float]) -> bool:
    """Return whether outputs of a graph and of Python differ by no more than SPREAD_FACTOR times a spread."""
    if len(ours) != len(theirs):
        return False
    triples = zip(ours, theirs, spread, strict=True)
    return all(_same(a, b) or _distance(a, b) <= SPREAD_FACTOR * apart for a, b, apart in triples)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} of them"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not _same(a, b):
            if torch.is_tensor(a) and torch.is_tensor(b) and a.numel() == b.numel() == 1:
                return f"{a.item():.9g} and {b.item():.9g}"
            return f"output {place}, by up to {_distance(a, b):.3g}"
    return "on another rank"


def _same(a: Any, b: Any) -> bool:
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # a != a finds NaN: two NaN at one place count as equal, else a skipped step would end the graphs.
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _distance(a: Any, b: Any) -> float:
    if not (torch.is_tensor(a) and torch.is_tensor(b)) or a.shape != b.shape or not a.is_floating_point():
        return 0.0 if _same(a, b) else float("inf")
    if not a.numel():
        return 0.0
    # Equal infinities would give NaN as their difference.
    found = (a.float() - b.float()).abs().masked_fill((a == b) | ((a != a) & (b != b)), 0).max().item()
    # NaN: one side is NaN where the other is a number.
    return found if found == found else float("inf")
