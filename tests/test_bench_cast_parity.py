"""The benchmark of casts in training: what its runs share, and the channel it plants."""

import json
import sys
from pathlib import Path

import pytest
import torch

from ds_fp8.config.errors import UserError

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import cast_parity


def test_runs_share_their_first_steps_and_differ_by_the_casts_after_them(tmp_path):
    file = tmp_path / "parity.json"
    arguments = ["--quick", "--steps", "3", "--shared-steps", "2", "--outlier", "15", "--variants", "bf16,fishman"]
    cast_parity.main([*arguments, "--json", str(file)])
    in_bf16, in_fp8 = json.loads(file.read_text())["rows"]
    assert in_bf16["losses"][:2] == in_fp8["losses"][:2]
    assert in_bf16["losses"][2] != in_fp8["losses"][2]
    assert in_fp8["losses"][2] == pytest.approx(in_bf16["losses"][2], rel=1e-2)


def test_the_planted_channel_exceeds_the_others_and_keeps_its_share_of_the_output():
    scale = cast_parity.QUICK
    model, rows = cast_parity.build_model(scale, 0), torch.randint(0, 256, (8, 64))
    cast_parity.plant_outliers(model, rows, 12)
    down, products = model.model.layers[1].mlp.down_proj, []
    down.register_forward_pre_hook(lambda layer, args: products.append(args[0].flatten(0, 1).float()))
    model(input_ids=rows)
    amax = products[0].abs().amax(0)
    assert 2**11 < amax[cast_parity.CHANNEL] / amax.median() < 2**13
    share = (amax * down.weight.float().norm(dim=0))[cast_parity.CHANNEL]
    assert share < 2 * (amax * down.weight.float().norm(dim=0)).median()


def test_there_must_be_something_to_compare_with():
    with pytest.raises(UserError, match="nothing to compare with"):
        cast_parity.main(["--quick", "--variants", "tensorwise"])
