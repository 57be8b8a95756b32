"""The decision on a micro-step, over every combination of what is known of it."""

import itertools
from dataclasses import fields

import pytest

from ds_fp8.graphs.decision import Action, Facts, decide

NAMES = [field.name for field in fields(Facts)]
ALL = [Facts(*values) for values in itertools.product((False, True), repeat=len(NAMES))]

TABLE = [
    ({"alone": 0}, Action.END),
    ({"lasting": 0}, Action.END),
    ({"alike": 0}, Action.EAGER),
    # With a graph.
    ({"usable": 1, "unmeasured": 1, "unchecked": 1}, Action.REPLAY),
    ({"usable": 1, "unmeasured": 1, "comparable": 0}, Action.REPLAY),
    ({"usable": 1, "comparable": 1}, Action.CHECK),
    ({"usable": 1}, Action.EAGER),
    # Without one.
    ({"unmeasured": 0}, Action.EAGER),
    ({"has_capacity": 0}, Action.EAGER),
    ({"ready": 1}, Action.CAPTURE),
    ({}, Action.EAGER),
]
"""The first row that holds decides."""


def row_of(facts):
    return next(i for i, (row, _) in enumerate(TABLE) if all(getattr(facts, name) == row[name] for name in row))


def test_every_combination_is_decided_by_the_table():
    assert {row_of(facts) for facts in ALL} == set(range(len(TABLE)))  # no row is in vain
    for facts in ALL:
        assert decide(facts)[0] is TABLE[row_of(facts)][1], facts


@pytest.mark.parametrize("facts", [Facts(alone=False), Facts(alone=True, alike=True, unmeasured=True)])
def test_an_end_has_a_reason(facts):
    action, reason = decide(facts)
    assert action is Action.END
    assert reason


def test_nothing_is_captured_or_replayed_unless_all_ranks_are_alike():
    assert {decide(facts)[0] for facts in ALL if not facts.alike} == {Action.EAGER, Action.END}


def test_measured_steps_are_launched_by_python():
    found = {decide(facts)[0] for facts in ALL if not facts.unmeasured}
    assert found == {Action.EAGER, Action.CHECK, Action.END}


def test_a_graph_that_is_due_runs_unchecked_only_if_it_cannot_be_compared():
    for facts in ALL:
        if decide(facts)[0] is Action.REPLAY:
            assert facts.unchecked or not facts.comparable
