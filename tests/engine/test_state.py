"""What checkpoints hold of FP8: a run that stops and resumes is the run that does not, bit for bit."""

import os
import random
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed import comm as dist

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.train.resume import load_on_other_ranks
from tests.ranks import on_ranks
from tests.zero import models

AUTOMATIC = {"preset": "fp8lm_o1"}
# Every layer is past the threshold at every measurement; the third moves it to BF16
DEGRADING = {"monitor": {"every": 2, "min_snr_db": 90.0, "fallback": True}}


def build(section):
    return models.build({**models.config({"monitor": {"every": 0}, **section}), "gradient_accumulation_steps": 2})


@pytest.mark.parametrize(("world", "name"), [(1, "hybrid_fast"), (2, "fp8lm_o1"), (2, "fp8lm_o3"), (1, "compact")])
@on_ranks()
def test_a_resumed_run_is_the_run_that_did_not_stop(name, tmp_path):
    """(Others: test_state_machine.py.)"""
    engine = build({"preset": name})
    models.train(engine, 1)
    engine.save_checkpoint(tmp_path, client_state={"mine": 7})
    losses = models.train(engine, 2, start=1)
    engine.destroy()
    resumed = build({"preset": name})
    _, client_state = resumed.load_checkpoint(tmp_path)
    assert models.train(resumed, 2, start=1) == losses
    expected, found = models.bf16_weights(engine), models.bf16_weights(resumed)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert client_state["mine"] == 7
    assert "ds_fp8" not in client_state


