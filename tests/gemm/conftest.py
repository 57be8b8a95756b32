import pytest

from ds_fp8.gemm import trial
from tests.gemm.mxfp8_library import install


@pytest.fixture
def library(monkeypatch):
    """Transformer Engine's MXFP8 products in torch; the layouts that were asked for."""
    trial._why_not.cache_clear()
    yield install(monkeypatch)
    trial._why_not.cache_clear()  # outcomes of products without the real library
