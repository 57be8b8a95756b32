"""Errors a user can act on.

A mistake in a configuration, a path or a data file is reported as one screen that names the file, the key and the
remedy, never as a traceback. `main_entry` is what a script wraps around its main function: rank 0 prints, every rank
leaves with exit code 2.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

EXIT_USER_ERROR = 2


def clipped(text: str, length: int = 200) -> str:
    """Return `text`, or where it is long its beginning."""
    return text if len(text) <= length else f"{text[:length]}..."


class UserError(Exception):
    """A mistake that the user can mend.

    `problem` says what is wrong, `remedy` what to change; `file` and `key` say where (a dotted key such as
    `fp8.param_gather.format`), where that is known.
    """

    def __init__(self, problem: str, *, remedy: str = "", key: str = "", file: str | os.PathLike | None = None):
        self.problem, self.remedy, self.key, self.file = problem, remedy, key, file
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [f"error: {clipped(self.problem, 1000)}"]
        if self.file:
            lines.append(f"  file:   {clipped(os.fspath(self.file), 1000)}")
        if self.key:
            lines.append(f"  key:    {clipped(self.key)}")
        if self.remedy:
            lines.append(f"  remedy: {clipped(self.remedy, 1000)}")
        # What users write may hold what no terminal can show.
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")

    def located(self, file: str | os.PathLike | None) -> UserError:
        """Return the same error with its file filled in, for code that knows the file only further out."""
        self.file = self.file or file
        return self


def refusal_in(file: str | os.PathLike | None) -> Callable[[str, str, str], NoReturn]:
    """Return a function of key, problem and remedy that raises the UserError about this configuration file."""

    def refuse(key: str, problem: str, remedy: str) -> NoReturn:
        raise UserError(problem, key=key, file=file, remedy=remedy)

    return refuse


def main_entry(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with its result; a UserError becomes one printed screen and exit code 2."""
    try:
        sys.exit(main() or 0)
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"\n{error}\n", file=sys.stderr, flush=True)
        else:
            # The launcher ends the whole job as soon as one rank leaves: let rank 0 say why first.
            time.sleep(10)
        sys.stdout.flush()
        # Not sys.exit: other ranks may be waiting in a collective, and torch's clean-up would wait for them.
        os._exit(EXIT_USER_ERROR)
