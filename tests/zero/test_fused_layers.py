"""Fused decoder layers of Hugging Face models under ZeRO-3, on real ranks: whole, in tiles of tokens, with a cache."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

from ds_fp8.layers.linear import weights
from ds_fp8.zero.collectives import AllGather
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.test_tiled_mlp import ROUNDED
from tests.ranks import case, on_ranks
from tests.zero import models

STEPS = 3
# A prefetch that ends between q (65,536 elements), k and v, and between gate and up (98,304)
MIDDLE = {"stage3_prefetch_bucket_size": 70_000, "stage3_max_reuse_distance": 0}


def rows(step, rank):
    """Two rows of this rank, by the number of a step."""
    return tokens(2 * dist.get_world_size(), 16).roll(step, 1)[2 * rank :][:2]


@contextlib.contextmanager
def stacks_seen():
    """Count stacked weights by whether they are views, outlier blocks, and fetches of a part of a product."""
    seen, stacked, extend, take = Counter(), weights._stacked, weights.extend_weight, AllGather.allocate

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

    with (
        mock.patch.object(weights, "_stacked", watched),
        mock.patch.object(weights, "extend_weight", extended),
        mock.patch.object(AllGather, "allocate", taken),
    ):
        yield seen


@on_ranks(2, 3)
def test_fused_layers_train_as_bf16_does():
    """On 3 ranks 256 x 256, 128 x 256 and 384 x 256 elements have padding between shards."""
    bf16 = models.train(models.engine(None, causal_lm("qwen2")), STEPS, rows=rows)
    assert bf16[-1] < bf16[0]
    for preset in ("infir2", "hybrid_fast", "rowwise", "tensorwise")[: 4 if dist.get_world_size() == 2 else 1]:
        engine = models.engine({"preset": preset}, causal_lm("qwen2"))
        with case(preset), stacks_seen() as seen:
            losses = models.train(engine, STEPS, rows=rows)
            assert losses != bf16
            assert losses == pytest.approx(bf16, rel=0.02)
            if preset == "infir2":
                assert (engine.fp8.report["fused_layers"], seen["copy"], seen["view"] > 0) == (2, 0, True)
                engine.eval()
                with torch.no_grad():
                    logits = engine(input_ids=tokens(1, 9)).logits.float()
                    found = engine.module.generate(tokens(1, 9), max_new_tokens=2, do_sample=False, synced_gpus=True)
                assert found.shape == (1, 11)
                assert models.held(engine) == [], "a gathered weight was not released"
                for ours in (logits, *models.bf16_weights(engine).values()):
                    first = ours.clone()
                    dist.broadcast(first, 0)
                    assert torch.equal(ours, first)
        engine.destroy()


@pytest.mark.parametrize("preset", ["infir2", "precise"])
@on_ranks(2)
def test_what_a_prefetch_parts_is_one_operand(preset):
    found = []
    for zero in ({}, MIDDLE):
        engine = models.engine({"preset": preset}, causal_lm("qwen2"), **zero)
        with stacks_seen() as seen:
            losses = models.train(engine, STEPS, rows=rows)
            seen["block"] = 0  # of forward, in the last step
            losses += models.train(engine, 1, STEPS, rows=rows)
        assert (seen["copy"], seen["view"] > 0, seen["block"], models.held(engine)) == (0, True, 0, [])
        found.append(losses)
    assert seen["parted"] > 0
    assert found[0] == found[1]


class Caller(torch.nn.Module):
    """Calls a layer with its input by position or by name, as a model of somebody else may."""

    def __init__(self, layer, by_name):
        super().__init__()
        self.layer, self.by_name = layer, by_name

    def forward(self, hidden_states, **options):
        if self.by_name:
            return self.layer(hidden_states=hidden_states, **options)
        return self.layer(hidden_states, **options)


@on_ranks(1)
def test_layers_may_be_called_with_their_input_by_name():
    for frozen in (False, True):
        found = []
        for by_name in (True, False):
            model = causal_lm("qwen2")
            model.model.layers = torch.nn.ModuleList(Caller(layer, by_name) for layer in model.model.layers)
            model.model.embed_tokens.requires_grad_(not frozen)
            engine = models.engine({}, model)
            assert engine.fp8.report["fused_layers"] == 2
            found.append((models.train(engine, 2, rows=rows), models.bf16_weights(engine)))
        with case(frozen):
            assert found[0][0] == found[1][0]
            models.assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "how", ["a layer twice", "a layer twice, recomputed", "two forwards", "a forward without backward"]
)
@on_ranks(2)
def test_a_backward_may_end_several_calls_of_a_layer(how):
    def gradients_of_calls(section, bucket):
        model = causal_lm("llama")
        if "recomputed" in how:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if "a layer twice" in how:
            first, second = model.model.layers
            model.model.layers = torch.nn.ModuleList([first, second, first])
            model.config.num_hidden_layers = 3
        engine = models.engine(section, model, reduce_bucket_size=bucket)

        def loss(step):  # without a cache, which would keep the keys of both calls of a layer as those of one
            return models.loss_of(engine, rows(step, dist.get_rank()))

        if how == "a forward without backward":
            loss(1)
        engine.backward(loss(0) + loss(1) if how == "two forwards" else loss(0))
        found = {name: safe_get_full_grad(parameter).float() for name, parameter in engine.module.named_parameters()}
        engine.step()
        loss(2)
        return found

    expected = gradients_of_calls(None, 10**6)
    for bucket in (10**6, 150_000):
        for name, gradient in gradients_of_calls({}, bucket).items():
            assert (gradient - expected[name]).norm() < 0.2 * expected[name].norm(), (name, bucket)


@on_ranks(2)
def test_forwards_without_backward_hold_no_gradients():
    """Part of all gradients that exists when a backward ends, after forwards whose backward never came."""
    for dropped in ("nothing", "an evaluation with gradients", "a loss that was not used"):
        engine = models.engine({}, causal_lm("llama"), reduce_bucket_size=1000)
        parameters, held = list(engine.module.parameters()), []
        engine.module.get_input_embeddings().weight.register_hook(  # its gradient comes behind all others
            lambda _, held=held, all=parameters: held.append(sum(p.grad.numel() for p in all if p.grad is not None))
        )
        for step in range(2):
            ids = tokens(2, 16).roll(step, 1)
            if dropped == "an evaluation with gradients" and step:
                engine.eval()
                engine(input_ids=ids, labels=ids)
                engine.train()
            if dropped == "a loss that was not used" and step:
                engine(input_ids=ids, labels=ids)
            models.take_step(engine, engine(input_ids=ids, labels=ids).loss)
        assert max(held) < 0.2 * sum(p.ds_numel for p in parameters), dropped


# ---------------------------------------------------------------- an MLP in tiles of tokens


LENGTH = 150  # Two rows of it are three tiles of 128, the last of them ragged


def in_tiles(tile, section, recompute=False):
    """Losses of four micro-batches in two steps, gradients of the first step by name, and BF16 weights."""
    model = causal_lm("qwen3", max_position_embeddings=LENGTH)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    changes = {"gradient_accumulation_steps": 2, "activation_checkpointing": {"cpu_checkpointing": recompute}}
    engine = models.engine(section | {"activations": {"mlp_tile_tokens": tile}}, model, changes)
    assert engine.fp8.report["fused_layers"] == 2
    losses, gradients = [], {}
    for number in range(4):
        starts = torch.randint(1, 97, (2, 1), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        loss = models.loss_of(engine, (starts + torch.arange(LENGTH)) % 97)
        engine.backward(loss)
        if number == 1:
            gradients = {name: safe_get_full_grad(p).float() for name, p in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    return losses, gradients, models.bf16_weights(engine)


@on_ranks(1, 2)
def test_gradients_of_tiles_are_those_of_the_whole():
    section, recompute = {"grad_reduce": {"format": "bf16"}}, dist.get_world_size() == 2
    (losses, gradients, found), (expected, exact, _) = (in_tiles(tile, section, recompute) for tile in (128, None))
    assert losses[:2] == expected[:2]  # before the first step no bit differs
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < losses[0]
    for name, gradient in exact.items():
        if ".mlp." in name:
            assert (gradients[name] - gradient).norm() < 3 * ROUNDED * gradient.norm(), name
        else:
            assert torch.equal(gradients[name], gradient), name
    for name, weight in found.items():
        dist.broadcast(first := weight.clone(), 0)
        assert torch.equal(weight, first), name


@pytest.mark.parametrize("preset", [pytest.param("hybrid_fast", marks=pytest.mark.slow), "precise"])
@on_ranks(2)
def test_gradients_of_tiles_that_travel_in_fp8(preset):
    losses, expected = (in_tiles(tile, {"preset": preset})[0] for tile in (128, None))
    assert losses == pytest.approx(expected, rel=3e-3)


# ---------------------------------------------------------------- gradients by keys and values of an earlier forward


@pytest.mark.parametrize(
    ("world", "kind", "segments", "loss_on_all"),
    [(2, "qwen3", (16, 16), False), (1, "llama", (8, 8, 16), False), (1, "llama", (16, 16), True)],
)
@on_ranks()
def test_keys_and_values_of_an_earlier_forward_learn(kind, segments, loss_on_all):
    """Of rows in segments, each of which reads the keys and values of those before."""
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    found = []
    for section in ({}, None):
        engine = models.engine(section, causal_lm(kind, **sizes, num_key_value_heads=1), stock=section is None)
        found.append([])
        for step in range(2):
            generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
            cache, loss = None, 0.0
            for part in torch.randint(0, 128, (2, sum(segments)), generator=generator).split(segments, 1):
                out = engine(input_ids=part, labels=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                loss = loss + out.loss if loss_on_all else out.loss
            found[-1].append((models.take_step(engine, loss), float(engine.get_global_grad_norm())))
        engine.destroy()
    for (loss, norm), (right, right_norm) in zip(*found, strict=True):
        assert loss == pytest.approx(right, rel=0.01)
        assert norm == pytest.approx(right_norm, rel=0.08)
