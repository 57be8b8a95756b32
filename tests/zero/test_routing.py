"""Router statistics of mixtures of experts under ZeRO-3, on real ranks, and routing replayed in an engine."""

import contextlib
import copy
import math

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

from ds_fp8.layers.decoder.decoder import FusedAttentionHalf
from ds_fp8.layers.experts import routing
from ds_fp8.monitor.routing import RoutingFigures
from tests.layers.moe import EXPERTS
from tests.ranks import on_ranks
from tests.zero import models
from tests.zero.test_experts import batch, engine_of

LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]


def watched(section, recompute=None, accumulate=1, every=1, steps=1, prepare=None):
    """(measurements by step, counts of tokens by layer and expert of the first step, aux losses of its micro-batches).

    Counts and losses are those of this rank, taken in the model's own forwards.
    """

    def change(model):
        model.config.output_router_logits = True
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        if prepare is not None:
            prepare(model)

    engine = engine_of("qwen3_moe", {"monitor": {"every": every}, **section}, change, accumulate=accumulate)
    counts, losses, forwards = {name: torch.zeros(EXPERTS) for name in LAYERS}, [], {"running": False}

    def count(name):
        def hook(module, args):
            if forwards["running"] and not engine.global_steps:
                counts[name] += torch.bincount(args[1].flatten(), minlength=EXPERTS).cpu()

        return hook

    for name in LAYERS:
        engine.module.get_submodule(name).register_forward_pre_hook(count(name))
    measurements = []
    for step in range(steps):
        for part in range(accumulate):
            rank = torch.distributed.get_rank()
            ids = batch(step * accumulate + part, rank, rows=1 + rank).to(engine.device)
            forwards["running"] = True
            output = engine(input_ids=ids, labels=ids, use_cache=False)
            forwards["running"] = False
            if step == 0:
                losses.append(output.aux_loss.item())
            engine.backward(output.loss)
            engine.step()
        report, engine.fp8.health.last = engine.fp8.health.last, None
        measurements.append(report and report.routing)
        engine.eval()
        with torch.no_grad():
            engine(input_ids=batch(99, 0).to(engine.device))
        engine.train()
    assert engine.fp8.routing() == next(m for m in reversed(measurements) if m is not None)
    return measurements, {name: count.tolist() for name, count in counts.items()}, losses


def expected(results):
    """Figures by layer of the counts of all ranks, and the mean of their auxiliary losses."""
    layers = {}
    for name in LAYERS:
        total = torch.tensor([counts[name] for _, counts, _ in results], dtype=torch.float64).sum(0)
        share = total / total.sum()
        entropy = -(share * share.log()).nan_to_num(0).sum().item() / math.log(EXPERTS)
        layers[name] = (entropy, share.max().item(), int((total == 0).sum()))
    losses = [loss for *_, losses in results for loss in losses]
    return layers, sum(losses) / len(losses)


