"""The benchmark of rotations: what it finds of a small outlier, and its table."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import rotations


def test_a_moderate_outlier_in_int8():
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((256, 384), (128, 384), (256, 128)))
    x[:, rotations.CHANNEL] *= 2.0**8
    w[:, rotations.CHANNEL] *= 2.0**-8
    tensors = x.bfloat16(), w.bfloat16(), dy.bfloat16()
    plain, rotated, smooth = (rotations.errors(tensors, "int8", name) for name in ("none", "all", "smooth"))
    assert rotated["y"] < plain["y"] / 2
    assert rotated["dw"] < plain["dw"] / 2
    assert smooth["y"] < rotated["y"]
    assert rotations.errors(tensors, "fp8", "level 1")["y"] > 2 * rotations.errors(tensors, "fp8", "none")["y"]


def test_every_variant_has_a_line(tmp_path):
    file = tmp_path / "errors.json"
    rotations.main(["--quick", "--outliers", "8", "--shared-steps", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["rotation"] for row in rows] == [*rotations.VARIANTS] * 2
    assert all(row["y gain"] == 1 for row in rows if row["rotation"] == "none")
