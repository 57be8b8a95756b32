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

from ds_fp8.train.metrics import read_metrics
from tests.train.crashes import go_on_from, run

STEPS = 5
COMPRESSED = {"preset": "coat", "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
CASES = {  # changes of sections
    "stage 3, saved in the background": {"train": {"async_save": True, "keep_last": 1}},
    "adapters": {"train": {"lora": {"r": 4, "dropout": 0.1, "targets": ["q_proj", "down_proj"]}}},
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


def chosen(copies: list[Path], steps: list[int], seed: int) -> list[Path]:
    """Choose a copy of each kind: by the step it goes on from, and what lies half done in it."""
    kinds: dict[tuple, list[Path]] = {}
    for copy, step in zip(copies, steps, strict=True):
        left = {re.sub(r"\d+", "N", path.name) for path in copy.rglob("*") if path.suffix in (".part", ".deleted")}
        latest = copy / "checkpoints" / "latest"
        kinds.setdefault((step, latest.exists() and latest.read_text(), *sorted(left)), []).append(copy)
    rng = random.Random(seed)
    return rng.sample([rng.choice(kind) for kind in kinds.values()], min(len(kinds), 2))


@pytest.mark.parametrize("case", CASES)
def test_a_crash_at_any_write_changes_no_bit(case, tiny, write, ranks, tmp_path, cache_home, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    tiny["train"] |= {"steps": STEPS, "save_every": 2, "eval_every": 2, "eval_batches": 1}
    for section, values in CASES[case].items():
        tiny[section] = values if section != "train" else {**tiny[section], **values}
    file, cache, whole, copies = str(write(tiny)), str(cache_home), tmp_path / "whole", tmp_path / "copies"
    ranks(2, run, file, cache, whole, STEPS, copies)
    found = sorted(copies.iterdir())
    steps, others = ranks(2, go_on_from, file, cache, found)
    assert steps == others
    assert set(steps) == {0, 2, 4, STEPS}, [step for step in steps if isinstance(step, str)]
    of_first = [step for copy, step in zip(found, steps, strict=True) if copy.name[4] == "0"]
    assert all(step <= after for step, after in pairwise(of_first)), "a whole checkpoint was lost"
    expected = ends(whole)
    for copy in chosen(found, steps, len(case)):
        metrics = copy / "metrics.jsonl"
        if metrics.exists():
            metrics.write_text(metrics.read_text() + '{"step": 3, "lo')  # the line that the crash cut off
        ranks(2, run, file, cache, copy, STEPS)
        losses, weights, kept, latest = ends(copy)
        assert losses == expected[0], copy.name
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected[1].items()), copy.name
        assert (kept, latest) == expected[2:], copy.name
        assert json.loads((copy / "result.json").read_text())["steps"] == STEPS
