"""A process that multiplies zeros of given sizes by DeepGEMM, so that their kernels are compiled and kept on disk."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WORKER = "ds_fp8.gemm.deep_gemm_worker"
_TAIL = 600
"""Characters of a process's output that are shown."""


@dataclass(frozen=True)
class Outcome:
    """End of a process."""

    failed: tuple[Any, str] | None = None
    """A product that DeepGEMM could not multiply, and the reason."""
    died: str | None = None
    """Why the process ended before it came to DeepGEMM: no memory, or no second process is allowed on the GPU."""


def compile_in_process(
    products: Sequence[Any], device: torch.device, on_compiled: Callable[[Any], None], ended: contextlib.ExitStack
) -> Outcome:
    """Multiply zeros of these sizes in a new process, until one fails.

    Args:
        products: Sizes.
        device: Where.
        on_compiled: Called with each product that was multiplied.
        ended: Ends the process if it still runs.
    """
    # Not multiprocessing, which would run a caller's script again that has no `if __name__ == "__main__"`.
    command = [sys.executable, "-m", WORKER, str(device), json.dumps(products)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, text=True
        )
        ended.callback(process.kill)
        try:
            failed = None
            for product, line in zip(products, process.stdout, strict=False):
                reason = json.loads(line)
                if reason is not None:
                    failed = product, reason
                    break
                on_compiled(product)
            code = process.wait()
        finally:
            process.kill()
        output.seek(0)
        tail = output.read()[-_TAIL:].strip()
    if failed is not None:
        return Outcome(failed=(failed[0], f"{failed[1]}\n{tail}".strip()))
    return Outcome(died=f"exit code {code}\n{tail}".strip() if code else None)
