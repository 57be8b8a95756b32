"""Fused layers whose MLP is computed in tiles, under ZeRO-3 on real ranks, beside the same layers computed whole."""

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

import ds_fp8
from tests.layers.hugging_face import causal_lm
from tests.layers.test_tiled_mlp import ROUNDED
from tests.zero import models
from tests.zero.test_training import QUIET

TILE = 128
LENGTH = 150  # Two rows of it are three tiles, the last of them ragged


def train(tile, section, recompute=False, steps=2):
    """(losses, gradients of the first step by name, BF16 weights) of steps of two micro-batches each."""
    model = causal_lm("qwen3", max_position_embeddings=LENGTH)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {**QUIET, **section, "activations": {"mlp_tile_tokens": tile}}
    config = {**models.config(section), "gradient_accumulation_steps": 2}
    config |= {"activation_checkpointing": {"cpu_checkpointing": recompute}}
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    assert engine.fp8.report["fused_layers"] == 2
    losses, gradients = [], {}
    for number in range(2 * steps):
        starts = torch.randint(1, 97, (2, 1), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        ids = (starts + torch.arange(LENGTH)) % 97
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        if number == 1:
            gradients = {name: safe_get_full_grad(p).float() for name, p in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    return losses, gradients, models.bf16_weights(engine)


@pytest.mark.parametrize(("world", "recompute"), [(1, False), (2, True)])
def test_gradients_are_those_of_the_whole(ranks, world, recompute):
    section = {"grad_reduce": {"format": "bf16"}}
    tiled, whole = (ranks(world, train, tile, section, recompute) for tile in (TILE, None))
    for (losses, gradients, weights), (expected, exact, _) in zip(tiled, whole, strict=True):
        assert losses[:2] == expected[:2]  # before the first step no bit differs
        assert losses == pytest.approx(expected, rel=1e-3)
        assert losses[-1] < losses[0]
        for name, gradient in exact.items():
            if ".mlp." in name:
                assert (gradients[name] - gradient).norm() < 3 * ROUNDED * gradient.norm(), name
            else:
                assert torch.equal(gradients[name], gradient), name
        for name, weight in weights.items():
            assert torch.equal(weight, tiled[0][2][name]), name


@pytest.mark.parametrize("preset", [pytest.param("hybrid_fast", marks=pytest.mark.slow), "precise"])
def test_gradients_that_travel_in_fp8(ranks, preset):
    (losses, *_), _ = ranks(2, train, TILE, {"preset": preset})
    (expected, *_), _ = ranks(2, train, None, {"preset": preset})
    assert losses == pytest.approx(expected, rel=3e-3)
