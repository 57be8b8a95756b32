"""The optimizer benchmark runs anywhere, and says what it is asked."""

from __future__ import annotations

import json

import optimizers
import pytest
import torch

from ds_fp8.config.errors import UserError


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


def test_errors_are_measured_on_saved_moments(capsys, tmp_path):
    moments = {name: (1e-3 * torch.randn(128, 256)).square() for name in ("exp_avg", "exp_avg_sq")}
    torch.save({"weight": moments}, tmp_path / "moments.pt")
    optimizers.main(["--moments", str(tmp_path / "moments.pt")])
    assert "e4m3_expanded" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these run")
@pytest.mark.parametrize("arguments", [[], ["--sweep"]])
def test_what_needs_a_gpu_is_refused_without_one(arguments):
    with pytest.raises(UserError, match="GPU"):
        optimizers.main(arguments)


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="no file of moments"):
        optimizers.main(["--moments", str(tmp_path / "none.pt")])
