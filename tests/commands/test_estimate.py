"""`ds-fp8 estimate MODEL`: a model in the place of a stage."""

import json

import pytest
from transformers import AutoConfig, T5Config

from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.memory import estimate
from tests.memory import workloads

COMMAND = ["estimate", "--gpus", "2", "--memory", "80"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    AutoConfig.for_model(**workloads.MODEL).save_pretrained(folder)
    return str(folder)


def figures(capsys, *arguments):
    assert main([*COMMAND, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_takes_what_the_stage_of_train_does(model, capsys):
    found = figures(capsys, model, "--seq", "512")
    assert set(found) == {"as configured", "BF16, fused loss", "BF16, its own loss"}
    configured = found["as configured"]
    assert (configured["micro_batch"], configured["sequence_length"]) == (16, 512)
    raw = workloads.stage(
        train_micro_batch_size_per_gpu=16,
        zero_optimization={
            "stage": 3,
            "reduce_bucket_size": 500_000_000,
            "stage3_param_persistence_threshold": 100_000,
        },
        fp8="precise",
        model={"attn_implementation": "packed"},
        data={"sequence_length": 512},
    )
    assert configured["peak_bytes"] == estimate(raw, gpus=2).peak_bytes
    assert (
        figures(capsys, model, "--seq", "512", "--lora", "4")["as configured"]["peak_bytes"] < configured["peak_bytes"]
    )
    assert figures(capsys, model, "--set", "fp8.enabled=false")["as configured"]["sequence_length"] == 4096


def test_a_known_name_needs_no_network(capsys):
    assert main(["estimate", "Qwen/Qwen3-30B-A3B", "--lora", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as configured"]["parameters"] == pytest.approx(31.5e9, rel=0.01)  # of which 1.0e9 are adapters
    assert found["BF16, fused loss"]["peak_bytes"] > found["as configured"]["peak_bytes"], "adapters on experts, too"


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (["MODEL", "--gpu", "h110"], "--gpu", '"h100"'),
        (["nobody/no-such-model"], "MODEL", "neither a folder"),
        (["/nowhere/at/all"], "MODEL", "does not exist"),
        (["EMPTY"], "MODEL", "no config.json"),
        (["T5"], "MODEL", "no causal language model"),
        (["MODEL", "--seq", "5000"], "--seq", "4,096 positions"),
        (["quickstart/cpt.json", "--lora", "8"], "--lora", "--set train.lora.r=8"),
        (["quickstart/ctp"], "", 'did you mean "quickstart/cpt.json"'),
    ],
)
def test_wrong_calls(model, tmp_path, arguments, key, words):
    (tmp_path / "empty").mkdir()
    T5Config().save_pretrained(tmp_path / "t5")
    places = {"MODEL": model, "EMPTY": str(tmp_path / "empty"), "T5": str(tmp_path / "t5")}
    with pytest.raises(UserError) as error:
        main(["estimate", *(places.get(argument, argument) for argument in arguments)])
    assert error.value.key == key
    assert words in f"{error.value.problem} {error.value.remedy}"
    assert error.value.remedy


@pytest.mark.parametrize("option", ["--lora", "--seq"])
def test_none_is_no_number(model, option, capsys):
    with pytest.raises(SystemExit):
        main(["estimate", model, option, "0"])
    assert "'0' is not a whole number from 1" in capsys.readouterr().err
