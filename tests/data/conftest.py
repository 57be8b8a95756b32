"""The quickstart's tokenizer, and a cache of the test's own."""

import pytest

from ds_fp8.data import DataConfig, build_tokenizer
from tests.corpus import CHATS


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_FP8_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(DataConfig(**CHATS))
