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
from ds_fp8.config.presets import PRESETS
from ds_fp8.train.resume import load_on_other_ranks
from tests.zero import models

AUTOMATIC = {"preset": "fp8lm_o1"}
# Every layer is past the threshold at every measurement; the third moves it to BF16
DEGRADING = {"monitor": {"every": 2, "min_snr_db": 90.0, "fallback": True}}


def build(section):
    return models.build({**models.config({"monitor": {"every": 0}, **section}), "gradient_accumulation_steps": 2})


def stopped_and_resumed(section, folder):
    """Losses and weights of 4 steps, and of the last 2 of them by an engine that begins with a checkpoint after 2."""
    engine = build(section)
    models.train(engine, 2)
    engine.save_checkpoint(folder, client_state={"mine": 7})
    losses = models.train(engine, 2, start=2)
    engine.destroy()

    resumed = build(section)
    _, client_state = resumed.load_checkpoint(folder)
    again = models.train(resumed, 2, start=2)
    same = {
        name: torch.equal(weight, after)
        for (name, weight), after in zip(
            models.bf16_weights(engine).items(), models.bf16_weights(resumed).values(), strict=True
        )
    }
    return losses, again, same, client_state


@pytest.mark.parametrize("name", PRESETS)
def test_a_resumed_run_is_the_run_that_did_not_stop(ranks, name, tmp_path):
    for losses, again, same, client_state in ranks(2, stopped_and_resumed, {"preset": name}, str(tmp_path)):
        assert losses == again
        assert all(same.values()), same
        assert client_state["mine"] == 7
        assert "ds_fp8" not in client_state


def read_with_plain_torch(folder):
    """The FP8 state in the checkpoint of every rank, read by torch without running anything."""
    engine = build(AUTOMATIC)
    models.train(engine, 2)
    engine.save_checkpoint(folder, tag="last")
    dist.barrier()
    state = engine.fp8.state_dict()
    torch.save(state, f"{folder}/alone{dist.get_rank()}.pt")
    alone = torch.load(f"{folder}/alone{dist.get_rank()}.pt", weights_only=True)
    whole = torch.load(f"{folder}/last/zero_pp_rank_{dist.get_rank()}_mp_rank_00_model_states.pt", weights_only=False)
    in_checkpoint = whole["ds_fp8"]
    scales = [s["gradients"]["scale"] for s in (state, alone, in_checkpoint)]
    same = all(torch.equal(scales[0][key], other[key]) for other in scales for key in ("mu", "saturated"))
    return same, state["micro_batches"], scales[0]["names"], scales[0]["mu"].tolist()


def test_the_state_is_plain_and_the_same_on_all_ranks(ranks, tmp_path):
    results = ranks(2, read_with_plain_torch, str(tmp_path))
    for same, micro_batches, names, mu in results:
        assert same
        assert micro_batches == 4
        assert "layers.0.up.weight" in names
        assert all(value != 1 for value in mu)
    assert results[0] == results[1]


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


def counters(folder):
    """Two engines' health after 4 steps, the second one's from a checkpoint, their next losses, and what moves then."""
    engine = build(DEGRADING)
    engine.fp8.health.move_to_bf16(["layers.1.up"])
    models.train(engine, 4)
    engine.save_checkpoint(folder)

    resumed, said = build(DEGRADING), []
    resumed.fp8.health.say = said.append
    resumed.load_checkpoint(folder)
    states = [one.fp8.health.state_dict() for one in (engine, resumed)]
    heard = list(said)
    losses = [models.train(one, 3, start=4) for one in (engine, resumed)]
    return states, heard, losses, [one.fp8.health.layers_in_bf16 for one in (engine, resumed)]


def test_counters_and_layers_in_bf16_are_resumed(ranks, tmp_path):
    for (before, after), said, losses, moved in ranks(2, counters, str(tmp_path)):
        assert before == after
        assert before["monitor"]["steps"] == 4
        assert {count for *_, count in before["monitor"]["in_a_row"]} == {2}
        assert before["layers_in_bf16"] == ["layers.1.up"]
        assert said == ["layers.1.up now runs in BF16"]
        assert losses[0] == losses[1]
        assert len(moved[0]) == 6  # with the third measurement in a row
        assert moved[0] == moved[1]


def layers_by_name(folder):
    """What a checkpoint says of layers that a filter left out, and what an engine without it, or without them, says."""

    def without_down(net):
        ds_fp8.convert(net, FP8Config(fuse="off"), filter=lambda name, layer: not name.endswith("1.down"))

    section = {"monitor": {"every": 0}, "fuse": "off"}
    engine = models.build(models.config(section), prepare=without_down)
    state = engine.fp8.state_dict()
    said = []
    fresh = models.build(models.config(section))
    fresh.fp8.health.warn = said.append
    fresh.fp8.load_state_dict({**state, "layers_in_bf16": ["base_model.layers.0.up", "layers.0.up"]})
    return state["excluded_by_filter"], said, fresh.fp8.health.layers_in_bf16


