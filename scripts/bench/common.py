"""Parts that the benchmarks share: command line, model sizes, operands, timing, versions, Markdown tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.presets import PRESETS
from ds_fp8.config.schema import nearest
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.gemm import BACKENDS, unavailable
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.monitor.energy import energy_counter

PACKAGES = ("ds-fp8", "torch", "triton", "transformer-engine", "transformers", "liger-kernel", "torchao", "deepspeed")
TABLE_WIDTH = 240  # Columns of a table that goes to a file or a pipe, where nobody says how wide the screen is

# Spread of random weights and output gradients; inputs have 1. Only the errors depend on it, and barely.
WEIGHT_STD, GRADIENT_STD = 0.02, 1e-3

# Of `sustained`: the share of the time that is run before, until clocks are those of the power limit, and the seconds
# that the GPU is given to do at once
SETTLE, CHUNK = 0.15, 0.008


class ModelSize(NamedTuple):
    """Sizes of a decoder layer, which its linears follow from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False  # True if embedding and head are one matrix

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (output features N, input features K) by name; q, k, v and gate, up are each one product."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


SIZES = {
    "70b": ModelSize(8192, 28672, 64, 8, 128),  # Llama 3.1 70B
    "32b": ModelSize(5120, 27648, 40, 8, 128),  # Qwen2.5-32B
    "14b": ModelSize(5120, 13824, 40, 8, 128),  # Qwen2.5-14B
    "8b": ModelSize(4096, 14336, 32, 8, 128),  # Llama 3.1 8B
    "7b": ModelSize(3584, 18944, 28, 4, 128),  # Qwen2.5-7B
    "1.5b": ModelSize(1536, 8960, 12, 2, 128, tied=True),  # Qwen2.5-1.5B
    "tiny": ModelSize(256, 512, 4, 2, 64),
}


