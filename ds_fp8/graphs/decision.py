"""Decision on one micro-step, as a pure function of facts that all ranks have agreed on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """Things to do with a micro-step."""

    EAGER = "eager"
    """Python launches it."""
    CAPTURE = "capture"
    """A graph is captured, and the decision taken again."""
    REPLAY = "replay"
    """A graph runs it."""
    CHECK = "check"
    """Python launches it, and the graph's forward runs beside it for comparison."""
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
        if facts.unmeasured and (facts.unchecked or not facts.comparable):
            return Action.REPLAY, None
        return (Action.CHECK if facts.comparable else Action.EAGER), None
    if not facts.unmeasured:
        return Action.EAGER, None
    if not facts.has_capacity:
        return Action.EAGER, "batches have too many shapes, and no more of them are captured"
    return (Action.CAPTURE if facts.ready else Action.EAGER), None
