"""Experts on a GPU: what the reference computes, within rounding, and a host that waits for nothing."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.layers.experts.products import ExpertAdapters, ExpertWeights, expert_products
from tests.gemm.tolerance import CHAIN
from tests.layers.test_expert_products import inputs, low_ranks, run, run_adapted, settings
from tests.numerics import error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128"])
@pytest.mark.parametrize(
    ("counts", "choices"), [((0, 1, 127, 128, 129), 1), ((300, 0, 0), 2), ((3,) * 64, 8), ((1,), 1)]
)
def test_experts_are_those_of_the_reference(counts, choices, wgrad_input):
    given = inputs(counts, choices)
    products = settings(backend="cublas", wgrad={"input": wgrad_input})
    expected = run(*given, products)
    found = run(*(tensor.cuda() for tensor in given), products)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert error(one.cpu(), other) < 2 * CHAIN[torch.bfloat16]  # and what tensor cores drop


@pytest.mark.parametrize("activations", [{}, {"recompute": "mlp"}])
@pytest.mark.parametrize("rank", [8, 32])
@pytest.mark.parametrize(("counts", "choices"), [((0, 1, 127, 128, 129), 1), ((300, 0, 0), 2), ((3,) * 64, 8)])
def test_adapters_are_those_of_the_reference(counts, choices, rank, activations):
    given, products = inputs(counts, choices), settings(activations=activations, backend="cublas")
    adapters = low_ranks(*given[3:5], rank, 0.3)
    expected = run_adapted(*given, products, adapters)
    on_device = ExpertAdapters.of_tensors([tensor.cuda() for tensor in adapters.tensors])
    found = run_adapted(*(tensor.cuda() for tensor in given), products, on_device)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert error(one.cpu(), other) < 2 * CHAIN[torch.bfloat16]


def parameters(given):
    x, index, router_weights, gate_up, down, dy = (tensor.cuda() for tensor in given)
    low_rank = low_ranks(gate_up, down).tensors
    leaves = [tensor.cuda().requires_grad_() for tensor in (x, router_weights, gate_up, down, *low_rank)]
    return leaves, index, dy


def step(leaves, index, dy, products):
    adapters = ExpertAdapters.of_tensors(leaves[4:])
    y = expert_products(leaves[0], index, leaves[1], ExpertWeights(*leaves[2:4]), products, adapters)
    # Without its history: as long as that is kept, the leaves' gradients belong to the stream of the first step, and
    # no other stream can capture them.
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def test_the_host_waits_for_nothing():
    leaves, index, dy = parameters(inputs((40, 0, 130, 7), 2))
    step(leaves, index, dy, settings(backend="cublas"))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, index, dy, settings(backend="cublas"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_the_routing_of_every_replay():
    products = settings(backend="cublas")
    leaves, index, dy = parameters(inputs((40, 0, 130, 7), 2))
    other = torch.rand(index.shape[0], 4, device="cuda").topk(2).indices
    expected = [step(leaves, chosen, dy, products) for chosen in (index, other)]
    static = index.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(leaves, static, dy, products)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(leaves, static, dy, products)
    for chosen, wanted in zip((index, other), expected, strict=True):
        static.copy_(chosen)
        graph.replay()
        for found, result in zip(results, wanted, strict=True):
            assert torch.equal(found, result)


def test_the_same_twice():
    leaves, index, dy = parameters(inputs((300, 5, 0, 200), 3))
    first, second = (step(leaves, index, dy, settings(backend="cublas")) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
