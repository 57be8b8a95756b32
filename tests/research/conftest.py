import pytest

import ds_fp8.research  # noqa: F401  registers the names that these tests use
from ds_fp8 import gemm
from tests.research.mxfp8_library import install


@pytest.fixture
def library(monkeypatch):
    """Transformer Engine's MXFP8 products in torch; the layouts that were asked for."""
    gemm._tried.cache_clear()
    yield install(monkeypatch)
    gemm._tried.cache_clear()  # outcomes of products without the real library
