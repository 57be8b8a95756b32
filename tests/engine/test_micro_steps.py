"""CUDA graphs of micro-steps, as far as a machine without a GPU knows them; tests/gpu has the rest."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed import comm as dist
from torch import nn
from torch.distributed import destroy_process_group
from torch.utils import checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert, step_plan
from ds_fp8.graphs.capture import (
    before_process_groups_end,
    process_groups_may_end,
    process_groups_used,
    random_states_unread,
)
from ds_fp8.graphs.conditions import rows_in_a_graph, unknown_code, why_no_graphs, why_not_recomputed
from ds_fp8.graphs.replay import MIN_DOCUMENTS, Shape, differentiable
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.format import use_fp8_attention
from ds_fp8.train import packed_attention
from ds_fp8.zero.collectives import first_reason
from tests.ranks import on_ranks
from tests.zero import models


@pytest.mark.parametrize(("graph", "why"), [("off", 'off: "graph" is "off"'), ("auto", "off: there is no CUDA device")])
@on_ranks(2)
def test_the_report_says_why_there_are_none(graph, why):
    engine = models.build(models.config({"monitor": {"every": 0}, "graph": graph}))
    assert (engine.fp8.report["graphs"], engine.fp8.graphs) == (why, None)


@on_ranks(2)
def test_a_reason_of_one_rank_holds_for_all():
    assert first_reason("here" if dist.get_rank() == 1 else None) == "here"


def captures(fp8=None, why_no_step=None, device="cuda", module=None, **answers):
    """Why an engine of these answers captures nothing; by default it does."""
    section = parse_fp8({"fp8": {"preset": "hybrid_fast", "graph": "auto", **(fp8 or {})}})
    if module is None:
        module = nn.Linear(2, 2)
    methods = dict.fromkeys(("wall_clock_breakdown", "flops_profiler_enabled"), False)
    methods |= {"zero_optimization_stage": 3, "zero_overlap_comm": True}
    engine = SimpleNamespace(
        module=module,
        device=torch.device(device),
        sequence_parallel_size=answers.pop("sequence_parallel_size", 1),
        **{name: lambda value=value: value for name, value in {**methods, **answers}.items()},
    )
    return why_no_graphs(engine, step_plan(section), why_no_step)


def linear(change, **casts):
    """A module of one linear layer, changed."""
    module = nn.Sequential(nn.Linear(128, 128, bias=False).bfloat16())
    convert(module, parse_fp8({"fp8": {"linear": {"backend": "reference", **casts}}}))
    change(module)
    return module


REASONS = {
    '"graph" is "off"': {"fp8": {"graph": "off"}},
    "there is no CUDA device": {"device": "cpu"},
    "DeepSpeed's step stays: offloaded": {"why_no_step": "offloaded"},
    "one scale each": {"fp8": {"grad_reduce": {"scale": "tensor"}}},
    "casts are emulated": {"module": lambda: linear(lambda m: None, input={"rounding": "stochastic"})},
    "ranks share sequences": {"sequence_parallel_size": 2},
    "DeepSpeed times or profiles": {"wall_clock_breakdown": True},
    "profiles forward": {"flops_profiler_enabled": True},
    "overlap_comm is false": {"zero_overlap_comm": False},
    "dropped at random": {"module": lambda: linear(lambda m: setattr(m, "config", SimpleNamespace(layerdrop=0.1)))},
    "the module is compiled": {"module": lambda: linear(lambda m: m.compile(backend="eager"))},
}


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_given(reason):
    answers = {name: value() if callable(value) else value for name, value in REASONS[reason].items()}
    assert reason in captures(**answers)


def test_there_may_be_no_reason():
    assert captures() is None
    assert captures(module=linear(lambda m: None)) is None


def test_code_of_others_is_captured_and_hooks_only_if_asked_for():
    """Hooks are there to be called at every step, and a graph calls none."""

    class Counting(nn.Module):
        def forward(self, x):
            return x

    hooked, own = linear(lambda m: m[0].register_forward_hook(lambda *_: None)), linear(lambda m: m.append(Counting()))
    assert "0 has a hook of tests.engine.test_micro_steps" in captures(module=hooked)
    assert captures(module=hooked, fp8={"graph": "on"}) is None
    assert captures(module=own) is None
    assert "1 is a Counting of tests.engine.test_micro_steps" in unknown_code(own)
    assert captures(module=small_model()) is unknown_code(small_model()) is None


ROWS = torch.arange(6).expand(2, 6)
PADDED = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
PACKED_ROWS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("batch", "held", "why"),
    [
        ({}, 0, None),
        ({"attention_mask": PADDED}, 0, "padded"),
        ({"attention_mask": torch.ones(2, 6)}, 0, None),
        ({"position_ids": ROWS}, 0, None),
        ({"position_ids": ROWS[:1]}, 0, None),
        ({"position_ids": ROWS.expand(3, 2, 6)}, 0, None),
        ({"position_ids": ROWS, "attention_mask": torch.ones(2, 6)}, 0, None),
        ({"position_ids": PACKED_ROWS}, 3, None),
        ({"position_ids": PACKED_ROWS[:1]}, 4, None),
        ({"position_ids": PACKED_ROWS.expand(3, 2, 6)}, 0, "several positions"),
        ({"position_ids": PACKED_ROWS, "attention_mask": torch.ones(2, 6)}, 0, "a mask says"),
        ({"position_ids": ROWS + 1}, 0, "do not count from 0"),
        ({"position_ids": ROWS // 2}, 0, "do not count from 0"),
        ({"position_ids": ROWS, "attention_mask": PADDED}, 0, "padded"),
    ],
)
def test_what_rows_hold(batch, held, why):
    found = rows_in_a_graph(small_model("packed"), {"input_ids": torch.zeros(2, 6), **batch})
    assert found[0] == held
    assert found[1] is None if why is None else why in found[1]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "fp8_packed"])
def test_packed_rows_are_captured_with_packed_attention_alone(attention):
    model, tokens = small_model(attention), torch.zeros(2, 6)
    assert rows_in_a_graph(model, {"input_ids": tokens, "position_ids": ROWS}) == (0, None)
    varies = "rows are padded, so that attention's work differs from batch to batch"
    padded = varies if attention == "fp8_packed" else None
    assert rows_in_a_graph(model, {"input_ids": tokens, "attention_mask": PADDED}) == (0, padded)
    held, why = rows_in_a_graph(model, {"input_ids": tokens, "position_ids": PACKED_ROWS})
    assert held == 0
    assert f'attention is "{attention}"' in why


def test_packed_rows_too_short_for_attention_in_fp8_are_captured(monkeypatch):
    model, batch = small_model("packed"), {"input_ids": torch.zeros(2, 6), "position_ids": PACKED_ROWS}
    model.model.layers[1].self_attn.attention_dropout = 0.1  # in BF16 in rows of any length
    assert len(use_fp8_attention(model, only_long=True).left) == 1
    assert rows_in_a_graph(model, batch) == (3, None)
    monkeypatch.setattr(documents, "LONG", 6)
    assert 'attention is "fp8_packed"' in rows_in_a_graph(model, batch)[1]


def test_a_graph_has_room_for_twice_the_documents_ever_seen():
    shape, found = Shape(), []
    for shape.most_documents in (0, 2, 16, 17):
        found.append(shape.capacity())
    assert found == [0, MIN_DOCUMENTS, 32, 64]  # plain rows stay plain
    for shape.most_documents in range(1, 300):
        assert 2 * shape.most_documents <= shape.capacity() <= max(MIN_DOCUMENTS, 4 * shape.most_documents)


def small_model(attention="sdpa", **more) -> nn.Module:
    packed_attention.register()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=32, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def test_what_is_recomputed_without_random_numbers_can_be_captured():
    model = small_model()
    assert why_not_recomputed(list(model.modules())) is None
    model.gradient_checkpointing_enable()
    assert why_not_recomputed(list(model.modules())) is None
    model.model.layers[0].mlp.dropout = nn.Dropout(0.1)
    assert "dropout" in why_not_recomputed(list(model.modules()))
    assert why_not_recomputed(list(model.eval().modules())) is None
    model = small_model(attention_dropout=0.1)
    assert why_not_recomputed(list(model.modules())) is None
    model.gradient_checkpointing_enable()
    assert "dropout" in why_not_recomputed(list(model.modules()))
    model.gradient_checkpointing_enable(offload=True)
    assert "kept on the host" in why_not_recomputed(list(model.modules()))


def test_recomputation_with_random_numbers_ends_a_capture():
    checkpoint.get_device_states()
    with random_states_unread(drawn=True), pytest.raises(RuntimeError, match="recomputed with random numbers"):
        checkpoint.get_device_states()
    checkpoint.get_device_states()


def test_recomputation_works_while_random_states_are_not_read():
    model, tokens = small_model(), torch.arange(8)[None]
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with random_states_unread(drawn=False):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Ended:
    """Notes which process groups are about to end."""

    def __init__(self):
        self.groups = []

    def process_group_ends(self, group):
        self.groups.append((group.group_name, torch.distributed.is_initialized()))


def new_group():
    group = torch.distributed.new_group()
    torch.distributed.barrier(group)  # or one rank ends it while the other is still connecting
    return group


@on_ranks(2)
def test_process_groups_that_end_are_told_of_while_there_are_graphs():
    """And torch's method is back behind the last of them."""
    shutdown = vars(torch.distributed.ProcessGroup)["shutdown"]
    groups = [new_group() for _ in range(4)]
    names = [group.group_name for group in groups]
    gone, first, last = (Ended() for _ in range(3))
    for one in (gone, first, last):
        before_process_groups_end(one)
    seen = gone.groups
    del gone, one
    for group, one in zip(groups, (None, first, last, None), strict=True):
        destroy_process_group(group)
        if one is not None:
            process_groups_may_end(one)
    called = [[name for name, there in x if there] for x in (seen, first.groups, last.groups)]
    assert called == [[], names[:2], names[:3]]
    assert vars(torch.distributed.ProcessGroup)["shutdown"] is shutdown


@on_ranks(2)
def test_process_groups_of_a_capture_are_found():
    ours, others = new_group(), new_group()
    names = set()
    with process_groups_used(names):
        torch.distributed.all_reduce(torch.ones(1), group=ours)
    assert names == {ours.group_name}
    for group in (ours, others):
        destroy_process_group(group)


def test_outputs_with_a_gradient_are_found():
    loss, logits = torch.ones((), requires_grad=True), torch.ones(3)
    assert differentiable([None, logits, loss]) == [2]
    assert differentiable([loss, 1, loss * 2, "x"]) == [0, 2]
    with pytest.raises(ValueError, match="no tensor with a gradient"):
        differentiable([logits])
    with pytest.raises(ValueError, match="use_cache"):
        differentiable([loss, object()])
