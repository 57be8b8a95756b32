"""Docstrings name a class or a module, and say what a function does; none begins with a clause ("What it is")."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLAUSES = ("What ", "How ", "Where ", "When ", "Whether ", "Which ", "Who ", "Why ")
# Of the words that ruff's D401 lets pass: what a noun phrase begins with, and a mean of some kind.
NO_VERBS = re.compile(r"(The|A|An|One|Two|Both|All|Every|Each|Of|In|By|Median|Mean|Other) |(?![A-Z][a-z]+\b)")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTION


def docstrings(text: str, kinds: type) -> list[str]:
    """Return the docstrings in `text` of these kinds of nodes."""
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return [docstring for docstring in found if docstring]


def clauses(text: str) -> list[str]:
    """Return the docstrings in `text` that begin with a clause; those of attributes may."""
    return [docstring for docstring in docstrings(text, DOCUMENTED) if docstring.startswith(CLAUSES)]


def things(text: str) -> list[str]:
    """Return the docstrings of functions in `text` that name a thing in the place of what is done."""
    found = docstrings(text, FUNCTION)
    return [docstring for docstring in found if docstring.startswith(CLAUSES) or NO_VERBS.match(docstring)]


def test_a_clause_is_found():
    assert clauses('"""What it is."""\nclass A:\n    """How it is."""\n    x: int = 1\n    """Whether."""\n') == [
        "What it is.",
        "How it is.",
    ]


@pytest.mark.parametrize(
    ("docstring", "is_thing"),
    [
        ("The sum.", True),
        ("A sum.", True),
        ("(sum, mean).", True),
        ("FP32 sums.", True),
        ("`x` with a change.", True),
        ("Return the sum.", False),
        ("Allow a sum.", False),
    ],
)
def test_a_thing_is_found(docstring, is_thing):
    assert things(f'class A:\n    """The sums."""\n    def f():\n        """{docstring}"""\n') == [docstring] * is_thing


@pytest.mark.parametrize(("folder", "wrong"), [("ds_fp8", clauses), ("ds_fp8", things), ("scripts", things)])
def test_no_docstring_begins_wrongly(folder: str, wrong: Callable[[str], list[str]]):
    found = {str(file.relative_to(ROOT)): wrong(file.read_text()) for file in (ROOT / folder).rglob("*.py")}
    assert {file: few for file, few in found.items() if few} == {}
