"""Digests of other packages' functions, by which those that this package depends on are compared."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import textwrap
import tokenize
from collections.abc import Iterator

_LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER, tokenize.ENCODING}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BETWEEN = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_PIECES = {"FSTRING_START": 1, "FSTRING_END": -1, "TSTRING_START": 1, "TSTRING_END": -1}
"""Ends of the strings that newer Pythons give in pieces."""


def digest(path: str) -> str | None:
    """Return a digest of a function's source that comments, docstrings and line breaks do not change.

    It is the same in all versions of Python. None where there is no such function or no source.
    """
    module, _, names = path.partition(":")
    source, found = _parsed(module)
    for name in names.split("."):
        # Decorators of other packages hide what they wrap: the definition is looked up in the source.
        found = next((node for node in _definitions(found) if node.name == name), ast.Pass())
    if not isinstance(found, _DEFINITIONS):
        return None
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    lines = "\n".join(source.split("\n")[first - 1 : found.end_lineno]) + "\n"
    return hashlib.sha256(" ".join(_words(textwrap.dedent(lines))).encode()).hexdigest()[:12]


def _definitions(parent: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _DEFINITIONS):
            yield node
        elif isinstance(node, (ast.stmt, ast.excepthandler)):
            yield from _definitions(node)


@functools.lru_cache(maxsize=1)  # functions of one module are asked for one after the other
def _parsed(module: str) -> tuple[str, ast.AST]:
    try:
        spec = importlib.util.find_spec(module)
        with tokenize.open(spec.origin) as file:
            source = file.read()
    except (ImportError, AttributeError, TypeError, OSError, SyntaxError, UnicodeDecodeError):
        source = ""  # no such module, or none of Python
    return source, ast.parse(source)


def _words(source: str) -> Iterator[str]:
    """Yield the tokens of a source as text, and the ends of lines and blocks as the names of their tokens."""
    text: list[str] = []
    for kind, string in _tokens(source):
        if kind not in _BETWEEN:
            text.append(string)
            continue
        if kind == tokenize.NEWLINE and len(text) == 1 and text[0].lstrip("rRbBuU")[:1] in ("'", '"'):
            text = []  # a docstring
            continue
        yield from text
        yield tokenize.tok_name[kind]
        text = []


def _tokens(source: str) -> Iterator[tuple[int, str]]:
    """Yield (kind, text) of every token but comments; a string with expressions in it is one, as before Python 3.12."""
    lines = source.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        change = _PIECES.get(tokenize.tok_name[token.type], 0)
        if change == 1 and depth == 0:
            start = token.start
        depth += change
        if change == -1 and depth == 0:
            yield tokenize.STRING, _between(lines, start, token.end)
        elif depth == 0 and token.type not in _LEFT_OUT:
            yield token.type, token.string


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    (first, begin), (last, stop) = start, end
    if first == last:
        return lines[first - 1][begin:stop]
    return "".join([lines[first - 1][begin:], *lines[first : last - 1], lines[last - 1][:stop]])
