"""Every benchmark starts, at a size for any machine; what the fuzzer writes is accepted or refused."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "ERROR"}

TINY = {
    "attention": "--shapes 1x40",
    "casts": "--presets infir2,rowwise --tokens 16",
    "experts": "--preset precise --tokens 16",
    "gemms": "--presets infir2 --backends reference --tokens 16",
    "update": "",
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
    for script, arguments in (("step.py", ["--variants", "torch,infir2", "--lora", "4"]), ("collectives.py", [])):
        file = tmp_path / f"{script}.json"
        words = [sys.executable, str(BENCH / script), "--quick", "--json", str(file), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = json.loads(file.read_text())["rows"]
        if script == "step.py":
            assert all(row["losses"][-1] < row["losses"][0] for row in rows)
            assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=0.01)
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
