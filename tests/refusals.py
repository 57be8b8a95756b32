"""What every refusal has, beside the words that a test asks for."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_fp8.config.errors import UserError


@contextmanager
def refused(match: str = "", key: str | None = None, *, text: str = "") -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError with a remedy: its message has `text` and something that `match` matches, it names `key`."""
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    assert re.search(match, str(error)), error
    assert text in str(error)
    assert key is None or error.key == key
    assert error.remedy
