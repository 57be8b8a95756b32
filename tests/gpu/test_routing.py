"""Mixtures of experts on GPUs: routing counted and replayed, gathered experts, and labels outside the vocabulary."""

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.layers.experts.experts import dequantize_rows
from ds_fp8.layers.linear.weights import UNSHARDED
from tests.layers.moe import EXPERTS, routed_steps
from tests.zero.test_experts import EXACT, PREFETCH, batch, engine_of, gathered_against_whole, gradients, trained
from tests.zero.test_labels import CASES, IGNORED, steps_until_refused
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


# -------------------- gathered experts


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_decoded_weights_are_those_of_the_cpu(scale):
    weight = torch.nn.Parameter(torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(0)).bfloat16())
    decoded = []
    for device in ("cpu", "cuda"):
        own = torch.nn.Parameter(weight.detach().to(device))
        setattr(own, UNSHARDED, quantize(own.detach().float().flatten(0, 1), "e4m3", "128x128", scale))
        decoded.append([dequantize_rows(own).cpu(), dequantize_rows(own, 128, 300).cpu()])
    for ours, theirs in zip(*decoded, strict=True):
        assert torch.equal(ours, theirs)


@two_gpus
def test_gathered_experts_are_the_cast_of_the_whole(gpu_ranks):
    for result in gpu_ranks(2, gathered_against_whole, "qwen3_moe", 2):
        assert set(result.values()) == {(True, True, True)}


@two_gpus
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_mixtures_train_as_bf16_does(gpu_ranks, architecture):
    fp8 = gpu_ranks(2, trained, architecture, {}, 12)[0]
    bf16 = gpu_ranks(2, trained, architecture, {"enabled": False}, 12)[0]
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02)
    assert fp8[2] == 0


@two_gpus
def test_gradients_are_nearly_those_of_the_decoded_weights(gpu_ranks):
    arguments = ("different empty experts", "grouped_mm", None, 1)
    decoded = {**EXACT, "linear": {**EXACT["linear"], "expert_products": "bf16"}}
    ours = gpu_ranks(2, gradients, decoded, *arguments, 3, PREFETCH)
    wanted = gpu_ranks(2, gradients, {"enabled": False}, *arguments, 1, PREFETCH)
    for mine, theirs in zip(ours, wanted, strict=True):
        for name, gradient in theirs.items():
            assert (mine[name] - gradient).norm() <= 0.02 * gradient.norm(), name


# -------------------- labels outside the vocabulary


@pytest.mark.parametrize("case", ["on", *(case for case in CASES if "offload_optimizer" not in CASES[case][1])])
def test_labels_outside_the_vocabulary_are_refused(gpu_ranks, case):
    good = 12 if case == "on" else 2
    ((step, said, in_graph),) = gpu_ranks(1, steps_until_refused, case, 97, good)
    assert step == good
    assert "2 labels are outside the vocabulary of 97 tokens, 97 for one" in said
    assert in_graph or case != "on"


def test_labels_without_loss_are_none_of_them(gpu_ranks):
    assert gpu_ranks(1, steps_until_refused, "on", IGNORED, 12)[0][:2] == (14, None)
