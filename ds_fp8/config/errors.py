"""Errors a user can act on.

A mistake in a configuration, a path or a data file is reported as one screen that names the file, the key and the
remedy, never as a traceback. `main_entry` is what a script wraps around its main function: rank 0 prints, every rank
leaves with exit code 2.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

# Exit codes of a run: they say whether starting it again helps.
EXIT_DONE = 0
EXIT_FAILED = 1  # a rank raised an exception: the same command will probably fail again
EXIT_USER_ERROR = 2  # a mistake in a configuration, a path or a hostfile: the message says what to change
EXIT_LOST = 75
"""A rank, a host or a link was lost, or nothing moved for train.timeout: the same command resumes (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 143  # asked to stop (128 + SIGTERM): a checkpoint is saved, and the same command resumes
EXIT_KEYBOARD = 130  # 128 + SIGINT, as a shell reports it
_RANK_0_SAYS = 10  # seconds that other ranks wait for rank 0's message: the launcher ends the job when one rank exits


def clipped(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return clipped(next(iter(str(error).strip().splitlines()), type(error).__name__))


def first_paragraph(error: BaseException) -> str:
    """Return an error's first paragraph on one line, or its type: transformers' first lines say little."""
    return clipped(" ".join(str(error).split("\n\n")[0].split()), 300) or type(error).__name__


class UserError(Exception):
    """A mistake that the user can correct.

    `problem` says what is wrong, `remedy` what to change; `file` and `key` say where (a dotted key such as
    `fp8.param_gather.format`), where that is known.
    """

    def __init__(self, problem: str, *, remedy: str = "", key: str = "", file: str | os.PathLike | None = None):
        self.problem, self.remedy, self.key, self.file = problem, remedy, key, file
        self.others: tuple[UserError, ...] = ()  # found at the same time
        super().__init__(problem)

    @property
    def all(self) -> tuple[UserError, ...]:
        return (self, *self.others)

    def __str__(self) -> str:
        return "\n".join(error._screen() for error in self.all)

    def _screen(self) -> str:
        lines = [f"error: {clipped(self.problem, 1000)}"]
        if self.file:
            lines.append(f"  file:   {clipped(os.fspath(self.file), 1000)}")
        if self.key:
            lines.append(f"  key:    {clipped(self.key)}")
        if self.remedy:
            lines.append(f"  remedy: {clipped(self.remedy, 1000)}")
        # Users' text may not be printable.
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")

    def located(self, file: str | os.PathLike | None) -> UserError:
        """Return the error with `file` set, for callers that know the file."""
        self.file = self.file or file
        return self


def joined(errors: Sequence[UserError]) -> UserError:
    first, *others = errors
    first.others = tuple(others)
    return first


def results_of(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks and return their results; raise the errors of all that fail as one UserError."""
    results, mistakes = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            mistakes += error.all
    if mistakes:
        raise joined(mistakes)
    return results


_OF_ANYTHING = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or choose another place"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
"""Remedies for errors of the file system that do not depend on the path."""
_OF_A_PATH = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EIO, errno.ESTALE),
)


def as_user_error(error: Exception) -> UserError | None:
    """Return a UserError, or an error of the file system as one; None for others."""
    if isinstance(error, UserError):
        return error
    remedy = _OF_ANYTHING.get(error.errno) if isinstance(error, OSError) else None
    # Without a file name it may be of a socket or pipe.
    if not remedy and not (isinstance(error, OSError) and error.errno in _OF_A_PATH and error.filename is not None):
        return None
    named = isinstance(error.filename, (str, bytes, os.PathLike))
    file = os.fsdecode(error.filename) if named else None
    return UserError(os.strerror(error.errno), file=file, remedy=remedy or "check the path, its rights and its disk")


def show_without_traceback() -> None:
    """Print uncaught UserErrors without traceback, on one rank."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    if int(os.environ.get("RANK", "0")) != 0:
        time.sleep(_RANK_0_SAYS)
    print(f"\n{error}\n", file=sys.stderr, flush=True)


def main_entry(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with its result.

    A UserError, or one of the file system, is one screen and exit code 2; Ctrl-C is one line and 130.
    """
    try:
        sys.exit(main() or 0)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_KEYBOARD)
    except (UserError, OSError) as raised:
        error = as_user_error(raised)
        if error is None:
            raise
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"\n{error}\n", file=sys.stderr, flush=True)
        else:
            time.sleep(_RANK_0_SAYS)
        sys.stdout.flush()
        # Not sys.exit: torch's clean-up would wait for ranks in a collective.
        os._exit(EXIT_USER_ERROR)
