"""Graphs of padded rows: the mask is one of their inputs, so that one graph is right for any padding of its shape."""

import pytest
import torch

from ds_fp8.train import packed_attention
from tests.engine.graphs_in_python import Graphs, engine_of, take_step

ROWS, LENGTH = 3, 32


def mask(step, side):
    """Ones, zeros at one side: as many as it likes, others at every step."""
    padding = torch.tensor([(5 * step + 11 * row + 1) % (LENGTH - 2) for row in range(ROWS)])[:, None]
    places = torch.arange(LENGTH)[None]
    return ((places >= padding) if side == "left" else (places < LENGTH - padding)).long()


def batch(step, kind):
    tokens = (torch.arange(LENGTH * ROWS).view(ROWS, LENGTH) * 7 + step) % 128
    more = {}
    if kind != "absent":
        side = kind if kind in ("left", "right") else ("left", "right")[step % 2]
        more["attention_mask"] = torch.ones_like(tokens) if kind == "ones" else mask(step, side)
    if kind == "with positions":
        more["position_ids"] = (more["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    labels = tokens if "attention_mask" not in more else tokens.masked_fill(more["attention_mask"] == 0, -100)
    return {"input_ids": tokens, "labels": labels, **more}


def trained(graphs, attention, kinds):
    """Loss and gradient norm of each step, what became of it, what was said."""
    packed_attention.register()
    engine, said = engine_of(attention)
    if graphs:
        engine.fp8.graphs = Graphs(engine, auto=True)
    found = []
    for step in range(4 * len(kinds) + 1):
        found.append(take_step(engine, engine(**batch(step, kinds[step % len(kinds)])).loss))
    outcome = graphs and (engine.fp8.graphs.off, engine.fp8.graphs.captured, list(engine.fp8.graphs.log))
    engine.destroy()
    return found, outcome, said


PADDINGS = ("right", "left")
EVERY = ("right", "ones", "left", "absent", "with positions")


@pytest.mark.parametrize(("attention", "kinds", "captured"), [("sdpa", EVERY, 3), ("eager", PADDINGS, 1)])
def test_every_bit_is_that_of_python_whatever_the_padding(ranks, attention, kinds, captured):
    plain, _, _ = ranks(1, trained, False, attention, kinds)[0]
    found, outcome, said = ranks(1, trained, True, attention, kinds)[0]
    assert found == plain
    assert outcome[:2] == (None, captured), said
    log = outcome[2]
    assert "captured for 0, padded" in log
    assert log.count("replayed for 0") >= 2 * len(kinds) - captured
    assert not any("differ" in line for line in said)


def test_attention_that_reads_the_padding_is_launched_by_python(ranks):
    _, (off, captured, _), said = ranks(1, trained, True, "packed", ("right",))[0]
    assert (off, captured) == (None, 0)
    assert said == ["without CUDA graphs: rows are padded, so that attention's work differs from batch to batch"]
