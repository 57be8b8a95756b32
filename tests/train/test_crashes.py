"""Runs that crash at any write go on from the newest whole checkpoint, and end as if nothing had happened."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_fp8.data import build_tokenizer
from ds_fp8.train import load_stage
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.model import build_model, load_model_config
from ds_fp8.train.resume import inspect_run
from tests.refusals import refused
from tests.train.crashes import go_on_from, run

STEPS = 3
COMPRESSED = {"preset": "coat", "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
LORA = {"r": 4, "dropout": 0.1, "targets": ["q_proj", "down_proj"]}
CASES = {  # changes of sections
    "stage 3, saved in the background": {"train": {"async_save": True}},
    "adapters of a stored model": {"train": {"lora": LORA}},
    "adapters beside another run's weights": {"train": {"lora": LORA, "resume": "first"}},
    "compressed moments of stage 2": {"zero_optimization": {"stage": 2}, "fp8": COMPRESSED},
    "moments as they are stored": {"fp8": {"preset": "coat"}, "train": {"compact_checkpoints": True}},
}


def ends(run_dir: Path) -> tuple[list, dict, set[str], str]:
    """Return the figures of the log, each as often as it is there, weights, kept checkpoints, and the latest one."""
    records = read_metrics(run_dir / "metrics.jsonl")
    keys = ("loss", "learning_rate", "gradient_norm", "validation_loss", "skipped_steps")
    losses = sorted((record["step"], key, record[key]) for record in records for key in keys if key in record)
    kept = {path.name for path in (run_dir / "checkpoints").iterdir()}
    weights = load_file(run_dir / "model" / "model.safetensors")
    return losses, weights, kept, (run_dir / "checkpoints" / "latest").read_text()


def beside_a_stored_model(tiny: dict, write, ranks, folder: Path) -> None:
    """Store a model for the stage's adapters. A run to begin from leaves other frozen weights, in its checkpoint."""
    own = {key: value for key, value in tiny["train"].items() if key != "resume"}
    tiny["train_batch_size"] = tiny.pop("gradient_accumulation_steps") * 4
    if "resume" in tiny["train"]:
        ranks(2, run, str(write({**tiny, "train": own})), folder / "first", 2)
        tiny["train"]["resume"] = str(folder / "first")
    stage = load_stage(write({**tiny, "train": {**own, "seed": 7, "lora": None, "resume": None}}))
    build_model(stage, load_model_config(stage, build_tokenizer(stage.data))).save_pretrained(folder / "other")
    tiny["model"] = {"path": str(folder / "other")}


def chosen(copies: list[Path], steps: list[int], seed: int, count: int) -> list[Path]:
    """Choose copies of several kinds: by the step that each goes on from, and what lies half done in it."""
    kinds: dict[tuple, list[Path]] = {}
    for copy, step in zip(copies, steps, strict=True):
        left = {re.sub(r"\d+", "N", path.name) for path in copy.rglob("*") if path.suffix in (".part", ".deleted")}
        latest = copy / "checkpoints" / "latest"
        kinds.setdefault((step, latest.exists() and latest.read_text(), *sorted(left)), []).append(copy)
    rng = random.Random(seed)
    return rng.sample([rng.choice(kind) for kind in kinds.values()], count)


@pytest.mark.parametrize("case", CASES)
def test_a_crash_at_any_write_changes_no_bit(case, tiny, write, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    tiny["train"] |= {"steps": STEPS, "save_every": 2, "keep_last": 1, "eval_every": 2, "eval_batches": 1}
    for section, values in CASES[case].items():
        tiny[section] = values if section != "train" else {**tiny[section], **values}
    whole, copies = tmp_path / "whole", tmp_path / "copies"
    if "lora" in tiny["train"]:
        beside_a_stored_model(tiny, write, ranks, tmp_path)
    file = str(write(tiny))
    ranks(2, run, file, whole, STEPS, copies)
    found = sorted(copies.iterdir())
    steps, others = ranks(2, go_on_from, file, found)
    assert steps == others
    assert set(steps) == {0, 2, STEPS}, [step for step in steps if isinstance(step, str)]
    of_first = [step for copy, step in zip(found, steps, strict=True) if copy.name[4] == "0"]
    assert all(step <= after for step, after in pairwise(of_first)), "a whole checkpoint was lost"
    expected = ends(whole)
    for copy in chosen(found, steps, len(case), 2 if "background" in case else 1):
        metrics = copy / "metrics.jsonl"
        if metrics.exists():
            metrics.write_text(metrics.read_text() + '{"step": 3, "lo')  # the line that the crash cut off
        ranks(2, run, file, copy, STEPS)
        losses, weights, kept, latest = ends(copy)
        assert losses == expected[0], copy.name
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected[1].items()), copy.name
        assert (kept, latest) == expected[2:], copy.name
        assert json.loads((copy / "result.json").read_text())["steps"] == STEPS
    if "resume" in tiny["train"]:
        # Weights that checkpoints hold whole cannot be divided, of the run as of one that begins from the same.
        for folder in whole, tmp_path / "new":
            with refused("frozen weights, which cannot be divided over 1 ranks"):
                inspect_run(load_stage(file, [f"train.run_dir={folder}", "train.steps=4"], world=1))
