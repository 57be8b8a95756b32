"""Products of groups of rows: each group's own, beside the product in FP64 of the decoded operands.

The kernels run in Triton's interpreter where there is no GPU (tests/gpu/test_experts.py has them compiled).
"""

from dataclasses import replace

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise
from ds_fp8.casts.quantization import block_scales
from ds_fp8.config.formats import CastSpec
from ds_fp8.gemm import grouped
from tests.gemm.groups import AWKWARD, random_rows, row_groups, spans
from tests.gemm.tolerance import OF_SCALES, assert_is_product

kernels = pytest.importorskip("ds_fp8.gemm.grouped_triton", reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(ON_GPU, reason="compiled kernels are tested in tests/gpu")


def operands(counts, columns, contraction, scale="pow2"):
    torch.manual_seed(0)
    groups = row_groups(counts)
    a = quantize(random_rows(groups, contraction), scale=scale)
    b = quantize(torch.randn(len(counts) * columns, contraction), granularity="128x128", scale=scale)
    return a, b, groups


def wgrad_operands(counts, features, inputs, granularity, scale="pow2"):
    torch.manual_seed(0)
    groups = row_groups(counts)
    dy = quantize_columnwise(random_rows(groups, features, 1e-3), scale=scale)
    return dy, quantize_columnwise(random_rows(groups, inputs), granularity=granularity, scale=scale), groups


def assert_products_of_groups(y, a, b, groups):
    a, b = a.dequantize(), b.dequantize().unflatten(0, (len(groups.counts), -1))
    rest = torch.ones(len(a), dtype=torch.bool)
    for span, matrix in zip(spans(groups), b, strict=True):
        assert_is_product(y[span], a[span], matrix, OF_SCALES)
        rest[span] = False
    assert not y[rest].any()


def assert_wgrads_of_groups(dw, dy, x, groups):
    dy, x = dy.dequantize(), x.dequantize()
    for span, found in zip(spans(groups), dw, strict=True):
        assert_is_product(found, dy[:, span], x[:, span], OF_SCALES)


@pytest.mark.parametrize(("scale", "dtype"), [("pow2", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("counts", AWKWARD)
def test_each_group_has_its_matrix(counts, scale, dtype):
    a, b, groups = operands(counts, 128, 384, scale)
    y = grouped.grouped_matmul(a, b, groups, out_dtype=dtype)
    assert y.dtype is dtype
    assert_products_of_groups(y, a, b, groups)


@pytest.mark.parametrize(("granularity", "dtype"), [("1x128", torch.bfloat16), ("128x128", torch.float32)])
@pytest.mark.parametrize("counts", AWKWARD)
def test_each_group_has_the_gradient_over_its_rows(counts, granularity, dtype):
    dy, x, groups = wgrad_operands(counts, 256, 128, granularity)
    dw = grouped.grouped_wgrad(dy, x, groups, out_dtype=dtype)
    assert dw.shape == (len(counts), 256, 128)
    assert dw.dtype is dtype
    assert_wgrads_of_groups(dw, dy, x, groups)
    assert not dw[groups.counts == 0].any()


@interpreted
@pytest.mark.parametrize(("columns", "contraction", "scale"), [(128, 384, "fp32"), (512, 128, "pow2")])
@pytest.mark.parametrize("counts", AWKWARD)
def test_kernel_of_products(counts, columns, contraction, scale):
    a, b, groups = operands(counts, columns, contraction, scale)
    y = kernels.multiply_tiles(a, b, groups, torch.float32)
    assert_products_of_groups(y, a, b, groups)


@interpreted
def test_kernel_covers_all_tiles_whatever_the_panel(monkeypatch):
    a, b, groups = operands((128,) * 5, 384, 128)
    for panel in (1, 2, 4, 8):
        monkeypatch.setattr(kernels, "PANEL", panel)
        assert_products_of_groups(kernels.multiply_tiles(a, b, groups, torch.float32), a, b, groups)


@interpreted
@pytest.mark.parametrize(
    ("features", "inputs", "granularity", "scale"), [(128, 384, "1x128", "pow2"), (256, 256, "128x128", "fp32")]
)
@pytest.mark.parametrize("counts", AWKWARD)
def test_kernel_of_wgrad(counts, features, inputs, granularity, scale):
    dy, x, groups = wgrad_operands(counts, features, inputs, granularity, scale)
    dw = kernels.multiply_along_rows(dy, x, groups, torch.float32)
    assert_wgrads_of_groups(dw, dy, x, groups)


@interpreted
def test_kernels_read_scales_in_any_layout():
    a, b, groups = operands((5, 128), 256, 384)
    expected = kernels.multiply_tiles(a, b, groups, torch.float32)
    by_group = a.scale.t().contiguous().t()
    padded = block_scales(*b.scale.shape).copy_(b.scale)
    assert padded.stride() != b.scale.stride()
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
