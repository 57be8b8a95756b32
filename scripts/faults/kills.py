"""Kill training runs at random moments, resume them, and compare their end with an undisturbed run's, bit for bit.

    python scripts/faults/kills.py --kills 30 --in-save 10 --presets infir2 coat fp8lm_o2

Each kill is SIGKILL to one rank, to all processes of the run, or to the `deepspeed` command that started it. A kill
counts as inside a save when it leaves a checkpoint that is half written. Compared are weights, losses (those as well
that a kill made a run repeat) and what checkpoints are left. Exits with 1 when a run ends otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from tiny_runs import RANKS, ForkedRun, warm_up, write_stage

SAVE_EVERY = 2
MAX_STEPS_TO_KILL = 3
FILES = 2 * RANKS  # Files of a checkpoint: states of the model and of the optimizer
MAX_WAIT_SECONDS = 0.4
TRAIN = Path(__file__).resolve().parents[1] / "train.py"


class Victim:
    """A run folder that is killed again and again."""

    def __init__(self, stage: Path, run_dir: Path, rng: random.Random) -> None:
        self.stage, self.run_dir, self.rng = stage, run_dir, rng
        self.output = run_dir.with_name(f"{run_dir.name}.txt")
        # (step, loss) of all steps that were done, among them those that a kill made the run repeat
        self.losses: set[tuple[int, float]] = set()
        self.resumed_from: list[int] = []

    def kill(self, whom: str, in_save: bool) -> bool | None:
        """Start or resume the run and kill it. Return whether a save was cut, None where the run ended first."""
        self._look_back()
        started = time.time_ns()
        run = self._command() if whom == "launcher" else ForkedRun.start(self.stage, self.run_dir, self.output)
        if not (self._wait_for_save(run, started) if in_save else self._wait_for_steps(run)):
            return None
        if whom == "launcher":
            ranks = psutil.Process(run.pid).children(recursive=True)
            run.send_signal(signal.SIGKILL)
            run.wait()
            psutil.wait_procs(ranks, timeout=120)
        else:
            run.kill(*([self.rng.choice(run.ranks)] if whom == "rank" else [run.launcher, *run.ranks]))
            run.wait()
        self.losses.update(logged(self.run_dir))
        return bool(self._parts_since(started))

    def finish(self) -> None:
        self._look_back()
        if ForkedRun.start(self.stage, self.run_dir, self.output).wait():
            raise SystemExit(f"the run did not end well:\n{self.output.read_text()[-3000:]}")
        self.losses.update(logged(self.run_dir))

    def _look_back(self) -> None:
        from ds_fp8.train.checkpoints import steps_in

        step = (steps_in(self.run_dir) or [None])[-1]
        self.resumed_from += [step] if step else []

    def _command(self) -> subprocess.Popen:
        script = [
            str(TRAIN),
            "--gpus",
            str(RANKS),
            "--deepspeed_config",
            str(self.stage),
            "--set",
            f"train.run_dir={self.run_dir}",
        ]
        with self.output.open("a") as output:
            return subprocess.Popen([sys.executable, *script], stdout=output, stderr=output)

    def _parts_since(self, started: int) -> list[Path]:
        """Return the checkpoints that are half written, but for those that an earlier kill left; `started` in ns."""
        found = []
        for part in (self.run_dir / "checkpoints").glob("step_*.part"):
            with contextlib.suppress(FileNotFoundError):  # it is complete since
                found += [part] if part.stat().st_mtime_ns > started else []
        return found

    def _wait_for_save(self, run: ForkedRun | subprocess.Popen, started: int) -> bool:
        """Wait until some of the files of this start's first or second checkpoint are being written."""
        number, files = self.rng.randint(1, 2), self.rng.randint(0, FILES)
        begun: set[str] = set()

        def is_time() -> bool:
            parts = self._parts_since(started)
            begun.update(part.name for part in parts)
            return len(begun) >= number and any(len(list(part.glob("*.pt"))) >= files for part in parts)

        return self._wait_until(is_time, run)

    def _wait_for_steps(self, run: ForkedRun | subprocess.Popen) -> bool:
        first, wanted = len(logged(self.run_dir)), self.rng.randrange(MAX_STEPS_TO_KILL)
        if not self._wait_until(lambda: len(logged(self.run_dir)) >= first + wanted, run):
            return False
        time.sleep(self.rng.uniform(0, MAX_WAIT_SECONDS))
        return True

    def _wait_until(self, condition, run: ForkedRun | subprocess.Popen) -> bool:
        while not condition():
            ended = run.poll() is not None if isinstance(run, subprocess.Popen) else run.has_ended()
            if ended:
                code = run.wait()
                if code:
                    raise SystemExit(f"the run ended with {code} by itself:\n{self.output.read_text()[-3000:]}")
                return False
            time.sleep(0.002)
        return True


