"""Decisions on graphs of micro-steps: ranks agree, no gradient is lost, and what has changed is captured anew."""

import itertools
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.graphs import driver
from ds_fp8.graphs.agreement import LEAST_TIMEOUT, Action, Facts, State, decide, group_of_all_ranks
from ds_fp8.graphs.conditions import fingerprint, unknown_code, why_auto_disabled
from ds_fp8.graphs.replay import Shape
from ds_fp8.zero.deepspeed.hooks import CheckpointState
from tests.engine.graphs_in_python import Run
from tests.ranks import on_ranks

REPLAYED, CHECKED = "replayed for 0", "checked, eager"
CAPTURED = f"captured for 0, {CHECKED}"


def forward(engine, length=64, step=0, padded=False):
    tokens = (torch.arange(length) * 7 + step)[None] % 128
    more = {}
    if padded:
        more["attention_mask"] = (torch.arange(length) >= 8)[None].long()
    return engine(input_ids=tokens, labels=tokens, use_cache=False, **more).loss


def several_forwards(graphs, lengths):
    """Loss and gradient norm of steps of one forward, then of one step of two; what became of the last."""
    with Run(graphs=graphs) as run:
        for step in range(8):
            run.step(forward(run.engine, step=step))
        run.step(sum(forward(run.engine, length, 9, padded) for length, padded in lengths))
        return run.found, run.happened[-2:]


@on_ranks(1)
def test_no_gradient_is_lost_where_two_forwards_share_a_backward():
    launched, captured = (several_forwards(graphs, [(48, True), (64, False)]) for graphs in (False, True))
    assert captured == (launched[0], [REPLAYED, "eager, eager"])
    with pytest.raises(RuntimeError, match=r'the losses of several forwards[^"]*"graph": "off"'):
        several_forwards(True, [(64, False), (48, True)])


@on_ranks(1)
def test_training_that_always_has_several_forwards_captures_nothing():
    with Run() as run:
        for step in range(5):
            run.step(forward(run.engine, 64, step) + forward(run.engine, 48, step))
        assert set(run.log) == {"eager"}
        assert run.said == ["CUDA graphs are off: one backward has the losses of several forwards"]


@on_ranks(1)
@mock.patch.object(driver, "MOST_SHAPES", 3)
def test_lengths_that_vary_without_end_are_forgotten_but_for_those_with_graphs():
    with Run() as run:
        for step, length in enumerate((64, 64, 64, 64, *range(16, 64, 8))):
            run.step(forward(run.engine, length, step))
        assert len(run.graphs._shapes) <= 3
        assert run.graphs.captured == 1


def evict(graphs):
    graphs._free()


def evaluate(graphs):
    graphs._evaluated = True


def change_again_and_again(graphs):
    graphs._changes = driver.MAX_CHANGES


def free_too_soon(graphs):
    graphs._freed_too_soon = True


def run_short(graphs):
    graphs._pool.room = False


def fail_to_capture(graphs):
    """Rank 0 alone remembers two captures that failed: the model has changed on the other one since."""
    capture = graphs._pool.capture
    for name in ("one", "another"):
        graphs._shapes[name] = Shape()
        graphs._shapes[name].reason = ""

    def fails(*args):
        capture(*args)
        raise ValueError("not this shape")

    graphs._pool.capture = fails


AGREED = [
    (evict, 1, ["eager", "eager"], "too many shapes"),  # the other has as many as there may be
    (evaluate, None, ["eager", "captured for 0", "checked", "eager"], ""),
    (change_again_and_again, None, [], "the model changes again and again"),
    (free_too_soon, None, [], "too little memory is free"),
    (run_short, None, ["captured for 0", REPLAYED, REPLAYED], "unchecked"),
    (fail_to_capture, None, ["captured for 0"], "CUDA graphs are off: "),
]


@pytest.mark.parametrize(("what", "most", "end", "words"), AGREED)
@on_ranks(2)
def test_ranks_agree_whatever_happens_on_one(what, most, end, words):
    """Between two steps something happens on rank 0 alone."""
    with Run() as run, mock.patch.object(driver, "MAX_GRAPHS", most or driver.MAX_GRAPHS):
        for step, length in enumerate((64, 64, 64, 48, 48)):
            run.step(forward(run.engine, length, step))
        if dist.get_rank() == 0:
            what(run.graphs)
        for step in (5, 6):
            run.step(forward(run.engine, 48, step))
        done = [one for one in run.log if one != "closed"]
        logs = [None, None]
        dist.all_gather_object(logs, done)
        assert logs[0] == logs[1]
        assert done[len(done) - len(end) :] == end, done
        assert any(words in line for line in run.said)


