"""CUDA graphs of mixtures of experts: measured steps are counted, and no graph runs where routing is replayed."""

import torch

from ds_fp8.layers.experts import routing
from tests.engine.graphs_in_python import Graphs, engine_of
from tests.layers.moe import EXPERTS, mixture, routed_steps

EVERY = 5
REPLAYED_IN = 8  # The step whose routing is given


def steps(graphs):
    """(losses, router statistics by step, what was done, what was said) of steps of two micro-batches' tokens."""
    model = mixture("qwen3_moe", num_hidden_layers=1)
    # All experts for all tokens: operations that an OperationList repeats need fixed sizes.
    model.config._experts_implementation = "batched_mm"
    engine, said = engine_of(fp8={"monitor": {"every": EVERY}}, model=model)
    if graphs:
        engine.fp8.graphs = Graphs(engine)

    def routes(ids):
        with routing.record(engine) as recorded, torch.no_grad():
            engine.eval()
            engine(input_ids=ids)
            engine.train()
        return {name: (chosen + 1) % EXPERTS for name, chosen in recorded.items()}

    def batch(step):
        return ((torch.arange(64) * 7 + step) % model.config.vocab_size)[None]

    losses, measured = routed_steps(engine, batch, 11, REPLAYED_IN, routes)
    log = list(engine.fp8.graphs.log) if graphs else []
    engine.destroy()
    return losses, measured, log, said


def test_measured_steps_are_counted_and_given_routing_runs_eagerly(ranks):
    losses, measured, log, said = ranks(1, steps, True)[0]
    plain, measured_without, *_ = ranks(1, steps, False)[0]
    assert losses == plain
    assert measured == measured_without
    assert [step for step, found in enumerate(measured) if found is not None] == [0, EVERY, 2 * EVERY]
    assert any(line.startswith("replayed") for line in log)
    assert "without CUDA graphs: routing of experts is recorded or replayed" in said
