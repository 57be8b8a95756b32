"""Cut the power of a disk that a run saves to, at random moments, and look for a good checkpoint in what is left.

    python scripts/faults/power_loss.py --filesystems ext4 xfs --images 50

recorded_disk.py says what an image holds. Every image is mounted, so that the file system's journal recovers it, and
read as a resume does: manifests, then every byte of the newest checkpoint whose manifest is sound. Exits with 1 where
an image has no good checkpoint, or one older than the newest that the run had reported as saved at that moment.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from recorded_disk import RecordedDisk, mounted_image
from tiny_runs import ForkedRun, warm_up, write_stage

SIZE = 400 * 2**20
RUN = "run"


def newest_good(run_dir: Path) -> tuple[int | None, list[str]]:
    """Return the step of the newest checkpoint that is whole, and what is wrong with newer ones."""
    from ds_fp8.train.checkpoints import survey

    whole, damaged = survey(run_dir)
    problems = [f"{folder.name}: {reason}" for folder, reason in damaged.items()]
    for folder, manifest in whole:
        found = manifest.problems(folder, manifest.files)
        if not found:
            return manifest.step, problems
        problems += found
    return None, problems


def record(disk: RecordedDisk, stage: Path, keep_last: int) -> list[tuple[int, int]]:
    """Train on the disk; return (place in the log, step) of every save, when the run reports it as done."""
    saved, known = disk.mount / RUN / "saved.json", 0
    reported: list[tuple[int, int]] = []
    output = disk.mount.with_name("output.txt")
    run = ForkedRun.start(stage, disk.mount / RUN, output, f"train.keep_last={keep_last}")
    while not run.has_ended():
        if saved.exists():
            position, step = disk.position, json.loads(saved.read_text())["step"]
            if step > known:
                # What is in the file now was done before, at the latest at a position that is read after it.
                reported.append((max(position, disk.position), step))
                known = step
        time.sleep(0.005)
    if run.wait():
        raise SystemExit(output.read_text()[-3000:])
    return reported


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filesystems", nargs="+", default=["ext4", "xfs"])
    parser.add_argument("--images", type=int, default=50, help="of each file system")
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--async-save", action="store_true")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    failed = False
    for kind in arguments.filesystems:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            warm_up(folder / "cache")
            more = {"steps": arguments.steps, "save_every": 1, "async_save": arguments.async_save}
            stage = write_stage(folder, "infir2", **more)
            disk = RecordedDisk(folder / "disk", kind, SIZE)
            with disk.mounted():
                reported = record(disk, stage, arguments.keep_last)
                end = disk.position
            first = reported[0][0]
            positions = [rng.randrange(first, end) for _ in range(arguments.images)]
            outcomes: Counter[str] = Counter()
            for position, image in disk.images(positions, folder, rng):
                expected = max(step for place, step in reported if place <= position)
                with mounted_image(image, kind, folder / "after") as mount:
                    step, problems = newest_good(mount / RUN)
                good = step is not None and step >= expected
                failed |= not good
                outcomes["good" if good else "BAD"] += 1
                outcomes["with damage beside"] += bool(problems)
                if not good:
                    print(f"{kind}: at {position} step {expected} was saved, found {step}: {problems}", flush=True)
            print(
                f"{kind}: {arguments.images} images between the first save and the end ({len(reported)} saves, "
                f"{end / 2**20:.0f} MiB written): {dict(outcomes)}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
