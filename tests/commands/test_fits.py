"""`ds-fp8 estimate --fits`: the page has what the command prints, measured figures are the log's."""

import re
from pathlib import Path

import pytest

from ds_fp8.cli import main
from ds_fp8.commands import fits
from ds_fp8.commands.new_stage import defaults
from ds_fp8.config.errors import UserError
from ds_fp8.memory import estimate, estimate_workload
from ds_fp8.memory.shapes import with_known_model

DOCS = Path(__file__).parents[2] / "docs"


def lines(text):
    """Lines of tables without what makes columns as wide as their cells."""
    return [re.sub(r" {2,}|-{3,}", " ", line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def page():
    return (DOCS / "fits.md").read_text()


@pytest.mark.slow
def test_the_page_has_what_the_command_prints(page, capsys):
    assert main(["estimate", "--fits"]) == 0
    assert capsys.readouterr().out in page


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"])
def test_rows_of_the_page_are_those_of_the_command(model, page):
    found = [f"| {' | '.join(row)} |" for card in fits.CARDS for row in fits.rows_of(model, card)]
    name = model.partition("/")[2]
    assert found == [line for line in lines(page) if line.startswith(f"| {name} ")][: len(found)]


def test_the_page_has_all_models_and_all_measured_runs(page, capsys, monkeypatch):
    models = [model.partition("/")[2] for model in fits.MODELS for _ in fits.KINDS]
    monkeypatch.setattr(fits, "MODELS", ())
    assert main(["estimate", "--fits"]) == 0
    printed, there = lines(capsys.readouterr().out), lines(page[page.index(fits.LEGEND) :])
    assert not set(printed) - set(there)
    firsts = [line.split(" ")[1] for line in there if re.match(r"\| \w", line)]
    runs = [run.model for run in fits.MEASURED]
    assert firsts == ["model", *models, "model", *models, "measured", *runs]


@pytest.mark.parametrize("kind", fits.KINDS)
def test_one_layer_stands_for_all(kind):
    raw = defaults("Qwen/Qwen3-0.6B", "DATA", 4, fits.RANK if kind == fits.ADAPTERS else None)
    raw["model"]["activation_checkpointing"] = True
    raw["data"]["sequence_length"] = 2048
    if kind == fits.COMPACT:
        raw |= {"fp8": {"preset": {"linear": "precise", "optimizer": "compact"}}}
        raw |= {"data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 1}
    found = fits.workloads("Qwen/Qwen3-0.6B")[kind].resized("sequence_length", 2048)
    expected = estimate(with_known_model(raw, None), gpus=4)
    assert estimate_workload(fits.replace(found, gpus=4)).as_json() == expected.as_json()


@pytest.mark.parametrize("run", fits.MEASURED, ids=lambda run: f"{run.model} {run.kind} {run.gpus} {run.gpu}")
def test_measured_figures_are_those_of_the_log(run):
    entries = re.split(r"^## ", (DOCS / "log/zero3.md").read_text(), flags=re.MULTILINE)
    of_day = [entry for entry in entries if entry.startswith(run.date)]
    row = re.compile(rf"^\|.*\b{run.speed:,} (?=.*\b{run.gib:g}\b)", re.MULTILINE)
    assert any(row.search(entry) for entry in of_day)


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (["Qwen/Qwen3-8B"], "FILE", "ds-fp8 estimate MODEL --gpus 8"),
        (["qwen3_8b/cpt.json"], "FILE", "leave it out"),
        (["--gpus", "4"], "--gpus", "leave it out"),
        (["--lora", "8"], "--lora", "leave it out"),
        (["--memory", "80"], "--memory", "takes --gpu alone"),
        (["--set", "fp8.preset=infir2"], "--set", "leave it out"),
        (["--json"], "--json", "leave it out"),
        (["--gpu", "h110"], "--gpu", '"h100"'),
        (["--gpu", "a100-80"], "--gpu", "no FP8 products"),
        (["--gpu", "l40s"], "--gpu", "--set fp8.preset=..."),
    ],
)
def test_wrong_calls(arguments, key, words, capsys):
    with pytest.raises(UserError) as error:
        main(["estimate", "--fits", *arguments])
    assert error.value.key == key
    assert words in f"{error.value.problem} {error.value.remedy}"
    assert error.value.remedy
    assert capsys.readouterr().out == ""