@on_ranks(1)
def test_what_has_changed_in_python_is_captured_anew():
    with Run() as run:
        module = run.engine.module
        layer = module.model.layers[0]
        for step in range(18):
            if step == 4:
                layer.mlp.register_forward_hook(lambda *_: None)
            if step == 8:
                module.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda p: None)
            if step == 12:
                module.config.output_attentions = False
                layer.self_attn.attention_dropout = 0.1
                layer.self_attn.attention_dropout = 0.0
            if step == 14:
                module.gradient_checkpointing_enable()
            run.step(forward(run.engine, step=step))
        anew = ["closed, eager", "eager", CAPTURED, REPLAYED]
        assert run.happened[:14] == ["eager", "eager", CAPTURED, REPLAYED, *anew, *anew, CHECKED, REPLAYED]
        assert run.happened[14].startswith("closed")
        assert "CUDA graphs are off: the model changes again and again" in run.said


@on_ranks(1)
def test_memory_of_graphs_is_free_while_a_checkpoint_is_loaded_and_the_module_alone_can_be(tmp_path):
    with Run() as run:
        for step in range(4):
            run.step(forward(run.engine, step=step))
        called = []
        run.engine.fp8.hooks.before_load.append(lambda: called.append("before"))
        run.engine.fp8.hooks.states["ours"] = CheckpointState(dict, lambda state: called.append("loaded"))
        run.engine.save_checkpoint(tmp_path)
        found, load = [run.graphs.captured], run.engine._load_checkpoint

        def watched(*args, **kwargs):
            found.append(run.graphs.captured)
            return load(*args, **kwargs)

        run.engine._load_checkpoint = watched
        run.engine.load_checkpoint(tmp_path)
        run.engine.load_checkpoint(tmp_path, load_module_only=True)
        assert found == [1, 0, 0]
        assert called == ["before", "loaded", "before"]


@pytest.mark.parametrize(
    ("change", "found", "words"),
    [
        (lambda m: m.weight.register_hook(lambda g: g), why_auto_disabled, "weight has a hook of tests.engine.test_"),
        (lambda m: setattr(m, "forward", lambda x: x), unknown_code, "the model has a forward of tests.engine.test"),
        (lambda m: m.register_full_backward_hook(lambda *_: None), why_auto_disabled, "the model has a hook of"),
        (lambda m: m.register_forward_hook(lambda *_: None), why_auto_disabled, "the model has a hook of tests."),
        (lambda m: m.p.__setitem__(0, 0.2), None, ""),  # a setting that cannot be hashed
    ],
)
def test_code_of_others_and_changes_are_found_wherever_they_are(change, found, words):
    module = torch.nn.Linear(2, 2)
    module.p = [0.1]
    assert found is None or found(module) is None
    before = fingerprint([module], list(module.parameters()), None)
    assert before == fingerprint([module], list(module.parameters()), None)
    change(module)
    assert found is None or words in found(module)
    assert before != fingerprint([module], list(module.parameters()), None)


def test_settings_that_cannot_be_hashed_are_read():
    module = torch.nn.Linear(2, 2)
    module.p = [0.1]
    before = fingerprint([module], [], None)
    module.p = [0.2]
    assert fingerprint([module], [], None) != before


@on_ranks(2)
def test_ranks_wait_for_each_other_for_long():
    group = group_of_all_ranks(torch.device("cpu"))
    assert group._get_backend(torch.device("cpu")).options._timeout == LEAST_TIMEOUT
    torch.distributed.destroy_process_group(group)


# ---------------------------------------------------------------- the decision, over all that may be known


ALL = [
    Facts(state, *more) for state in State for more in itertools.product((False, True), repeat=len(Facts._fields) - 1)
]

# The first row that holds decides
TABLE = [
    ({"alone": 0}, Action.END),
    ({"affordable": 0}, Action.END),
    ({"constant": 0}, Action.END),
    ({"state": State.EAGER}, Action.EAGER),
    ({"state": State.CAPTURED, "unmeasured": 1, "unchecked": 1}, Action.REPLAY),
    ({"state": State.CAPTURED, "unmeasured": 1, "comparable": 0}, Action.REPLAY),
    ({"state": State.CAPTURED, "unmeasured": 1, "room": 0}, Action.REPLAY),
    ({"state": State.CAPTURED, "comparable": 1}, Action.CHECK),
    ({"state": State.CAPTURED}, Action.EAGER),
    ({"unmeasured": 0}, Action.EAGER),
    ({"has_capacity": 0}, Action.EAGER),
    ({"state": State.READY}, Action.CAPTURE),
    ({"state": State.WARM}, Action.EAGER),
]


def row_of(facts):
    return next(i for i, (row, _) in enumerate(TABLE) if all(getattr(facts, name) == row[name] for name in row))


def test_every_combination_is_decided_by_the_table():
    assert {row_of(facts) for facts in ALL} == set(range(len(TABLE)))  # no row is in vain
    for facts in ALL:
        action, reason = decide(facts)
        assert action is TABLE[row_of(facts)][1], facts
        assert reason or action is not Action.END
