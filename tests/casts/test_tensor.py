"""QuantizedTensor: what it accepts, what it weighs, and when it transposes."""

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize, transpose


@pytest.mark.parametrize("granularity", ["row", "1x128"])
def test_a_cast_along_one_dimension_is_not_transposed(granularity):
    with pytest.raises(ValueError, match=granularity):
        quantize(torch.randn(5, 7), granularity=granularity).t()


@pytest.mark.parametrize(
    ("granularity", "scales"), [("tensor", 1), ("row", 200), ("1x128", 200 * 3), ("128x128", 2 * 3)]
)
def test_nbytes_counts_elements_and_scales(granularity, scales):
    assert quantize(torch.randn(200, 300), granularity=granularity).nbytes == 200 * 300 + 4 * scales


@pytest.mark.parametrize(
    ("granularity", "shape"), [("tensor", (1,)), ("row", (4,)), ("1x128", (4, 2)), ("128x128", ())]
)
def test_scales_of_another_shape_are_refused(granularity, shape):
    data = torch.zeros(4, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=granularity):
        QuantizedTensor(data, torch.ones(shape), granularity)


@pytest.mark.parametrize("granularity", ["tensor", "128x128"])
def test_transposing_shares_the_bytes(granularity):
    quantized = quantize(torch.randn(130, 7), granularity=granularity)
    assert quantized.t().data.data_ptr() == quantized.data.data_ptr()
    assert quantized.t().scale.data_ptr() == quantized.scale.data_ptr()
    assert quantized.t().shape == (7, 130)


@pytest.mark.parametrize("granularity", ["tensor", "128x128"])
def test_stacked_matrices_are_transposed_one_by_one(granularity):
    stacked = quantize(torch.randn(3 * 256, 384), granularity=granularity)
    turned = transpose(stacked, 3)
    assert turned.shape == (3 * 384, 256)
    expected = stacked.dequantize().unflatten(0, (3, 256)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(turned.dequantize(), expected)
    assert turned.data.is_contiguous()
