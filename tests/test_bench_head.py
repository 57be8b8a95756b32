"""The benchmarks of the head: what they compare and write, and how they refuse."""

import json
import sys
from pathlib import Path

import pytest

from ds_fp8.config.errors import UserError

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import head
import head_parity


def test_heads_are_compared_with_all_logits_in_fp32(tmp_path):
    file = tmp_path / "head.json"
    head.main(["--quick", "--tokens", "96", "--chunks", "32", "--only", "bf16,fp8,all", "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 5
    for name, row in rows.items():
        assert row["milliseconds"] > 0
        assert all(
            (0.01 if "fp8" in name else 0) <= error < (0.1 if "fp8" in name else 0.01) for error in row["errors"][1:]
        )


def test_runs_of_one_seed_differ_by_the_head_alone(tmp_path):
    file = tmp_path / "parity.json"
    head_parity.main(["--quick", "--steps", "2", "--variants", "bf16,infir2", "--json", str(file)])
    in_bf16, in_fp8 = json.loads(file.read_text())["rows"]
    assert in_bf16["losses"][0] == pytest.approx(in_fp8["losses"][0], rel=1e-3)
    assert in_bf16["losses"] != in_fp8["losses"]
    assert in_fp8["final_vs_bf16"] == pytest.approx(in_fp8["final_loss"] / in_bf16["final_loss"] - 1)


@pytest.mark.parametrize(("script", "argument"), [(head, "--only"), (head_parity, "--variants")])
def test_an_unknown_name_is_refused(script, argument):
    with pytest.raises(UserError, match="infir3") as caught:
        script.main(["--quick", argument, "infir3"])
    assert caught.value.key == argument
