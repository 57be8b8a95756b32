"""Decisions on graphs of micro-steps: ranks agree, no gradient is lost, and what has changed is captured anew."""

import itertools

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.graphs import driver
from ds_fp8.graphs.agreement import LEAST_TIMEOUT, Action, Facts, State, decide, group_of_all_ranks
from ds_fp8.graphs.conditions import fingerprint, unknown_code, why_auto_disabled
from ds_fp8.graphs.replay import Shape
from ds_fp8.zero.deepspeed.hooks import CheckpointState
from tests.engine.graphs_in_python import Graphs, engine_of, log_of, take_step

REPLAYED, CHECKED = "replayed for 0", "checked, eager"


def forward(engine, length=64, step=0, padded=False):
    tokens = (torch.arange(length) * 7 + step)[None] % 128
    more = {}
    if padded:
        more["attention_mask"] = (torch.arange(length) >= 8)[None].long()
    return engine(input_ids=tokens, labels=tokens, use_cache=False, **more).loss


def several_forwards(graphs, order):
    """Loss and gradient norm of steps of one forward, then of one step of two."""
    engine, _ = engine_of()
    log = log_of(engine, graphs)
    found = [take_step(engine, forward(engine, step=step)) for step in range(8)]
    lengths = {"eager first": [(48, True), (64, False)], "graph first": [(64, False), (48, True)]}[order]
    try:
        found.append(take_step(engine, sum(forward(engine, length, 9, padded) for length, padded in lengths)))
    except RuntimeError as error:
        found.append(str(error))
    log = list(log)
    engine.destroy()
    return found, log


def test_no_gradient_is_lost_where_two_forwards_share_a_backward(ranks):
    launched, (found, log) = (ranks(1, several_forwards, graphs, "eager first")[0] for graphs in (False, True))
    assert log[-3:] == [REPLAYED, "eager", "eager"]
    assert found == launched[0]


def test_a_graph_and_another_forward_cannot_share_a_backward(ranks):
    found, _ = ranks(1, several_forwards, True, "graph first")[0]
    assert "the losses of several forwards" in found[-1]
    assert '"graph": "off"' in found[-1]


def always_several(_):
    """Steps of two forwards from the start."""
    engine, said = engine_of()
    graphs = engine.fp8.graphs = Graphs(engine)
    for step in range(5):
        take_step(engine, forward(engine, 64, step) + forward(engine, 48, step))
    engine.destroy()
    return graphs.log, said


def test_training_that_always_has_several_forwards_captures_nothing(ranks):
    log, said = ranks(1, always_several, None)[0]
    assert set(log) == {"eager"}
    assert said == ["CUDA graphs are off: one backward has the losses of several forwards"]


def many_lengths(_):
    engine, _ = engine_of()
    graphs = engine.fp8.graphs = Graphs(engine)
    before, driver.MOST_SHAPES = driver.MOST_SHAPES, 3
    for step, length in enumerate((64, 64, 64, 64, *range(16, 64, 8))):
        take_step(engine, forward(engine, length, step))
    driver.MOST_SHAPES = before
    found = len(graphs._shapes), graphs.captured
    engine.destroy()
    return found


def test_lengths_that_vary_without_end_are_forgotten_but_for_those_with_graphs(ranks):
    remembered, captured = ranks(1, many_lengths, None)[0]
    assert remembered <= 3
    assert captured == 1


def of_one_rank(what, most=None):
    """Run steps between which something happens on rank 0 alone; return what became of them, losses, what was said."""
    engine, said = engine_of()
    before, driver.MAX_GRAPHS = driver.MAX_GRAPHS, most or driver.MAX_GRAPHS
    graphs = engine.fp8.graphs = Graphs(engine)
    losses = [take_step(engine, forward(engine, length, step))[0] for step, length in enumerate((64, 64, 64, 48, 48))]
    if dist.get_rank() == 0:
        what(graphs)
    losses += [take_step(engine, forward(engine, 48, step))[0] for step in (5, 6)]
    driver.MAX_GRAPHS = before
    log = list(graphs.log)
    engine.destroy()
    return log, losses, said


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
def test_ranks_agree_whatever_happens_on_one(ranks, what, most, end, words):
    ours, theirs = ranks(2, of_one_rank, what, most)
    ours_done, theirs_done = ([one for one in log if one != "closed"] for log, *_ in (ours, theirs))
    assert ours_done == theirs_done
    assert theirs_done[len(theirs_done) - len(end) :] == end
    assert all(any(words in line for line in said) for *_, said in (ours, theirs))


