"""The optimizer benchmarks run anywhere, and say what they are asked."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch

from ds_fp8.config.errors import UserError

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import optimizer_parity
import optimizers


@pytest.fixture
def _modules_left_to_themselves():
    """The benchmarks collect garbage before each measurement: not all that the tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_modules_left_to_themselves")
def test_steps_and_errors(capsys, tmp_path):
    file = tmp_path / "steps.json"
    optimizers.main(["--quick", "--numel", "20000", "--json", str(file)])
    shown, written = capsys.readouterr().out, json.loads(file.read_text())
    state = {row["optimizer"]: row["state_bytes"] for row in written["steps"]}
    assert state["torch AdamW, fused"] == 8
    assert state["coat: e4m3_expanded"] < 2.1
    errors = {(row["codec"], row["granularity"], row["scale"]): row["update"] for row in written["errors"]}
    expanded, plain = errors["e4m3_expanded", "1x128", "fp32"], errors["e4m3", "1x128", "fp32"]
    assert 0 < expanded < plain < errors["e4m3", "tensor", "fp32"]
    assert "| torch AdamW, fused" in shown


@pytest.mark.usefixtures("_modules_left_to_themselves")
def test_parity_saves_moments_that_the_errors_are_measured_on(capsys, tmp_path):
    figures, moments, picture = tmp_path / "parity.json", tmp_path / "moments.pt", tmp_path / "parity.png"
    outputs = ["--json", str(figures), "--save-moments", str(moments), "--plot", str(picture)]
    optimizer_parity.main(["--quick", "--steps", "4", "--presets", "infir2,coat", *outputs])
    rows = json.loads(figures.read_text())["rows"]
    assert [row["state"] for row in rows] == ["infir2", "coat"]
    assert rows[0]["difference"] == 0 != rows[1]["difference"]
    assert rows[0]["losses"][0] == rows[1]["losses"][0]
    assert abs(rows[1]["difference"]) < 0.01
    assert picture.stat().st_size > 1000
    assert set(next(iter(torch.load(moments, weights_only=True).values()))) == {"exp_avg", "exp_avg_sq"}
    optimizers.main(["--moments", str(moments)])
    assert "e4m3_expanded" in capsys.readouterr().out


@pytest.mark.usefixtures("_modules_left_to_themselves")
def test_parity_from_shared_first_steps(tmp_path):
    figures = tmp_path / "parity.json"
    presets = ["infir2", "perturbed", "dithered", "fp8lm_o3"]
    arguments = ["--quick", "--steps", "8", "--presets", ",".join(presets), "--json", str(figures)]
    curves = {}
    for shared in (0, 5):
        optimizer_parity.main([*arguments, "--shared-steps", str(shared)])
        written = json.loads(figures.read_text())
        assert written["run"]["shared_steps"] == shared
        curves[shared] = {row["state"]: row["losses"] for row in written["rows"]}
    assert curves[0]["infir2"] == curves[5]["infir2"]  # FP32 state goes on as if nothing had been
    for name in presets[1:]:
        assert curves[5][name][:5] == curves[5]["infir2"][:5]
        assert curves[5][name][5:] != curves[5]["infir2"][5:]
        assert curves[0][name][:5] != curves[0]["infir2"][:5]


def test_dithered_masters_start_beside_the_weights_that_they_round_to():
    model = optimizer_parity.build_model(optimizer_parity.QUICK, 0)
    optimizer = optimizer_parity.AdamW(model.parameters())
    optimizer_parity.dither(optimizer)
    for p in model.parameters():
        assert ("master" in optimizer.state[p]) == (p.dim() > 1)
    weight = model.lm_head.weight
    master = optimizer.state[weight]["master"]
    away = (master - weight.float()).abs() / weight.float().abs()
    assert 0 < away.max() <= 2.0**-10
    assert (master.bfloat16() == weight).float().mean() > 0.99  # not below a power of two, where BF16 is finer


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these run")
@pytest.mark.parametrize(
    ("main", "arguments"), [(optimizers.main, []), (optimizers.main, ["--sweep"]), (optimizer_parity.main, [])]
)
def test_what_needs_a_gpu_is_refused_without_one(main, arguments):
    with pytest.raises(UserError, match="GPU"):
        main(arguments)


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="no file of moments"):
        optimizers.main(["--moments", str(tmp_path / "none.pt")])
    with pytest.raises(UserError, match="unknown preset"):
        optimizer_parity.main(["--quick", "--presets", "coats"])
    with pytest.raises(UserError, match="no step is left"):
        optimizer_parity.main(["--quick", "--steps", "5", "--shared-steps", "5"])
