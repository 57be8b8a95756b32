"""Graphs that are compared with Python: what has changed is found, and training has the same bits with checks."""

from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ds_fp8.graphs.conditions import attributes_of_unknown, changed_attribute, unknown_code
from ds_fp8.graphs.driver import PAID_AFTER
from ds_fp8.graphs.replay import MAX_INTERVAL, CheckSchedule
from tests.engine.graphs_in_python import Around, Graphs, engine_of, log_of, model_of, take_step

SCHEDULE = {"factor": 1.0}  # What the attention of these tests reads at every call


def scheduled_attention(module, query, *args, **kwargs):
    return sdpa_attention_forward(module, query * SCHEDULE["factor"], *args, **kwargs)


def register():
    SCHEDULE["factor"] = 1.0  # processes of ranks are used again
    AttentionInterface.register("scheduled", scheduled_attention)
    AttentionMaskInterface.register("scheduled", sdpa_mask)


def batch(step):
    tokens = (torch.arange(64) * 7 + step)[None] % 128
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def train(engine, steps, before=lambda step: None):
    """Loss and gradient norm of each step."""
    found = []
    for step in steps:
        before(step)
        found.append(take_step(engine, engine(**batch(step)).loss))
    return found


def words(log):
    found = ", ".join(log)
    log.clear()
    return found


CHANGED_AT, FOUND_AT, END = 10, 14, 20


def change(step):
    SCHEDULE["factor"] = 30.0 if step >= CHANGED_AT else 1.0


def with_schedule(folder):
    """Train beside a schedule; return figures, what became of each step, and what was said."""
    register()
    engine, said = engine_of("scheduled")
    log = log_of(engine, folder is not None, auto=True)
    happened = []

    def before(step):
        change(step)
        if folder is not None and step == FOUND_AT:
            engine.save_checkpoint(folder, tag="found")
        happened.append(words(log))

    found = train(engine, range(END), before)
    engine.destroy()
    return found, [*happened[1:], words(log)], said


def eager_from(folder):
    register()
    engine, _ = engine_of("scheduled")
    engine.load_checkpoint(folder, tag="found")
    found = train(engine, range(FOUND_AT, END), change)
    engine.destroy()
    return found


def test_a_schedule_in_python_is_found_at_the_next_check(ranks, tmp_path):
    launched, captured = ranks(2, with_schedule, None), ranks(2, with_schedule, str(tmp_path))
    after = ranks(2, eager_from, str(tmp_path))
    for (theirs, _, _), (ours, log, said), same in zip(launched, captured, after, strict=True):
        assert ours[:CHANGED_AT] == theirs[:CHANGED_AT]
        assert ours[CHANGED_AT] != theirs[CHANGED_AT]  # stale, as a CUDA graph would be
        assert log[CHANGED_AT:FOUND_AT] == ["replayed for 0"] * (FOUND_AT - CHANGED_AT)
        assert log[FOUND_AT] == "checked, eager, closed"
        assert "".join(log[FOUND_AT + 1 :]) == ""
        assert ours[FOUND_AT:] == same
        ends = [line for line in said if line.startswith("CUDA graphs are off")]
        assert len(ends) == 1
        assert f"in step {FOUND_AT + 1} the outputs of a graph and of Python differ" in ends[0]


def of_one_rank(_):
    """The schedule changes on rank 1 alone."""
    register()
    engine, said = engine_of("scheduled")
    graphs = engine.fp8.graphs = Graphs(engine, auto=True)

    def before(step):
        if step == 3 and dist.get_rank() == 1:
            SCHEDULE["factor"] = 30.0

    train(engine, range(6), before)
    SCHEDULE["factor"] = 1.0
    engine.destroy()
    return graphs.off, said


def test_all_ranks_end_their_graphs_where_one_has_changed(ranks):
    found = ranks(2, of_one_rank, None)
    assert all("outputs of a graph and of Python differ" in off for off, _ in found)
    assert "on another rank" in found[0][0]


