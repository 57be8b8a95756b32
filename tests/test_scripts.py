"""Every benchmark starts, at a size for any machine; what the fuzzer writes is accepted or refused."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import collectives
import fuzz
import pytest
import served_loss
import step
import torch

from ds_fp8.casts import quantize

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "ERROR"}

TINY = {
    "attention": "--shapes 1x40",
    "casts": "--presets infir2,rowwise --tokens 16",
    "experts": "--preset precise --tokens 16",
    "gemms": "--presets infir2 --backends reference --tokens 16",
    "update": "",
    "joules": "--parts products,attention,layers --tokens 16 --seconds 0.001",
    "layers": "--layers 1 --length 16 --sequences 1 --repeats 1 --only hf,infir2",
}
FP8_ERROR = 0.01, 0.15  # Of a layer or an attention, relative: less would mean that nothing was cast


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


def losses_of(variant, *more):
    options = step.parse_arguments(["--quick", "--lora", "4", *more])
    return step.measure_variant(variant, options, step.Batches(options))["losses"]


def test_variants_of_a_step_are_measured(ranks):
    plain, fp8 = (ranks(1, losses_of, variant)[0] for variant in ("torch", "infir2"))
    assert max(plain[-1] / plain[0], fp8[-1] / fp8[0]) < 1
    assert plain == pytest.approx(fp8, rel=0.01)
    assert ranks(1, losses_of, "infir2", "--lr", "0")[0][-1] > fp8[-1]


def test_rounding_by_the_inputs_moments_errs_less_in_the_product():
    inputs = torch.randn(512, 4).matmul(torch.randn(4, 192)) + 0.1 * torch.randn(512, 192)
    weight = torch.randn(2, 144, 192)
    moments = (inputs.t() @ inputs / len(inputs)).expand(2, -1, -1)
    by_data = served_loss.gptq(weight, moments, "fp32")
    nearest = torch.stack([quantize(one, "e4m3", "128x128", "fp32").dequantize() for one in weight])
    errors = [((rounded - weight) @ inputs.t()).norm() for rounded in (by_data, nearest)]
    assert errors[0] < 0.5 * errors[1]


def test_the_loss_as_served_of_arms_that_go_on_from_a_run_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    if not torch.cuda.is_available():  # which a fork would lose; arms that are spawned import everything anew
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        monkeypatch.setattr(served_loss.multiprocessing, "get_context", lambda method: context)
    served_loss.main(["--quick", "--json", str(file), "--jobs", "1", "--steps", "10", "--arms", "served,served+pull=1"])
    whole, drawn = json.loads(file.read_text())["results"]
    assert whole["same_data"] == drawn["same_data"] == 1
    served = {name: losses for name, losses in drawn["losses"].items() if "mean" not in name}
    assert served["bf16"] == pytest.approx(served["fp8"], rel=1e-5)  # masters are the values of their quantized weights
    assert whole["losses"]["bf16"] != pytest.approx(whole["losses"]["fp8"], rel=1e-5)


def figures_of_collectives():
    gathers = (collectives.measure_gathers("tiny", section, 1) for section in (None, {"monitor": {"every": 0}}))
    reductions = (collectives.measure_reductions("tiny", how, 1) for how in (None, {"scale": "group"}))
    return collectives.rows_of("gather", "tiny", *gathers) + collectives.rows_of("reduce", "tiny", *reductions)


def test_collectives_are_measured(ranks):
    rows = ranks(2, figures_of_collectives)[0]
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


CASES = {"configurations": 80, "overrides": 80, "texts": 60, "sweeps": 40, "data": 40, "chats": 60}
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
