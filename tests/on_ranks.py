"""Tests that run on every rank of a pool: what they assert, each rank asserts of its own results."""

import functools
import inspect
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    try:
        getattr(import_module(module), name).body(**arguments)
    except AssertionError as error:  # pytest explains those of its own process alone
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "/tests/" in frame.f_code.co_filename]
        values = "\n".join(f"  {name} = {value!r:.300}" for name, value in frames[-1].f_locals.items())
        raise AssertionError(f"{error}\n{values}") from error


def on_ranks(world: int = 2, fixture: str = "ranks") -> Callable:
    """Run the decorated test on `world` ranks of the pools of a fixture; its parameters travel to them by pickle."""

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            pools = arguments.pop(fixture)
            pools(arguments.get("world", world), _run, body.__module__, body.__name__, arguments)

        names = [*inspect.signature(body).parameters, fixture]
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__, test.body = inspect.Signature(keywords), body
        return test

    return decorate