class Counted(Around):
    """A model whose result depends on a buffer that its forward writes, and on random numbers."""

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("calls", torch.zeros(()))
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids, labels, use_cache):
        self.calls.add_(1)
        loss = self.model(input_ids=input_ids, labels=labels, use_cache=use_cache).loss
        return self.dropout(loss.expand(64)).mean() * (1 + self.calls / 100)


def counted(kind):
    torch.manual_seed(0)
    engine, _ = engine_of(model=Counted(model_of(attention_dropout=0.1)), fp8={"monitor": {"every": 7}})
    log = log_of(engine, kind != "launched", auto=True)
    torch.manual_seed(1)
    found = []
    unchecked = mock.patch.object(CheckSchedule, "due", property(lambda self: False))
    with unchecked if kind == "unchecked" else mock.MagicMock():
        for step in range(12):
            found.append((*take_step(engine, engine(**batch(step))), engine.module.calls.item()))
    random = torch.rand(3).tolist()
    outcome = engine.fp8.graphs and engine.fp8.graphs.off
    engine.destroy()
    return found, random, list(log), outcome


def test_training_has_the_same_bits_with_and_without_checks(ranks):
    launched, unchecked, checked = (ranks(2, counted, kind) for kind in ("launched", "unchecked", "checked"))
    for theirs, few, ours in zip(launched, unchecked, checked, strict=True):
        assert theirs[:2] == few[:2] == ours[:2]
        assert ours[3] is few[3] is None
        assert few[2].count("checked") == 1  # the measured step, 7
        assert ours[2].count("checked") > 3


class Penalised(Around):
    """A model whose forward differentiates."""

    def forward(self, **kwargs):
        loss = self.model(**kwargs).loss
        with torch.enable_grad():
            x = loss.detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.sin() * x.exp(), x)
        return loss * slope.abs()


def penalised(captured):
    engine, said = engine_of(model=Penalised(model_of()))
    log = log_of(engine, captured)
    found = [take_step(engine, engine(**batch(step))) for step in range(8)]
    engine.destroy()
    return found, log, [line for line in said if "off" in line]


def test_a_forward_that_differentiates_is_checked(ranks):
    for (theirs, *_), (ours, log, off) in zip(ranks(1, penalised, False), ranks(1, penalised, True), strict=True):
        assert ours == theirs
        assert log.count("checked") > 2
        assert not off


GENERATOR = torch.Generator()


@torch.library.custom_op("ds_fp8_tests::unordered", mutates_args=())
def unordered(x: torch.Tensor) -> torch.Tensor:
    """A sum in no fixed order: its last bits differ from call to call."""
    return x * (1 + 2**-10 * torch.rand((), generator=GENERATOR))


unordered.register_autograd(lambda ctx, gradient: gradient)


class Unordered(Around):
    def forward(self, **kwargs):
        return unordered(self.model(**kwargs).loss) * SCHEDULE["factor"]


def in_no_order(_):
    GENERATOR.manual_seed(0)
    engine, _ = engine_of(model=Unordered(model_of()))
    graphs = engine.fp8.graphs = Graphs(engine, auto=True)
    outcome = []
    for step in range(11):
        SCHEDULE["factor"] = 1.0 if step < 9 else 1.5
        take_step(engine, engine(**batch(step)))
        outcome.append(graphs.off)
    SCHEDULE["factor"] = 1.0
    engine.destroy()
    return outcome, graphs.log.count("checked")


def test_sums_in_no_fixed_order_are_compared_within_their_spread(ranks):
    outcome, checks = ranks(1, in_no_order, None)[0]
    assert outcome[:9] == [None] * 9
    assert "differ" in outcome[9]
    assert checks == 4


class Counting(Around):
    """A model that counts in Python."""

    calls = 0

    def forward(self, **kwargs):
        self.calls += 1
        return self.model(**kwargs).loss


def counting(_):
    engine, said = engine_of(model=Counting(model_of()))
    graphs = engine.fp8.graphs = Graphs(engine, auto=True)
    for step in range(4):
        take_step(engine, engine(**batch(step)))
    calls = engine.module.calls
    engine.destroy()
    return graphs.log, said, calls


