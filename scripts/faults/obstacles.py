"""Put something else in the place of every file of a run's folder, resume the run, and compare its end.

    python scripts/faults/obstacles.py [--only metrics.jsonl saved.json] [--by "a pipe" garbage]

A run of two ranks is killed between two checkpoints. In a copy of its folder one name is taken by a folder, garbage, a
named pipe, or a link: to nowhere, to itself, to a device, or to a file or folder elsewhere. The run is then started
again. It must end with the weights of an undisturbed run, or with an error in words; never in a traceback, never
hang, and what a link leads to must stay as it was. Exits with 1 where something else happens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tiny_runs import ForkedRun, warm_up, write_stage

STEPS, SAVE_EVERY, KILLED_AFTER = 5, 2, 5
QUICK = ("fp8.enabled=false", "model.config.num_hidden_layers=1")
"""Changes for runs that are about files alone."""
PATIENCE = 240
"""Seconds after which a run hangs."""
NAMES = (
    "config.json",
    "metrics.jsonl",
    "saved.json",
    "result.json",
    "run.lock",
    "model",
    "model.part",
    "metrics.jsonl.part",
    "saved.json.part",
    "config.json.part",
    "checkpoints",
    "checkpoints/latest",
    "checkpoints/zero_to_fp32.py",
    "checkpoints/universal",
    "checkpoints/step_4",
    "checkpoints/step_5",
    "checkpoints/step_5.part",
    "checkpoints/step_2.deleted",
    "checkpoints/step_4.damaged",
    "checkpoints/step_4/manifest.json",
)


def _take(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _obstacle(make: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    def put(place: Path, elsewhere: Path) -> None:
        _take(place)
        make(place, elsewhere)

    return put


OBSTACLES: dict[str, Callable[[Path, Path], None]] = {
    "nothing": _obstacle(lambda place, _: None),
    "a folder": _obstacle(lambda place, _: place.mkdir()),
    "garbage": _obstacle(lambda place, _: place.write_bytes(bytes(i * 37 % 251 for i in range(300))) and None),
    "a pipe": _obstacle(lambda place, _: os.mkfifo(place)),
    "a link to nowhere": _obstacle(lambda place, _: place.symlink_to("nowhere-at-all")),
    "a link to itself": _obstacle(lambda place, _: place.symlink_to(place.name)),
    "a link to a device": _obstacle(lambda place, _: place.symlink_to("/dev/zero")),
    "a link to a file": _obstacle(lambda place, elsewhere: place.symlink_to(elsewhere / "file")),
    "a link to a folder": _obstacle(lambda place, elsewhere: place.symlink_to(elsewhere / "folder")),
}


def resumed(stage: Path, run_dir: Path, output: Path) -> int | None:
    """Start the run again and return its exit code; None where it hangs, and is killed."""
    run = ForkedRun.start(stage, run_dir, output, *QUICK)
    deadline = time.monotonic() + PATIENCE
    while not run.has_ended():
        if time.monotonic() > deadline:
            run.kill(run.launcher, *run.ranks)
            run.wait()
            return None
        time.sleep(0.01)
    return run.wait()


def judged(code: int | None, said: str, equal: bool) -> str:
    """Return how a run ended: "equal", "refused", or what must not happen."""
    if code is None:
        return "HANGS"
    if "Traceback" in said:
        return "TRACEBACK"
    if code == 2 and "error: " in said and "remedy: " in said:
        return "refused"
    if code:
        return f"EXIT CODE {code}"
    return "equal" if equal else "OTHER WEIGHTS"


def killed_run(stage: Path, run_dir: Path, output: Path) -> None:
    """Leave the folder of a run that was killed after its last step, and before that was saved."""
    run = ForkedRun.start(stage, run_dir, output, *QUICK)
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or f'{{"step": {KILLED_AFTER}, "loss"' not in metrics.read_text():
        if run.has_ended():
            raise SystemExit(f"the run ended by itself:\n{output.read_text()[-3000:]}")
        time.sleep(0.001)
    run.kill(run.launcher, *run.ranks)
    run.wait()
    shutil.rmtree(run_dir / "checkpoints" / f"step_{KILLED_AFTER}.part", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="names that are taken")
    parser.add_argument("--by", nargs="+", choices=OBSTACLES, default=tuple(OBSTACLES), metavar="OBSTACLE")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up(folder / "cache")
        # Its last step is done and not saved when it is killed.
        stage = write_stage(folder, "infir2", steps=STEPS, save_every=SAVE_EVERY, keep_last=3)
        output = folder / "output.txt"
        whole, killed = folder / "whole", folder / "killed"
        if resumed(stage, whole, output):
            raise SystemExit(f"the undisturbed run did not end well:\n{output.read_text()[-3000:]}")
        killed_run(stage, killed, output)
        weights = (whole / "model" / "model.safetensors").read_bytes()
        for place in arguments.only:
            for obstacle in arguments.by:
                run_dir, elsewhere = folder / "run", folder / "elsewhere"
                shutil.copytree(killed, run_dir, symlinks=True)
                (elsewhere / "folder").mkdir(parents=True)
                for file in (elsewhere / "file", elsewhere / "folder" / "file"):
                    file.write_text("untouched")
                OBSTACLES[obstacle](run_dir / place, elsewhere)
                output.write_text("")
                code = resumed(stage, run_dir, output)
                model = run_dir / "model" / "model.safetensors"
                said = output.read_text()
                outcome = judged(code, said, model.is_file() and model.read_bytes() == weights)
                left = sorted(elsewhere.rglob("*"))
                if len(left) != 3 or any(file.is_file() and file.read_text() != "untouched" for file in left):
                    outcome = "WRITTEN ELSEWHERE"
                counts[outcome] += 1
                print(f"{place}: {obstacle}: {outcome}", flush=True)
                if outcome not in ("equal", "refused"):
                    print(said[-3000:], flush=True)
                shutil.rmtree(run_dir)
                shutil.rmtree(elsewhere)
    print(dict(counts))
    return int(bool(set(counts) - {"equal", "refused"}))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
