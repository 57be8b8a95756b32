"""What a step does shows in torch's profiler by name, and the ranges are not made where nobody profiles."""

import torch
from torch.profiler import ProfilerActivity, profile

from tests.engine.graphs_in_python import Graphs, engine_of
from tests.zero import models

RANGES = ["ds_fp8: cast", "ds_fp8: gather", "ds_fp8: reduce", "ds_fp8: step"]


def ranges_of(profiled):
    """Names and counts of this package's ranges, and by name those of the ranges around a collective."""
    events = [event for event in profiled.events() if event.name.startswith("ds_fp8: ")]
    around = {}
    for event in events:
        names, waiting = around.setdefault(event.name, set()), list(event.cpu_children)
        while waiting:
            child = waiting.pop()
            names.add(child.name)
            waiting += child.cpu_children
    counts = {name: sum(event.name == name for event in events) for name in around}
    return counts, around


def step(_):
    engine = models.build(models.config({"monitor": {"every": 0}}))
    models.train(engine, 1)
    made, record = [], torch.profiler.record_function
    torch.profiler.record_function = lambda name: made.append(name) or record(name)
    try:
        models.train(engine, 1, start=1)
    finally:
        torch.profiler.record_function = record
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        models.train(engine, 1, start=2)
    return made, *ranges_of(profiled)


def test_a_profile_of_a_step_has_its_parts(ranks):
    for made, counts, around in ranks(2, step, None):
        assert made == []
        assert sorted(counts) == RANGES
        assert counts["ds_fp8: step"] == counts["ds_fp8: cast"] == 1
        assert counts["ds_fp8: reduce"] >= 1
        assert counts["ds_fp8: gather"] > 6  # each module, forward and backward
        assert "ds_fp8: cast" in around["ds_fp8: step"]
        # The collectives are within.
        for name, word in (("gather", "allgather"), ("cast", "allreduce"), ("reduce", "alltoall")):
            found = [child for child in around[f"ds_fp8: {name}"] if child.startswith("c10d::")]
            assert any(word in child for child in found), (name, found)


def replayed(_):
    engine, _ = engine_of(fp8={"graph": "off"})
    graphs = engine.fp8.graphs = Graphs(engine, auto=True)
    tokens = torch.arange(32).view(2, 16)

    def train(steps):
        for _ in range(steps):
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
            engine.step()

    train(5)
    assert graphs.captured == 1
    graphs.log.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(1)
    assert graphs.log == ["replayed for 0"]
    return ranges_of(profiled)[0].get("ds_fp8: graph")


def test_so_has_a_replay(ranks):
    assert ranks(2, replayed, None) == [2, 2]  # forward and backward
