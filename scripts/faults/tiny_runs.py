"""Runs of a tiny stage on two CPU ranks that start in a second: forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_fp8.cluster.hosts import free_port
from tests.train.tiny_stage import TINY

RANKS = 2
GRACE_SECONDS = 1.0  # Seconds from the end of one rank until the launcher kills the others


def warm_up(cache: Path) -> None:
    """Import everything that a run needs, so that forked ones have it; keep data in DS_FP8_CACHE, or else `cache`."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("DS_FP8_CACHE", str(cache))
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401  deepspeed.initialize imports it, and it compiles
    import torch
    import transformers
    from deepspeed.utils.logging import set_log_level_from_string

    import ds_fp8.train  # noqa: F401

    torch.set_num_threads(1)
    set_log_level_from_string("error")
    transformers.utils.logging.disable_progress_bar()


def write_stage(folder: Path, preset: str, **train: Any) -> Path:
    """Write the tiny stage with an FP8 preset and these keys of "train" to a file in `folder`."""
    stage = {**TINY, "fp8": {"preset": preset}, "train": {**TINY["train"], "eval_batches": 1, **train}}
    file = folder / f"{preset}.json"
    file.write_text(json.dumps(stage, indent=2))
    return file


@dataclass
class ForkedRun:
    """A launcher process and its ranks."""

    launcher: int
    ranks: list[int]

    @classmethod
    def start(cls, file: Path, run_dir: Path, output: Path, *overrides: str) -> ForkedRun:
        """Fork a launcher, which forks the ranks and ends when they have; all write to `output`."""
        port = free_port()
        told, tell = os.pipe()
        launcher = os.fork()
        if launcher == 0:
            os.close(told)
            with output.open("a") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            changes = [f"train.run_dir={run_dir}", *overrides]
            ranks = [_fork_rank(rank, port, file, changes, tell) for rank in range(RANKS)]
            os.write(tell, json.dumps(ranks).encode())
            os.close(tell)
            os._exit(_wait_for(ranks))
        os.close(tell)
        with os.fdopen(told) as stream:
            ranks = json.loads(stream.read())
        return cls(launcher, ranks)

    def kill(self, *processes: int) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.launcher, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        _, status = os.waitpid(self.launcher, 0)
        while any(_is_running(rank) for rank in self.ranks):
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(status)


def _fork_rank(rank: int, port: int, file: Path, overrides: list[str], pipe: int) -> int:
    process = os.fork()
    if process:
        return process
    os.close(pipe)  # its reader waits until nobody holds it
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from ds_fp8.config.errors import EXIT_INTERRUPTED, main_entry
    from ds_fp8.train import load_stage, train
    from ds_fp8.train.processes import Interrupted

    def main() -> int:
        try:
            train(load_stage(file, overrides))
        except Interrupted:
            return EXIT_INTERRUPTED
        return 0

    code = 1
    try:
        main_entry(main)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(code)


def _wait_for(ranks: list[int]) -> int:
    """Wait for the ranks; one that fails takes the others with it, as under DeepSpeed's launcher."""
    left, code = set(ranks), 0
    while left:
        process, status = os.wait()
        left.discard(process)
        code = code or os.waitstatus_to_exitcode(status)
        if code and left:
            for other in left:
                os.kill(other, signal.SIGTERM)
            time.sleep(GRACE_SECONDS)
            for other in left:
                os.kill(other, signal.SIGKILL)
    return code


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
