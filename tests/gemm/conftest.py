import pytest

from ds_fp8 import gemm
from tests.gemm.deep_gemm_on_cpu import Library, forget


@pytest.fixture
def deep_gemm_library(monkeypatch, tmp_path):
    """The package deep_gemm on a CPU, with nothing compiled."""
    found = Library(tmp_path, monkeypatch.setenv, monkeypatch.syspath_prepend)
    gemm._tried.cache_clear()
    yield found
    forget()
    gemm._tried.cache_clear()
