"""Robustness: the sharpness beside a search, outcomes of canned runs, the page in a real browser, and a whole grid."""

import json
import math
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ds_fp8.report.parity import Cell, twins_of
from ds_fp8.report.robustness import SHARPNESS, cell_overrides, gaps, outcomes, summarise, words
from ds_fp8.report.robustness_page import write_robustness
from ds_fp8.train import load_stage
from ds_fp8.train.sharpness import logit_sharpness, losses_at_worst, sharpness
from tests.browser import visit
from tests.layers.hugging_face import causal_lm, tokens
from tests.report.runs import finished_run
from tests.train.tiny_stage import TINY

ROOT = Path(__file__).resolve().parents[2]
RATES, SEEDS = [0.001, 0.004], [5, 6]
TWINS = twins_of({f"lr {rate}": [f"optimizer.params.lr={rate}"] for rate in RATES}, SEEDS)
FACTS = {"stage": "x.json", "steps": 10, "device": "cpu", "relative": 0.01, "versions": {"torch": "2.13.0"}}


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "stage.json").write_text(json.dumps(TINY))
    return load_stage(tmp_path / "stage.json")


def runs_in(folder: Path, losses: dict[tuple[str, float, int], float | None]) -> None:
    """Write the runs of TWINS; those of `losses` end there, all others at 0.5 and, in FP8, 0.51."""
    for cell in (cell for pair in TWINS for cell in pair):
        usual = 0.51 if cell.kind == "fp8" else 0.5
        loss = losses.get((cell.kind, float(cell.point.removeprefix("lr ")), cell.seed), usual)
        finished_run(cell.folder(folder), loss, 10, 0.5, cell.kind == "fp8", measured=False)
        if loss is not None:
            (cell.folder(folder) / SHARPNESS).write_text(json.dumps({"sharpness": 2.0 + loss}))


@pytest.mark.parametrize("shape", [(1, 2), (7, 5), (3, 97)])
@pytest.mark.parametrize("relative", [0.0, 0.01, 0.3])
def test_no_corner_or_gradient_ascent_finds_a_larger_loss(shape, relative):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(shape, generator=generator) * 4
    y = torch.randint(0, shape[1], shape[:1], generator=generator)
    loss, worst = losses_at_worst(z, y, relative)
    assert torch.allclose(loss, F.cross_entropy(z, y, reduction="none"))
    limit = relative * (z.abs() + 1)
    for _ in range(200):
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        assert (F.cross_entropy(z + signs * limit, y, reduction="none") <= worst + 1e-5).all()
    d = torch.zeros_like(z).requires_grad_()
    for _ in range(300):
        (gradient,) = torch.autograd.grad(F.cross_entropy(z + d, y, reduction="sum"), d)
        d = torch.minimum(torch.maximum(d + gradient.sign() * limit / 20, -limit), limit).detach().requires_grad_()
    assert torch.allclose(F.cross_entropy(z + d, y, reduction="none"), worst, atol=1e-4)
    assert (worst >= loss).all()
    assert (worst > loss).all() == (relative > 0)


def test_sharpness_of_a_model_counts_label_tokens_alone():
    model, ids = causal_lm("qwen2", torch.float32), tokens(2, 12)
    labels = ids.clone()
    labels[0, :7] = -100
    batch = {"input_ids": ids, "labels": labels}
    found = logit_sharpness(model, [batch], 0.05)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert found["worst_loss"] > found["loss"]
    assert found["sharpness"] == pytest.approx(sharpness(found["loss"], found["worst_loss"]))


def test_outcomes_tell_divergence_and_spikes(stage, tmp_path):
    # Before the first step the loss is 6.1 and the best of the grid 0.5: beyond 3.3 a run has diverged.
    runs_in(tmp_path, {("fp8", 0.004, 5): None, ("fp8", 0.004, 6): 3.31, ("bf16", 0.004, 6): 3.29})
    spiking = TWINS[0][0].folder(tmp_path) / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 9.0 if step == 25 else 2 - step / 100}) for step in range(1, 31)]
    spiking.write_text("\n".join(lines) + "\n")
    found = outcomes(stage, TWINS, tmp_path)
    by_cell = {(each.kind, each.point, each.seed): each for pair in found for each in pair}
    assert [cell for cell, each in by_cell.items() if each.diverged] == [("fp8", "lr 0.004", 5), ("fp8", "lr 0.004", 6)]
    assert by_cell["fp8", "lr 0.001", 5].spikes == 1
    assert by_cell["bf16", "lr 0.001", 5].spikes == 0
    assert by_cell["fp8", "lr 0.004", 5].sharpness is None
    assert by_cell["bf16", "lr 0.001", 5].sharpness == 2.5
    summary = summarise(found)
    assert summary["fp8"]["diverged_share"] == 0.5
    assert summary["fp8"]["mean_final_loss"] == pytest.approx(0.51)
    assert summary["bf16"]["mean_final_loss"] == pytest.approx(0.5)
    assert gaps(found) == {("lr 0.001", 5): pytest.approx(0.02), ("lr 0.001", 6): pytest.approx(0.02)}
    sentence = "2 of 4 FP8 runs diverged and 0 of 4 BF16 runs; 1 and 0 loss spikes"
    assert words(summary, {}) == ("bad", sentence)
    unequal = {("a", 5): 0.02, ("a", 6): -0.01, ("b", 5): 0.5}
    assert words(summary, unequal) == ("bad", f"{sentence}; final loss of FP8 +2.0% in the median, -1.0% to +50.0%")


