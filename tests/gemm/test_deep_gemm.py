"""DeepGEMM against the reference, on every layout of scales that the casts produce."""

import os
import subprocess
import sys
import time

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise, transpose
from ds_fp8.gemm import scaled_matmul, unavailable
from ds_fp8.gemm.deep_gemm_kernels import Layer, compile_for, expect
from tests.gemm.deep_gemm_on_cpu import forget

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


def test_kernels_are_compiled_before_their_products(monkeypatch, tmp_path):
    # The library reads the variable at its first product in a process: the tests above may have had theirs.
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    forget()
    layer = Layer(1152, 640, wgrad=True)
    expect([layer])
    device = torch.device("cuda", torch.cuda.current_device())
    compile_for(4096, device)
    assert len(list((tmp_path / "cache").iterdir())) == len(layer.products(4096))
    begin = time.perf_counter()
    forget()
    expect([layer])
    compile_for(4096, device)
    assert time.perf_counter() - begin < 1  # no process is started


def test_a_compiled_kernel_is_loaded_and_not_compiled_again(tmp_path):
    """In a process of its own, which finds what another has compiled."""
    program = """
import sys, time, torch
from ds_fp8.gemm import deep_gemm
from ds_fp8.gemm.deep_gemm_kernels import Layer, Product, compile_for, expect
expect([Layer(1152, 640)])
device = torch.device("cuda", 0)
compile_for(4096, device)
operands = deep_gemm.zeros(Product(4096, 1152, 640), device)
begin = time.perf_counter()
deep_gemm.scaled_matmul(*operands, torch.bfloat16)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 2
