"""The tiny stage of tests/train."""

from tests.train.conftest import _own_cache, cache_home, tiny, write  # noqa: F401
