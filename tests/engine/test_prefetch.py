"""Fetches of layers with experts ahead of their use."""

import functools

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.model import BUCKET, LIVE, wider_prefetch
from ds_fp8.engine.plans import convert
from ds_fp8.layers.experts.experts import FP8Experts
from tests.layers.hugging_face import causal_lm
from tests.layers.moe import mixture
from tests.zero.test_experts import engine_of, train


@pytest.fixture(scope="module")
def model():
    model = mixture("qwen3_moe")
    convert(model, FP8Config(linear={"backend": "reference"}))
    return model


@pytest.fixture(scope="module")
def layer(model):
    return sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def wider(model, **zero):
    return wider_prefetch(DeepSpeedZeroConfig(**{"stage": 3, **zero}), model)


def test_limits_that_a_layer_does_not_fit_are_raised_and_said(model, layer):
    changes, notes = wider(model, **{BUCKET: 1000, LIVE: 2 * layer - 1})
    assert changes == {BUCKET: layer, LIVE: 2 * layer}
    assert [note.split(" raised ")[0] for note in notes] == [BUCKET, LIVE]
    assert notes[0].startswith(f"{BUCKET} raised from 1,000 to {layer:,}")
    changes, notes = wider(model, **{BUCKET: layer, LIVE: 1000})
    assert changes == {LIVE: 2000}  # at most doubled
    assert notes[-1] == f"{LIVE} is too small to fetch a layer with experts ahead: {2 * layer:,} would do"


def test_others_stay(model, layer):
    for zero in ({}, {BUCKET: layer, LIVE: 2 * layer}, {BUCKET: 0, LIVE: 1}, {"stage": 2, BUCKET: 1}):
        assert wider(model, **zero) == ({}, [])


def test_dense_models_are_left_alone():
    dense = causal_lm("llama")
    convert(dense, FP8Config(linear={"backend": "reference"}))
    assert wider(dense, **{BUCKET: 1, LIVE: 1}) == ({}, [])


def fetched_ahead():
    """By layer: whether its experts were under way before forward reached it, once the trace was known; and notes."""
    # Space for two layers, in a bucket that ends with the first weight.
    engine = engine_of(
        "qwen3_moe", {}, changes={"num_hidden_layers": 4}, **{BUCKET: 100, "stage3_max_reuse_distance": 0}
    )
    train(engine, 3)
    seen = {}

    def look(name, layer, *_):
        experts = [part for part in layer.modules() if isinstance(part, FP8Experts)]
        weights = [weight for part in experts for weight in part.parameters()]
        seen.setdefault(name, [weight.ds_status.name != "NOT_AVAILABLE" for weight in weights])

    for number, layer in enumerate(engine.module.model.layers):
        layer.register_forward_pre_hook(functools.partial(look, number), prepend=True)
    ids = torch.arange(32)[None]
    engine(input_ids=ids, labels=ids, use_cache=False)
    return seen, engine.fp8.report["notes"]


def test_experts_are_under_way_before_their_layer(ranks):
    for seen, notes in ranks(2, fetched_ahead):
        assert len(seen) == 4
        assert all(all(weights) for name, weights in seen.items() if name > 0), seen
        assert any(note.startswith(BUCKET) for note in notes)
