"""Steps on 2, 4 and 8 GPUs of a host beside each other: efficiency, gain over BF16, peaks beside their estimates.

    python scripts/bench/many_gpus.py --peers FOLDER --json many.json          all points, in the order of their worth
    python scripts/bench/many_gpus.py --peers FOLDER --minutes 10 --json many.json
    python scripts/bench/many_gpus.py --quick                                  two CPU ranks, a small model

Every point is a run of step.py in processes of its own, with CUDA graphs as by default: 7.62B and 1.54B of Qwen2.5's
shapes on 2, 4 and 8 GPUs, a whole Qwen3-30B-A3B on all of them, and 7.62B over sockets
(NCCL_P2P_DISABLE=1). A point that began before --minutes were over is finished, later ones are left out and
named. --json is written after each point; points that a file of an earlier call has are not run again.

    efficiency    tokens/s a GPU on N GPUs over those on the fewest, of the same variant
    gain          tokens/s a GPU over those of the first variant, on as many GPUs
    estimate      of ds-fp8 estimate, over the measured peak
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import integers, print_table, words, write_json
from step_variants import PEERS, fp8_section
from zero_ranks import causal_lm_config, zero3_config

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.memory import estimate

STEP = Path(__file__).with_name("step.py")
OURS = "hybrid_fast+coat/graph-auto"
SOCKETS = {"NCCL_P2P_DISABLE": "1"}


class Point(NamedTuple):
    """One variant on so many GPUs."""

    size: str
    layers: int
    vocabulary: int
    tokens: int
    """Length of the one row of a micro-batch."""
    gpus: int
    variant: str
    slow_link: bool = False

    @property
    def name(self) -> str:
        link = ", sockets" if self.slow_link else ""
        return f"{self.size}, 1 x {self.tokens}, {self.gpus} GPUs, {self.variant}{link}"

    def command(self, steps: int, peers: str | None, file: Path) -> list[str]:
        """Return the command that measures this point and writes `file`."""
        shape = ["--size", self.size, "--layers", self.layers, "--vocabulary", self.vocabulary]
        shape += ["--sequences", 1, "--length", self.tokens, "--steps", steps, "--warmup", min(6, steps - 1)]
        shape += ["--gpus", self.gpus, "--variants", self.variant, "--json", file]
        return [sys.executable, str(STEP), *map(str, shape), *(["--peers", peers] if peers else [])]

    def estimated_bytes(self) -> int | None:
        """Return the estimate of the peak, or None for a peer."""
        if self.variant in PEERS:
            return None
        model = causal_lm_config(self.size, self.layers, self.vocabulary, self.tokens)
        raw = zero3_config(1, 1, fp8_section(self.variant))
        return estimate(raw, gpus=self.gpus, model=model, sequence_length=self.tokens).peak_bytes


def points(counts: list[int], peers: bool, quick: bool) -> list[Point]:
    """Return all points, those first that say most."""
    if quick:
        return [Point("tiny", 2, 512, 64, gpus, variant) for variant in ("bf16", "hybrid_fast+coat") for gpus in counts]
    most = max(counts)
    ends = sorted({most, min(counts)}, reverse=True)
    between = [gpus for gpus in counts if gpus not in ends]
    bf16, others = ("deepspeed", ["te-fsdp2"]) if peers else ("bf16", [])
    seven, small = ("7b", 28, 152064, 8192), ("1.5b", 28, 152064, 2048)
    mixture = ("qwen3-30b", 48, 151936, 8192)
    result = [Point(*seven, gpus, variant) for gpus in ends for variant in (bf16, OURS)]
    result += [Point(*small, gpus, variant) for gpus in ends for variant in (bf16, OURS)]
    result += [Point(*mixture, most, variant) for variant in (OURS, "bf16")]
    result += [Point(*seven, gpus, variant) for gpus in between for variant in (bf16, OURS)]
    result += [Point(*seven, most, variant) for variant in others]
    result += [Point(*seven, most, variant, slow_link=True) for variant in (bf16, OURS)]
    return result


def measure(point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a point as step.py writes it, or what it said when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        environment = os.environ | (SOCKETS if point.slow_link else {})
        command = point.command(options.steps, options.peers, file)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not file.is_file():
            return {"failed": "\n".join((done.stdout + done.stderr).splitlines()[-12:])}
        found = json.loads(file.read_text())
    return {**found["rows"][0], "banner": found["banner"], "link": found["link"]}


def summary(all_points: list[Point], rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return efficiency, gain and estimate of every point that was measured."""
    measured = [point for point in all_points if "step_seconds" in rows.get(point.name, {})]
    rate = {point: rows[point.name]["tokens_per_second_per_gpu"] for point in measured}
    result = []
    for point in measured:
        row = rows[point.name]
        fewest = min((p for p in measured if p._replace(gpus=0) == point._replace(gpus=0)), key=lambda p: p.gpus)
        bf16 = next((p for p in measured if p.variant in ("deepspeed", "bf16") and _alike(p, point)), None)
        expected, peak = point.estimated_bytes(), row["peak_bytes"]
        result.append(
            {
                "point": point.name,
                "milliseconds": row["step_seconds"] * 1e3,
                "tokens_per_second_per_gpu": rate[point],
                "efficiency": rate[point] / rate[fewest] if fewest != point else None,
                "gain": rate[point] / rate[bf16] if bf16 else None,
                "peak_gib": peak and peak / 2**30,
                "estimate": expected / peak if expected and peak else None,
            }
        )
    return result


