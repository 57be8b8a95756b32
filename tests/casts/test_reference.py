"""Casts against their definition, and the properties that training and checkpoints rest on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.casts import QuantizedTensor, group_amax, quantize, quantize_with_scale, scale_from_amax
from ds_fp8.config.formats import FORMATS, NATIVE_FORMATS, NATIVE_GRANULARITIES, scale_shape
from tests.casts import oracle
from tests.casts.inputs import EDGES, FP32_MAX, NOT_FINITE, TOO_LARGE, matrix_shapes, shapes, tensors

formats = pytest.mark.parametrize("format", NATIVE_FORMATS)
granularities = pytest.mark.parametrize("granularity", NATIVE_GRANULARITIES)
scale_types = pytest.mark.parametrize("scale_type", ["fp32", "pow2"])
transposable = pytest.mark.parametrize("granularity", ["tensor", "128x128"])
FEW = settings(max_examples=25, deadline=None)


def shapes_of(granularity: str):
    return matrix_shapes if granularity == "128x128" else shapes


def codes(quantized: QuantizedTensor) -> np.ndarray:
    return quantized.data.contiguous().view(torch.uint8).numpy()


def scale_per_element(quantized: QuantizedTensor) -> np.ndarray:
    """FP64 scales, one per element, spread by the oracle's idea of groups."""
    spread = np.empty(tuple(quantized.shape))
    for index, where in oracle.groups(tuple(quantized.shape), quantized.granularity):
        spread[where] = quantized.scale[index].item()
    return spread


def values(quantized: QuantizedTensor) -> np.ndarray:
    """data * scale in FP64, without `dequantize`."""
    return oracle.LAYOUTS[quantized.format].values(codes(quantized)) * scale_per_element(quantized)


@formats
def test_format_has_the_values_of_its_bit_layout(format):
    layout = oracle.LAYOUTS[format]
    assert FORMATS[format].dtype is layout.dtype
    assert FORMATS[format].max == layout.max
    assert FORMATS[format].smallest_subnormal == layout.magnitude(1)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_decodes_every_code(format, dtype):
    layout, every_code = oracle.LAYOUTS[format], np.arange(256, dtype=np.uint8)
    finite = every_code[~np.isnan(layout.values(every_code))]
    quantized = QuantizedTensor(torch.from_numpy(finite).view(layout.dtype), torch.tensor(0.5), "tensor")
    decoded = quantized.dequantize(dtype)
    assert decoded.dtype is dtype
    np.testing.assert_array_equal(decoded.double().numpy(), layout.values(finite) * 0.5)


@formats
def test_every_midpoint_rounds_to_the_even_code_and_its_neighbours_to_theirs(format):
    layout = oracle.LAYOUTS[format]
    midpoints = ((layout.magnitudes[1:] + layout.magnitudes[:-1]) / 2).astype(np.float32)
    expected = np.arange(len(midpoints))
    for numbers, code in [
        (midpoints, expected + expected % 2),
        (np.nextafter(midpoints, np.float32(0)), expected),
        (np.nextafter(midpoints, np.float32(np.inf)), expected + 1),
    ]:
        for sign, sign_bit in ((1, 0), (-1, 128)):
            data = quantize_with_scale(torch.from_numpy(sign * numbers), torch.tensor(1.0), format, "tensor")
            np.testing.assert_array_equal(data.view(torch.uint8).numpy(), code + sign_bit)


@formats
@granularities
@scale_types
@FEW
@given(data=st.data())
def test_quantize_and_dequantize_are_their_definitions(format, granularity, scale_type, data):
    x = data.draw(tensors(shapes_of(granularity), [*EDGES, *TOO_LARGE, FP32_MAX, *NOT_FINITE]))
    quantized = quantize(x, format, granularity, scale_type)
    expected_codes, expected_scales = oracle.quantize(x.float().numpy(), format, granularity, scale_type)

    assert quantized.scale.dtype is torch.float32
    assert tuple(quantized.scale.shape) == scale_shape(x.shape, granularity)
    assert quantized.scale.numel() == len(expected_scales)
    for index, scale in expected_scales.items():
        np.testing.assert_array_equal(quantized.scale[index].numpy(), scale)
    # NaN has two codes, one for each sign.
    got = np.where(np.isnan(quantized.data.float().numpy()), 0x7F, codes(quantized))
    np.testing.assert_array_equal(got, expected_codes)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(quantized.dequantize().numpy(), values(quantized).astype(np.float32))