CASES = {
    "decoded": ({}, None, 1),
    "products in FP8": ({"linear": {"expert_products": "fp8"}}, None, 1),
    "experts in BF16": ({"linear": {"overrides": {"experts": "bf16"}}}, None, 1),
    "recomputed": ({}, "not reentrant", 2),
    "recomputed by reentrant checkpoints": ({}, "reentrant", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_all_ranks_are_counted_once(ranks, case):
    section, recompute, accumulate = CASES[case]
    results = ranks(2, watched, section, recompute, accumulate)
    layers, auxiliary_loss = expected(results)
    (first,), (second,) = (measurements for measurements, *_ in results)
    assert first == second, "the figures are the same on all ranks"
    assert results[0][1] != results[1][1], "the ranks have different tokens"
    tokens = sum(sum(counts[LAYERS[0]]) for _, counts, _ in results)
    assert tokens == 2 * 32 * (1 + 2) * accumulate
    assert list(first.layers) == LAYERS
    for name, (entropy, largest, empty) in layers.items():
        figures = first.layers[name]
        assert (figures.entropy, figures.largest_share) == pytest.approx((entropy, largest))
        assert figures.experts_without_tokens == empty
    assert first.mean.entropy == pytest.approx(sum(entropy for entropy, *_ in layers.values()) / 2)
    assert first.auxiliary_loss == pytest.approx(auxiliary_loss)


def to_two_experts(model):
    """Send all tokens to the same two experts."""
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight.zero_()  # topk of equal scores takes the same ones for every token


@on_ranks(2)
def test_a_collapsed_router_shows_and_other_steps_measure_nothing():
    (figures,), *_ = watched({}, None, 1, 1, 1, to_two_experts)
    for layer in figures.layers.values():
        assert layer == RoutingFigures(pytest.approx(0.5), 0.5, 2)
    measurements, *_ = watched({}, None, 1, 2, 3)
    assert [found is None for found in measurements] == [False, True, False]


def is_ours(hook):
    return getattr(hook, "func", hook).__module__ == "ds_fp8.monitor.routing"


@on_ranks(1)
def test_nothing_is_watched_without_a_monitor_or_after_destroy():
    """By this monitor's hooks on model and experts."""
    for every in (1, 0):
        engine = engine_of("qwen3_moe", {"monitor": {"every": every}})

        def hooks(engine=engine):
            parts = [engine.module, *(engine.module.get_submodule(name) for name in LAYERS)]
            every = (
                hook for part in parts for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
            )
            return sum(map(is_ours, every))

        assert hooks() == 3 * every
        fused = [module for module in engine.module.modules() if isinstance(module, FusedAttentionHalf)]
        assert len(fused) == 2
        assert not any(layer.fused_parts.changed() for layer in fused), "these stay fused"
        copied = copy.deepcopy(engine.module.get_submodule(LAYERS[0])._forward_pre_hooks).values()
        copies = [hook.func.__self__._monitor.active for hook in copied if is_ours(hook)]
        assert copies == [False] * every, "the copy of a model counts nothing"
        engine.destroy()
        assert (hooks(), engine.fp8.routing()) == (0, None)


def one_step(section, recompute, shift):
    """(routes, loss, gradients by name, counts of tokens) of one micro-step of a rank.

    shift: None for the model's own routing, else it is recorded before and replayed with this added to every expert.
    """

    def change(model):
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})

    engine = engine_of("qwen3_moe", {"monitor": {"every": 1}, **section}, change)
    ids = batch(0, dist.get_rank())
    engine.eval()
    with routing.record(engine) as routes, torch.no_grad():
        engine(input_ids=ids)
    engine.train()
    given = {name: (chosen + (shift or 0)) % EXPERTS for name, chosen in routes.items()}
    with contextlib.nullcontext() if shift is None else routing.replay(engine, given):
        loss = models.loss_of(engine, ids)
        engine.backward(loss)
    gradients = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
    engine.step()
    return given, loss.item(), gradients, engine.fp8.routing()


REPLAYED = {
    "decoded": (1, {}, None),
    "products in FP8, recomputed": (2, {"linear": {"expert_products": "fp8"}}, "not reentrant"),
    "recomputed by reentrant checkpoints": (1, {}, "reentrant"),
}


@pytest.mark.parametrize(("world", "section", "recompute"), REPLAYED.values(), ids=REPLAYED)
@on_ranks()
def test_an_engine_replays_routing(section, recompute):
    _, loss, gradients, _ = one_step(section, recompute, None)
    _, again, same, _ = one_step(section, recompute, 0)
    assert again == loss
    models.assert_same(same, gradients)
    given, other, gradients, counted = one_step(section, recompute, 1)
    assert other != loss
    for name in LAYERS:
        counts = torch.bincount(given[name].flatten(), minlength=EXPERTS)
        dist.all_reduce(counts)
        assert counted.layers[name].largest_share == pytest.approx((counts.max() / counts.sum()).item())
        assert gradients[name.replace("experts", "gate.weight")].abs().sum() > 0