def read_with_plain_torch(folder):
    """The FP8 state in the checkpoint of every rank, read by torch without running anything."""
    engine, rank = build(AUTOMATIC), dist.get_rank()
    models.train(engine, 2)
    engine.save_checkpoint(folder, tag="last")
    dist.barrier()
    state = engine.fp8.state_dict()
    torch.save(state, f"{folder}/alone{rank}.pt")
    alone = torch.load(f"{folder}/alone{rank}.pt", weights_only=True)
    stored = torch.load(f"{folder}/last/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
    scale, *others = (s["gradients"]["scale"] for s in (state, alone, stored["ds_fp8"]))
    assert all(torch.equal(scale[key], other[key]) for other in others for key in ("mu", "saturated"))
    return state["micro_batches"], scale["names"], scale["mu"].tolist()


def test_the_state_is_plain_and_the_same_on_all_ranks(ranks, tmp_path):
    (micro_batches, names, mu), other = ranks(2, read_with_plain_torch, str(tmp_path))
    assert other == (micro_batches, names, mu)
    assert micro_batches == 4
    assert "layers.0.up.weight" in names
    assert all(value != 1 for value in mu)


def saved(folder):
    engine = build(AUTOMATIC)
    models.train(engine, 2)
    engine.save_checkpoint(folder, tag="step_2")
    return engine.fp8.state_dict()


def loaded(folder):
    engine = build(AUTOMATIC)
    load_on_other_ranks(engine, Path(folder) / "step_2", Path(folder), with_schedule=False)
    models.train(engine, 1, start=2)
    engine = build(AUTOMATIC)
    load_on_other_ranks(engine, Path(folder) / "step_2", Path(folder), with_schedule=False)
    return engine.fp8.state_dict()


def test_another_number_of_ranks_goes_on_with_the_same_scales(ranks, tmp_path):
    before = ranks(3, saved, str(tmp_path))[0]
    for after in ranks(2, loaded, str(tmp_path)):
        assert after["micro_batches"] == before["micro_batches"] == 4
        scales, expected = after["gradients"]["scale"], before["gradients"]["scale"]
        assert scales["names"] == expected["names"]
        assert torch.equal(scales["mu"], expected["mu"])
        assert torch.equal(scales["saturated"], expected["saturated"])


@on_ranks(2)
def test_counters_and_layers_in_bf16_are_resumed(tmp_path):
    engine = build(DEGRADING)
    engine.fp8.health.move_to_bf16(["layers.1.up"])
    models.train(engine, 4)
    engine.save_checkpoint(tmp_path)
    resumed, said = build(DEGRADING), []
    resumed.fp8.health.say = said.append
    resumed.load_checkpoint(tmp_path)
    before = engine.fp8.health.state_dict()
    assert resumed.fp8.health.state_dict() == before
    assert before["monitor"]["steps"] == 4
    assert {count for *_, count in before["monitor"]["in_a_row"]} == {2}
    assert before["layers_in_bf16"] == ["layers.1.up"]
    assert said == ["layers.1.up now runs in BF16"]
    assert models.train(engine, 3, start=4) == models.train(resumed, 3, start=4)
    moved = engine.fp8.health.layers_in_bf16
    assert len(moved) == 4  # with the third measurement in a row
    assert moved == resumed.fp8.health.layers_in_bf16


@on_ranks(1)
def test_layers_of_a_checkpoint_that_this_engine_lacks_or_casts_are_named():
    def without_down(net):
        ds_fp8.convert(net, FP8Config(fuse="off"), filter=lambda name, layer: not name.endswith("1.down"))

    section = {"monitor": {"every": 0}, "fuse": "off"}
    state = models.build(models.config(section), prepare=without_down).fp8.state_dict()
    assert state["excluded_by_filter"] == ["layers.1.down"]
    said, fresh = [], models.build(models.config(section))
    fresh.fp8.health.warn = said.append
    fresh.fp8.load_state_dict({**state, "layers_in_bf16": ["base_model.layers.0.up", "layers.0.up"]})
    lacking, cast = said
    assert "base_model.layers.0.up" in lacking
    assert "layers.1.down" in cast
    assert fresh.fp8.health.layers_in_bf16 == ["layers.0.up"]


@on_ranks(2)
def test_what_starts_anew_is_said(tmp_path):
    """Of an engine that loads only a model, a checkpoint without FP8, or its own."""
    engine, plain = build(AUTOMATIC), build({"enabled": False})
    for name, one in (("own", engine), ("plain", plain)):
        models.train(one, 1)
        one.save_checkpoint(tmp_path, tag=name)
    loads = [("own", True, None, 0), ("plain", False, "no FP8 state", 0), ("own", False, None, 2)]
    for tag, module_only, words, clock in loads:
        said, fresh = [], build(AUTOMATIC)
        fresh.fp8.health.say = said.append
        assert fresh.load_checkpoint(tmp_path, tag=tag, load_module_only=module_only)[0] is not None
        assert words in said[0] if words else said == []
        assert fresh.fp8.clock() == clock


WRONG = [
    {"micro_batches": "x"},
    {"gradients": {"scale": [1]}},
    {"outlier_channels": []},
    {"outlier_channels": {"layers.0.up": [99999] * 128}},
    {"monitor": 3},
    [1],
]


@on_ranks(1)
def test_a_wrong_value_in_the_state_is_an_error_and_another_preset_is_said():
    engine, said = build({"preset": "precise", "grad_reduce": {"scale": "tensor"}}), []
    models.train(engine, 1)
    state = engine.fp8.state_dict()
    for wrong in WRONG:
        with pytest.raises(UserError, match="FP8 state of the checkpoint is damaged") as caught:
            engine.fp8.load_state_dict({**state, **wrong} if isinstance(wrong, dict) else wrong)
        assert caught.value.remedy
    engine.fp8.health.say = said.append
    engine.fp8.load_state_dict({**state, "preset": "coat"})
    assert said == ['the checkpoint was trained with preset "coat", and goes on with "precise"']


class Crafted:
    """Makes the folder `trace` when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.makedirs, (self.trace, 0o700, True)


def usual_client_state():
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = torch.optim.lr_scheduler.OneCycleLR(torch.optim.AdamW([parameter]), 1e-3, total_steps=9)
    return {
        "arguments": Namespace(lr=1e-3, output=Path("runs/1"), betas=(0.9, 0.95)),
        "values": [1, 2.5, None, True, "text", b"bytes", {3}, OrderedDict(a=1), SimpleNamespace(b=2)],
        "numpy": [np.float64(0.5), np.int64(7), np.bool_(True), np.arange(3.0)],
        "random": [random.getstate(), np.random.get_state(), np.random.default_rng(1).bit_generator.state],
        "torch": [torch.get_rng_state(), torch.arange(3), torch.float8_e4m3fn],
        "schedule": schedule.state_dict(),
    }


@pytest.mark.parametrize("crafted", ["*model_states.pt", "*optim_states.pt"])
@pytest.mark.parametrize(
    ("stage", "section"),
    [(3, {"preset": "compact"}), (3, {"enabled": False}), (2, {"enabled": False})],
    ids=["fp8", "bf16", "bf16 at stage 2"],
)
@on_ranks(1)
def test_no_code_of_a_checkpoint_runs_but_where_it_is_trusted(tmp_path, section, stage, crafted):
    config = models.config({"monitor": {"every": 0}, **section}, stage=stage)
    usual, trace = usual_client_state(), tmp_path / "trace"
    engine = models.build(config)
    models.train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="usual", client_state=usual)
    engine.save_checkpoint(tmp_path, tag="crafted", client_state={"mine": 7})
    (file,) = (tmp_path / "crafted").glob(crafted)
    torch.save({**torch.load(file, weights_only=False), "extra": Crafted(str(trace))}, file)
    _, state = engine.load_checkpoint(tmp_path, tag="usual")
    assert [key for key in usual if str(state[key]) != str(usual[key])] == []
    assert state["arguments"] == usual["arguments"]
    with pytest.raises(UserError, match=r"it names os\.makedirs") as caught:
        engine.load_checkpoint(tmp_path, tag="crafted")
    assert caught.value.key == "fp8.trust_checkpoints"
    assert '"trust_checkpoints": true' in caught.value.remedy
    assert not trace.exists()
    trusting = models.build({**config, "fp8": {**config["fp8"], "trust_checkpoints": True}})
    assert trusting.load_checkpoint(tmp_path, tag="crafted")[1]["mine"] == 7
    assert trace.exists()
