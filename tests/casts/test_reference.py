"""Casts against their definition, and the properties that training and checkpoints rest on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from ds_fp8.casts import QuantizedTensor, group_amax, quantize, quantize_with_scale, scale_from_amax, transpose
from ds_fp8.casts import quantization as triton_check
from ds_fp8.casts.primitives import round_stochastically, uniform
from ds_fp8.config.errors import UserError
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


# ---------------------------------------------------------------- QuantizedTensor


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


# ---------------------------------------------------------------- stochastic rounding


SAMPLES = 20000


def grid(format):
    numbers = torch.arange(256, dtype=torch.uint8).view(FORMATS[format].dtype).float()
    return numbers[numbers.isfinite()]


def draws(count, key=0):
    return uniform(torch.arange(count), key)


def test_draws_are_even_and_repeat_with_their_key_only():
    first = draws(SAMPLES, 7)
    assert first.min() >= 0
    assert first.max() < 1
    assert torch.equal(first, draws(SAMPLES, 7))
    assert torch.histc(first, 10, 0, 1).sub(SAMPLES / 10).abs().max() < 5 * (SAMPLES / 10) ** 0.5
    for other in (draws(SAMPLES, 8), first.roll(1)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / SAMPLES**0.5


@pytest.mark.parametrize("format", NATIVE_FORMATS)
def test_numbers_on_the_grid_stay(format):
    numbers = grid(format)
    for draw in (0.0, 1 - 2.0**-16):
        assert torch.equal(round_stochastically(numbers, torch.full_like(numbers, draw), format), numbers)


@pytest.mark.parametrize("format", NATIVE_FORMATS)
def test_every_result_is_a_neighbour_on_the_grid(format):
    target = FORMATS[format]
    x = torch.cat(
        [torch.randn(SAMPLES), torch.randn(SAMPLES) * target.smallest_subnormal * 3, torch.tensor([target.max])]
    )
    result = round_stochastically(x, draws(len(x)), format)
    assert torch.isin(result, grid(format)).all()
    assert torch.equal(result.to(target.dtype).float(), result)
    down, up = (round_stochastically(x, torch.full_like(x, draw), format) for draw in (0.0, 1 - 2.0**-16))
    assert ((result == down) | (result == up)).all()
    assert result.abs().max() <= target.max
    assert round_stochastically(torch.tensor([torch.nan]), torch.zeros(1), format).isnan().all()


@pytest.mark.parametrize("format", NATIVE_FORMATS)
@pytest.mark.parametrize("value", [1.01, -1.3, 17.99, 2.0**-17, -3e-3])
def test_the_expectation_is_the_number(format, value):
    x = torch.full((SAMPLES,), value)
    result = round_stochastically(x, draws(SAMPLES), format)
    spread = result.std().item() / SAMPLES**0.5
    assert abs(result.mean().item() - value) <= 5 * spread + 1e-9


# ---------------------------------------------------------------- a Triton that may miscompile transposing casts


CUDA = torch.device("cuda")


def test_right_casts_differ_nowhere():
    assert triton_check.wrong_casts(torch.device("cpu")) == []


@pytest.mark.parametrize("name", ["transpose", "quantize_both"])
def test_one_wrong_byte_is_refused_with_a_remedy(monkeypatch, name):
    right = getattr(triton_check, name)

    def wrong(*args):
        result = right(*args)
        q = result[1] if isinstance(result, tuple) else result
        codes = q.data.contiguous().view(torch.uint8).clone()
        codes[1, 1] ^= 1
        q = replace(q, data=codes.view(q.data.dtype))
        return (result[0], q) if isinstance(result, tuple) else q

    monkeypatch.setattr(triton_check, name, wrong)
    found = triton_check.wrong_casts(torch.device("cpu"))
    assert len(found) == (2 if name == "transpose" else 6)
    monkeypatch.setattr(triton_check, "wrong_casts", lambda device: found)
    monkeypatch.setattr(triton_check, "_version", lambda: Version("3.8.0"))
    with pytest.raises(UserError, match=r"(?s)Triton 3\.8\.0 miscompiles .*constraints-gpu") as raised:
        triton_check.check_triton(CUDA)
    assert "triton#11111" in str(raised.value)
    monkeypatch.setattr(triton_check, "_version", lambda: Version("3.7.1"))
    triton_check.check_triton(CUDA)
    triton_check.check_triton(torch.device("cpu"))
