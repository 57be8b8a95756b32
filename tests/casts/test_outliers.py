"""Outlier blocks: the exactness they buy, on awkward sizes, and the kernels beside the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.casts.outliers import (
    HALF,
    channel_energy,
    extend_input,
    extend_input_reference,
    extend_weight,
    largest_channels,
    residual_scale,
    weight_residual,
)
from ds_fp8.casts.primitives import apply_factors
from ds_fp8.casts.quantization import round_up_to_blocks
from ds_fp8.config.formats import CastSpec
from tests.casts.test_kernels import DEVICE, assert_same

# count: channels
sizes_and_scales = pytest.mark.parametrize(
    ("rows", "columns", "count", "scale"),
    [
        (1, 128, 64, "pow2"),
        (130, 576, 64, "fp32"),
        (257, 200, 17, "pow2"),
        (128, 384, 128, "pow2"),
        (5, 40, 40, "fp32"),
        (131, 300, 130, "fp32"),
    ],
)


def with_outliers(rows: int, columns: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Return numbers [rows, columns] of which some columns are 50 times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, torch.randperm(columns, generator=generator)[:channels]] *= 50
    return x.bfloat16()


@sizes_and_scales
def test_products_of_outlier_channels_are_exact_to_second_order(rows, columns, count, scale):
    x, w = with_outliers(rows, columns, count), torch.randn(96, columns).bfloat16()
    x_cast, w_cast = quantize(x, granularity="1x128", scale=scale), quantize(w, granularity="128x128", scale=scale)
    channels = largest_channels(channel_energy(x_cast), count)
    wide_x = extend_input(x_cast, x, channels)
    wide_w = extend_weight(w_cast, weight_residual(w, w_cast, channels), channels)
    at = channels.long()
    exact = x.float()[:, at] @ w.float()[:, at].t()
    plain = x_cast.dequantize()[:, at] @ w_cast.dequantize()[:, at].t()
    start = round_up_to_blocks(columns)
    block = wide_x.dequantize()[:, start:] @ wide_w.dequantize()[:, start:].t()
    assert (plain + block - exact).norm() < 0.004 * exact.norm()
    assert (plain - exact).norm() > 0.01 * exact.norm()  # what the block is for
    # What stands before the block is as it was, with zeros up to it.
    torch.testing.assert_close(wide_x.dequantize()[:, :columns], x_cast.dequantize(), rtol=0, atol=0)
    torch.testing.assert_close(wide_w.dequantize()[:, :columns], w_cast.dequantize(), rtol=0, atol=0)
    assert not wide_x.dequantize()[:, columns:start].any()
    assert not wide_w.dequantize()[:, columns:start].any()


def test_channels_are_those_of_the_largest_energy_in_ascending_order():
    x = with_outliers(200, 300, 5)
    largest = x.float().square().sum(0).topk(5).indices.sort().values
    assert largest_channels(channel_energy(quantize(x)), 5).tolist() == largest.tolist()
    assert largest_channels(torch.zeros(3), 64).tolist() == [0, 1, 2]
    assert largest_channels(torch.tensor([1.0, 2.0, 2.0, 2.0]), 2).tolist() == [1, 2]  # the first of equals
    assert largest_channels(torch.arange(40_000.0), 2).tolist() == [39_998, 39_999]


def test_infinity_and_nan_stay_visible_and_count_for_no_energy():
    x = with_outliers(4, 256, 2).to(DEVICE)
    x[0, 3] = torch.inf
    energy = channel_energy(quantize(x))
    assert energy[:128].tolist() == [0.0] * 128  # the group is NaN
    assert energy[128:].gt(0).all()
    x = with_outliers(3, 256, 8).to(DEVICE)
    channels = largest_channels(channel_energy(quantize(x)), 8)
    x[1, channels[0]] = torch.nan
    wide = extend_input(quantize(x), x, channels).dequantize()
    assert wide[1, -128:].isnan().all()
    assert wide[[0, 2]].isfinite().all()


def test_zeros_stay_zero():
    x = torch.zeros(4, 256, dtype=torch.bfloat16, device=DEVICE)
    channels = torch.arange(HALF, dtype=torch.int32, device=DEVICE)
    assert not extend_input(quantize(x), x, channels).dequantize().any()
    w = quantize(x, granularity="128x128")
    assert not extend_weight(w, weight_residual(x, w, channels), channels).dequantize().any()


def on_cpu(x: QuantizedTensor) -> QuantizedTensor:
    return replace(x, data=x.data.cpu(), scale=x.scale.cpu())


@sizes_and_scales
@pytest.mark.parametrize("factors", [False, True])
def test_kernel_of_inputs_is_its_reference(rows, columns, count, factors, scale):
    from ds_fp8.casts.outliers_triton import extend_input_tiles

    x = with_outliers(rows, columns, count).to(DEVICE)
    row = torch.rand(rows, device=DEVICE) + 0.5 if factors else None
    column = torch.rand(columns, device=DEVICE).bfloat16() + 0.5 if factors else None
    cast = quantize(apply_factors(x, row, column), scale=scale)
    channels = largest_channels(channel_energy(cast), count)
    at = channels.long()
    values = apply_factors(x[:, at], row, None if column is None else column[at])
    expected = extend_input_reference(cast, values, channels)
    result = extend_input_tiles(cast, x, channels, row, column)
    assert_same(result, on_cpu(expected))


@pytest.mark.parametrize("columnwise", [None, "128x128"])
@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 128, 64), (130, 256, 17), (128, 384, 128), (256, 128, 1)])
def test_a_cast_that_left_room_gets_its_outlier_block_in_place(rows, columns, count, columnwise):
    from ds_fp8.casts.outliers_triton import extend_input_tiles
    from ds_fp8.casts.quantization_triton import quantize_tiles

    x = with_outliers(rows, columns, count).to(DEVICE)
    room = round_up_to_blocks(2 * count)
    narrow, expected_columns = quantize_tiles(x, "e4m3", "fp32", "1x128", columnwise)
    roomy, found_columns = quantize_tiles(x, "e4m3", "fp32", "1x128", columnwise, room=room)
    channels = largest_channels(channel_energy(narrow), count)
    copied, in_place = extend_input_tiles(narrow, x, channels), extend_input_tiles(roomy, x, channels)
    assert in_place.data.data_ptr() == roomy.data.data_ptr()
    assert in_place.data.is_contiguous()
    assert torch.equal(in_place.data.view(torch.uint8), copied.data.view(torch.uint8))
    assert torch.equal(in_place.scale, copied.scale)
    assert in_place.scale.t().is_contiguous()
    if columnwise:
        assert torch.equal(found_columns.data.view(torch.uint8), expected_columns.data.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), [(1, 384), (130, 128)])
def test_fused_casts_leave_room(rows, columns):
    from ds_fp8.layers.decoder.rms_norm_triton import normalise
    from ds_fp8.layers.linear.gated_activation_triton import gated_forward

    spec, room = CastSpec(scale="fp32"), 256
    x, gate_up = (with_outliers(rows, width, 3).to(DEVICE) for width in (columns, 2 * columns))
    weight = torch.rand(columns, device=DEVICE).bfloat16()
    for expected, found in [
        [normalise(x, None, weight, 1e-6, spec, size)[2] for size in (0, room)],
        [gated_forward(gate_up, "silu", spec, save=True, room=size)[1] for size in (0, room)],
    ]:
        assert found.data.stride() == (columns + room, 1)
        assert found.scale.stride() == (1, rows)
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale, expected.scale)


@sizes_and_scales
def test_kernel_of_weights_is_its_reference(rows, columns, count, scale):
    from ds_fp8.casts.outliers_triton import extend_weight_tiles

    weight = with_outliers(rows, columns, count).to(DEVICE)
    w = quantize(weight, granularity="128x128", scale=scale)
    channels = torch.randperm(columns)[:count].sort().values.int().to(DEVICE)
    residual = weight_residual(weight, w, channels)
    expected = extend_weight(on_cpu(w), residual.cpu(), channels.cpu())
    assert_same(extend_weight_tiles(w, residual, channels, residual_scale(w.scale)), expected)
