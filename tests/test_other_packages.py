"""Digests of other packages' functions."""

import importlib
import itertools

import pytest

from ds_fp8.config.other_packages import digest

SOURCE = '''
import functools


class Outer:
    @functools.wraps(print)
    def method(self, x):
        """Say what it does."""
        # a comment
        if x:
            return f"{x!r} of {self.name + '#'}"  # another

        def inner(y):
            return (y,
                    x)

        return inner
'''
DIGESTS = {"Outer.method": "8fdd4f03ec56", "Outer.method.inner": "f68116af16d7", "Outer": "e5a29df94650"}
"""The same in every version of Python."""


NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module, whose name is returned."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"written_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return write


@pytest.mark.parametrize("names", DIGESTS)
def test_a_digest_is_the_same_in_every_python(module, names):
    assert digest(f"{module(SOURCE)}:{names}") == DIGESTS[names]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        # a comment\n", ""),
        ("  # another", ""),
        ('        """Say what it does."""\n', ""),
        ("        def inner", "\n\n        def inner"),
        ("return (y,\n                    x)", "return (y, x)"),
        ("import functools", "import functools\nimport math"),
    ],
)
def test_comments_docstrings_and_line_breaks_change_nothing(module, before, after):
    assert before in SOURCE
    assert digest(f"{module(SOURCE.replace(before, after))}:Outer.method") == DIGESTS["Outer.method"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if x:", "if not x:"),
        ("{x!r} of", "{x!s} of"),
        ("'#'", "'# '"),
        ("        return inner", "            return inner"),
        ("@functools.wraps(print)", "@functools.cache"),
        ("self, x)", "self, x=1)"),
    ],
)
def test_code_changes_the_digest(module, before, after):
    assert before in SOURCE
    assert digest(f"{module(SOURCE.replace(before, after))}:Outer.method") != DIGESTS["Outer.method"]


def test_what_is_not_there_has_no_digest(module):
    name = module(SOURCE)
    assert digest(f"{name}:Outer.other") is None
    assert digest(f"{name}:Outer.method.inner.other") is None
    assert digest("module_that_is_nowhere:f") is None
    assert digest("sys:exit") is None  # has no source
