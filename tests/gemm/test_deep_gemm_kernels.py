"""Kernels of DeepGEMM are compiled before they are needed, once a host and with lines that say so."""

import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.gemm import deep_gemm, deep_gemm_kernels, reference, trial
from ds_fp8.gemm.deep_gemm_kernels import Layer, Product, compile_for, expect
from tests.gemm.deep_gemm_on_cpu import CPU, forget, multiply
from tests.gemm.groups import row_groups

LAYERS = [Layer(384, 256, wgrad=True), Layer(256, 128)]


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "ds_fp8")
    return lambda: [record.getMessage() for record in caplog.records]


def sizes(library):
    return sorted(tuple(int(n) for n in line[2:4]) for line in library.compiled)


def test_kernels_of_all_layers_are_compiled_by_other_processes(deep_gemm_library, lines):
    expect(LAYERS)
    compile_for(512, CPU)
    assert sizes(deep_gemm_library) == [(128, 256), (256, 128), (256, 384), (256, 512), (384, 256)]
    assert str(os.getpid()) not in {process for process, *_ in deep_gemm_library.compiled}
    first, last = lines()[0], lines()[-1]
    assert f"compiling the kernels of 5 products in {deep_gemm_library.cache}" in first
    assert re.search(r"5 products compiled in \d+ s", last)
    for rows, columns, contraction in [(512, 384, 256), (512, 256, 384), (384, 256, 512), (512, 128, 256)]:
        multiply(rows, columns, contraction)
    assert len(deep_gemm_library.compiled) == 5
    # Another run starts no process, and says nothing.
    said = len(lines())
    forget()
    expect(LAYERS)
    compile_for(512, CPU)
    multiply(512, 384, 256)
    assert len(deep_gemm_library.compiled) == 5
    assert len(lines()) == said
    # Until somebody removes kernels.
    next((deep_gemm_library.cache / "cache").iterdir()).rename(deep_gemm_library.cache / "elsewhere")
    forget()
    expect(LAYERS)
    compile_for(512, CPU)
    assert len(deep_gemm_library.compiled) == 6
    assert len(lines()) > said


def test_the_first_product_of_a_step_brings_those_of_all_layers(deep_gemm_library, lines):
    expect(LAYERS)
    multiply(512, 384, 256)
    assert len(deep_gemm_library.compiled) == 5
    assert str(os.getpid()) not in {process for process, *_ in deep_gemm_library.compiled}
    assert "5 products" in lines()[0]
    multiply(256, 512, 128)  # of no layer
    assert len(deep_gemm_library.compiled) == 6
    assert "kernels of 1 product" in "\n".join(lines())


def test_products_are_those_of_the_reference(deep_gemm_library):
    torch.manual_seed(0)
    a, b = quantize(torch.randn(48, 256).bfloat16()), quantize(torch.randn(384, 256).bfloat16(), granularity="128x128")
    assert torch.equal(deep_gemm.scaled_matmul(a, b, torch.bfloat16), reference.scaled_matmul(a, b, torch.bfloat16))


def test_a_slow_compiler_is_not_silent(deep_gemm_library, lines, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "2")
    monkeypatch.setattr(deep_gemm_kernels, "SECONDS_BETWEEN_LINES", 0.5)
    expect(LAYERS[1:])
    compile_for(512, CPU)
    progress = [line for line in lines() if re.search(r"[012] of 2 products after \d+ s", line)]
    assert len(progress) >= 3


def test_a_kernel_that_the_compiler_refuses_is_an_error_in_words(deep_gemm_library, lines, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_FAILS", "384")
    expect(LAYERS)
    with pytest.raises(UserError) as error:
        compile_for(512, CPU)
    assert "DeepGEMM cannot multiply 512 x 384 x 256" in error.value.problem
    assert "this is a test" in error.value.problem  # what the compiler says
    assert (error.value.key, error.value.remedy) == ("fp8.linear.backend", '"backend": "cublas"')
    with pytest.raises(UserError, match="512 x 384 x 256"):
        multiply(512, 384, 256)


def test_the_trial_of_a_backend_hands_on_what_the_compiler_says(deep_gemm_library, lines, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_FAILS", "128")
    reason = trial.why_not(deep_gemm.scaled_matmul, CastSpec(), CastSpec(granularity="128x128"))
    assert "NVCC compilation failed" in reason
    assert "error:" not in reason
    assert any("DeepGEMM cannot multiply 128 x 128 x 128" in line for line in lines())


def test_a_host_that_allows_no_second_process_compiles_in_the_first_and_says_so(deep_gemm_library, lines, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_DIES", str(os.getpid()))
    expect(LAYERS[1:])
    compile_for(512, CPU)
    assert any("exit code 9" in line for line in lines())
    multiply(512, 256, 128)
    multiply(512, 256, 128)
    assert [process for process, *_ in deep_gemm_library.compiled] == [str(os.getpid())]
    assert sum("this process compiles 512 x 256 x 128" in line for line in lines()) == 1


def test_products_of_groups_are_compiled_too(deep_gemm_library, lines):
    expect([Layer(256, 128, groups=2)])
    rows = row_groups([100, 130])
    a, b = deep_gemm.zeros(Product(len(rows.of_tile) * 128, 256, 128, 2), CPU)[:2]
    result = deep_gemm.grouped_matmul(a, b, rows.of_tile, 2)
    assert result.shape == (len(a.data), 256)
    assert str(os.getpid()) not in {process for process, *_ in deep_gemm_library.compiled}
    assert sorted(line[2:5] for line in deep_gemm_library.compiled) == [["128", "256", "2"], ["256", "128", "2"]]


PROGRAM = """
import torch
from ds_fp8.gemm.deep_gemm_kernels import Layer, compile_for, expect
expect([Layer(256, 128), Layer(384, 128)])
compile_for(512, torch.device("cpu"))
"""


def test_one_process_of_a_host_compiles_and_the_others_wait_with_a_line(deep_gemm_library, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "2")
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sizes(deep_gemm_library) == [(128, 256), (128, 384), (256, 128), (384, 128)]
    assert sum("compiling the kernels of 4 products" in output for output in outputs) == 1
    assert sum("another process of this host compiles" in output for output in outputs) == 1


def test_a_killed_process_leaves_no_lock(deep_gemm_library, lines, monkeypatch):
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "30")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not deep_gemm_library.compiled:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    monkeypatch.setenv("FAKE_DEEP_GEMM_SECONDS", "0")
    expect([Layer(256, 128)])
    compile_for(512, CPU)
    assert any("2 products compiled" in line for line in lines())
