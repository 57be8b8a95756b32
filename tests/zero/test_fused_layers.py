"""Fused decoder layers of a Hugging Face model under ZeRO-3, on real ranks."""

from collections import Counter

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

import ds_fp8
from ds_fp8.layers.linear import weights
from ds_fp8.zero.collectives import AllGather
from tests.layers.hugging_face import causal_lm, tokens
from tests.zero import models
from tests.zero.test_training import QUIET

STEPS = 4
# A prefetch that ends between q (65,536 elements), k and v, and between gate and up (98,304)
MIDDLE = {"stage3_prefetch_bucket_size": 70_000, "stage3_max_reuse_distance": 0}


def train(section, world):
    """(losses, largest differences between a BF16 weight and that of rank 0's, what was seen) of a tiny Qwen2."""
    model = causal_lm("qwen2")
    config = models.config({**QUIET, **section})
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    views, stacked = [], weights._stacked

    def watched(parts):
        result = stacked(parts)
        views.append(result.data_ptr() == parts[0].data_ptr())
        return result

    weights._stacked = watched
    losses = []
    for step in range(STEPS):
        ids = tokens(2 * world, 16).roll(step, 1)[2 * dist.get_rank() :][:2]
        losses.append(models.take_step(engine, engine(input_ids=ids, labels=ids).loss))
    weights._stacked = stacked
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens(1, 9)).logits.float()
        generated = engine.module.generate(tokens(1, 9), max_new_tokens=2, do_sample=False, synced_gpus=True)
    report = engine.fp8.report
    held = [p for p in engine.module.parameters() if getattr(p, weights.UNSHARDED, None) is not None]
    return losses, models.bf16_weights(engine), (views, report.get("fused_layers"), logits, generated, len(held))


@pytest.mark.parametrize("world", [2, 3])
def test_fused_layers_train_as_bf16_does(ranks, baseline, world):
    fp8 = ranks(world, train, {}, world)
    bf16 = baseline(world, train, {"enabled": False}, world)
    assert bf16[0][0][-1] < bf16[0][0][0]
    for (losses, trained, seen), (expected, *_) in zip(fp8, bf16, strict=True):
        assert losses != expected
        assert losses == pytest.approx(expected, rel=0.02)
        views, fused_layers, logits, generated, held = seen
        assert fused_layers == 2
        assert held == 0, "a gathered weight was not released"
        assert generated.shape == (1, 11)
        for name, weight in trained.items():
            assert torch.equal(weight, fp8[0][1][name]), name
        assert torch.equal(logits, fp8[0][2][2])
        # 256 x 256, 128 x 256 and 384 x 256 elements divide by 2 ranks and not by 3: then padding lies between shards
        assert all(views), "q, k, v and gate, up are copied, though their shards lie side by side"


@pytest.mark.parametrize("preset", ["hybrid_fast", "rowwise", "tensorwise"])
def test_other_presets(ranks, baseline, preset):
    losses = ranks(2, train, {"preset": preset}, 2)[0][0]
    assert losses == pytest.approx(baseline(2, train, {"enabled": False}, 2)[0][0], rel=0.02)


class Caller(torch.nn.Module):
    """Calls a layer with its input by position or by name, as a model of somebody else may."""

    def __init__(self, layer, by_name):
        super().__init__()
        self.layer, self.by_name = layer, by_name

    def forward(self, hidden_states, **options):
        if self.by_name:
            return self.layer(hidden_states=hidden_states, **options)
        return self.layer(hidden_states, **options)


def train_called(by_name, frozen):
    """Losses and weights after three steps, and the number of fused layers."""
    model = causal_lm("qwen2")
    model.model.layers = torch.nn.ModuleList(Caller(layer, by_name) for layer in model.model.layers)
    model.model.embed_tokens.requires_grad_(not frozen)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=models.config(QUIET))[0]
    losses = []
    for step in range(3):
        ids = tokens(4, 16).roll(step, 1)[2 * dist.get_rank() :][:2]
        losses.append(models.take_step(engine, engine(input_ids=ids, labels=ids).loss))
    return losses, models.bf16_weights(engine), engine.fp8.report["fused_layers"]


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_may_be_called_with_their_input_by_name(ranks, frozen):
    for left, right in zip(ranks(2, train_called, True, frozen), ranks(2, train_called, False, frozen), strict=True):
        assert left[0] == right[0]
        assert left[2] == right[2] == 2
        for name, weight in left[1].items():
            assert torch.equal(weight, right[1][name]), name


