"""CUDA graphs of micro-steps, as far as a machine without a GPU knows them; tests/gpu has the rest."""

from collections import Counter

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.capture import before_process_groups_end, random_states_unread
from ds_fp8.engine.graph_conditions import one_sequence_a_row, why_not_recomputed
from ds_fp8.engine.micro_step_graph import only_differentiable
from ds_fp8.zero.wire import GATHER, WireMeter
from tests.zero import models


def reported(graph):
    engine = models.build(models.config({"monitor": {"every": 0}, "graph": graph}))
    return engine.fp8.report["graphs"], engine.fp8.graphs


@pytest.mark.parametrize(("graph", "why"), [("off", 'off: "graph" is "off"'), ("auto", "off: there is no CUDA device")])
def test_the_report_says_why_there_are_none(ranks, graph, why):
    assert ranks(2, reported, graph) == [(why, None)] * 2


def test_they_are_off_unless_asked_for():
    assert FP8Config().graph == "off"


ROWS = torch.arange(6).expand(2, 6)


@pytest.mark.parametrize(
    ("batch", "plain"),
    [
        ({}, True),
        ({"attention_mask": torch.ones(2, 6)}, True),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, False),
        ({"position_ids": ROWS}, True),
        ({"position_ids": ROWS[:1]}, True),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, False),
        ({"position_ids": ROWS + 1}, False),
        ({"position_ids": ROWS, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, False),
    ],
)
def test_rows_of_one_sequence(batch, plain):
    assert one_sequence_a_row(batch) is plain


def small_model(**more) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=32, **more)).train()


def test_what_is_recomputed_without_random_numbers_can_be_captured():
    model = small_model()
    assert why_not_recomputed(model) is None
    model.gradient_checkpointing_enable()
    assert why_not_recomputed(model) is None
    model.model.layers[0].mlp.dropout = nn.Dropout(0.1)
    assert "dropout" in why_not_recomputed(model)
    assert why_not_recomputed(model.eval()) is None


def test_what_is_recomputed_with_dropout_of_attention_is_not_captured():
    model = small_model(attention_dropout=0.1)
    assert why_not_recomputed(model) is None
    model.gradient_checkpointing_enable()
    assert "dropout" in why_not_recomputed(model)


def test_activations_kept_on_the_host_are_not_captured():
    model = small_model()
    model.gradient_checkpointing_enable(offload=True)
    assert "kept on the host" in why_not_recomputed(model)


def test_recomputation_works_while_random_states_are_not_read():
    model, tokens = small_model(), torch.arange(8)[None]
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with random_states_unread():
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def ended(_):
    """What is done before a process group ends, and not once it is taken back."""
    done = []
    take_back = before_process_groups_end(lambda: done.append(torch.distributed.is_initialized()))
    torch.distributed.destroy_process_group(torch.distributed.new_group())
    take_back()
    torch.distributed.destroy_process_group(torch.distributed.new_group())
    return done


def test_graphs_are_gone_before_a_process_group_ends(ranks):
    assert ranks(2, ended, None) == [[True]] * 2


def test_one_output_has_the_gradient():
    loss, logits = torch.ones((), requires_grad=True), torch.ones(3)
    assert only_differentiable([None, logits, loss])[0] == 2
    for leaves in ([logits], [loss, loss * 2]):
        with pytest.raises(ValueError, match="a graph knows one loss"):
            only_differentiable(leaves)


def test_bytes_of_a_graph_are_counted_when_it_runs():
    wire = WireMeter()
    wire.add(Counter({GATHER: 5}))
    sent = wire.sent()
    wire.add(Counter({GATHER: 7}))
    more = wire.sent() - sent
    wire.subtract(more)
    assert wire.sent()[GATHER] == 5
    wire.add(more)
    assert wire.take()[GATHER] == 12
