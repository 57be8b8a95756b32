"""DeepGEMM: its kernels are compiled once a host, with lines that say so; on a GPU beside the reference."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise, transpose
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.gemm import deep_gemm, reference, scaled_matmul, unavailable, why_not_multiplied
from tests.gemm.deep_gemm_on_cpu import forget, operands


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "ds_fp8")
    return lambda: [record.getMessage() for record in caplog.records]


def multiply(*sizes):
    return deep_gemm.scaled_matmul(*operands(*sizes), torch.bfloat16)


def test_products_are_those_of_the_reference_and_a_kernel_is_compiled_once(deep_gemm_library, lines, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "1.1")
    torch.manual_seed(0)
    a, b = operands(48, 384, 256)
    for _ in range(2):
        product = deep_gemm.scaled_matmul(a, b, torch.bfloat16)
        assert torch.equal(product, reference.scaled_matmul(a, b, torch.bfloat16))
        assert [line for line in lines() if "compiled in 1 s" in line] == lines()
        assert len(lines()) == len(deep_gemm_library.compiled) == 1
        forget()  # as another process, which loads it from the disk


def test_a_kernel_that_the_compiler_refuses_is_an_error_in_words(deep_gemm_library, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_FAILS", "384")
    with pytest.raises(UserError) as error:
        multiply(512, 384, 256)
    assert "DeepGEMM cannot multiply 512 x 384 x 256: Assertion error" in error.value.problem
    assert (error.value.key, error.value.remedy) == ("fp8.linear.backend", '"backend": "cublas"')
    monkeypatch.setenv("FAKE_DEEP_GEMM_FAILS", "128")
    assert "NVCC compilation failed" in why_not_multiplied(
        deep_gemm.scaled_matmul, CastSpec(), CastSpec(granularity="128x128")
    )


PROGRAM = """
import torch
from ds_fp8.gemm import deep_gemm
from tests.gemm.deep_gemm_on_cpu import operands
deep_gemm.scaled_matmul(*operands(512, 256, 128), torch.bfloat16)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_others_wait_for_the_process_that_compiles_until_it_ends(deep_gemm_library, monkeypatch, killed):
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "300" if killed else "2.5")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], start_new_session=True)
    deadline = time.monotonic() + 100
    while not deep_gemm_library.compiled:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "0")
    waiting = threading.Thread(target=multiply, args=(512, 256, 128))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert len(deep_gemm_library.compiled) == 1
    if killed:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(100) == (-signal.SIGKILL if killed else 0)
    waiting.join(100)
    assert not waiting.is_alive()
    assert len(deep_gemm_library.compiled) == 1 + killed


# Few, because each compiles kernels of its own: scales of one row, of one column, and of rows that are padded.
@pytest.mark.gpu
@pytest.mark.skipif(unavailable("deep_gemm") is not None, reason="DeepGEMM cannot run here")
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