def changed(_):
    """Run steps in which somebody changes the model; return what became of each, and what was said."""
    engine, said = engine_of()
    graphs = engine.fp8.graphs = Graphs(engine)
    log = []
    for step in range(18):
        if step == 4:
            engine.module.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        if step == 8:
            engine.module.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda p: None)
        if step == 12:
            engine.module.config.output_attentions = False
            engine.module.model.layers[0].self_attn.attention_dropout = 0.1
            engine.module.model.layers[0].self_attn.attention_dropout = 0.0
        if step == 14:
            engine.module.gradient_checkpointing_enable()
        graphs.log.clear()
        take_step(engine, forward(engine, step=step))
        log.append(", ".join(graphs.log))
    engine.destroy()
    return log, said


def test_what_has_changed_in_python_is_captured_anew(ranks):
    log, said = ranks(1, changed, None)[0]
    captured = f"captured for 0, {CHECKED}"
    anew = ["closed, eager", "eager", captured, REPLAYED]
    assert log[:12] == ["eager", "eager", captured, REPLAYED, *anew, *anew]
    assert log[12:14] == [CHECKED, REPLAYED]
    assert log[14].startswith("closed")
    assert any(line == "CUDA graphs are off: the model changes again and again" for line in said)


def loaded(folder):
    """Return how many graphs there are before a load, and while a checkpoint's shards are read."""
    engine, _ = engine_of()
    graphs = engine.fp8.graphs = Graphs(engine)
    for step in range(4):
        take_step(engine, forward(engine, step=step))
    engine.save_checkpoint(folder)
    found, load = [graphs.captured], engine._load_checkpoint

    def watched(*args, **kwargs):
        found.append(graphs.captured)
        return load(*args, **kwargs)

    engine._load_checkpoint = watched
    engine.load_checkpoint(folder)
    engine.destroy()
    return found


def test_memory_of_graphs_is_free_while_a_checkpoint_is_loaded(ranks, tmp_path):
    assert ranks(1, loaded, str(tmp_path))[0] == [1, 0]


@pytest.mark.parametrize(
    ("change", "found", "words"),
    [
        (
            lambda m: m.weight.register_hook(lambda g: g),
            why_auto_disabled,
            "weight has a hook of tests.engine.test_graph",
        ),
        (lambda m: setattr(m, "forward", lambda x: x), unknown_code, "the model has a forward of tests.engine.test"),
        (lambda m: m.register_full_backward_hook(lambda *_: None), why_auto_disabled, "the model has a hook of"),
        (lambda m: m.register_forward_hook(lambda *_: None), why_auto_disabled, "the model has a hook of tests."),
    ],
)
def test_code_of_others_is_found_wherever_it_is(change, found, words):
    module = torch.nn.Linear(2, 2)
    assert found(module) is None
    before = fingerprint([module], list(module.parameters()), None)
    assert before == fingerprint([module], list(module.parameters()), None)
    change(module)
    assert words in found(module)
    assert before != fingerprint([module], list(module.parameters()), None)


def test_settings_that_cannot_be_hashed_are_read():
    module = torch.nn.Linear(2, 2)
    module.p = [0.1]
    before = fingerprint([module], [], None)
    module.p = [0.2]
    assert fingerprint([module], [], None) != before


def module_only(folder):
    """Load the module alone, then all of a checkpoint; return what was called."""
    engine, _ = engine_of()
    take_step(engine, forward(engine))
    found = []
    engine.fp8.hooks.before_load.append(lambda: found.append("before"))
    states = engine.fp8.hooks.states
    states["ours"] = CheckpointState(dict, lambda state: found.append("loaded"))
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder, load_module_only=True)
    engine.load_checkpoint(folder)
    engine.destroy()
    return found


def test_a_load_of_the_module_alone_stays_one(ranks, tmp_path):
    assert ranks(1, module_only, str(tmp_path))[0] == ["before", "before", "loaded"]


def timeout(_):
    group = group_of_all_ranks(torch.device("cpu"))
    found = group._get_backend(torch.device("cpu")).options._timeout
    torch.distributed.destroy_process_group(group)
    return found


def test_ranks_wait_for_each_other_for_long(ranks):
    assert ranks(2, timeout, None) == [LEAST_TIMEOUT] * 2


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
