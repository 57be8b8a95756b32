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
from tests.engine.graphs_in_python import Around, Run, model_of
from tests.ranks import on_ranks

SCHEDULE = {"factor": 1.0}  # What the attention of these tests reads at every call


def scheduled_attention(module, query, *args, **kwargs):
    return sdpa_attention_forward(module, query * SCHEDULE["factor"], *args, **kwargs)


def register():
    SCHEDULE["factor"] = 1.0  # processes of ranks are used again
    AttentionInterface.register("scheduled", scheduled_attention)
    AttentionMaskInterface.register("scheduled", sdpa_mask)


def loss_of(run, step):
    tokens = (torch.arange(64) * 7 + step)[None] % 128
    found = run.engine(input_ids=tokens, labels=tokens, use_cache=False)
    return found if torch.is_tensor(found) else found.loss


def train(run, steps, before=lambda step: None):
    for step in steps:
        before(step)
        run.step(loss_of(run, step))
    return run


CHANGED_AT, FOUND_AT, END = 7, 9, 12


def change(step):
    SCHEDULE["factor"] = 30.0 if step >= CHANGED_AT else 1.0


@on_ranks(1)
def test_a_schedule_in_python_is_found_at_the_next_check(tmp_path):
    register()
    with Run("scheduled", graphs=False) as launched:
        theirs = train(launched, range(END), change).found
    with Run("scheduled", auto=True) as run:

        def before(step):
            change(step)
            if step == FOUND_AT:
                run.engine.save_checkpoint(tmp_path, tag="found")

        ours = train(run, range(END), before).found
    with Run("scheduled", graphs=False) as eager:
        eager.engine.load_checkpoint(tmp_path, tag="found")
        assert ours[FOUND_AT:] == train(eager, range(FOUND_AT, END), change).found
    assert ours[:CHANGED_AT] == theirs[:CHANGED_AT]
    assert ours[CHANGED_AT] != theirs[CHANGED_AT]  # stale, as a CUDA graph would be
    assert run.happened[CHANGED_AT:FOUND_AT] == ["replayed for 0"] * (FOUND_AT - CHANGED_AT)
    assert run.happened[FOUND_AT:] == ["checked, eager, closed"] + [""] * (END - FOUND_AT - 1)
    (end,) = [line for line in run.said if line.startswith("CUDA graphs are off")]
    assert f"in step {FOUND_AT + 1} the outputs of a graph and of Python differ" in end


@on_ranks(2)
def test_all_ranks_end_their_graphs_where_one_has_changed():
    register()

    def before(step):
        if step == 3 and dist.get_rank() == 1:
            SCHEDULE["factor"] = 30.0

    with Run("scheduled", auto=True) as run:
        train(run, range(6), before)
    assert "outputs of a graph and of Python differ" in run.graphs.off
    assert ("on this rank by up to 0)" in run.graphs.off) == (dist.get_rank() == 0)


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


def counted(graphs, checked):
    torch.manual_seed(0)
    model, calls = Counted(model_of(attention_dropout=0.1)), []
    unchecked = mock.patch.object(CheckSchedule, "due", property(lambda self: False))
    with Run(model=model, fp8={"monitor": {"every": 7}}, graphs=graphs, auto=True) as run:
        torch.manual_seed(1)
        with mock.MagicMock() if checked else unchecked:
            for step in range(12):
                run.step(loss_of(run, step))
                calls.append(run.engine.module.calls.item())
        return (run.found, calls, torch.rand(3).tolist()), run


@on_ranks(1)
def test_training_has_the_same_bits_with_and_without_checks():
    theirs, _ = counted(False, False)
    for checked in (False, True):
        ours, run = counted(True, checked)
        assert ours == theirs
        assert run.graphs.off is None
        # Unchecked, it is the measured step, 7.
        assert run.log.count("checked") > 3 if checked else run.log.count("checked") == 1


class Penalised(Around):
    """A model whose forward differentiates."""

    def forward(self, **kwargs):
        loss = self.model(**kwargs).loss
        with torch.enable_grad():
            x = loss.detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.sin() * x.exp(), x)
        return loss * slope.abs()


