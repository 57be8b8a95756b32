"""Entry point of a rank's script: all ranks end together, with one exit code."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable

from ds_fp8.cluster.guardian import ERROR, LOST, USER
from ds_fp8.config.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_USER_ERROR,
    as_user_error,
    first_line,
    main_entry,
)

# Gloo raises plain RuntimeErrors.
_LINK = re.compile(r"gloo|NCCL|connection (reset|closed)|socket|timed out", re.IGNORECASE)


def rank_entry(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with its result, as `main_entry`; under a watchdog a failed rank ends all."""

    def guarded() -> int | None:
        try:
            code = main()
        except Exception as error:
            from ds_fp8.cluster import watchdog  # here: it imports torch, after the first messages of `main`

            if mistake := as_user_error(error):
                watchdog.fail(USER, str(mistake), EXIT_USER_ERROR)
                raise mistake from None
            traceback.print_exc()
            reason = f"{type(error).__name__}: {first_line(error)}"
            watchdog.fail(LOST if lost_others(error) else ERROR, reason, EXIT_LOST)
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            from ds_fp8.cluster import watchdog

            watchdog.fail(LOST, "it was interrupted (SIGINT) before there was anything to save", EXIT_INTERRUPTED)
            raise
        from ds_fp8.cluster import watchdog

        # Done: a signal while Python ends must not change the exit code.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        watchdog.leave()
        return code

    main_entry(guarded)


def lost_others(error: Exception) -> bool:
    """Return whether an exception shows the loss of another rank or of the output's reader."""
    import torch.distributed

    if isinstance(error, torch.distributed.DistError | BrokenPipeError):
        return True
    # Exactly RuntimeError: its subclasses (out of memory) are errors of this rank.
    return type(error) is RuntimeError and _LINK.search(str(error)) is not None
