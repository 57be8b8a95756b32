"""What the benchmarks share: model sizes, operands, timing, versions, Markdown tables and JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ds_fp8.errors import UserError

PACKAGES = ("ds-fp8", "torch", "triton", "transformer-engine", "transformers", "liger-kernel", "torchao", "deepspeed")
TABLE_WIDTH = 240
"""Columns of a table that goes to a file or a pipe, where nobody says how wide the screen is."""


WEIGHT_STD, GRADIENT_STD = 0.02, 1e-3
"""Spread of random weights and output gradients; inputs have 1. Only the errors depend on it, and barely."""


class ModelSize(NamedTuple):
    """What the linears of a decoder layer follow from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """(output features N, input features K) by name; q, k, v and gate, up are each one product."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


SIZES = {
    "7b": ModelSize(3584, 18944, 28, 4, 128),  # Qwen2.5-7B
    "1.5b": ModelSize(1536, 8960, 12, 2, 128),  # Qwen2.5-1.5B
    "tiny": ModelSize(256, 512, 4, 2, 64),
}


def device() -> torch.device:
    """The device benchmarks run on: the current GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_operands(tokens: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BF16 x [T, K], w [N, K] and dy [T, N], the same on every call."""
    generator = torch.Generator(device()).manual_seed(0)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.empty(rows, columns, device=device(), dtype=torch.bfloat16).normal_(0, std, generator=generator)

    return normal(tokens, k, 1.0), normal(n, k, WEIGHT_STD), normal(tokens, n, GRADIENT_STD)


def measure(function: Callable[[], Any], *, milliseconds: float = 120.0, warmup_milliseconds: float = 25.0) -> float:
    """Median duration of `function()` in milliseconds, over about `milliseconds` of repetitions after a warm-up.

    On a GPU between CUDA events, with the L2 cache flushed before every repetition; on a CPU by the wall clock.
    """
    if device().type == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=warmup_milliseconds, rep=milliseconds, return_mode="median")
    from torch.utils.benchmark import Timer

    function()
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=milliseconds / 1e3).median * 1e3


def banner() -> dict[str, str]:
    """The machine and the versions of what a figure depends on; packages that are not installed are left out."""
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
    """One line: the device, then every version."""
    rest = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    print(f"{facts['device']}, {rest}", flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A title and below it a Markdown table, columns of numbers right-aligned, cells as `format_cell` writes them."""
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
    """A table cell's text: floats with 3 significant digits (1148, 10.3, 0.907, 1.7e-03), None as a dash."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value and abs(value) < 1e-2:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_json(path: str | os.PathLike, **sections: Any) -> None:
    """Write `sections` (banner=..., rows=...) as one JSON object. Raises UserError where the file cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(sections, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", key="--json", remedy="name a file in a folder that can be written"
        ) from error


def integers(text: str) -> list[int]:
    """The positive integers of a comma-separated argument. Raises ValueError for anything else, for argparse."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(f"{text} has a number below 1")
    return values


def words(text: str) -> list[str]:
    """The words of a comma-separated argument."""
    return [part.strip() for part in text.split(",") if part.strip()]
