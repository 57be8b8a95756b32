"""The benchmark of NVFP4's ingredients: what its variants leave out, and that runs are trained once and compared."""

import json
import sys
from pathlib import Path

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.config.linear import LinearConfig

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import nvfp4_ingredients as bench

SMALL = ["--quick", "--hidden", "64", "--intermediate", "64", "--layers", "2", "--length", "32", "--rows", "2"]


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(Path(bench.__file__).read_bytes() * 4)
    return file


def test_every_variant_leaves_out_one_ingredient():
    recipe = LinearConfig(**bench.linear_section(bench.RECIPE, 6, 2))
    assert recipe.weight.granularity == "16x16"
    assert recipe.grad_output.rounding == "stochastic"
    assert recipe.rotation.random
    assert recipe.overrides == {"model.layers.4.*": "bf16", "model.layers.5.*": "bf16"}
    differences = {}
    for variant in bench.LEFT_OUT:
        other = LinearConfig(**bench.linear_section(variant, 6, 2))
        differences[variant] = [
            name for name in LinearConfig.model_fields if getattr(other, name) != getattr(recipe, name)
        ]
    assert differences == {
        "no-2d-scales": ["weight"],
        "no-stochastic-rounding": ["grad_output"],
        "no-hadamard": ["rotation"],
        "no-bf16-layers": ["overrides"],
    }


def test_runs_differ_by_what_is_left_out_and_none_is_repeated(text, tmp_path, capsys):
    output, file = tmp_path / "runs.jsonl", tmp_path / "all.json"
    arguments = [str(text), *SMALL, "--steps", "2", "--seeds", "3", "--output", str(output)]
    assert bench.main([*arguments, "--variants", "bf16,recipe"]) == 0
    assert bench.main([*arguments, "--variants", "bf16,recipe,no-2d-scales,other-draws", "--json", str(file)]) == 0
    runs = {run["variant"]: run for run in map(json.loads, output.read_text().splitlines())}
    assert list(runs) == ["bf16", "recipe", "no-2d-scales", "other-draws"]
    assert len(output.read_text().splitlines()) == 4
    assert len(json.loads(file.read_text())["runs"]) == 4
    first = {variant: run["losses"][0] for variant, run in runs.items()}
    # Forward rounds nothing at random, so that other draws change the losses after the first alone.
    assert first["bf16"] != first["recipe"] == first["other-draws"] != first["no-2d-scales"]
    assert runs["recipe"]["losses"][1] != runs["other-draws"]["losses"][1]
    assert all(run["losses"][0] == pytest.approx(first["bf16"], rel=1e-2) for run in runs.values())
    tables = capsys.readouterr().out
    assert "| no-2d-scales |     1 |" in tables
    assert "above the recipe of the same seed" in tables


def test_a_run_that_fails_is_named_and_the_others_go_on(text, tmp_path, capsys, monkeypatch):
    def train(variant, *rest, original=bench.train):
        if variant == "recipe":
            raise RuntimeError("out of memory")
        return original(variant, *rest)

    monkeypatch.setattr(bench, "train", train)
    output = tmp_path / "runs.jsonl"
    arguments = [str(text), *SMALL, "--steps", "1", "--seeds", "0", "--output", str(output)]
    assert bench.main([*arguments, "--variants", "bf16,recipe"]) == 1
    assert [json.loads(line)["variant"] for line in output.read_text().splitlines()] == ["bf16"]
    assert "recipe seed 0: RuntimeError: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "key"), [(["--kept", "2"], "--kept"), (["--variants", "recipe"], "--variants")])
def test_what_cannot_be_compared_is_refused(arguments, key, text, tmp_path):
    with pytest.raises(UserError) as caught:
        bench.main([str(text), *SMALL, *arguments, "--output", str(tmp_path / "runs.jsonl")])
    assert caught.value.key == key


def test_a_text_must_hold_rows_to_validate_with(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(UserError, match="5 bytes"):
        bench.main([str(tmp_path / "text"), *SMALL, "--output", str(tmp_path / "runs.jsonl")])
