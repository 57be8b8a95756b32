"""The benchmark of attention: what it compares and writes, and how it refuses."""

import json

import attention
import pytest
import torch
from common import SIZES

from ds_fp8.config.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU other rows are measured, for heads of 128 features")
def test_errors_are_those_against_fp32(tmp_path):
    file = tmp_path / "attention.json"
    attention.main(["--quick", "--shapes", "1x40,2x24", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["rows"], row["length"]) for row in rows] == [
        ("sdpa", 1, 40), ("fp8 (emulated)", 1, 40), ("sdpa", 2, 24), ("fp8 (emulated)", 2, 24),
    ]  # fmt: skip
    for row in rows:
        assert row["forward"] > 0
        assert row["both"] > 0
        low, high = (0.02, 0.15) if "fp8" in row["name"] else (0, 0.01)
        assert all(low <= row["errors"][name] < high for name in attention.NAMES)


def test_operations_of_a_small_shape():
    # Scores and output of one head: 2 products of 2 S² D operations, half of them below the diagonal.
    assert attention.floating_point_operations(SIZES["tiny"], 3, 16) == 3 * 4 * (2 * 2 * 16 * 16 * 64) // 2


@pytest.mark.parametrize("arguments", [["--only", "cdnn"], ["--size", "9b"], ["--shapes", "8192"]])
def test_what_is_unknown_is_refused(arguments):
    with pytest.raises(UserError):
        attention.main(["--quick", *arguments])
