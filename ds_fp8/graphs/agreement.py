"""Decide alike on all ranks from the facts of each, and compare a replay with an eager run.

The first part is the protocol: ranks exchange facts on the host, and `decide` maps them to one action. The second: a
graph keeps every Python value that its capture met: attributes, schedules by the number of steps, branches taken on
values of the host. When such a value changes, outputs of an eager forward differ. A replayed forward runs no Python, no
hook of DeepSpeed and no autograd. Outside of its own memory it changes random states and buffers alone, which
ForwardState puts back: training has the same bits with and without checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import nn
from torch.utils._pytree import tree_leaves

LEAST_TIMEOUT = timedelta(minutes=30)  # for which ranks wait for the slowest of them: it may be saving or loading
SPREAD_REPLAYS = 16  # replays of one micro-batch that measure the spread of kernels that sum in no fixed order
SPREAD_FACTOR = 8  # tolerance: 16 replays underestimate the run-to-run variance


def group_of_all_ranks(device: torch.device) -> torch.distributed.ProcessGroup | None:
    """Return a process group of all ranks over gloo, None of a single rank. Collective."""
    if dist.get_world_size() == 1:
        return None
    backend = torch.distributed.group.WORLD._get_backend(device)
    given = getattr(getattr(backend, "options", None), "_timeout", None)
    # Of its own: gloo's collectives are matched by their order within a group, and others use the default one.
    group = torch.distributed.new_group(backend="gloo", timeout=max(LEAST_TIMEOUT, given or LEAST_TIMEOUT))
    least(group, 0)  # a rank that closes it early must not leave another that is still connecting
    return group


def least(group: torch.distributed.ProcessGroup | None, *numbers: int) -> list[int]:
    """Return the least of every number over all ranks. Collective."""
    if group is None:
        return list(numbers)
    # Explicitly on the CPU: a default device of the user's would make gloo copy from the GPU, which waits for it.
    found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=group)
    return found.tolist()


class State(Enum):
    """State of a shape on all ranks (Shape.agree); EAGER where ranks have different shapes."""

    EAGER = 0  # a reason says why
    WARM = 1
    READY = 2
    CAPTURED = 3


class Action(Enum):
    """An action that all ranks take for a micro-batch."""

    EAGER = "eager"
    CAPTURE = "capture"  # and decide again
    REPLAY = "replay"
    CHECK = "check"  # replay the forward, and compare it with an eager one
    END = "end"  # free all graphs, and capture none any more


class Facts(NamedTuple):
    """State of the shape of a micro-batch on all ranks, and facts, each the least over all ranks."""

    state: State
    alone: bool  # no other forward is outstanding, or graphs have been captured: this is how the training goes
    affordable: bool  # no graph was freed for memory before it had paid for its capture
    constant: bool  # the model's code or settings have changed fewer than MAX_CHANGES times
    unmeasured: bool  # its casts are not measured, which a graph cannot do
    unchecked: bool  # the graph need not be checked now
    comparable: bool  # the graph runs the kernels of an eager forward
    room: bool  # a check that is due has memory, or none is due
    has_capacity: bool  # fewer than MAX_GRAPHS graphs are captured


def decide(facts: Facts) -> tuple[Action, str | None]:
    """Return what is done with a micro-batch, and a reason to log; a pure function of what all ranks know."""
    if not facts.alone:
        return Action.END, "one backward has the losses of several forwards"
    if not facts.affordable:
        return Action.END, "too little memory is free next to them"
    if not facts.constant:
        return Action.END, "the model changes again and again"
    if facts.state is State.EAGER:
        return Action.EAGER, None  # the reason is another one on every rank
    if facts.state is State.CAPTURED:
        # A measured micro-batch runs eagerly, since the monitor's kernels are not in the graph; where a replay is
        # `comparable`, it is compared with that run.
        if facts.unmeasured and (facts.unchecked or not facts.comparable or not facts.room):
            return Action.REPLAY, None
        return (Action.CHECK if facts.comparable else Action.EAGER), None
    if not facts.unmeasured:
        return Action.EAGER, None
    if not facts.has_capacity:
        return Action.EAGER, "batches have too many shapes, and no more of them are captured"
    return (Action.CAPTURE if facts.state is State.READY else Action.EAGER), None


class ForwardState:
    """Random states and buffers of the model, which a forward can change next to its outputs."""

    def __init__(self, module: nn.Module, device: torch.device):
        self._device = device
        self._host = torch.get_rng_state()
        self._random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def restore(self) -> None:
        """Put them back; autograd does not notice."""
        torch.set_rng_state(self._host)
        if self._random is not None:
            torch.cuda.set_rng_state(self._random, self._device)
        for buffer, value in self._buffers:
            # Through `.data`: an in-place write that autograd sees would raise the version of saved tensors.
            buffer.data.copy_(value)


def outputs_of(output: Any) -> list[Any]:
    return [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in tree_leaves(output)]


def same(replayed: Sequence[Any], eager: Sequence[Any], spread: Sequence[float] = ()) -> bool:
    """Return whether outputs are equal, or differ by no more than SPREAD_FACTOR times the spread of each."""
    if len(replayed) != len(eager):
        return False
    triples = zip(replayed, eager, spread or [0.0] * len(eager), strict=True)
    return all(distance(a, b) <= SPREAD_FACTOR * most for a, b, most in triples)


def distance(a: Any, b: Any) -> float:
    """Return the largest difference of two outputs; inf where they cannot be subtracted, or one side alone is NaN."""
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return 0.0 if type(a) is type(b) and a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.is_floating_point() or not a.numel():
        return 0.0 if torch.equal(a, b) else float("inf")
    # Two NaN at one place count as equal, else a skipped step would end the graphs; equal infinities would give NaN.
    found = (a - b).abs().masked_fill((a == b) | ((a != a) & (b != b)), 0).max().item()
    return found if found == found else float("inf")
