"""The built-in tokenizer, trained once for all tests."""

import pytest

from ds_fp8.data import DataConfig, build_tokenizer


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="session")
def tokenizer(cache_dir):
    return build_tokenizer(DataConfig(), cache_dir)
