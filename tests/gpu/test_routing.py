"""Router statistics and replayed routing on GPUs, with CUDA graphs and without."""

import pytest
import torch

from tests.layers.moe import EXPERTS, routed_steps
from tests.zero.test_experts import batch, engine_of
from tests.zero.test_routing import expected, watched

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PRODUCTS = {"linear": {"expert_products": "fp8"}}


@two_gpus
@pytest.mark.parametrize("section", [{}, PRODUCTS], ids=["decoded", "products in FP8"])
def test_tokens_of_all_ranks_are_counted_once(gpu_ranks, section):
    results = gpu_ranks(2, watched, section, "not reentrant", 2)
    layers, auxiliary_loss = expected(results)
    (first,), (second,) = (measurements for measurements, *_ in results)
    assert first == second
    for name, (entropy, largest, empty) in layers.items():
        figures = first.layers[name]
        assert (figures.entropy, figures.largest_share) == pytest.approx((entropy, largest))
        assert figures.experts_without_tokens == empty
    assert first.auxiliary_loss == pytest.approx(auxiliary_loss)


def steps(graph):
    """(losses, router statistics by step, number of graphs); the routing of step 11 is given."""
    engine = engine_of("qwen3_moe", {"monitor": {"every": 5}, "graph": graph, **PRODUCTS})

    def routes(ids):
        tokens = torch.arange(ids.numel(), device=ids.device)
        return [torch.stack([tokens % EXPERTS, (tokens + 1) % EXPERTS], 1)] * 2

    losses, found = routed_steps(engine, lambda step: batch(step, 0).to(engine.device), 16, 11, routes)
    measured = [one and one.mean.entropy for one in found]
    return losses, measured, engine.fp8.graphs.captured if engine.fp8.graphs else 0


def test_graphs_measure_and_replay_as_python_does(gpu_ranks):
    losses, measured, captured = gpu_ranks(1, steps, "on")[0]
    expected_losses, expected_measured, _ = gpu_ranks(1, steps, "off")[0]
    assert captured
    assert [step for step, entropy in enumerate(measured) if entropy is not None] == [0, 5, 10, 15]
    assert losses == pytest.approx(expected_losses, rel=0.01)
    for ours, theirs in zip(measured, expected_measured, strict=True):
        assert ours == (theirs and pytest.approx(theirs, rel=0.02))
