"""The first line of a docstring names the thing or says what it does; it is no clause ("What a cast is made of")."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLAUSES = ("What ", "How ", "Where ", "When ", "Whether ", "Which ", "Who ", "Why ")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def clauses(text: str) -> list[str]:
    """Return the docstrings in `text` that begin with a clause; those of attributes may."""
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    return [docstring for docstring in docstrings if docstring and docstring.startswith(CLAUSES)]


def test_a_clause_is_found():
    assert clauses('"""What it is."""\nclass A:\n    """How it is."""\n    x: int = 1\n    """Whether."""\n') == [
        "What it is.",
        "How it is.",
    ]


def test_no_docstring_begins_with_a_clause():
    found = {file.relative_to(ROOT): clauses(file.read_text()) for file in (ROOT / "ds_fp8").rglob("*.py")}
    assert {str(file): few for file, few in found.items() if few} == {}