def test_a_forward_that_changes_python_attributes_is_not_captured(ranks):
    log, said, calls = ranks(1, counting, None)[0]
    assert set(log) == {"eager"}
    assert calls == 4
    assert said == ['CUDA graphs are off: the forward of the model changes its attribute "calls"']


@pytest.mark.parametrize(
    ("attribute", "before", "change"),
    [
        ("last", None, lambda m: setattr(m, "last", torch.ones(1))),
        ("losses", [], lambda m: m.losses.append(1)),
        ("fresh", None, lambda m: setattr(m, "fresh", 1)),
        ("rate", 0.5, lambda m: setattr(m, "rate", 0.25)),
    ],
)
def test_attributes_that_a_forward_writes_are_found(attribute, before, change):
    module = _of_others()
    if attribute != "fresh":
        setattr(module, attribute, before)
    before = attributes_of_unknown(module)
    module.ds_grads_remaining = 3  # DeepSpeed's
    assert changed_attribute(before, attributes_of_unknown(module)) is None
    change(module)
    assert f'changes its attribute "{attribute}"' in changed_attribute(before, attributes_of_unknown(module))


def _of_others():
    class Own(nn.Module):
        def forward(self, x):
            return x

    return Own()


def test_a_registered_attention_function_is_code_of_others():
    register()
    assert "attention is a function of tests.engine.test_graph_checks" in unknown_code(model_of("scheduled"))
    assert unknown_code(model_of("sdpa")) is None


def test_checks_come_often_at_first_and_never_end():
    schedule, checks = CheckSchedule(), []
    for _ in range(4 * MAX_INTERVAL + 1):
        if schedule.due:
            checks.append(schedule.replays)
            schedule.checked()
        schedule.replays += 1
    assert checks == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048]


def short_of_memory(known, room_from, auto):
    """Steps in which graphs leave no room beside them until one of them, of a model of known code or not."""
    register()
    engine, said = engine_of("sdpa" if known else "scheduled")
    graphs = engine.fp8.graphs = Graphs(engine, auto=auto)
    log = []
    for step in range(8):
        graphs._pool.room = step >= room_from
        train(engine, [step])
        log.append(words(graphs.log))
    engine.destroy()
    return log, said


def test_where_memory_is_short_known_code_is_not_checked(ranks):
    log, said = ranks(1, short_of_memory, True, 6, True)[0]
    assert log[2:6] == ["captured for 0, replayed for 0", *["replayed for 0"] * 3]
    assert log[6:] == ["checked, eager", "replayed for 0"]
    assert "unchecked" in said[-1]


@pytest.mark.parametrize("auto", [True, False])
def test_where_memory_is_short_other_code_has_no_graphs(ranks, auto):
    log, said = ranks(1, short_of_memory, False, 8, auto)[0]
    assert log[2].startswith("captured for 0, closed")
    assert set(log[3:]) == {""}  # nothing is asked any more
    assert "too little memory is free next to them" in said[-1]


def freed(paid):
    """Steps around a measured one, for which there is no room beside graphs that have been replayed often or not."""
    engine, said = engine_of("sdpa", fp8={"monitor": {"every": 5}})
    graphs = engine.fp8.graphs = Graphs(engine)
    log = []
    for step in range(8):
        graphs._pool.room = step != 5
        if step == 5 and paid:
            graphs._graphs[0].schedule.replays = PAID_AFTER
        train(engine, [step])
        log.append(words(graphs.log))
    engine.destroy()
    return log, said


@pytest.mark.parametrize(("paid", "after"), [(True, "captured for 0, checked, eager"), (False, "")])
def test_graphs_give_way_to_a_measured_step(ranks, paid, after):
    log, said = ranks(1, freed, paid)[0]
    assert log[4] == "replayed for 0"
    assert log[5].startswith("closed")
    assert log[6] == after
    assert any("too little memory is free next to them" in line for line in said) is not paid
