"""A crash at any write of a run: a run whose folder is copied before each of its writes, and what a resume makes of it.

A copy is what SIGKILL leaves at that moment: what was flushed before is there, the write at hand is not.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.train import load_stage, resume, train
from ds_fp8.train.model import files_of_base

_at_work = threading.local()
_recorder = None  # Of this process: an audit hook stays for good


class Recorder:
    """Copies `run_dir` into a folder of its own before each write in it by this process."""

    def __init__(self, run_dir: Path, copies: Path) -> None:
        self.run_dir, self.copies, self.count = run_dir, copies, 0
        self._lock = threading.Lock()  # a save in the background waits for the copy before a line of metrics

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            return
        path, folder = args[0], args[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
        if isinstance(path, int) or (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        # shutil.rmtree names files by the folder's descriptor.
        path = Path(os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else "", os.fsdecode(path))
        if self.run_dir not in path.parents or path.name == "run.lock" or not self.run_dir.exists():
            return
        with self._lock:
            to = self.copies / f"{self.count:03d}-{dist.get_rank()}-{event}-{path.name}"
            self.count += 1
            try:
                _copy(self.run_dir, to)
            except OSError:  # changed by the other rank meanwhile
                shutil.rmtree(to)


def _copy(folder: Path, to: Path) -> None:
    to.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_dir():
            _copy(path, to / path.name)
        elif path.suffix in (".pt", ".safetensors") and not folder.name.endswith(".part"):
            os.link(path, to / path.name)  # is never written again
        elif path.name != "run.lock":  # to close it would release the lock
            shutil.copy(path, to / path.name)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _recorder is not None and not getattr(_at_work, "copies", False):
        _at_work.copies = True
        try:
            _recorder.note(event, args)
        finally:
            _at_work.copies = False


def run(file: str, run_dir: Path, steps: int, copies: Path | None = None) -> None:
    """Train on this rank; before each write the run's folder is copied into `copies`."""
    global _recorder
    if copies is not None:
        if not hasattr(sys, "_audits_runs"):
            sys.addaudithook(_audit)
            sys._audits_runs = True
        _recorder = Recorder(run_dir, copies)
    try:
        train(load_stage(file, [f"train.run_dir={run_dir}", f"train.steps={steps}"]))
    finally:
        _recorder = None


def go_on_from(file: str, folders: list[Path]) -> list[int | str]:
    """Return the step that a resume in each folder goes on from, or why it is refused; every file is checked."""
    found: list[int | str] = []
    for folder in folders:
        try:
            stage = load_stage(file, [f"train.run_dir={folder}"])
            found.append(resume.settle(replace(stage, base=files_of_base(stage)), lambda line: None).step)
        except (UserError, OSError) as error:
            found.append(f"{folder.name}: {error}")
    return found
