"""Every script starts, at a size for any machine; the fuzzer finds what it looks for."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed_tests
import fuzz
import newest_releases
import pytest

from ds_fp8.config.errors import UserError

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "ERROR"}

TINY = {
    "attention": "--shapes 1x40",
    "casts": "--presets infir2,rowwise --tokens 16",
    "experts": "--preset precise --tokens 16",
    "gemms": "--presets infir2 --backends reference --tokens 16",
    "layers": "--layers 1 --length 16 --sequences 1 --repeats 1 --only hf,infir2",
}
FP8_ERROR = 0.01, 0.15
"""Of a layer or an attention, relative: less would mean that nothing was cast."""


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_measures_what_it_names(name, tmp_path):
    file = tmp_path / "found.json"
    importlib.import_module(name).main(["--quick", "--json", str(file), *TINY[name].split()])
    rows = json.loads(file.read_text())["rows"]
    assert rows
    low, high = FP8_ERROR
    for row in rows:
        if name == "experts":
            assert low < row["layer"]["error_vs_bf16"] < high
        elif name == "attention":
            assert row["both"] > 0
            assert ("fp8" in row["name"]) == (low < row["errors"]["output"] < high)
        else:
            assert row["milliseconds"] > 0
        if name == "layers" and row["layers"] == "infir2":
            assert low < row["y_error"] < high
        if name == "gemms":
            assert row["error_vs_fp64"] < 3e-3 < row["error_vs_bf16"]


def test_a_step_and_the_collectives_are_measured(tmp_path):
    for script, arguments in (("step.py", ["--variants", "infir2"]), ("collectives.py", [])):
        file = tmp_path / f"{script}.json"
        words = [sys.executable, str(BENCH / script), "--quick", "--json", str(file), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = json.loads(file.read_text())["rows"]
        if script == "step.py":
            assert rows[0]["losses"][-1] < rows[0]["losses"][0]
        else:
            assert {row["operation"] for row in rows} == {"gather", "reduce", "refresh"}
            assert all(row["fp8_milliseconds"] > 0 for row in rows)


def test_kernels_of_experts_compile_for_hopper_with_its_fp8_units(tmp_path):
    pytest.importorskip("triton")
    environment = {**ENVIRONMENT, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", "import json, experts; print(json.dumps(experts.compiled_figures()))"]
    done = subprocess.run(words, env=environment, cwd=BENCH, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"fprop", "wgrad 1x128", "wgrad 128x128"}
    for kernel in figures.values():
        assert kernel["wgmma.mma_async"] >= 4  # one for every 32 of a sum of 128
        assert kernel["cp.async.bulk.tensor"] >= 2
        assert kernel["st.local"] == 0  # no registers spilt
        assert kernel["shared bytes"] <= 227 * 1024


CASES = {"configurations": 80, "overrides": 80, "texts": 60, "sweeps": 40, "data": 40}
CASES |= {"models": 16, "commands": 40}


def fuzzed(kind: str, tmp_path: Path) -> tuple:
    folder, work = tmp_path / "cases", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        return fuzz.fuzz(kind, CASES[kind], seed=0, folder=folder)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_what_users_write_is_accepted_or_refused(kind, tmp_path):
    counts, wrong = fuzzed(kind, tmp_path)
    assert not wrong, "\n".join(f"{what}\n  {case}" for what, case in wrong.items())
    assert counts["accepted"] + counts["refused"] >= CASES[kind] // 2
    assert counts["accepted"]
    assert counts["refused"]


def test_the_fuzzer_notices_what_it_looks_for(tmp_path, monkeypatch):
    """A traceback, a file that is written and a refusal without a remedy are told apart from refusals."""

    def judge(self, raw):
        choice = len(str(raw)) % 4
        if choice == 0:
            raise KeyError("a fault of ours")
        if choice == 1:
            Path(f"written{os.getpid()}").touch()
        if choice == 2:
            raise UserError("no remedy")

    monkeypatch.setattr(fuzz.Judges, "configurations", judge)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    counts, wrong = fuzz.fuzz("configurations", 20, seed=0, folder=tmp_path)
    kinds = " ".join(wrong)
    assert "KeyError" in kinds
    assert "written" in kinds
    assert "without remedy" in kinds
    assert counts["failed"]


REFUSED = "ds_fp8.config.errors.UserError: error: hpZ is not for FP8\n  key: zero_hpz_partition_size"


@pytest.mark.parametrize(("outcome", "message", "code"), [("passed", "", 0), ("failed", "AssertionError: 1 != 2", 1)])
def test_outcomes_of_deepspeeds_tests_are_the_same_refused_or_different(
    tmp_path, monkeypatch, capsys, outcome, message, code
):
    plain = {"same": ("passed", ""), "broken": ("failed", "KeyError"), "hpz": ("passed", ""), "other": ("passed", "")}
    after = {**plain, "hpz": ("failed", REFUSED), "other": (outcome, message)}
    for kind, outcomes in (("plain", plain), (deepspeed_tests.sha256(b"{}").hexdigest()[:8], after)):
        records = [{"test": f"a.py::{name}", "outcome": o, "message": m} for name, (o, m) in outcomes.items()]
        records.append({"test": "", "outcome": "finished", "message": ""})
        (tmp_path / f"a.py.{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(deepspeed_tests, "build_optimizers", lambda results: None)
    monkeypatch.setattr(sys, "argv", ["deepspeed_tests", str(tmp_path), "--tests", "a.py", "--results", str(tmp_path)])
    assert deepspeed_tests.main() == code
    table = capsys.readouterr().out
    assert f"| a.py | 4 | {2 - code} | 0 | 1 | 1 | {code} |" in table
    assert "| hpZ is not for FP8 | 1 |" in table
    assert ("a.py::other: passed, with FP8 failed: AssertionError: 1 != 2" in table) == bool(code)


OUTCOMES = """
import os
import pytest

def test_right():
    assert (os.environ["DS_FP8_TRY_DEEPSPEED"], os.environ["DS_FP8_TRY_TRANSFORMERS"]) == ("1.2.3", "4.5.6")

@pytest.mark.parametrize("seconds", [0.0])
def test_wrong(seconds):
    assert seconds == 1, "one and not zero"

def test_skipped():
    pytest.skip("not here")

@pytest.fixture
def broken():
    raise RuntimeError("a fixture")

def test_broken(broken):
    pass
"""


def test_newest_releases_are_tried_and_failures_listed(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(OUTCOMES)
    monkeypatch.setattr(newest_releases, "ROOT", tmp_path)
    versions = {"deepspeed": "1.2.3", "transformers": "4.5.6"}
    outcome = newest_releases.run(Path(sys.executable), "test_some.py", versions, 60)
    text = newest_releases.table([outcome])
    assert "| `test_some.py` | 1 | 2 | 1 |" in text
    assert "test_wrong[0.0]: AssertionError: one and not zero" in text
    assert "a fixture" in text
    root = Path(__file__).parents[1]
    assert [tests for tests in newest_releases.TESTS if not (root / tests).exists()] == []
    assert {"torch", "triton", "accelerate", "trl", "peft"} < set(newest_releases.PACKAGES)
