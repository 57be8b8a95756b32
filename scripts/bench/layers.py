"""Whole decoder layers, forward and backward: time and peak memory against BF16, torchao and Transformer Engine.

    python scripts/bench/layers.py                            7B and 1.5B shapes, 4 layers, 2 x 8192 tokens
    python scripts/bench/layers.py --recompute                each also with activation recompute
    python scripts/bench/layers.py --only te-block,infir2     some of the rows
    python scripts/bench/layers.py --quick                    seconds on a CPU, with the emulated product

Rows are hf (transformers' own layers in BF16), hf-compile, torchao-tensorwise and -rowwise (compiled), te-bf16,
-current and -block (te.TransformerLayer) and this library's presets, of those that compute alike the first. Peers that
are not installed are said to be.

    "weights"      how they lie in memory: fp8 as an FP8 gather leaves them, bf16 cast in every step
    "recompute"    layer: each layer runs again in backward; mlp: fp8.activations.recompute
    "of TE"        over te-block with fp8 weights, "of torchao" over torchao-tensorwise, both with the same recompute of
                   layers; below 1 is faster, or smaller
    "y", "dx"      relative error (Frobenius norm, sampled tokens) of what the layers add to their input, and to its
                   gradient, against hf
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import (
    GRADIENT_STD,
    SIZES,
    argument_parser,
    begin,
    device,
    distinct_presets,
    first_line,
    normal,
    positive,
    print_table,
    refuse_on_cpu,
    words,
    write_json,
)
from decoder_stacks import Contestant, Shape, Stack, contestants, our_layers

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.presets import PRESETS
from ds_fp8.config.schema import nearest
from ds_fp8.research import mxfp8

SAMPLE = 256  # Tokens whose results are compared

WARMUP = 4  # Steps before the clock runs


@dataclass(frozen=True)
class Row:
    """A variant to measure, and its recompute: "none", "layer" or "mlp"."""

    contestant: Contestant
    recompute: str

    @property
    def label(self) -> str:
        return f"{self.contestant.name}, {self.contestant.weights} weights, recompute {self.recompute}"

    def build(self, shape: Shape) -> Stack:
        if self.recompute == "mlp":
            preset, _, backend = self.contestant.name.partition("/")
            return our_layers(shape, preset, self.contestant.weights, {"recompute": "mlp"}, backend or "auto")
        return self.contestant.build(shape)


def time_and_peak(step: Callable[[], Any], repeats: int) -> tuple[float, float | None]:
    """Return (median ms of step(), peak of allocated GiB: None on a CPU) over `repeats` steps after a warm-up."""
    for _ in range(WARMUP):
        step()
    if device().type != "cuda":
        durations = []
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            durations.append((time.perf_counter() - start) * 1e3)
        return statistics.median(durations), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    durations = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        durations.append(start.elapsed_time(end))
    return statistics.median(durations), torch.cuda.max_memory_allocated() / 2**30


def sampled_difference(result: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return result - start, FP64 [SAMPLE, H], of evenly spaced tokens of [B, S, H]."""
    result, start = result.flatten(0, 1), start.flatten(0, 1)
    tokens = torch.linspace(0, len(result) - 1, min(len(result), SAMPLE), device=result.device).long()
    return result[tokens].double() - start[tokens].double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def measure_row(row: Row, shape: Shape, repeats: int, exact: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Return time, peak memory and errors of one row; `exact` is what hf's layers add to x and to dy."""
    x, dy = operands(shape)
    stack = row.build(shape)
    y, dx = stack.step(x, dy, row.recompute == "layer")
    errors = [relative_error(sampled_difference(*pair), e) for pair, e in zip(((y, x), (dx, dy)), exact, strict=True)]
    del y, dx
    milliseconds, peak = time_and_peak(partial(stack.step, x, dy, row.recompute == "layer"), repeats)
    return {
        "layers": row.contestant.name,
        "weights": row.contestant.weights,
        "recompute": row.recompute,
        "backend": stack.backend,
        "milliseconds": milliseconds,
        "peak_gib": peak,
        "y_error": errors[0] if stack.same_weights else None,
        "dx_error": errors[1] if stack.same_weights else None,
    }


def operands(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = shape.sequences, shape.length, shape.size.hidden
    return normal(*sizes, seed=0), normal(*sizes, std=GRADIENT_STD, seed=1)


def free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()


def measure_rows(rows: list[Row], shape: Shape, repeats: int) -> Iterator[dict[str, Any]]:
    x, dy = operands(shape)
    y, dx = contestants()[0].build(shape).step(x, dy)
    exact = sampled_difference(y, x), sampled_difference(dx, dy)
    del x, dy, y, dx
    for row in rows:
        free_memory()
        try:
            result = measure_row(row, shape, repeats, exact)
        except Exception as error:  # another library fails in its own way
            if not row.contestant.is_peer:
                raise
            print(f"not measured: {row.label} ({first_line(error)})", flush=True)
            continue
        print(f"{row.label}: {result['milliseconds']:.1f} ms", flush=True)
        yield result


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Compare every row with hf, te-block and torchao-tensorwise, where those were measured."""

    def base(row: dict[str, Any], layers: str, weights: str) -> dict[str, Any]:
        recompute = "layer" if row["recompute"] == "layer" else "none"
        wanted = {"layers": layers, "weights": weights, "recompute": recompute}
        return next((other for other in rows if wanted.items() <= other.items()), {})

    for row in rows:
        te, torchao = base(row, "te-block", "fp8"), base(row, "torchao-tensorwise", "bf16")
        row["speedup_over_hf"] = _ratio(base(row, "hf", "bf16"), row, "milliseconds")
        row["time_of_te"], row["peak_of_te"] = _ratio(row, te, "milliseconds"), _ratio(row, te, "peak_gib")
        row["time_of_torchao"] = _ratio(row, torchao, "milliseconds")
        row["peak_of_torchao"] = _ratio(row, torchao, "peak_gib")


def _ratio(of: dict[str, Any], to: dict[str, Any], key: str) -> float | None:
    return of[key] / to[key] if of.get(key) and to.get(key) else None


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    keys = {
        "layers": "layers", "weights": "weights", "recompute": "recompute", "backend": "backend",
        "ms": "milliseconds", "GiB": "peak_gib", "speed-up over hf": "speedup_over_hf",
        "time of TE": "time_of_te", "peak of TE": "peak_of_te",
        "time of torchao": "time_of_torchao", "peak of torchao": "peak_of_torchao", "y": "y_error", "dx": "dx_error",
    }  # fmt: skip
    print_table(title, list(keys), [[row[key] for key in keys.values()] for row in rows])


def choose_rows(only: list[str] | None, recompute: bool, with_compiled: bool) -> list[Row]:
    """Return the rows to measure, and print which cannot be. Raise UserError for an unknown name."""
    known = contestants()
    names = list(dict.fromkeys(contestant.name for contestant in known))
    first_of = {preset: first for first, few in distinct_presets(PRESETS).items() for preset in few}
    only = [first_of.get(name, name) for name in only or ()]
    for name in only:
        if name not in names:
            raise UserError(f'no layers are called "{name}"', key="--only", remedy=nearest(name, names))
    rows, missing = [], {}
    for contestant in known:
        if contestant.name not in (only or names) or (contestant.compiles and not with_compiled and not only):
            continue
        reason = contestant.missing()
        if reason is not None:
            missing[contestant.name] = reason
            continue
        kinds = ["none", "layer"] if contestant.is_peer else ["none", "mlp", "layer"]
        rows += [Row(contestant, kind) for kind in (kinds if recompute else ["none"])]
    for name, reason in missing.items():
        print(f"not measured: {name} ({reason})")
    return rows


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults that follow from --quick."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", type=words, metavar="NAME,...", help=f"of {', '.join(SIZES)} (default 7b,1.5b)")
    parser.add_argument("--layers", type=positive, metavar="L", help="how many (default 4)")
    parser.add_argument("--sequences", type=positive, metavar="B", help="of a micro-batch (default 2)")
    parser.add_argument("--length", type=positive, metavar="S", help="tokens of a sequence (default 8192)")
    parser.add_argument("--repeats", type=positive, metavar="R", help="steps to take the median of (default 15)")
    parser.add_argument("--recompute", action="store_true", help="measure each row also with activation recompute")
    parser.add_argument("--only", type=words, metavar="NAME,...", help="layers to measure (default all)")
    options = parser.parse_args(arguments)
    for name in options.sizes or ():
        if name not in SIZES:
            raise UserError(f'unknown size "{name}"', key="--sizes", remedy=nearest(name, SIZES))
    if not (options.quick or (options.sizes == ["tiny"] and options.length)):
        refuse_on_cpu("--sizes tiny and --length")
    options.sizes = options.sizes or (["tiny"] if options.quick else ["7b", "1.5b"])
    options.layers = options.layers or (2 if options.quick else 4)
    options.sequences = options.sequences or 2
    options.length = options.length or (64 if options.quick else 8192)
    options.repeats = options.repeats or (3 if options.quick else 15)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    mxfp8.missing()  # loads it, which fails once torch has loaded another cuDNN
    facts = begin()
    rows = choose_rows(options.only, options.recompute, with_compiled=not options.quick)
    results = []
    for name in options.sizes:
        shape = Shape(SIZES[name], options.layers, options.sequences, options.length)
        measured = list(measure_rows(rows, shape, options.repeats))
        add_ratios(measured)
        tokens = f"{shape.sequences} x {shape.length} tokens"
        print_rows(f"{name}: forward and backward of {shape.layers} decoder layers, {tokens}", measured)
        results += [{"size": name, **row} for row in measured]
        if options.json:  # after every size: nothing is lost when the time runs out
            sizes = {key: getattr(options, key) for key in ("layers", "sequences", "length", "repeats")}
            write_json(options.json, banner=facts, shape=sizes, rows=results)
    return 0


if __name__ == "__main__":
    main_entry(main)