def _alike(one: Point, other: Point) -> bool:
    return one._replace(variant="") == other._replace(variant="")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=integers, metavar="N,...", help="default 2,4,8, as many as there are")
    parser.add_argument("--only", type=words, default=[], metavar="WORD,...", help="points whose names have all these")
    parser.add_argument("--peers", metavar="FOLDER", help="of the peers' scripts; without it BF16 is DeepSpeed's alone")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no point is begun (default 60)")
    parser.add_argument("--steps", type=int, help="of a point, with those that warm up (default 14)")
    parser.add_argument("--quick", action="store_true", help="a small model on one and two ranks, on any machine")
    parser.add_argument("--json", metavar="FILE", help="figures; points that it has are not run again")
    options = parser.parse_args(arguments)
    here = torch.cuda.device_count()
    options.steps = options.steps or (4 if options.quick else 14)
    options.gpus = options.gpus or ([1, 2] if options.quick else [n for n in (2, 4, 8) if n <= here])
    if not options.quick and (not options.gpus or max(options.gpus) > here):
        raise UserError(f"there are {here} GPUs", key="--gpus", remedy="fewer, a machine of 2 to 8 GPUs, or --quick")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    end = time.monotonic() + 60 * options.minutes
    file = Path(options.json) if options.json else None
    rows = json.loads(file.read_text())["rows"] if file and file.is_file() else {}
    every = points(options.gpus, options.peers is not None, options.quick)
    every = [point for point in every if all(word in point.name for word in options.only)]
    for point in every:
        if point.name in rows and "failed" not in rows[point.name]:
            continue
        if time.monotonic() > end:
            print(f"left out: {point.name}")
            continue
        print(f"{point.name} ...", flush=True)
        rows[point.name] = measure(point, options)
        if "failed" in rows[point.name]:
            print(rows[point.name]["failed"], file=sys.stderr, flush=True)
        if file:
            write_json(str(file), rows=rows)
    found = summary(every, rows)
    print_table(
        "steps beside each other",
        ("point", "ms", "tokens/s a GPU", "efficiency", "gain", "peak GiB", "estimate / peak"),
        [tuple(row.values()) for row in found],
    )
    if file:
        write_json(str(file), rows=rows, summary=found)
    return int(any("failed" in row for row in rows.values()))


if __name__ == "__main__":
    main_entry(main)
