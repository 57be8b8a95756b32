"""The tiny stage of tests/train."""

from tests.train.conftest import tiny, write  # noqa: F401
