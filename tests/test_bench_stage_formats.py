"""The benchmark of a stage in every number format: what its runs share, and that it goes on where it stopped."""

import json
import sys
from pathlib import Path

import pytest

from ds_fp8.config.errors import UserError

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import stage_formats

STAGE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "fp8": {},
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        }
    },
    "data": {"path": "synthetic", "examples": 200, "vocab_size": 400, "sequence_length": 64},
}


def test_runs_of_a_seed_differ_by_their_casts_and_none_is_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DS_FP8_CACHE", str(tmp_path / "cache"))
    stage, output = tmp_path / "stage.json", tmp_path / "runs.jsonl"
    train = {"run_dir": str(tmp_path / "run"), "steps": 9, "schedule": {"type": "constant"}}
    stage.write_text(json.dumps({**STAGE, "train": train}))
    arguments = ["--stage", str(stage), "--steps", "2", "--output", str(output)]
    stage_formats.main([*arguments, "--variants", "bf16,int8"])
    stage_formats.main([*arguments, "--variants", "bf16,perturbed,int8,e2m1"])
    runs = {run["variant"]: run for run in map(json.loads, output.read_text().splitlines())}
    assert list(runs) == ["bf16", "int8", "perturbed", "e2m1"]
    assert len(output.read_text().splitlines()) == 4
    first = {variant: run["losses"][0] for variant, run in runs.items()}
    assert first["perturbed"] == pytest.approx(first["bf16"], rel=1e-3)
    assert 0 < abs(first["int8"] - first["bf16"]) < abs(first["e2m1"] - first["bf16"]) < 0.1
    assert all(len(run["losses"]) == 2 and run["validation_loss"] > 4 for run in runs.values())
    table = capsys.readouterr().out
    assert "| perturbed |" in table
    assert "| bf16      |     1 |" in table


@pytest.mark.parametrize("variants", ["int8", "bf16,int9"])
def test_variants_begin_with_bf16_and_exist(variants, tmp_path):
    with pytest.raises(UserError) as caught:
        stage_formats.main(["--variants", variants, "--output", str(tmp_path / "runs.jsonl")])
    assert caught.value.key == "--variants"


def test_the_default_variants_exist(tmp_path):
    options = stage_formats.parse_arguments(["--output", str(tmp_path / "runs.jsonl")])
    assert len(options.variants) == 15
