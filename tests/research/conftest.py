from tests.zero.conftest import baseline

__all__ = ["baseline"]
