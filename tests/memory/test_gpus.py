"""Whether a stage fits on a named GPU, and what is proposed where it does not."""

from __future__ import annotations

import json
import shlex

import pytest

from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.memory import estimate
from ds_fp8.memory.gpus import GPUS, gpu_of
from ds_fp8.memory.remedies import gpus_that_fit, settings_that_fit
from tests.memory import workloads

GIB = 2**30


def test_gpus_are_found_by_name_and_have_less_than_their_name_says():
    assert gpu_of("H100") is GPUS["h100"]
    assert 75 * GIB < gpu_of("h100").bytes < 80 * GIB
    with pytest.raises(UserError) as caught:
        gpu_of("h110")
    assert '"h100"' in caught.value.remedy
    assert "--memory" in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--gpus", "8", "--gpu", "h100"], 0, "fits: 32.9 of 79.1 GiB on 8 x h100"),
        (["--gpus", "8", "--memory", "80"], 0, "fits: 32.9 of 80.0 GiB on 8 GPUs"),
        (["--gpus", "4", "--gpu", "l40s"], 1, "does not fit: "),
    ],
)
def test_the_command_gives_a_verdict_and_an_exit_code(arguments, code, words, capsys):
    assert main(["estimate", "infir2_7b/cpt.json", *arguments]) == code
    printed = capsys.readouterr().out
    assert words in printed
    assert ("presets rowwise, tensorwise" in printed) == ("l40s" in arguments)
    assert ("; fits with " in printed) == bool(code)


def test_what_is_proposed_fits(capsys):
    """The arguments of the last line make the same command say that it fits."""
    command = ["estimate", "infir2_7b/cpt.json", "--gpu", "l40s", "--gpus", "4"]
    assert main([*command, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["as configured"]["verdict"]
    for way in verdict.partition("; fits with ")[2].split(" or with "):
        assert main([*command, *shlex.split(way.rpartition(" (")[0])]) == 0, way
        assert "fits: " in capsys.readouterr().out


def test_one_amount_of_memory():
    with pytest.raises(UserError, match="exclude each other"):
        main(["estimate", "quickstart/cpt.json", "--gpu", "h100", "--memory", "80"])


def test_harmless_changes_come_first():
    raw = workloads.stage()
    raw["model"]["activation_checkpointing"] = False
    raw["train_micro_batch_size_per_gpu"] = 64
    needed = estimate(raw, gpus=2).device_bytes
    assert settings_that_fit(raw, 2, needed - 1).change == "--set model.activation_checkpointing=true"
    least = settings_that_fit(raw, 2, settings_that_fit(raw, 2, needed - 1).device_bytes - 1)
    assert "train_micro_batch_size_per_gpu=1 --set gradient_accumulation_steps=64" in least.change
    assert settings_that_fit(raw, 2, 1000) is None
    assert gpus_that_fit(raw, 2, 1000) is None


def test_long_rows_are_offered_the_host_and_then_tiles():
    wide = {"intermediate_size": 4096, "max_position_embeddings": 1 << 20}
    raw = workloads.stage(model={"config": wide, "activation_checkpointing": True}, data={"sequence_length": 1 << 18})
    raw["train_micro_batch_size_per_gpu"] = 1
    offload = settings_that_fit(raw, 2, estimate(raw, gpus=2).device_bytes - 1)
    assert offload.change == "--set model.activation_checkpointing=offload"
    tiles = settings_that_fit(raw, 2, offload.device_bytes - 1)
    assert tiles.change == f"{offload.change} --set fp8.activations.mlp_tile_tokens=8192"
    raw["fp8"] = {"preset": "rowwise", "activations": {"mlp_tile_tokens": 8192}}
    with pytest.raises(UserError, match="that of all tokens"):
        estimate(raw, gpus=2)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_an_optimizer_on_the_host_is_estimated(device):
    raw = workloads.stage()
    plain = estimate(raw, gpus=2)
    raw["zero_optimization"]["offload_optimizer"] = {"device": device}
    offloaded = estimate(raw, gpus=2)
    assert (offloaded.device_bytes < plain.device_bytes) == (device == "cpu")
