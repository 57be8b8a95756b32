"""The Triton casts against the reference: bit-equal on a GPU; elsewhere in Triton's interpreter.

The interpreter rounds to FP8 in its own way (no carry into the exponent, no subnormals), so there only the scales are
compared bit for bit, and the codes for their place.
"""

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize_both

kernels = pytest.importorskip("ds_fp8.casts.quantization_triton", reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SAME_CODES = 1.0 if ON_GPU else 0.9  # Share of equal codes among random numbers of one magnitude

SHAPES = [(1, 1), (7, 130), (130, 257), (128, 256), (256, 128)]
PAIRS = [
    ("1x128", "1x128"), ("128x128", "128x128"), ("1x128", "128x128"), ("row", "row"), ("tensor", "tensor"),
    ("row", "1x128"), (None, "1x128"), ("1x128", None), (None, "row"),
]  # fmt: skip


def assert_same(result: QuantizedTensor | None, expected: QuantizedTensor | None, share: float = SAME_CODES) -> None:
    if expected is None:
        assert result is None
        return
    assert torch.equal(result.scale.cpu().nan_to_num(7), expected.scale.nan_to_num(7))
    codes, wanted = (q.data.cpu().contiguous().view(torch.uint8) for q in (result, expected))
    finite = ~expected.dequantize().isnan()
    assert torch.equal(result.dequantize().cpu().isnan(), ~finite)
    if finite.sum() > 100 or ON_GPU:
        assert (codes == wanted)[finite].float().mean() >= share or not finite.any()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_directions_in_one_pass(shape, pair):
    """Every shape with every pair of granularities, and of the other words each with each of these."""
    (rowwise, columnwise), turn = pair, SHAPES.index(shape) + PAIRS.index(pair)
    format, scale, factors = ("e4m3", "e5m2")[turn % 2], ("pow2", "fp32")[turn // 2 % 2], turn % 3 == 0
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[0, 0] = 0
    row, column = (torch.rand(shape[0]) + 0.5, torch.rand(shape[1]) + 0.5) if factors else (None, None)
    expected = quantize_both(x, format, rowwise, columnwise, scale, row, column)
    on_device = [None if t is None else t.to(DEVICE) for t in (x, row, column)]
    results = kernels.quantize_tiles(on_device[0], format, scale, rowwise, columnwise, *on_device[1:])
    for result, wanted in zip(results, expected, strict=True):
        assert_same(result, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_a_strided_matrix(dtype):
    torch.manual_seed(0)
    wide = torch.randn(130, 600).to(dtype)
    for x in (wide[:, 40:300], wide.t()[:300, :130]):
        expected = quantize_both(x, rowwise="1x128", columnwise="1x128")
        for result, wanted in zip(
            kernels.quantize_tiles(x.to(DEVICE), "e4m3", "pow2", "1x128", "1x128"), expected, strict=True
        ):
            assert_same(result, wanted)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_scales_of_extreme_groups(format, scale):
    """Thresholds of the power of two, subnormal and huge amax, zeros, overflow: the scales agree bit for bit."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[format]
    above = torch.nextafter(torch.tensor(1.75), torch.tensor(2.0)).item()
    amax = torch.tensor([0, 1e-45, 2.0**-126, 2.0**-100, 1.75, above, largest, 1, 1.999, 3e38, torch.inf, torch.nan])
    x = torch.zeros(len(amax), 128)
    x[:, 5] = -amax
    expected, _ = quantize_both(x, format, "1x128", None, scale)
    result, _ = kernels.quantize_tiles(x.to(DEVICE), format, scale, "1x128", None)
    assert torch.equal(result.scale.cpu().nan_to_num(7), expected.scale.nan_to_num(7))
    result, _ = kernels.quantize_tiles(x.to(DEVICE), format, scale, "row", None)
    assert torch.equal(result.scale.cpu().nan_to_num(7), expected.scale.nan_to_num(7))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(130, 200), (128, 256)])
def test_overflow_spoils_its_own_group_alone(value, shape):
    x = torch.randn(shape)
    x[3, 130] = value
    row, column = kernels.quantize_tiles(x.to(DEVICE), "e4m3", "pow2", "1x128", "1x128")
    spoilt = torch.zeros(shape, dtype=torch.bool)
    spoilt[3, 128:256] = True
    assert torch.equal(row.dequantize().cpu().isnan(), spoilt)
    spoilt = torch.zeros(shape, dtype=torch.bool)
    spoilt[:128, 130] = True
    assert torch.equal(column.dequantize().cpu().isnan().t(), spoilt)


@pytest.mark.parametrize("shape", [(0, 128), (5, 0)])
def test_empty(shape):
    row, column = kernels.quantize_tiles(torch.empty(shape, device=DEVICE), "e4m3", "pow2", "1x128", "row")
    assert row.shape == shape
    assert column.shape == shape[::-1]


@pytest.mark.parametrize("shape", [*SHAPES, (3, 128, 256), (1, 7, 130), (2, 2, 130, 5)])
def test_transposed_bytes(shape):
    data = torch.randn(shape).to(torch.float8_e4m3fn)
    turned = kernels.transpose_bytes(data.to(DEVICE)).cpu()
    assert torch.equal(turned.view(torch.uint8), data.view(torch.uint8).transpose(-2, -1))


def test_transposed_bytes_of_rows_with_room_behind_them():
    data = torch.randn(131, 384).to(torch.float8_e4m3fn).to(DEVICE)[:, :200]
    assert torch.equal(kernels.transpose_bytes(data).view(torch.uint8), data.view(torch.uint8).t())