def gradients_of_calls(section, how, bucket):
    """Gradients of a step in which a backward ends several calls of a layer, by name."""
    model = causal_lm("llama")
    if "recomputed" in how:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "a layer twice" in how:
        first, second = model.model.layers
        model.model.layers = torch.nn.ModuleList([first, second, first])
        model.config.num_hidden_layers = 3
    config = models.config({**QUIET, **section}, reduce_bucket_size=bucket)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def loss(step):
        ids = tokens(4, 16).roll(step, 1)[2 * dist.get_rank() :][:2]
        # A cache would keep the keys of both calls of a layer as those of one.
        return engine(input_ids=ids, labels=ids, use_cache=False).loss

    if how == "a forward without backward":
        loss(1)
    engine.backward(loss(0) + loss(1) if how == "two forwards" else loss(0))
    found = {name: safe_get_full_grad(parameter).float() for name, parameter in engine.module.named_parameters()}
    engine.step()
    loss(2)
    return found


@pytest.mark.parametrize(
    ("how", "bucket"),
    [
        ("a layer twice", 10**6),
        ("a layer twice", 150_000),
        ("a layer twice, recomputed", 150_000),
        ("two forwards", 10**6),
        ("two forwards", 150_000),
        ("a forward without backward", 150_000),
    ],
)
def test_a_backward_may_end_several_calls_of_a_layer(ranks, baseline, how, bucket):
    fp8 = ranks(2, gradients_of_calls, {}, how, bucket)
    bf16 = baseline(2, gradients_of_calls, {"enabled": False}, how, 10**6)
    for gradients, expected in zip(fp8, bf16, strict=True):
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() < 0.2 * expected[name].norm(), name


def gradients_held_at_the_end(dropped: str):
    """Largest part of all gradients that exists when a backward ends, after forwards whose backward never came."""
    model = causal_lm("llama")
    config = models.config(QUIET, reduce_bucket_size=1000)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    parameters, held = list(engine.module.parameters()), []

    def last(_: torch.Tensor) -> None:  # the embedding's gradient comes behind all others
        held.append(sum(p.grad.numel() for p in parameters if p.grad is not None))

    engine.module.get_input_embeddings().weight.register_hook(last)
    loss = None
    for step in range(3):
        ids = tokens(2, 16).roll(step, 1)
        if dropped == "an evaluation with gradients" and step:
            engine.eval()
            engine(input_ids=ids, labels=ids)
            engine.train()
        loss = engine(input_ids=ids, labels=ids).loss
        if dropped == "a loss that was not used" and step:
            loss = engine(input_ids=ids, labels=ids).loss
        models.take_step(engine, loss)
    return max(held) / sum(p.ds_numel for p in parameters)


@pytest.mark.parametrize("dropped", ["nothing", "an evaluation with gradients", "a loss that was not used"])
def test_forwards_without_backward_hold_no_gradients(ranks, dropped):
    for share in ranks(2, gradients_held_at_the_end, dropped):
        assert share < 0.2


def gathers(section, zero):
    """Train a tiny Qwen2 and watch what its products read.

    Returns ((losses, stacks that were copied, whether some were views, outlier blocks made by forward in the last step,
    weights that stayed gathered), whether some of a product was fetched without the rest).
    """
    model = causal_lm("qwen2")
    config = models.config({**QUIET, **section}, **zero)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    seen, losses, stacked, extend, take = Counter(), [], weights._stacked, weights.extend_weight, AllGather.allocate

    def watched(parts):
        result = stacked(parts)
        seen["view" if result.data_ptr() == parts[0].data_ptr() else "copy"] += 1
        return result

    def extended(*arguments):
        seen["block"] += 1
        return extend(*arguments)

    def taken(gather, stack, *arguments):
        seen["parted"] += len(stack) < len(gather._product[stack[0]])
        return take(gather, stack, *arguments)

    weights._stacked, weights.extend_weight, AllGather.allocate = watched, extended, taken
    for step in range(STEPS):
        seen["block"] = 0
        ids = tokens(4, 16).roll(step, 1)[2 * dist.get_rank() :][:2]
        losses.append(models.take_step(engine, engine(input_ids=ids, labels=ids).loss))
    weights._stacked, weights.extend_weight, AllGather.allocate = stacked, extend, take
    held = [p for p in engine.module.parameters() if getattr(p, weights.UNSHARDED, None) is not None]
    return (losses, seen["copy"], seen["view"] > 0, seen["block"], len(held)), seen["parted"] > 0


@pytest.mark.parametrize("preset", ["infir2", "precise"])
def test_what_a_prefetch_parts_is_one_operand(ranks, preset):
    found = [ranks(2, gathers, {"preset": preset}, zero) for zero in ({}, MIDDLE)]
    for (whole, _), (parted, was_parted) in zip(*found, strict=True):
        assert was_parted
        assert parted == whole
        assert whole[1:] == (0, True, 0, 0)
