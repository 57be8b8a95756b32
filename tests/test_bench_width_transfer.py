"""The benchmark of learning rates over widths: a run of each variant, and going on from what a file holds."""

import json
import sys
from pathlib import Path

import pytest

from ds_fp8.config.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))
import width_transfer


def test_every_variant_trains_and_is_not_trained_again(tmp_path, capsys):
    file = tmp_path / "transfer.json"
    arguments = ["--quick", "--widths", "32", "--rates=-4", "--standard-rates=-8", "--steps", "3", "--json", str(file)]
    assert width_transfer.main(arguments) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [run["variant"] for run in runs] == list(width_transfer.VARIANTS)
    assert all(3 < run["loss"] < 6 for run in runs)
    assert capsys.readouterr().out.count("width 32 rate") == 3
    assert width_transfer.main(arguments) == 0
    assert "width 32 rate" not in capsys.readouterr().out
    assert json.loads(file.read_text())["runs"] == runs
    with pytest.raises(UserError, match=r"another seed\b"):
        width_transfer.main([*arguments, "--seed", "1"])
    assert json.loads(file.read_text())["runs"] == runs


def test_the_optimum_is_the_lowest_finite_loss():
    runs = [
        {"variant": "munit", "width": 64, "log2_rate": rate, "loss": loss}
        for rate, loss in {-5: 2.5, -4: 2.3, -3: float("nan")}.items()
    ]
    ((_, width, best, loss, _),) = width_transfer.summary(runs, "munit")
    assert (width, best, loss) == (64, -4, 2.3)


def test_exponents():
    assert width_transfer.whole_numbers("-3,2") == [-3, 2]
    with pytest.raises(width_transfer.argparse.ArgumentTypeError):
        width_transfer.whole_numbers("x")
