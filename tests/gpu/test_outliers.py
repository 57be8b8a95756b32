"""Kernels of outlier channels on a GPU beside their references (casts of inputs and weights: tests/casts)."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.casts.outliers import channel_energy, extend_input, extend_input_reference, largest_channels
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.gated_activation import ACTIVATIONS, gated_product_reference
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("tokens", "features", "count"), [(1, 128, 64), (130, 576, 64), (257, 200, 17), (512, 1536, 128)]
)
def test_outlier_blocks_of_gated_products(tokens, features, count, activation):
    from ds_fp8.layers.linear.gated_activation_triton import extend_product_tiles, gated_forward

    gate_up = torch.randn(tokens, 2 * features, device="cuda").bfloat16()
    gate_up[:, : features // 8] *= 20
    _, cast, _ = gated_forward(gate_up, activation, CastSpec(scale="fp32"), save=False)
    channels = largest_channels(channel_energy(cast), count)
    at = torch.cat([channels, channels + features]).long()
    values = gated_product_reference(gate_up[:, at], activation)
    expected, found = (
        extend_input_reference(cast, values, channels),
        extend_product_tiles(cast, gate_up, activation, channels),
    )
    start = -(-features // 128) * 128
    assert torch.equal(found.data.view(torch.uint8)[:, :start], expected.data.view(torch.uint8)[:, :start])
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-4, atol=0)
    # The kernel's exponential differs in the last places, where a residual is a small difference of large numbers.
    exact, block = values.double(), found.dequantize().double()[:, start:]
    exact = torch.nn.functional.pad(exact, (0, -count % 64)).view(tokens, -1, 64)
    value, residual = block.view(tokens, -1, 2, 64).unbind(2)
    rounded = cast.dequantize().double()[:, channels.long()]
    rounded = torch.nn.functional.pad(rounded, (0, -count % 64)).view(tokens, -1, 64)
    assert (value - exact).norm() < 0.04 * exact.norm()
    assert (rounded + residual - exact).norm() < 0.004 * exact.norm()


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
