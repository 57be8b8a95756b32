"""DeepGEMM against the reference, on every layout of scales that the casts produce."""

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise, transpose
from ds_fp8.gemm import scaled_matmul, unavailable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(unavailable("deep_gemm") is not None, reason="DeepGEMM cannot run here"),
]


# Few, because each compiles kernels of its own: scales of one row, of one column, and of rows that are padded.
@pytest.mark.parametrize(("rows", "columns", "contraction"), [(16, 128, 256), (400, 384, 128), (48, 384, 640)])
@pytest.mark.parametrize("source", ["cast", "columnwise", "transposed", "transposed view"])
def test_products_of_all_layouts(rows, columns, contraction, source):
    torch.manual_seed(0)
    x = torch.randn(rows, contraction, device="cuda").bfloat16()
    w = torch.randn(columns, contraction, device="cuda").bfloat16()
    a = quantize(x)
    if source == "cast":
        b = quantize(w, granularity="128x128")
    elif source == "columnwise":
        a, b = quantize_columnwise(x.t().contiguous()), quantize_columnwise(w.t().contiguous(), granularity="128x128")
    else:
        turned = quantize(w.t().contiguous(), granularity="128x128")
        b = transpose(turned) if source == "transposed" else turned.t()
    ours = scaled_matmul(a, b, backend="deep_gemm")
    assert torch.allclose(ours.float(), scaled_matmul(a, b).float(), rtol=1e-2, atol=1e-2 * contraction**0.5)
