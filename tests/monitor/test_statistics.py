"""The kernel that counts what casts lose, against the count in torch; without a GPU in Triton's interpreter."""

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize, quantize_with_scale
from ds_fp8.casts.quantization import block_scales
from ds_fp8.monitor import statistics
from ds_fp8.monitor.statistics import PEAKS, SUMS, add_cast_statistics

kernels = pytest.importorskip("ds_fp8.monitor.statistics_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SQUARES = {"rtol": 1e-5, "atol": 0.0}  # Of sums of squares: the kernel squares in FP32, the reference in FP64
# Noise that is no more than this share of the signal is the rounding of code * scale, which a GPU leaves out
EXACT = 1e-12
SHAPES = [(1, 1), (3, 130), (257, 129), (128, 256), (70, 1000)]
GRANULARITIES = ["tensor", "row", "1x128", "128x128"]


@pytest.fixture(autouse=True)
def every_element(monkeypatch):
    """The reference counts all elements, too."""
    monkeypatch.setattr(statistics, "SAMPLE", 2**30)


def empty() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(len(SUMS), dtype=torch.float64), torch.full((len(PEAKS),), -torch.inf, dtype=torch.float64)


def expected(x: torch.Tensor, quantized: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums, peaks = empty()
    add_cast_statistics(x, quantized, sums, peaks)
    return sums, peaks


def as_stored(quantized: QuantizedTensor) -> torch.Tensor:
    """The scales in the layout that casts on a GPU leave them in: by group, or with padded rows."""
    scale = quantized.scale
    if quantized.granularity == "1x128":
        return scale.t().contiguous().t()
    if quantized.granularity == "128x128":
        return block_scales(*scale.shape).copy_(scale)
    return scale


def counted(x: torch.Tensor, quantized: QuantizedTensor, times: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, into every third column of a buffer, as the monitor keeps them."""
    sums, peaks = (part[:, None].repeat(1, 3).to(DEVICE) for part in empty())
    q = QuantizedTensor(quantized.data.to(DEVICE), as_stored(quantized).to(DEVICE), quantized.granularity)
    limit = statistics._limit(quantized)
    for _ in range(times):
        kernels.count(x.to(DEVICE), q, limit, sums[:, 1], peaks[:, 1])
    assert not sums[:, [0, 2]].any()
    return sums[:, 1].cpu(), peaks[:, 1].cpu()


def assert_same(x: torch.Tensor, quantized: QuantizedTensor) -> None:
    (sums, peaks), (sums_expected, peaks_expected) = counted(x, quantized), expected(x, quantized)
    assert torch.equal(sums[1:3], sums_expected[1:3]), "saturated, flushed"
    torch.testing.assert_close(sums[3], sums_expected[3], **SQUARES)
    torch.testing.assert_close(sums[4], sums_expected[4], rtol=SQUARES["rtol"], atol=EXACT * sums_expected[3].item())
    assert torch.equal(peaks, peaks_expected)


def numbers(shape: tuple[int, int], spread: float = 4.0) -> torch.Tensor:
    """Of many magnitudes, so that some are flushed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_counts_what_torch_counts(shape, granularity):
    """Every shape with every granularity, and of the formats and scales each with each of these."""
    turn = SHAPES.index(shape) + GRANULARITIES.index(granularity)
    format, scale = ("e4m3", "e5m2")[turn % 2], ("pow2", "fp32")[turn // 2 % 2]
    x = numbers(shape)
    assert_same(x, quantize(x, format, granularity, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_a_strided_matrix(dtype):
    wide = numbers((200, 600), spread=1.0).to(dtype)
    for x in (wide[:, 40:300], wide.t()[:300, :130]):
        assert_same(x, quantize(x.contiguous()))


@pytest.mark.parametrize("magnitude", [2.0**-120, 2.0**-60, 2.0**60, 2.0**120])
def test_squares_beyond_the_range_of_fp32(magnitude):
    x = numbers((5, 300), spread=1.0) * magnitude
    quantized = quantize(x)
    assert_same(x, quantized)
    sums, _ = counted(x, quantized)
    assert 0 < sums[4] < sums[3] < torch.inf


def test_what_is_beyond_the_scale_is_saturated():
    x, scale = torch.tensor([[447.0, 448.0, 500.0, -1e9, torch.inf, 0.0]]), torch.tensor(1.0)
    quantized = QuantizedTensor(quantize_with_scale(x, scale, "e4m3", "tensor"), scale, "tensor")
    (sums, peaks), (sums_expected, peaks_expected) = counted(x, quantized), expected(x, quantized)
    assert sums[1] == sums_expected[1] == 3
    assert peaks[0] == peaks_expected[0] == torch.inf


def test_zeros_and_groups_that_are_not_finite_tell_nothing_of_the_scales():
    x = torch.zeros(40, 400)
    x[1, 130] = 2.0**-20
    x[2, 5], x[3, 300], x[3, 301] = torch.nan, torch.inf, 1e-30
    quantized = quantize(x)
    (sums, peaks), (_, peaks_expected) = counted(x, quantized), expected(x, quantized)
    assert sums[2] == 0
    assert sums[4].isnan()
    assert torch.equal(peaks, peaks_expected)
    assert peaks.tolist() == [torch.inf, 2.0**-28, -(2.0**-28)]


def test_casts_add_up():
    x = numbers((33, 257))
    quantized = quantize(x)
    once, peaks = counted(x, quantized)
    twice, same_peaks = counted(x, quantized, times=2)
    torch.testing.assert_close(twice, 2 * once, **SQUARES)
    assert torch.equal(peaks, same_peaks)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_on_a_gpu_rows_may_come_in_parts(granularity, monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 30_000)
    x = numbers((1000, 200)).cuda()
    quantized = quantize(x, granularity=granularity)
    results = []
    for given in (x, lambda rows: x[rows]):
        sums, peaks = (part.cuda() for part in empty())
        add_cast_statistics(given, quantized, sums, peaks, elements=7)
        results.append((sums, peaks))
    (sums, peaks), (in_parts, same_peaks) = results
    torch.testing.assert_close(in_parts, sums, **SQUARES)
    assert torch.equal(peaks, same_peaks)
    assert sums[0] == 7