@on_ranks(1)
def test_a_forward_that_differentiates_is_checked():
    with Run(model=Penalised(model_of()), graphs=False) as launched, Run(model=Penalised(model_of())) as run:
        assert train(run, range(8)).found == train(launched, range(8)).found
        assert run.log.count("checked") > 2
        assert not [line for line in run.said if "off" in line]


GENERATOR = torch.Generator()


@torch.library.custom_op("ds_fp8_tests::unordered", mutates_args=())
def unordered(x: torch.Tensor) -> torch.Tensor:
    """A sum in no fixed order: its last bits differ from call to call."""
    return x * (1 + 2**-10 * torch.rand((), generator=GENERATOR))


unordered.register_autograd(lambda ctx, gradient: gradient)


class Unordered(Around):
    def forward(self, **kwargs):
        return unordered(self.model(**kwargs).loss) * SCHEDULE["factor"]


@on_ranks(1)
def test_sums_in_no_fixed_order_are_compared_within_their_spread():
    GENERATOR.manual_seed(0)
    outcome = []
    with Run(model=Unordered(model_of()), auto=True) as run:
        for step in range(11):
            SCHEDULE["factor"] = 1.0 if step < 9 else 1.5
            run.step(loss_of(run, step))
            outcome.append(run.graphs.off)
    SCHEDULE["factor"] = 1.0
    assert outcome[:9] == [None] * 9
    assert "differ" in outcome[9]
    assert run.log.count("checked") == 4


class Counting(Around):
    """A model that counts in Python."""

    calls = 0

    def forward(self, **kwargs):
        self.calls += 1
        return self.model(**kwargs).loss


@on_ranks(1)
def test_a_forward_that_changes_python_attributes_is_not_captured():
    with Run(model=Counting(model_of()), auto=True) as run:
        train(run, range(4))
        assert set(run.log) == {"eager"}
        assert run.engine.module.calls == 4
        assert run.said == ['CUDA graphs are off: the forward of the model changes its attribute "calls"']


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
    class Own(nn.Module):
        def forward(self, x):
            return x

    module = Own()
    if attribute != "fresh":
        setattr(module, attribute, before)
    before = attributes_of_unknown(module)
    module.ds_grads_remaining = 3  # DeepSpeed's
    assert changed_attribute(before, attributes_of_unknown(module)) is None
    change(module)
    assert f'changes its attribute "{attribute}"' in changed_attribute(before, attributes_of_unknown(module))


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


def short_of_memory(attention, no_room, auto, fp8=None, paid=False):
    """What happened in steps in some of which graphs leave no room beside them, and what was said."""
    register()
    with Run(attention, auto=auto, fp8=fp8) as run:
        for step in range(8):
            run.graphs._pool.room = step not in no_room
            if step == 5 and paid:
                run.graphs._graphs[0].schedule.replays = PAID_AFTER
            train(run, [step])
        return run.happened, run.said


@on_ranks(1)
def test_where_memory_is_short_known_code_is_not_checked_and_other_code_has_no_graphs():
    happened, said = short_of_memory("sdpa", range(6), True)
    assert happened[2:6] == ["captured for 0, replayed for 0", *["replayed for 0"] * 3]
    assert happened[6:] == ["checked, eager", "replayed for 0"]
    assert "unchecked" in said[-1]
    for auto in (True, False):
        happened, said = short_of_memory("scheduled", range(8), auto)
        assert happened[2].startswith("captured for 0, closed")
        assert set(happened[3:]) == {""}  # nothing is asked any more
        assert "too little memory is free next to them" in said[-1]


@pytest.mark.parametrize(("paid", "after"), [(True, "captured for 0, checked, eager"), (False, "")])
@on_ranks(1)
def test_graphs_give_way_to_a_measured_step(paid, after):
    """Graphs that have been replayed often come back behind it."""
    happened, said = short_of_memory("sdpa", (5,), False, {"monitor": {"every": 5}}, paid)
    assert happened[4] == "replayed for 0"
    assert happened[5].startswith("closed")
    assert happened[6] == after
    assert any("too little memory is free next to them" in line for line in said) is not paid
