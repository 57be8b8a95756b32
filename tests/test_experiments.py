"""Every experiment of scripts/experiments starts, and writes what it found."""

import importlib
import sys
from pathlib import Path

import bench_path
import pytest

TINY = {
    "corpus": "--megabytes 0.1 --output FOUND",
    "crossover": "--quick --tokens 16 --hidden 256 --presets infir2 --json FOUND",
    "head": "--quick --tokens 96 --chunks 32 --only bf16,fp8,all --json FOUND",
    "optimizer_parity": "--quick --steps 4 --shared-steps 2 --presets infir2,perturbed,dithered,coat --json FOUND",
    "zero_step": "--quick --json FOUND",
}
MEASURED_BY_TESTS = {"continue_training": "test_continue_training.py", "export_memory": "export/test_memory.py"}
HELPERS = {"bench_path", "byte_training", "peer_linears"}


@pytest.mark.parametrize("name", TINY)
def test_it_starts_and_writes_what_it_found(name, tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TINY[name].replace("FOUND", str(file)).split()])
    assert not importlib.import_module(name).main()
    assert file.stat().st_size > 100


def test_none_is_forgotten_and_each_says_its_question_and_answer():
    experiments = {file.stem: file.read_text() for file in Path(bench_path.__file__).parent.glob("*.py")}
    assert experiments.keys() == {*TINY, *MEASURED_BY_TESTS, *HELPERS}
    for name in experiments.keys() - HELPERS - {"corpus"}:
        first, *rest = experiments[name].splitlines()[:10]
        assert "?" in first, name
        assert any(line.startswith("Answer (20") for line in rest), name
    for name, file in MEASURED_BY_TESTS.items():
        assert name in (Path(__file__).parent / file).read_text()
