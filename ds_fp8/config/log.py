"""The logger "ds_fp8", on rank 0 alone.

    logging.getLogger("ds_fp8").setLevel(logging.WARNING)  # without the start report and progress

Logs to stdout unless the program configures a handler, for this logger or the root logger.
"""

from __future__ import annotations

import io
import logging
import os
import sys

from rich.console import Console, RenderableType

logger = logging.getLogger("ds_fp8")
_WIDTH = 120  # columns of tables in handlers without a terminal


def show(renderable: RenderableType) -> None:
    """Log a table or panel at INFO: in colour on a terminal, as text to other handlers."""
    if logger.isEnabledFor(logging.INFO) and is_first_rank():
        text = Console(file=io.StringIO(), width=_WIDTH, highlight=False)
        text.print(renderable)
        logger.info("\n%s", text.file.getvalue().rstrip(), extra={"renderable": renderable})


def is_first_rank() -> bool:
    """Return whether this process is rank 0; before torch.distributed is initialised, by environment."""
    distributed = sys.modules.get("torch.distributed")  # not imported here, which takes seconds
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


class _Lasting(Console):
    """A console that goes silent on a broken pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class _Standard(logging.Handler):
    """Writes to stdout unless the program has configured a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        others = logger.handlers + (logging.getLogger().handlers if logger.propagate else [])
        if any(other is not self for other in others):
            return
        try:
            # sys.stdout at the time: progress bars and tests replace it.
            console = _Lasting(file=sys.stdout, highlight=False, soft_wrap=True)
            renderable = getattr(record, "renderable", None)
            if renderable is not None:
                console.print(renderable, soft_wrap=False)
            else:
                console.print(record.getMessage(), markup=False)
            sys.stdout.flush()
        except Exception:
            self.handleError(record)


logger.addHandler(_Standard())
logger.addFilter(lambda record: is_first_rank())
if logger.level == logging.NOTSET:  # unless set by the program
    logger.setLevel(logging.INFO)
