import pytest

from tests.gemm.mxfp8_library import install


@pytest.fixture
def library(monkeypatch):
    """Transformer Engine's MXFP8 products in torch; the layouts that were asked for."""
    return install(monkeypatch)
