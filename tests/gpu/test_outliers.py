"""Kernels of outlier channels on a GPU beside their references (casts of inputs and weights: tests/casts)."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.casts.outliers import extend_input
from tests.layers.test_fused_parts import test_outlier_blocks_of_gated_products  # noqa: F401
from tests.zero.test_outlier_residuals import CUT_ROWS, WHOLE_ROWS, kernel_and_reference, losses_and_channels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("world", "master", "sizes"),
    [(1, "fp32", CUT_ROWS), (2, "fp32", CUT_ROWS), (2, "fp32", WHOLE_ROWS), (1, "fp8_plus16", CUT_ROWS)],
)
def test_residuals_of_shards_are_the_references(gpu_ranks, world, master, sizes):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for pairs in gpu_ranks(world, kernel_and_reference, master, sizes):
        for expected, found in pairs:
            assert torch.equal(expected, found)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sizes", [WHOLE_ROWS, (256, 512)])
def test_blocks_that_gathers_bring_change_no_number(gpu_ranks, world, sizes):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    section = {"preset": "precise", "monitor": {"every": 2}}
    found, expected = (gpu_ranks(world, losses_and_channels, room, section, sizes, 6) for room in (True, False))
    assert found == expected


def test_scales_and_codes_of_zeros_and_infinity():
    x = torch.zeros(3, 256, device="cuda", dtype=torch.bfloat16)
    x[1, 7] = torch.inf
    x[2, 9] = 1.0
    channels = torch.tensor([7, 9], dtype=torch.int32, device="cuda")
    wide = extend_input(quantize(x, scale="fp32"), x, channels).dequantize()
    assert not wide[0].any()
    assert wide[1, -128:].isnan().any()
    assert wide[2].isfinite().all()
    assert wide[2, 9] == wide[2, 257] == 1.0
