"""FP8 against BF16 on your own stage: python scripts/parity.py --deepspeed_config FILE --steps 500 --seeds 3.

Trains the stage for so many steps in FP8 and in BF16 from each of the seeds, one run after the other, and compares the
final validation losses with what another seed changes. Leaves parity.json and parity.png in --out. Run it again and it
continues where it stopped. The exit code is 0 where FP8 is equal, else 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ds_fp8.errors import UserError, main_entry
from ds_fp8.launch import deepspeed_command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, type=Path, metavar="FILE", help="the stage's JSON")
    parser.add_argument("--steps", required=True, type=int, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from train.seed upwards (default 1)")
    parser.add_argument("--ranks", type=int, help="processes of every run (default: the GPUs, or 1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the stage")
    parser.add_argument("--out", type=Path, default=Path("runs/parity"), help="folder (default runs/parity)")
    parser.add_argument("--tolerance", type=float, help="relative gap that is allowed (default 0.0025)")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.seeds < 1:
        raise UserError("there is nothing to compare", key="--steps, --seeds", remedy="numbers of at least 1")

    import torch

    from ds_fp8.train import load_stage, parity
    from ds_fp8.train.twin_report import KINDS, RunRecord

    ranks = arguments.ranks or torch.cuda.device_count() or 1
    os.environ["WORLD_SIZE"] = str(ranks)
    stage = load_stage(arguments.deepspeed_config, arguments.set)
    del os.environ["WORLD_SIZE"]
    seeds = range(stage.train.seed, stage.train.seed + arguments.seeds)
    runs: parity.Runs = {kind: [] for kind in KINDS}
    for seed in seeds:
        for kind in KINDS:
            print(f"\n== {kind}, seed {seed}", flush=True)
            changes = parity.twin_overrides(stage, kind, seed, arguments.steps, arguments.out)
            _train(arguments.deepspeed_config, ranks, [*arguments.set, *changes])
            runs[kind].append(RunRecord(parity.run_folder(arguments.out, kind, seed)))
    tolerance = parity.TOLERANCE if arguments.tolerance is None else arguments.tolerance
    comparison = parity.compare(runs, list(seeds), tolerance)
    numbers, picture = parity.write(comparison, arguments.out)
    print(f"\n{comparison['verdict']}\nfigures: {numbers}\npicture: {picture}")
    return 0 if comparison["passed"] else 1


def _train(config: Path, ranks: int, overrides: list[str]) -> None:
    """One run, with what it prints; its failure is this script's."""
    script = Path(__file__).with_name("train.py")
    command = deepspeed_command(ranks) if ranks > 1 else [sys.executable]
    command += [str(script), "--deepspeed_config", str(config)]
    command += [part for change in overrides for part in ("--set", change)]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main_entry(main)