@formats
@granularities
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@FEW
@given(data=st.data())
def test_decode_then_encode_gives_the_same_codes_and_with_pow2_scales_the_same_values(format, granularity, scale, data):
    x = data.draw(tensors(shapes_of(granularity)))
    once = quantize(x, format, granularity, scale)
    again = quantize(once.dequantize(), format, granularity, scale)
    np.testing.assert_allclose(values(again), values(once), rtol=0 if scale == "pow2" else 2.0**-22)
    if scale == "fp32":  # a power of two may be another one, and the codes with it
        np.testing.assert_array_equal(codes(again), codes(once))
    assert np.isfinite(values(once)).all()


@formats
@transposable
@scale_types
@FEW
@given(x=tensors(matrix_shapes, [*EDGES, *TOO_LARGE]))
def test_casting_the_transpose_is_transposing_the_cast(format, granularity, scale_type, x):
    of_transpose = quantize(x.t(), format, granularity, scale_type)
    transposed = quantize(x, format, granularity, scale_type).t()
    np.testing.assert_array_equal(codes(of_transpose), codes(transposed))
    assert torch.equal(of_transpose.scale, transposed.scale)
    assert torch.equal(of_transpose.dequantize(), transposed.dequantize())


@formats
@granularities
@pytest.mark.parametrize("poison", NOT_FINITE)
def test_a_number_that_is_not_finite_poisons_its_group_and_no_other(format, granularity, poison):
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    clean = quantize(x, format, granularity)
    x[140, 260] = poison
    poisoned = quantize(x, format, granularity)
    group = next(
        where
        for _, where in oracle.groups((200, 300), granularity)
        if where == (...,) or all(part.start <= at < part.stop for part, at in zip(where, (140, 260), strict=True))
    )
    inside = np.zeros((200, 300), bool)
    inside[group] = True
    assert np.isnan(poisoned.dequantize().numpy()[inside]).all()
    np.testing.assert_array_equal(codes(poisoned)[~inside], codes(clean)[~inside])
    assert poisoned.scale.isnan().sum() == 1


@granularities
@pytest.mark.parametrize("poison", NOT_FINITE)
def test_amax_of_a_group_that_is_not_finite_is_inf(granularity, poison):
    """A maximum over ranks drops NaN or not as it likes; Inf it must keep."""
    x = torch.ones(3, 5)
    x[1, 2] = poison
    amax = group_amax(x, granularity)
    assert amax.isinf().sum() == 1
    assert not amax.isnan().any()


@formats
@granularities
@scale_types
@pytest.mark.parametrize("amax", [1e-45, 2.0**-126, 1.0, FP32_MAX])
def test_saturation_never_yields_nan(format, granularity, scale_type, amax):
    """Numbers far above the amax their scale was made from, as when the scale is older than the numbers."""
    x = torch.tensor([[FP32_MAX, -FP32_MAX, 1.0, 0.0]])
    scale = scale_from_amax(torch.full(scale_shape(x.shape, granularity), amax), format, scale_type)
    data = quantize_with_scale(x, scale, format, granularity)
    assert data.float().isfinite().all()
    if amax <= 1:
        assert data[0, :2].float().tolist() == [FORMATS[format].max, -FORMATS[format].max]


@granularities
@scale_types
@pytest.mark.parametrize("shape", [(0, 5), (300, 0)])
def test_empty_tensors_stay_empty(granularity, scale_type, shape):
    quantized = quantize(torch.empty(shape), "e4m3", granularity, scale_type)
    assert quantized.shape == shape
    assert quantized.dequantize().shape == shape
    assert (quantized.scale == 1).all()


@formats
@scale_types
def test_a_scalar_is_a_tensor_of_one_group(format, scale_type):
    quantized = quantize(torch.tensor(-3.0), format, "tensor", scale_type)
    assert quantized.shape == quantized.scale.shape == ()
    assert quantized.dequantize() == pytest.approx(-3.0)


def test_the_input_is_left_alone_and_carries_no_gradient():
    x = torch.randn(3, 130, requires_grad=True)
    before = x.detach().clone()
    quantized = quantize(x)
    assert torch.equal(x, before)
    assert not quantized.dequantize().requires_grad


@pytest.mark.parametrize(
    ("words", "wrong"), [({"format": "e4m4"}, "e4m4"), ({"granularity": "block"}, "block"), ({"scale": "pow3"}, "pow3")]
)
def test_an_unknown_word_is_named(words, wrong):
    with pytest.raises(ValueError, match=wrong):
        quantize(torch.ones(2, 2), **words)


@pytest.mark.parametrize(
    ("shape", "granularity"), [((), "row"), ((), "1x128"), ((), "128x128"), ((5,), "128x128"), ((2, 3, 4), "128x128")]
)
def test_a_granularity_that_does_not_fit_the_shape_is_refused(shape, granularity):
    with pytest.raises(ValueError, match=granularity):
        quantize(torch.ones(shape), granularity=granularity)
