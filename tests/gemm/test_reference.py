"""The scaled product against FP64, for every pair of casts and awkward sizes."""

import itertools

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import NATIVE_GRANULARITIES
from ds_fp8.gemm import BACKENDS, scaled_matmul, select_backend, unavailable
from tests.gemm.tolerance import assert_is_product

SHAPES = [(1, 1, 1), (1, 130, 7), (7, 1, 130), (130, 7, 1), (129, 128, 127), (7, 300, 200), (200, 257, 3)]  # M, K, N


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose magnitude differs from row to row and from column to column, so that scales do too."""
    generator = torch.Generator().manual_seed(1000 * rows + columns + seed)
    spread = torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator))
    spread = spread * torch.exp2(torch.randint(-3, 4, (1, columns), generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


@pytest.mark.parametrize(("scale", "out_dtype"), [("pow2", torch.float32), ("fp32", torch.bfloat16)])
@pytest.mark.parametrize(("a_granularity", "b_granularity"), list(itertools.product(NATIVE_GRANULARITIES, repeat=2)))
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_product_of_dequantised_operands(m, k, n, a_granularity, b_granularity, scale, out_dtype):
    a = quantize(random(m, k), "e4m3", a_granularity, scale)
    b = quantize(random(n, k, seed=1), "e5m2", b_granularity, scale)
    product = scaled_matmul(a, b, out_dtype=out_dtype)
    assert product.dtype is out_dtype
    assert_is_product(product, a.dequantize(), b.dequantize())


def test_a_transposed_operand():
    a, b = quantize(random(9, 200), "e4m3"), quantize(random(200, 130), "e4m3", "128x128")
    assert_is_product(scaled_matmul(a, b.t()), a.dequantize(), b.dequantize().t())


def test_a_contraction_of_length_zero_is_zero():
    product = scaled_matmul(quantize(torch.empty(3, 0)), quantize(torch.empty(4, 0)))
    assert torch.equal(product, torch.zeros(3, 4, dtype=torch.bfloat16))


def test_nan_reaches_the_rows_that_read_it():
    x = random(3, 200)
    x[1, 150] = torch.inf
    product = scaled_matmul(quantize(x), quantize(random(4, 200)))
    assert product.isnan().all(1).tolist() == [False, True, False]
    assert product[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_selected_by_its_name_or_refused_with_the_reason(backend):
    reason = unavailable(backend)
    if reason is None:
        assert select_backend(backend) == backend
        assert select_backend("auto") in BACKENDS
        return
    with pytest.raises(UserError) as error:
        select_backend(backend)
    assert reason in error.value.problem
    assert error.value.key == "fp8.linear.backend"
    assert "reference" in error.value.remedy


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        (("e5m2", "tensor"), ("e5m2", "tensor"), "two E5M2"),
        (("e5m2", "1x128"), ("e4m3", "128x128"), "block-scaled"),
        (("e4m3", "1x128"), ("e5m2", "tensor"), "block-scaled"),
    ],
)
def test_what_hopper_does_not_multiply_is_refused_with_the_reason(a, b, word):
    assert word in BACKENDS["cublas"].unsupported(*a, *b)
    assert BACKENDS["cublas"].unsupported("e4m3", a[1], "e4m3", b[1]) is None
    assert BACKENDS["reference"].unsupported(*a, *b) is None
