"""Seconds of a save, of the pause that it makes in training, and of the verified resume.

    python scripts/bench/checkpoints.py --config ds_configs/infir2_1.5b/cpt.json --ranks 2 --out /fast/disk/bench
        [--steps 20] [--set data.path=synthetic ...]

Trains the stage three times for a few steps through its own loop, each in processes of its own: with saves that it
waits for, resumed from the last of them, and with `train.async_save` (left out with --waiting). The folder that --out
names is made, and deleted afterwards; the time of a save is that of its disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

EVERY = 100
"""Steps between saves for which the pause is given as a share of the time."""
WARMUP = 3
WAITED = 4
"""Steps between saves that are waited for."""


class Resumed(Exception):
    """The checkpoint is loaded: no more is to be measured."""


def measure(config: str, overrides: list[str], out: Path, resumes: bool) -> None:
    """Train on this rank, or only resume; rank 0 writes to `out` what the saves or the resume took, in seconds."""
    from ds_fp8.train import checkpoints, load_stage, loop, resume, saving, train
    from ds_fp8.train.metrics import read_metrics

    found: dict[str, Any] = {"pauses": [], "copied": [], "written": [], "resume": {}}

    class Timed(loop.CheckpointWriter):
        def save(self, *args: Any) -> None:
            self.began = time.perf_counter()
            super().save(*args)
            found["pauses"].append(time.perf_counter() - self.began)

        def finish(self) -> Any:
            began = time.perf_counter()
            saved = super().finish()
            if saved is not None:  # the loop asks before the next save and after the last step
                found["pauses"][-1] += time.perf_counter() - began
            return saved

        def _write(self, *args: Any) -> None:
            super()._write(*args)
            found["written"].append(time.perf_counter() - self.began)

    class TimedCopies(saving.HostCopies):
        def copy(self, state: Any) -> Any:
            began = time.perf_counter()
            copied = super().copy(state)
            found["copied"].append(time.perf_counter() - began)
            return copied

    def timed(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            found["resume"][name] = time.perf_counter() - began
            if resumes and name == "load":
                raise Resumed
            return result

        setattr(owner, name, wrapped)

    loop.CheckpointWriter, saving.HostCopies = Timed, TimedCopies
    timed(resume, "settle")
    timed(checkpoints, "load")
    stage = load_stage(config, overrides)
    with contextlib.suppress(Resumed):
        train(stage)
    if int(os.environ["RANK"]):
        return
    if not resumes:
        records = [r for r in read_metrics(stage.run_dir / checkpoints.METRICS, 10**9) if "step_seconds" in r]
        found["step_seconds"] = {record["step"]: record["step_seconds"] for record in records}
        found["bytes"] = checkpoints.survey(stage.run_dir)[0][0][1].bytes
    out.write_text(json.dumps(found))


def run(part: str, options: argparse.Namespace, folder: Path, *overrides: str) -> dict[str, Any]:
    """Return what `measure` found in processes of its own."""
    from ds_fp8.cluster.local_launch import deepspeed_command

    out = folder / f"{part}.json"
    run_dir = folder / ("waiting" if part == "resumed" else part)
    changes = [*options.set, f"train.run_dir={run_dir}", "train.keep_last=1", "train.log_every=1"]
    changes += ["train.schedule.warmup=1", "train.schedule.decay=1", *overrides]
    command = [*deepspeed_command(options.ranks), str(Path(__file__).resolve()), "--config", options.config]
    command += [
        "--measure",
        str(out),
        *["--resumes"] * (part == "resumed"),
        *(part for change in changes for part in ("--set", change)),
    ]
    began, log = time.perf_counter(), folder / f"{part}.log"
    try:
        with log.open("w") as lines:
            status = subprocess.run(command, stdout=lines, stderr=subprocess.STDOUT).returncode
    except KeyboardInterrupt:  # a limit of time: what it was about is worth knowing
        sys.exit(f"{part}: interrupted after {time.perf_counter() - began:.0f} s\n{log.read_text()[-5000:]}")
    if status:
        sys.exit(log.read_text()[-5000:])
    print(f"{part}: {time.perf_counter() - began:.0f} s in all", flush=True)
    return json.loads(out.read_text())


def report(options: argparse.Namespace, folder: Path) -> None:
    """Measure the runs and print a line each."""
    every, count = options.steps, options.saves

    def saves(every: int, more: int) -> list[str]:
        # One interval more than saves count, or training would wait at its end for the last of them.
        return [f"train.save_every={every}", f"train.steps={every * (count + 1) + more}", "train.eval_batches=1"]

    waiting = run("waiting", options, folder, *saves(WAITED, 0))
    print(
        f"checkpoint of {waiting['bytes'] / 2**30:.2f} GiB on {options.ranks} ranks; save, waited for: "
        f"{median(waiting['pauses'][-count:]):.2f} s",
        flush=True,
    )
    resumed = run("resumed", options, folder, *saves(WAITED, 1))["resume"]
    print(
        f"resume: every byte checked in {resumed['settle']:.2f} s, loaded in {resumed['load']:.2f} s",
        flush=True,
    )
    shutil.rmtree(folder / "waiting")
    if options.waiting:
        return

    background = run("asynchronous", options, folder, *saves(every, 0), "train.async_save=true")
    pause, copied, written = (median(background[key][1:count]) for key in ("pauses", "copied", "written"))
    seconds = {int(number): value for number, value in background["step_seconds"].items()}
    step = median(value for number, value in seconds.items() if WARMUP < number <= every)  # nothing is written yet
    slowed = sum(
        seconds[number] - step
        for save in range(2, count + 1)
        for number in range(save * every + 1, min((save + 1) * every, max(seconds)) + 1)
    ) / (count - 1)
    share = (pause + max(0.0, slowed)) / (EVERY * step)
    print(
        f"save, asynchronous, at steps of {step:.3f} s: pause {pause:.2f} s, {copied:.2f} of it copies to the host; "
        f"written after {written:.2f} s, steps meanwhile longer by {slowed:.2f} s in all: {share:.2%} of "
        f"the time at a save every {EVERY} steps",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="a stage")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="between two saves in the background, longer than a save takes (default 20)",
    )
    parser.add_argument(
        "--saves",
        type=int,
        default=3,
        help="of which the first is left out: it takes the host memory that later ones reuse (default 3)",
    )
    parser.add_argument("--waiting", action="store_true", help="leave out the saves in the background")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        default="bench-checkpoints",
        help="folder to make and delete (default bench-checkpoints)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the stage")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--resumes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.config, options.set, Path(options.measure), options.resumes)
        return 0
    folder = Path(options.out).resolve()
    folder.mkdir(parents=True)
    try:
        report(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # ranks may still be ending
    return 0


if __name__ == "__main__":
    sys.exit(main())
