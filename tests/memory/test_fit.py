"""What fits: searches, verdicts on named GPUs, and what is proposed where a stage does not fit."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.memory import estimate, estimate_workload, largest_that_fits, read_workload
from ds_fp8.memory.estimate import GPUS, gpu_of, gpus_that_fit, longest_contexts, search, settings_that_fit
from ds_fp8.train import load_stage
from tests.memory import workloads

GIB = 1 << 30


NEEDS = {"linear": lambda n: 3 * n, "steps": lambda n: 50 * (n // 10), "convex": lambda n: max(5 * n, n * n // 50)}


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("limit", [1, 2, 7, 64, 1000, 1 << 17])
def test_search_finds_the_largest_and_asks_about_few(limit, need):
    for largest in {0, 1, 2, 5, 63, 64, 700} | {limit}:
        asked = []

        def needed(number, asked=asked):
            asked.append(number)
            return need(number)

        most = need(largest)
        near = range(max(min(largest, limit) - 20, 1), min(largest + 20, limit) + 1)
        expected = max((n for n in near if need(n) <= most), default=0)
        assert search(needed, most, limit) == expected
        assert len(asked) == len(set(asked)) <= 24
        assert all(1 <= number <= limit for number in asked)


@pytest.mark.parametrize("what", ["micro_batch", "sequence_length"])
def test_the_largest_fits_and_one_more_does_not(what):
    w = read_workload(workloads.stage(model={"config": {"max_position_embeddings": 1 << 22}}))
    unit = 128 if what == "sequence_length" else 1
    for memory in (2 * GIB, 5 * GIB):
        largest = largest_that_fits(w, what, memory)
        assert estimate_workload(w.resized(what, largest)).device_bytes <= memory
        assert estimate_workload(w.resized(what, largest + unit)).device_bytes > memory
    assert largest_that_fits(w, what, 1000) == 0
    assert largest_that_fits(read_workload(workloads.stage()), "sequence_length", 1 << 50) == 4096, "of positions"


def test_more_of_everything_takes_more():
    raw = workloads.stage()
    result = estimate(raw).as_json()
    assert sum(result["parts"].values()) == (peak := result["peak_bytes"])
    assert estimate(raw, gpus=4).lasting_bytes < estimate(raw).lasting_bytes
    assert estimate(workloads.stage(train_micro_batch_size_per_gpu=8)).peak_bytes > peak
    assert estimate(workloads.stage(data={"sequence_length": 1024})).peak_bytes > peak
    long = {"data": {"sequence_length": 4096}}
    sizes = [
        estimate(workloads.stage(**long, **changes)).peak_bytes
        for changes in (
            {"fp8": {"enabled": False}},
            {"fp8": {"fuse": "off"}},
            {"fp8": {}},
            {"fp8": {"activations": {"recompute": "mlp"}}},
            {"fp8": {"activations": {"mlp_tile_tokens": 512}}},
            {"model": {"activation_checkpointing": True}},
            {"model": {"activation_checkpointing": "offload"}},
            {"model": {"activation_checkpointing": "offload"}, "fp8": {"activations": {"mlp_tile_tokens": 512}}},
        )
    ]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {
                "zero_optimization": {"stage": 0},
                "data_types": {"grad_accum_dtype": "bf16"},
                "fp8": {"enabled": False},
            },
            "stage 0",
        ),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size"),
        ({"model": {"attn_implementation": "eager"}}, "eager"),
        ({"model": {"config": {"model_type": "falcon"}}, "fp8": {"enabled": False}}, "Falcon"),
        ({"model": {"config": None, "path": "/nowhere/at/all"}}, "/nowhere"),
        ({"fp8": {"presett": 1}}, "presett"),
    ],
)
def test_what_there_is_no_estimate_for(changes, says):
    with pytest.raises(UserError) as error:
        estimate(workloads.stage(**changes))
    assert says in str(error.value)
    assert error.value.remedy


def shared_rows(size, **changes):
    return workloads.stage(sequence_parallel_size=size, **changes)


def test_longest_contexts_grow_with_the_gpus_that_share_them():
    model = {"attn_implementation": "packed", "config": {"num_key_value_heads": 2}}
    found = longest_contexts(read_workload(shared_rows(2, model=model), gpus=8), 2 * GIB)
    assert list(found) == [1, 2, 4]  # of 8 GPUs and 4 heads
    assert 1.8 * found[1] < found[2] < 2.2 * found[1]
    assert found[2] < found[4] < 2 * found[2]  # 4 GPUs keep heads of k and v twice
    for size, length in found.items():
        sized = read_workload(shared_rows(size, model=model), gpus=8).resized("sequence_length", length)
        assert estimate_workload(sized).device_bytes <= 2 * GIB
        longer = sized.resized("sequence_length", length + 128 * size)
        assert estimate_workload(longer).device_bytes > 2 * GIB


def test_tokens_per_gpu_are_those_of_a_gpu():
    data = {"sequence_length": 512, "tokens_per_gpu": 256}
    w = read_workload(shared_rows(2, data=data, train_micro_batch_size_per_gpu=1), gpus=2)
    assert (w.rows, w.sequence_length, w.tokens) == (1, 512, 256)


def test_what_cannot_be_shared_is_refused():
    for size, message in ((2, "2 ranks share a sequence, but there are 3 ranks"), (3, "cannot be spread over 3")):
        with pytest.raises(UserError, match=message) as error:
            estimate(shared_rows(size), gpus=3)
        assert error.value.key == "sequence_parallel_size"


def test_bf16_has_the_same_loss_first(capsys):
    """The figures of BF16 as it is run, without logits, and with its own loss, which has logits of 32k tokens."""
    columns = ("as configured", "BF16, fused loss", "BF16, its own loss")
    arguments = ["estimate", "infir2_7b/cpt.json", "--gpus", "8", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found) == columns
    needed = [round(found[name]["device_bytes"] / GIB, 1) for name in columns]
    assert needed == [32.7, 36.8, 86.7]
    assert main([*arguments, "--set", "fp8.loss=off"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["as configured", "BF16, its own loss"]
    assert main([*arguments, "--set", "fp8.enabled=false", "--set", "fp8.loss=fused"]) == 0
    (alone,) = json.loads(capsys.readouterr().out).values()
    assert alone["peak_bytes"] == found["BF16, fused loss"]["peak_bytes"]


def test_gpus_are_found_by_name_and_have_less_than_their_name_says():
    assert gpu_of("H100") is GPUS["h100"]
    assert 75 * GIB < gpu_of("h100").bytes < 80 * GIB
    with pytest.raises(UserError) as caught:
        gpu_of("h110")
    assert '"h100"' in caught.value.remedy
    assert caught.value.remedy.endswith('"h100"? Or give its memory: --memory GIB')
    with pytest.raises(UserError) as caught:
        gpu_of("x")
    assert ".;" not in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--gpus", "8", "--gpu", "h100"], 0, "fits: 32.7 of 79.1 GiB on 8 x h100, 49.1 with CUDA graphs"),
        (["--gpus", "8", "--memory", "80", "--set", "fp8.graph=off"], 0, "fits: 32.7 of 80.0 GiB on 8 GPUs\n"),
        (["--gpus", "2", "--gpu", "h100"], 0, "fits only without CUDA graphs: 78.2 of 79.1 GiB on 2 x h100, 94.7 with"),
        (["--gpus", "2", "--gpu", "h100", "--set", "fp8.graph=on"], 1, "does not fit: 94.7 of 79.1 GiB on 2 x h100; "),
        (["--gpus", "4", "--gpu", "l40s"], 1, "does not fit: "),
    ],
)
def test_the_command_gives_a_verdict_and_an_exit_code(arguments, code, words, capsys):
    assert main(["estimate", "infir2_7b/cpt.json", *arguments]) == code
    printed, said = capsys.readouterr()
    assert words in printed
    assert "loading" in said
    assert "FP8 is on, preset infir2" in printed
    assert ("presets rowwise, tensorwise" in printed) == ("l40s" in arguments)
    assert ("; fits with " in printed) == bool(code)


def test_what_is_proposed_fits(capsys):
    """The arguments of the last line make the same command say that it fits."""
    command = ["estimate", "infir2_7b/cpt.json", "--gpu", "l40s", "--gpus", "4"]
    assert main([*command, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["as configured"]["verdict"]
    for way in verdict.partition("; fits with ")[2].split(" or with "):
        assert main([*command, *shlex.split(way.rpartition(" (")[0])]) == 0, way
        assert re.search("fits(: | only without CUDA graphs: )", capsys.readouterr().out)


def test_one_amount_of_memory():
    with pytest.raises(UserError, match="exclude each other"):
        main(["estimate", "quickstart/cpt.json", "--gpu", "h100", "--memory", "80"])


@pytest.mark.parametrize(
    ("source", "preset", "why"),
    [
        ({"model": {"path": "Qwen/Qwen3-0.6B-Base"}}, "precise", "loaded"),
        ({"model": {"path": "Qwen/Qwen3-0.6B-Base", "config": None}}, "precise", "loaded"),
        ({"model": {"config": workloads.MODEL}}, "infir2", "random"),
    ],
)
def test_an_open_preset_is_that_of_check(source, preset, why, tmp_path, capsys):
    """Also where the shape of a known model stands for its name, and where the estimate is made from Python."""
    raw = {**workloads.stage(fp8={"monitor": {"every": 0}}), **source}
    file = tmp_path / "stage.json"
    file.write_text(json.dumps(raw))
    for command in ("check", "estimate"):
        assert main([command, str(file)]) == 0
        assert f"preset {preset}: the stage names none, and its weights are {why}" in capsys.readouterr().out
    assert load_stage(file).fp8.preset == preset  # what training takes, whatever the weights are


def test_the_preset_of_a_program_is_left_to_the_weights(tmp_path, capsys):
    file = tmp_path / "ds.json"
    raw = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "fp8": {}}
    file.write_text(json.dumps(raw))
    assert main(["check", str(file)]) == 0
    assert "no preset is named, and infir2 assumed here: it is precise where weights" in capsys.readouterr().out


def test_an_open_preset_of_a_folder_is_estimated_as_precise(tmp_path):
    workloads.model_of(workloads.stage()).save_pretrained(tmp_path / "model")

    def needed(fp8, model):
        return estimate({**workloads.stage(), "fp8": fp8, "model": model}).peak_bytes

    stored, drawn = {"path": str(tmp_path / "model")}, {"config": workloads.MODEL}
    assert needed({}, stored) == needed("precise", stored) > needed("infir2", stored)
    assert needed({}, drawn) == needed("infir2", drawn)


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
    with pytest.raises(UserError, match="one scale for all tokens"):
        estimate(raw, gpus=2)


def test_an_optimizer_on_the_host_is_estimated():
    plain, same, offloaded = (
        estimate(workloads.stage(zero_optimization=zero), gpus=2).device_bytes
        for zero in ({}, {"offload_optimizer": {"device": "none"}}, {"offload_optimizer": {"device": "cpu"}})
    )
    assert offloaded < plain == same