def test_a_run_in_bf16_that_points_share_counts_once(stage, tmp_path):
    twins = twins_of({"a": ['fp8.preset="infir2"'], "b": ['fp8.preset="coat"']}, [5])
    assert twins[0][1] == twins[1][1]
    for loss, cell in zip((0.51, 0.6, 0.5), (twins[0][0], twins[1][0], twins[0][1]), strict=True):
        finished_run(cell.folder(tmp_path), loss, 10, 0.5, cell.kind == "fp8", measured=False)
    found = outcomes(stage, twins, tmp_path)
    summary = summarise(found)
    assert (summary["fp8"]["runs"], summary["bf16"]["runs"]) == (2, 1)
    assert gaps(found) == {("a", 5): pytest.approx(0.02), ("b", 5): pytest.approx(0.2)}
    written = json.loads(write_robustness(found, FACTS, tmp_path, "shared")[0].read_text())
    assert [(run["kind"], run["point"]) for run in written["runs"]] == [("fp8", "a"), ("bf16", ""), ("fp8", "b")]


def test_a_cell_is_the_stage_with_another_rate_seed_and_format(stage, tmp_path):
    changes = cell_overrides(stage, Cell("bf16", 6, "lr 0.004", ("optimizer.params.lr=0.004",)), 7, tmp_path)
    cell = load_stage(stage.file, changes)
    assert not cell.fp8.enabled
    assert cell.raw["optimizer"]["params"]["lr"] == 0.004
    assert (cell.train.seed, cell.train.steps) == (6, 7)
    assert cell.run_dir == tmp_path / "bf16" / "lr_0.004" / "seed_6"


ALL_CELLS = [(kind, rate, seed) for kind in ("fp8", "bf16") for rate in RATES for seed in SEEDS]


@pytest.mark.parametrize("losses", [{("fp8", 0.004, 5): None}, {}, dict.fromkeys(ALL_CELLS)])
def test_a_browser_shows_the_page_on_a_phone_and_a_desk(stage, tmp_path, losses):
    runs_in(tmp_path / "runs", losses)
    found = outcomes(stage, TWINS, tmp_path / "runs")
    figures, page, sentence = write_robustness(found, FACTS, tmp_path, "Robustness of <FP8>")
    written = json.loads(figures.read_text())
    assert len(written["runs"]) == 8
    assert written["verdict"] == sentence
    text = page.read_text()
    assert "Robustness of &lt;FP8&gt;" in text
    assert text.count("<svg") == 2
    assert text.count("<td>+2.0%</td>") == len(written["gaps"]) == len(gaps(found))
    assert text.count('colspan="5">lr 0.00') == 4
    fp8_alone = {each.kind for pair in found for each in pair if each.diverged} == {"fp8"}
    assert text.count(": FP8 diverged<") == (1 if fp8_alone else 0)
    assert text.count(": FP8 and BF16 diverged<") == (4 if not written["gaps"] else 0)
    wrapper = tmp_path / "look.html"
    look = Path(__file__).with_name("look.html").read_text()
    wrapper.write_text(look.replace("const page = PAGE;", f"const page = {json.dumps(text)};".replace("</", "<\\/")))
    seen = visit(wrapper, tmp_path)
    assert seen.console == []
    assert seen.requests == []
    looks = json.loads(unescape(re.search("<title>(.*?)</title>", seen.document, re.DOTALL).group(1)))
    assert len(looks) == 2
    for look in looks:
        assert look["needed"] <= look["width"] == look["asked"]
        assert look["faint"] == []


@pytest.mark.slow
def test_a_whole_grid_and_the_same_again_without_training(tmp_path):
    (tmp_path / "stage.json").write_text(json.dumps(TINY))
    command = [sys.executable, "-m", "ds_fp8.cli", "robustness", "stage.json", "--steps", "6", "--seeds", "1",
               "--rates", "1,1000", "--out", "out"]  # fmt: skip
    environment = {**os.environ, "DS_FP8_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr[-2000:]
    found = json.loads((tmp_path / "out" / "robustness.json").read_text())
    assert {(run["kind"], run["point"]) for run in found["runs"]} == {
        (kind, f"lr {rate}") for kind in ("fp8", "bf16") for rate in (1e-3, 1.0)
    }
    for run in found["runs"]:
        assert run["diverged"] or (math.isfinite(run["final_loss"]) and run["sharpness"] > 0)
    assert not any(run["diverged"] for run in found["runs"] if run["point"] == "lr 0.001")
    results = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("result.json")}
    assert len(results) == 4
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert {file: file.stat().st_mtime_ns for file in results} == results
    assert json.loads((tmp_path / "out" / "robustness.json").read_text()) == found