def test_layers_of_a_checkpoint_that_this_engine_lacks_or_casts_are_named(ranks, tmp_path):
    excluded, (lacking, cast), moved = ranks(1, layers_by_name, str(tmp_path))[0]
    assert excluded == ["layers.1.down"]
    assert "base_model.layers.0.up" in lacking
    assert "layers.1.down" in cast
    assert moved == ["layers.0.up"]


def other_ways_to_load(folder):
    """What is said, and the clock, of an engine that loads only a model, a checkpoint without FP8, or its own."""
    engine, plain = build(AUTOMATIC), build({"enabled": False})
    for name, one in (("own", engine), ("plain", plain)):
        models.train(one, 1)
        one.save_checkpoint(folder, tag=name)
    results = {}
    for name, tag, options in (
        ("model only", "own", {"load_module_only": True}),
        ("without FP8", "plain", {}),
        ("own", "own", {}),
    ):
        said = []
        fresh = build(AUTOMATIC)
        fresh.fp8.health.say = said.append
        path, _ = fresh.load_checkpoint(folder, tag=tag, **options)
        results[name] = path is not None, said, fresh.fp8.clock()
    return results


def test_what_starts_anew_is_said(ranks, tmp_path):
    for results in ranks(2, other_ways_to_load, str(tmp_path)):
        assert all(found for found, _, _ in results.values())
        assert results["model only"][1:] == ([], 0)
        assert "no FP8 state" in results["without FP8"][1][0]
        assert results["without FP8"][2] == 0
        assert results["own"][1:] == ([], 2)


WRONG = [
    {"micro_batches": "x"},
    {"gradients": {"scale": [1]}},
    {"outlier_channels": []},
    {"outlier_channels": {"layers.0.up": [99999] * 128}},
    {"monitor": 3},
    [1],
]


def wrong_states(preset, other):
    """What is raised for states with a wrong value each, and said of one with another preset."""
    engine, raised, said = build({"preset": preset, "grad_reduce": {"scale": "tensor"}}), [], []
    models.train(engine, 1)
    state = engine.fp8.state_dict()
    for wrong in WRONG:
        try:
            engine.fp8.load_state_dict({**state, **wrong} if isinstance(wrong, dict) else wrong)
        except UserError as error:
            raised.append(str(error))
    engine.fp8.health.say = said.append
    engine.fp8.load_state_dict({**state, "preset": other})
    return raised, said


def test_a_wrong_value_in_the_state_is_an_error_and_another_preset_is_said(ranks):
    ((raised, said),) = ranks(1, wrong_states, "precise", "coat")
    assert len(raised) == len(WRONG)
    assert all("FP8 state of the checkpoint is damaged" in error and "remedy" in error for error in raised)
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


def client_states(folder, config, crafted):
    """What an engine loads of checkpoints: a usual state, that of one with code in it, and the latter trusted."""
    usual, trace, refused = usual_client_state(), f"{folder}/trace", None
    engine = models.build(config)
    models.train(engine, 1)
    engine.save_checkpoint(folder, tag="usual", client_state=usual)
    engine.save_checkpoint(folder, tag="crafted", client_state={"mine": 7})
    (file,) = Path(folder, "crafted").glob(crafted)
    torch.save({**torch.load(file, weights_only=False), "extra": Crafted(trace)}, file)
    _, state = engine.load_checkpoint(folder, tag="usual")
    try:
        engine.load_checkpoint(folder, tag="crafted")
    except UserError as error:
        refused = error
    ran = os.path.exists(trace)
    trusting = models.build({**config, "fp8": {**config["fp8"], "trust_checkpoints": True}})
    _, trusted = trusting.load_checkpoint(folder, tag="crafted")
    same = [key for key in usual if str(state[key]) == str(usual[key])]
    return same, state["arguments"], str(refused), ran, trusted["mine"], os.path.exists(trace)


@pytest.mark.parametrize("crafted", ["*model_states.pt", "*optim_states.pt"])
@pytest.mark.parametrize(
    ("stage", "section"),
    [(3, {"preset": "compact"}), (3, {"enabled": False}), (2, {"enabled": False})],
    ids=["fp8", "twin", "twin of stage 2"],
)
def test_no_code_of_a_checkpoint_runs_but_where_it_is_trusted(ranks, tmp_path, section, stage, crafted):
    config = models.config({"monitor": {"every": 0}, **section}, stage=stage)
    ((same, arguments, refused, ran, *trusted),) = ranks(1, client_states, str(tmp_path), config, crafted)
    assert same == list(usual_client_state())
    assert arguments == usual_client_state()["arguments"]
    assert "it names os.makedirs" in refused
    assert "key:    fp8.trust_checkpoints" in refused
    assert '"trust_checkpoints": true' in refused
    assert not ran
    assert trusted == [7, True]