def device() -> torch.device:
    """Return the device that benchmarks run on: the current GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def preset_recipe(preset: str, **linear: Any) -> LinearRecipe:
    """Return the recipe of `preset` with changes to "linear" on this machine, without statistics."""
    return recipe_from_config(parse_fp8({"fp8": {"preset": preset, "linear": linear, "monitor": {"every": 0}}}))


def distinct_presets(presets: Iterable[str]) -> dict[str, list[str]]:
    """Group presets that compute alike (and differ in the optimizer, say) under the first of each group."""
    alike: dict[LinearRecipe, list[str]] = {}
    for preset in presets:
        alike.setdefault(preset_recipe(preset), []).append(preset)
    return {few[0]: few for few in alike.values()}


def describe_cast(q: QuantizedTensor) -> str:
    """Describe a cast in words: its granularity, and format and scale type where they are not e4m3 and pow2."""
    unusual = [q.format] * (q.format != "e4m3") + [f"{q.scale_type} scale"] * (q.scale_type != "pow2")
    return " ".join([q.granularity, *unusual])


def able_backends(wanted: list[str] | None) -> list[str]:
    """Return the backends to measure: those asked for, else all that run here; the emulation only as the last resort.

    Raise UserError for one that does not exist or does not run here, with the reason.
    """
    if wanted is None:
        able = [name for name in BACKENDS if unavailable(name) is None]
        for name in BACKENDS:
            if name not in able:
                print(f"not measured: {name} ({unavailable(name)})")
        return [name for name in able if name != "reference"] or able
    for name in wanted:
        if name not in BACKENDS:
            raise UserError(f'unknown backend "{name}"', key="--backends", remedy=nearest(name, BACKENDS))
        reason = unavailable(name)
        if reason is not None:
            raise UserError(f'the backend "{name}" cannot run here: {reason}', key="--backends", remedy="leave it out")
    return wanted


def normal(*shape: int, std: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Return normally distributed BF16 numbers, the same on every call with one seed."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.empty(shape, device=device(), dtype=torch.bfloat16).normal_(0, std, generator=generator)


def random_operands(tokens: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(tokens, k, seed=0), normal(n, k, std=WEIGHT_STD, seed=1), normal(tokens, n, std=GRADIENT_STD, seed=2)


def measure(function: Callable[[], Any], *, milliseconds: float = 120.0, warmup_milliseconds: float = 25.0) -> float:
    """Return the median duration of `function()` in ms, over about `milliseconds` of repetitions after a warm-up.

    On a GPU between CUDA events, with the L2 cache flushed before every repetition; on a CPU by the wall clock.
    """
    if device().type == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=warmup_milliseconds, rep=milliseconds, return_mode="median")
    from torch.utils.benchmark import Timer

    function()
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=milliseconds / 1e3).median * 1e3


class Sustained(NamedTuple):
    """A call in a steady state. `joules` is None where nothing counts them."""

    milliseconds: float
    joules: float | None = None

    @property
    def watts(self) -> float | None:
        return self.joules and self.joules / self.milliseconds * 1e3


def sustained(function: Callable[[], Any], seconds: float = 2.0, replay: bool = True) -> Sustained:
    """Return duration and energy of `function()`, called back to back for at least `seconds`, after SETTLE of them.

    On a GPU calls are replayed as CUDA graphs of about CHUNK seconds, so that the GPU never waits for the host; without
    `replay` they are launched anew. What fits into the L2 cache stays there. The energy is the power between the first
    and the last move of the counter, times the duration.
    """
    chunk, calls, synchronize = _chunk(function, replay)
    counter = energy_counter(device())
    begin = time.perf_counter()
    while time.perf_counter() - begin < SETTLE * seconds:
        chunk()
        synchronize()
    moves: list[tuple[float, float]] = []  # when the counter was found to have moved, and to what
    last, chunks, begin = counter and counter(), 0, time.perf_counter()
    # Where nothing is ever counted, as long: a counter that stands still is no reason to go on.
    while (passed := time.perf_counter() - begin) < seconds or (counter and len(moves) < 2 and passed < 2 * seconds):
        chunk()
        synchronize()
        chunks += 1
        if counter and (count := counter()) != last:
            last = count
            moves.append((time.perf_counter(), count))
    if device().type == "cuda":
        torch.cuda.synchronize()  # what is replayed may be freed then
    milliseconds = passed * 1e3 / (chunks * calls)
    if len(moves) < 2:
        return Sustained(milliseconds)
    (first, before), (end, after) = moves[0], moves[-1]
    return Sustained(milliseconds, (after - before) / (end - first) * milliseconds / 1e3)


def _chunk(function: Callable[[], Any], replay: bool) -> tuple[Callable[[], Any], int, Callable[[], None]]:
    """Return what calls `function` for about CHUNK seconds, how many calls that are, and what waits for the one before.

    The wait leaves one chunk in the GPU's queue.
    """
    function()
    if device().type != "cuda":
        return function, 1, lambda: None
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    calls = max(1, round(3 * CHUNK / (time.perf_counter() - begin)))

    def run() -> None:
        for _ in range(calls):
            function()

    if replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    events: list[torch.cuda.Event] = []

    def wait() -> None:
        events.append(torch.cuda.Event())
        events[-1].record()
        if len(events) > 1:
            events.pop(0).synchronize()

    return run, calls, wait


def banner() -> dict[str, str]:
    """Return the machine and the versions of what a figure depends on; packages that are not installed are left out."""
    facts = {"device": torch.cuda.get_device_name() if device().type == "cuda" else _processor()}
    if torch.version.cuda:
        facts["cuda"] = torch.version.cuda
    facts["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _processor() -> str:
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def print_banner(facts: dict[str, str]) -> None:
    rest = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    print(f"{facts['device']}, {rest}", flush=True)


def begin() -> dict[str, str]:
    facts = banner()
    print_banner(facts)
    return facts


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a title and a Markdown table, columns of numbers right-aligned, cells as `format_cell` writes them."""
    table = Table(*columns, box=box.MARKDOWN)
    cells = [list(row) for row in rows]
    for column, values in zip(table.columns, zip(*cells, strict=True), strict=False):
        if all(value is None or isinstance(value, int | float) for value in values):
            column.justify = "right"
    for row in cells:
        table.add_row(*map(format_cell, row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(title, markup=False, highlight=False)
    console.print(table)


def format_cell(value: object) -> str:
    """Format a table cell: floats with 3 significant digits (1148, 10.3, 0.907, 1.7e-03), None as a dash."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value and abs(value) < 1e-2:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_json(path: str | os.PathLike, **sections: Any) -> None:
    """Write `sections` (banner=..., rows=...) as one JSON object. Raise UserError where the file cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(sections, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", key="--json", remedy="name a file in a folder that can be written"
        ) from error


def argument_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes and few repetitions, for any machine")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    return parser


def check_presets(wanted: list[str] | None) -> list[str]:
    """Return the presets asked for, all by default. Raise UserError for one that does not exist."""
    for preset in wanted or ():
        if preset not in PRESETS:
            raise UserError(f'unknown preset "{preset}"', key="--presets", remedy=nearest(preset, PRESETS))
    return wanted or list(PRESETS)


def refuse_on_cpu(smaller: str) -> None:
    """Raise UserError where there is no GPU; `smaller` names the arguments that choose smaller sizes."""
    if device().type != "cuda":
        raise UserError(
            "there is no GPU here, and emulated products of the default sizes take hours",
            remedy=f"add --quick, or choose small sizes with {smaller}",
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def positive(text: str) -> int:
    """Parse a positive integer. Raise ValueError for anything else, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is below 1")
    return value


def integers(text: str) -> list[int]:
    """Parse the positive integers of a comma-separated argument. Raise ValueError for anything else, for argparse."""
    return [positive(part) for part in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    """Parse the integers of a comma-separated argument; for a first one below 0 write --option=-3,-2."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 0,1,2") from None


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