def logged(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of the steps in metrics.jsonl, whose last line may be half written."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def differences(run: Victim, other: Victim) -> list[str]:
    """Return the weights, losses and kept checkpoints in which two finished runs differ; numbers by a bit."""
    import torch
    from safetensors.torch import load_file

    weights = [load_file(each.run_dir / "model" / "model.safetensors") for each in (run, other)]
    different = sorted(weights[0].keys() ^ weights[1].keys())
    different += [key for key in weights[0].keys() & weights[1].keys() if not torch.equal(*(w[key] for w in weights))]
    different += [f"loss of step {step}" for step, _ in sorted(run.losses ^ other.losses)]
    if logged(run.run_dir) != logged(other.run_dir):
        different.append("steps in metrics.jsonl")
    kept = [{path.name for path in (each.run_dir / "checkpoints").iterdir()} for each in (run, other)]
    latest = {(each.run_dir / "checkpoints" / "latest").read_text() for each in (run, other)}
    different += ["what checkpoints/latest says"] if len(latest) > 1 else []
    return different + sorted(f"checkpoints/{name}" for name in kept[0] ^ kept[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["infir2", "coat", "fp8lm_o2"])
    parser.add_argument("--kills", type=int, default=30, help="of each preset")
    parser.add_argument("--in-save", type=int, default=10, help="how many of them at least inside a save")
    parser.add_argument("--by-launcher", type=int, default=1, help="how many of them kill the deepspeed command")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help='a key of "train"')
    arguments = parser.parse_args()
    more = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in arguments.set)}
    equal = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up(folder / "cache")
        for preset in arguments.presets:
            stage = write_stage(folder, preset, steps=arguments.steps, save_every=SAVE_EVERY, **more)
            equal &= kill_again_and_again(preset, stage, folder, arguments)
    return int(not equal)


def kill_again_and_again(preset: str, stage: Path, folder: Path, arguments: argparse.Namespace) -> bool:
    """Kill and finish runs of a stage until there are as many kills as wanted; return whether all ended equal."""
    rng = random.Random(arguments.seed)
    whole = Victim(stage, folder / f"{preset}-whole", rng)
    whole.finish()
    kills: Counter[str] = Counter()
    runs, cut, equal = 0, 0, True

    def lacking() -> tuple[int, int]:
        return arguments.kills - kills.total(), arguments.in_save - cut

    while max(lacking()) > 0:
        victim = Victim(stage, folder / f"{preset}-{runs}", rng)
        ended = False
        while not ended and max(lacking()) > 0:
            by_launcher = kills["launcher"] < arguments.by_launcher and rng.random() < 0.2
            whom = "launcher" if by_launcher else rng.choice(["rank", "all"])
            left, left_in_save = lacking()
            inside = victim.kill(whom, in_save=left_in_save > 0 and (rng.random() < 0.6 or left <= left_in_save))
            ended = inside is None
            if not ended:
                kills[whom] += 1
                cut += inside
        victim.finish()
        different = differences(victim, whole)
        equal &= not different
        outcome = f"DIFFERS in {different[:3]}" if different else "equal"
        print(f"{preset} run {runs}, resumed from steps {victim.resumed_from}: {outcome}", flush=True)
        runs += 1
        shutil.rmtree(victim.run_dir)
    by = ", ".join(f"{whom} {count}" for whom, count in sorted(kills.items()))
    print(f"{preset}: {kills.total()} kills ({by}), {cut} inside a save, {runs} runs", flush=True)
    return equal


if __name__ == "__main__":
    sys.exit(main())
