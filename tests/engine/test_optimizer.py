"""From the "fp8" and "optimizer" sections to an optimizer."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.optimizer import choose_optimizer, make_adamw, needs_own_optimizer, uses_own_optimizer
from ds_fp8.optim import AdamW, StatePrecision
from ds_fp8.train import load_stage
from tests.train.tiny_stage import TINY

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}
COAT = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}


def raw(fp8: dict, optimizer: dict | None = ADAMW, **sections) -> dict:
    result = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "fp8": fp8, **sections}
    return result if optimizer is None else {**result, "optimizer": optimizer}


def adamw(fp8: dict, optimizer: dict | None = ADAMW, rank: int = 0):
    return make_adamw(Configuration(raw(fp8, optimizer), "stage.json"), lambda: rank)([nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("fp8", "own"),
    [
        ({}, False),
        ({"preset": "fp8lm_o1"}, False),
        ({"enabled": False}, False),
        ({"optimizer": {"implementation": "ds_fp8"}}, True),
        ({"optimizer": {"exp_avg": "bf16"}}, True),
        ({"preset": "coat"}, True),
        ({"preset": "coat", "enabled": False}, False),
        ({"preset": "coat", "optimizer": {"exp_avg": "fp32", "exp_avg_sq": "fp32"}}, False),
    ],
)
def test_deepspeeds_adam_may_stay_while_all_state_is_fp32(fp8, own):
    config = raw(fp8)
    assert needs_own_optimizer(parse_fp8(config)) == own
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    for zero in ({"stage": 1}, offloaded):
        assert uses_own_optimizer(Configuration({**config, "zero_optimization": zero})) == own
    assert uses_own_optimizer(Configuration(config)) == fp8.get("enabled", True)


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [
        (ADAMW, True),
        ({"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, True),
        ({"type": "AdamW", "params": {"amsgrad": True}}, False),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, False),
        ({"type": "AdamW", "params": {"a_word_of_deepspeeds": 1}}, False),
        ({"type": "Lion", "params": {"lr": 1e-3}}, False),
        (None, False),
    ],
)
def test_a_zero3_step_is_this_packages_where_it_computes_the_same(optimizer, own):
    config = raw({}, optimizer)
    assert uses_own_optimizer(Configuration(config)) == own


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, AdamW])
def test_so_is_that_of_an_adamw_that_is_given(make):
    config = raw({}, None)
    given = make([nn.Parameter(torch.zeros(2))], lr=1e-3)
    assert uses_own_optimizer(Configuration(config), given) == (make is not torch.optim.SGD)


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [(torch.optim.SGD, {}, r"another \(SGD\)"), (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True")],
)
def test_another_optimizer_that_is_given_is_refused_where_state_is_compressed(make, more, message):
    config = raw({"preset": "coat"}, None)
    given = make([nn.Parameter(torch.zeros(2))], lr=1e-3, **more)
    with pytest.raises(UserError, match=message) as caught:
        choose_optimizer(Configuration(config, "stage.json"), given, None, lambda: 0)
    assert (caught.value.key, caught.value.file) == ("fp8.optimizer", "stage.json")
    assert "AdamW" in caught.value.remedy or "amsgrad=False" in caught.value.remedy


@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        ("infir2", StatePrecision()),
        ("fp8lm_o1", StatePrecision()),
        ("fp8lm_o2", StatePrecision("e4m3", "fp16", granularity="tensor", scale="pow2")),
        ("fp8lm_o3", StatePrecision("e4m3", "fp16", granularity="tensor", scale="pow2")),
        ("coat", StatePrecision("e4m3_expanded", "e4m3_expanded")),
        ("fishman", StatePrecision("e4m3", "e5m2", granularity="tensor")),
    ],
)
def test_presets_keep_state_in_the_formats_of_their_sources(preset, precision):
    assert adamw({"preset": preset}).precision == precision


@pytest.mark.parametrize("name", ["Adam", "AdamW", "adamw"])
def test_the_params_are_those_of_deepspeeds_section(name):
    ours = {"lr": 2e-5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}
    params = {**ours, "torch_adam": True, "adam_w_mode": True}
    group = adamw({"optimizer": COAT}, {"type": name, "params": params}).param_groups[0]
    assert {key: group[key] for key in ours} == {**ours, "betas": (0.8, 0.9)}


@pytest.mark.parametrize(("torch_adam", "decay"), [(False, 0.0), (True, 0.01)])
def test_weight_decay_left_out_is_that_of_the_adam_replaced(torch_adam, decay):
    """DeepSpeed's Adam has none, torch's AdamW some."""
    params = {"lr": 1e-4, "torch_adam": torch_adam}
    assert adamw({"optimizer": COAT}, {"type": "AdamW", "params": params}).param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(("stage", "seeds"), [(0, [0, 0]), (1, [0, 3]), (3, [0, 3])])
def test_ranks_with_shards_draw_different_numbers_and_replicas_the_same(stage, seeds):
    config = Configuration({**raw({"optimizer": COAT}), "zero_optimization": {"stage": stage}})
    made = [make_adamw(config, lambda rank=rank: rank)([nn.Parameter(torch.zeros(2))]) for rank in (0, 3)]
    assert [optimizer.precision.seed for optimizer in made] == seeds


@pytest.mark.parametrize(
    ("preset", "parts"), [("coat", {"exp_avg_sq"}), ("fishman", {"exp_avg", "exp_avg_sq"}), ("infir2", set())]
)
def test_moments_in_a_byte_are_rounded_stochastically(preset, parts):
    assert set(parse_fp8(raw({"preset": preset})).optimizer.precision().stochastic_parts) == parts


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        (None, "optimizer.type"),
        ({"type": "Lamb", "params": {}}, "optimizer.type"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "optimizer.params.adam_w_mode"),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "optimizer.params.amsgrad"),
        ({"type": "AdamW", "params": {"beta": [0.9, 0.95]}}, "optimizer.params.beta"),
        ({"type": "AdamW", "params": {"lr": -1}}, "optimizer.params.lr"),
        ({"type": "AdamW", "params": {"lr": "fast"}}, "optimizer.params"),
    ],
)
def test_an_optimizer_section_that_does_not_fit_is_explained(optimizer, key):
    with pytest.raises(UserError) as caught:
        adamw({"optimizer": COAT}, optimizer)
    assert (caught.value.key, caught.value.file) == (key, "stage.json")
    assert caught.value.remedy


def test_a_stage_is_checked_before_anything_starts(tmp_path):
    file = tmp_path / "stage.json"
    coat = "fp8.preset=coat"
    file.write_text(json.dumps(TINY))
    assert load_stage(file, [coat, "train.compact_checkpoints=true"]).train.compact_checkpoints
    for overrides, key in (
        (["train.compact_checkpoints=true"], "train.compact_checkpoints"),
        ([coat, "optimizer.type=Lamb"], "optimizer.type"),
        ([coat, "optimizer.params.amsgrad=true"], "optimizer.params.amsgrad"),
    ):
        with pytest.raises(UserError) as caught:
            load_stage(file, overrides)
        assert caught.value.key == key
