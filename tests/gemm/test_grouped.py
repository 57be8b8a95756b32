"""Products of groups of rows: each group's own, beside the product in FP64 of the dequantized operands.

The kernels run compiled on a GPU, elsewhere in Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise
from ds_fp8.casts.quantization import block_scales
from ds_fp8.config.formats import CastSpec
from ds_fp8.gemm import grouped
from tests.gemm.groups import AWKWARD, random_rows, row_groups, spans
from tests.gemm.tolerance import OF_SCALES, ROUNDING, assert_is_product

kernels = pytest.importorskip("ds_fp8.gemm.grouped_triton", reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Error of Hopper's tensor cores, of a sum of magnitudes: they align the terms of a sum of FP8 products to the largest
# and drop what lies more than 13 bits below it
TENSOR_CORES = 2.0**-10
counts_of_groups = pytest.mark.parametrize("counts", [*AWKWARD, pytest.param((512,) * 16, marks=pytest.mark.gpu)])
routes = pytest.mark.parametrize("kernel", [False, True])
LARGE = [pytest.param(1536, 2048, *more, marks=pytest.mark.gpu) for more in (("pow2", "1x128"), ("fp32", "128x128"))]


def on(device, groups):
    return type(groups)(*(tensor.to(device) for tensor in groups))


def operands(counts, columns, contraction, scale="pow2", device=DEVICE):
    torch.manual_seed(0)
    groups, b = row_groups(counts, unused=3 if ON_GPU else 1), torch.randn(len(counts) * columns, contraction)
    a = quantize(random_rows(groups, contraction).to(device), scale=scale)
    return a, quantize(b.to(device), granularity="128x128", scale=scale), on(device, groups)


def dtypes(kernel):
    """The interpreter does not round to BF16, it cuts."""
    return (torch.float32, torch.bfloat16)[: 1 if kernel and not ON_GPU else 2]


def assert_product(found, a, b, kernel):
    roundings = OF_SCALES
    if ON_GPU and kernel:
        roundings += int(TENSOR_CORES / ROUNDING[torch.float32]) - a.shape[1]
    assert_is_product(found, a, b, roundings)


def assert_products_of_groups(y, a, b, groups, kernel=True):
    y, a, b = y.cpu(), a.dequantize().cpu(), b.dequantize().cpu().unflatten(0, (len(groups.counts), -1))
    rest = torch.ones(len(a), dtype=torch.bool)
    for span, matrix in zip(spans(groups), b, strict=True):
        assert_product(y[span], a[span], matrix, kernel)
        rest[span] = False
    assert not y[rest].any()


@routes
@pytest.mark.parametrize(
    ("columns", "contraction", "scale", "_"),
    [(128, 384, "fp32", None), (512, 128, "pow2", None), *LARGE],
)
@counts_of_groups
def test_each_group_has_its_matrix(counts, columns, contraction, scale, _, kernel):
    a, b, groups = operands(counts, columns, contraction, scale, DEVICE if kernel else "cpu")
    for dtype in dtypes(kernel):
        if kernel:
            y = kernels.multiply_tiles(a, b, groups, dtype)
        else:
            y = grouped.grouped_matmul(a, b, groups, out_dtype=dtype)
        assert y.dtype is dtype
        assert_products_of_groups(y, a, b, groups, kernel)
    assert kernel or grouped.grouped_matmul(a, b, groups).dtype is torch.bfloat16


@routes
@pytest.mark.parametrize(
    ("features", "inputs", "scale", "granularity"),
    [(128, 384, "pow2", "1x128"), (256, 256, "fp32", "128x128"), *LARGE],
)
@counts_of_groups
def test_each_group_has_the_gradient_over_its_rows(counts, features, inputs, scale, granularity, kernel):
    torch.manual_seed(0)
    device, groups = DEVICE if kernel else "cpu", row_groups(counts)
    dy = quantize_columnwise(random_rows(groups, features, 1e-3).to(device), scale=scale)
    x = quantize_columnwise(random_rows(groups, inputs).to(device), granularity=granularity, scale=scale)
    for dtype in dtypes(kernel):
        if kernel:
            dw = kernels.multiply_along_rows(dy, x, on(device, groups), dtype)
        else:
            dw = grouped.grouped_wgrad(dy, x, groups, out_dtype=dtype)
        assert (dw.shape, dw.dtype) == ((len(counts), features, inputs), dtype)
        for span, found in zip(spans(groups), dw.cpu(), strict=True):
            assert_product(found, dy.dequantize().cpu()[:, span], x.dequantize().cpu()[:, span], kernel)
        assert not dw[groups.counts == 0].any()


def test_kernel_covers_all_tiles_whatever_the_panel(monkeypatch):
    a, b, groups = operands((128,) * 5, 384, 128)
    for panel in (1, 2, 4, 8):
        monkeypatch.setattr(kernels, "PANEL", panel)
        assert_products_of_groups(kernels.multiply_tiles(a, b, groups, torch.float32), a, b, groups)


def test_kernels_read_scales_in_any_layout():
    a, b, groups = operands((5, 128), 256, 384)
    expected = kernels.multiply_tiles(a, b, groups, torch.float32)
    by_group = a.scale.t().contiguous().t()
    padded = block_scales(*b.scale.shape, device=DEVICE).copy_(b.scale)
    assert ON_GPU or padded.stride() != b.scale.stride()
    for a_scale, b_scale in ((by_group, b.scale), (a.scale, padded), (a.scale, b.scale.t().contiguous().t())):
        y = kernels.multiply_tiles(replace(a, scale=a_scale), replace(b, scale=b_scale), groups, torch.float32)
        assert torch.equal(y, expected)


def test_casts_that_no_kernel_multiplies_are_named():
    e4m3, blocks = CastSpec("e4m3", "1x128"), CastSpec("e4m3", "128x128")
    assert grouped.unsupported(e4m3, blocks) is None
    assert grouped.unsupported(e4m3, e4m3) is None
    assert "e5m2" in grouped.unsupported(CastSpec("e5m2", "1x128"), blocks)
    assert "row by 128x128" in grouped.unsupported(CastSpec("e4m3", "row"), blocks)
    assert "e2m1" in grouped.unsupported(e4m3, CastSpec("e2m1", "128x128"))
