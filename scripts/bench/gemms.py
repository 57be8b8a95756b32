"""The products of FP8 linears against BF16's, one by one: time, rate and error.

    python scripts/bench/gemms.py --size 7b                   every product of a decoder layer, every preset and backend
    python scripts/bench/gemms.py --crossover                 whole linears with their casts: where FP8 stops paying
    python scripts/bench/gemms.py --quick                     seconds on a CPU, with the emulated product

The operands are cast by the library's own recipes, so a row is exactly what training multiplies: x [T, K] is the input
of a linear, w [N, K] its weight, dy [T, N] the gradient of its output. Presets that multiply the same casts share a
row. Products without block scales are measured with both accumulations, whichever the preset asks for.

Errors are relative (Frobenius norm), over a sample of rows and columns of the result:
    "vs FP64"   against the FP64 product of the same FP8 operands: what the product itself loses (BF16 output: 1.7e-3)
    "vs BF16"   against the BF16 product of the operands before their casts: what FP8 costs
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

import torch
from common import (
    SIZES,
    ModelSize,
    banner,
    device,
    integers,
    measure,
    print_banner,
    print_table,
    random_operands,
    words,
    write_json,
)
from torch import nn

from ds_fp8.config import PRESETS, parse_fp8
from ds_fp8.errors import UserError, main_entry
from ds_fp8.gemm import BACKENDS, Operand, scaled_matmul, unavailable
from ds_fp8.modules.linear import FP8Linear
from ds_fp8.modules.recipe import LinearRecipe
from ds_fp8.modules.weights import dgrad_operand, hold_in_fp8
from ds_fp8.quantize import QuantizedTensor
from ds_fp8.schema import nearest

PASSES = "fprop", "dgrad", "wgrad"

SAMPLE = 128
"""Rows and columns of a result that are compared with FP64."""


def preset_recipe(preset: str) -> LinearRecipe:
    """How `preset` casts and multiplies on this machine, without the statistics that training takes."""
    return LinearRecipe.from_config(parse_fp8({"fp8": {"preset": preset, "monitor": {"every": 0}}}))


class Product(NamedTuple):
    """a [M, K] times b [N, K] transposed, and the same in BF16."""

    name: str
    a: QuantizedTensor
    b: QuantizedTensor
    a_bf16: torch.Tensor
    b_bf16: torch.Tensor

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return Operand(self.a.format, self.a.granularity), Operand(self.b.format, self.b.granularity)

    @property
    def casts(self) -> str:
        """Both casts in words, "1x128 · 128x128"; format and scale type only where they are not e4m3 and pow2."""

        def describe(q: QuantizedTensor) -> str:
            unusual = [q.format] * (q.format != "e4m3") + [f"{q.scale_type} scale"] * (q.scale_type != "pow2")
            return " ".join([q.granularity, *unusual])

        return f"{describe(self.a)} · {describe(self.b)}"

    def has_fast_accumulation(self, backend: str) -> bool:
        """Whether `backend` can sum this product in fewer bits than FP32."""
        return backend != "reference" and not {self.a.granularity, self.b.granularity} & {"1x128", "128x128"}

    def teraflops(self, milliseconds: float) -> float:
        """TFLOP/s of one product that takes `milliseconds`."""
        return 2 * self.a.shape[0] * self.b.shape[0] * self.a.shape[1] / milliseconds / 1e9


def products(recipe: LinearRecipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[Product]:
    """The three products of a linear, x [T, K], w [N, K], dy [T, N] cast as `recipe` says."""
    x_TK, x_KT = recipe.cast_input_both(x)
    w_NK = recipe.cast_weight(w)
    w_KN, factor = dgrad_operand(w_NK)
    dy_TN, dy_NT = recipe.cast_grad_output(dy, column_factor=factor)
    return [
        Product("fprop", x_TK, w_NK, x, w),
        Product("dgrad", dy_TN, w_KN, dy, w.t()),
        Product("wgrad", dy_NT, x_KT, dy.t(), x.t()),
    ]


def sampled_errors(result: torch.Tensor, product: Product) -> dict[str, float]:
    """Relative errors of `result` [M, N] on evenly spaced rows and columns, as the module's docstring names them."""
    rows, columns = (
        torch.linspace(0, length - 1, min(length, SAMPLE), device=result.device).long() for length in result.shape
    )

    def relative(exact: torch.Tensor) -> float:
        sample = result[rows][:, columns].double()
        return ((sample - exact).norm() / exact.norm()).item()

    exact = product.a.dequantize()[rows].double() @ product.b.dequantize()[columns].double().t()
    bf16 = product.a_bf16[rows] @ product.b_bf16[columns].t()
    return {"error_vs_fp64": relative(exact), "error_vs_bf16": relative(bf16.double())}


def able_backends(wanted: list[str] | None) -> list[str]:
    """The backends to measure: those asked for, else all that run here; the emulation only where nothing else runs.

    Raises UserError for one that does not exist or does not run here, with the reason.
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


def report_gaps(presets: list[str], backends: list[str]) -> set[tuple[str, str]]:
    """Print which products of which preset a backend does not multiply; the (preset, backend) with such gaps."""
    gaps = set()
    for preset in presets:
        for product in products(preset_recipe(preset), *random_operands(128, 128, 128)):
            for backend in backends:
                reason = unavailable(backend, [product.operands])
                if reason is not None:
                    gaps.add((preset, backend))
                    print(f"not measured: {product.name} of {preset} on {backend} ({reason})")
    return gaps


def measure_linear(
    size: ModelSize, linear: str, tokens: int, presets: list[str], backends: list[str], milliseconds: float
) -> list[dict[str, Any]]:
    """One row for every distinct product of a linear under `presets`, times accumulation, times backend."""
    n, k = size.linears()[linear]
    x, w, dy = random_operands(tokens, n, k)
    bf16_times = {
        name: measure(lambda a=a, b=b: a @ b, milliseconds=milliseconds)
        for name, a, b in zip(PASSES, (x, dy, dy.t()), (w.t(), w, x), strict=True)
    }
    rows: dict[tuple, dict[str, Any]] = {}
    for preset in presets:
        recipe = preset_recipe(preset)
        for product in products(recipe, x, w, dy):
            for backend in backends:
                if unavailable(backend, [product.operands]) is not None:
                    continue
                fast_asked = recipe.fast_accumulation and product.has_fast_accumulation(backend)
                for fast in (False, True) if product.has_fast_accumulation(backend) else (False,):
                    key = (product.name, product.casts, backend, fast)
                    if key not in rows:
                        rows[key] = _measure_product(product, backend, fast, bf16_times[product.name], milliseconds)
                    if fast == fast_asked:
                        rows[key]["presets"].append(preset)
    by_pass = sorted(rows.values(), key=lambda row: PASSES.index(row["pass"]))
    return [{"linear": linear, "tokens": tokens, **row} for row in by_pass]


def _measure_product(
    product: Product, backend: str, fast: bool, bf16_time: float, milliseconds: float
) -> dict[str, Any]:
    def multiply() -> torch.Tensor:
        return scaled_matmul(product.a, product.b, backend=backend, fast_accumulation=fast)

    errors = sampled_errors(multiply(), product)
    time = measure(multiply, milliseconds=milliseconds)
    return {
        "pass": product.name,
        "shape": [product.a.shape[0], product.b.shape[0], product.a.shape[1]],
        "casts": product.casts,
        "accumulation": "fast" if fast else "fp32",
        "backend": backend,
        "presets": [],
        "milliseconds": time,
        "teraflops": product.teraflops(time),
        "bf16_milliseconds": bf16_time,
        "bf16_teraflops": product.teraflops(bf16_time),
        "speedup": bf16_time / time,
        **errors,
    }


def measure_crossover(
    preset: str, backend: str, hidden: int, tokens: int, milliseconds: float
) -> dict[str, int | float | str]:
    """Forward and backward of a linear [hidden, hidden], casts of x and dy included, FP8 against BF16.

    The weight is in FP8 beforehand, as the parameter gather leaves it.
    """
    x, _, dy = random_operands(tokens, hidden, hidden)
    x.requires_grad_()
    layer = nn.Linear(hidden, hidden, bias=False, device=x.device, dtype=x.dtype)

    def step() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    bf16_time = measure(step, milliseconds=milliseconds)
    layer.__class__ = FP8Linear
    layer.recipe = dataclasses.replace(preset_recipe(preset), backend=backend)
    hold_in_fp8(layer.weight, layer.recipe)
    time = measure(step, milliseconds=milliseconds)
    return {
        "preset": preset,
        "backend": backend,
        "hidden": hidden,
        "tokens": tokens,
        "milliseconds": time,
        "bf16_milliseconds": bf16_time,
        "speedup": bf16_time / time,
    }


def print_products(size: str, rows: list[dict[str, Any]]) -> None:
    columns = "linear", "pass", "M x N x K", "casts", "sums", "backend", "ms", "TFLOP/s", "BF16", "speed-up"
    print_table(
        f"{size}: products, median times; speed-up over BF16",
        (*columns, "vs FP64", "vs BF16", "presets"),
        [
            (
                row["linear"], row["pass"], "x".join(map(str, row["shape"])), row["casts"], row["accumulation"],
                row["backend"], row["milliseconds"], row["teraflops"], row["bf16_teraflops"], row["speedup"],
                row["error_vs_fp64"], row["error_vs_bf16"], ", ".join(row["presets"]) or None,
            )
            for row in rows
        ],
    )  # fmt: skip


def print_totals(rows: list[dict[str, Any]]) -> None:
    """What the products of a whole decoder layer take, by preset and backend, where the backend multiplies them all."""
    totals = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        wanted = {(row["linear"], row["pass"]) for row in rows}
        for preset in PRESETS:
            for backend in BACKENDS:
                mine = [r for r in rows if r["tokens"] == tokens and r["backend"] == backend and preset in r["presets"]]
                if {(row["linear"], row["pass"]) for row in mine} == wanted:
                    fp8, bf16 = (sum(row[key] for row in mine) for key in ("milliseconds", "bf16_milliseconds"))
                    totals.append((preset, backend, tokens, fp8, bf16, bf16 / fp8))
    columns = "preset", "backend", "tokens", "FP8 ms", "BF16 ms", "speed-up"
    print_table("products of one decoder layer, without casts", columns, totals)


def print_crossover(rows: list[dict[str, Any]]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    for preset, backend in dict.fromkeys((row["preset"], row["backend"]) for row in rows):
        mine = {
            (row["hidden"], row["tokens"]): row["speedup"]
            for row in rows
            if (row["preset"], row["backend"]) == (preset, backend)
        }
        print_table(
            f"{preset}, {backend}: forward and backward of one linear, BF16 time / FP8 time (below 1 FP8 loses)",
            ("hidden", *(f"{count} tokens" for count in tokens)),
            [(hidden, *(mine[hidden, count] for count in tokens)) for hidden in sorted({h for h, _ in mine})],
        )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with the defaults that follow from --quick, --crossover and the machine filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), help="whose linears to measure (default 7b, --quick: tiny)")
    parser.add_argument("--tokens", type=integers, metavar="T,...", help="tokens of a micro-batch (default 16384)")
    parser.add_argument("--presets", type=words, metavar="NAME,...", help=f"default all: {','.join(PRESETS)}")
    parser.add_argument(
        "--backends", type=words, metavar="NAME,...", help=f"default all that run: {','.join(BACKENDS)}"
    )
    parser.add_argument("--crossover", action="store_true", help="whole linears over tokens and hidden sizes instead")
    parser.add_argument("--hidden", type=integers, metavar="H,...", help="hidden sizes of --crossover")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repetitions, for any machine")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)

    for preset in options.presets or ():
        if preset not in PRESETS:
            raise UserError(f'unknown preset "{preset}"', key="--presets", remedy=nearest(preset, PRESETS))
    options.presets = options.presets or list(PRESETS)
    chosen_small = options.tokens and (options.hidden if options.crossover else options.size == "tiny")
    if device().type != "cuda" and not options.quick and not chosen_small:
        raise UserError(
            "there is no GPU here, and emulated products of the default sizes take hours",
            remedy="add --quick, or choose small ones: --size tiny, or --hidden with --crossover, and --tokens",
        )
    options.size = options.size or ("tiny" if options.quick else "7b")
    if options.crossover:
        options.tokens = options.tokens or ([32, 128] if options.quick else [256, 1024, 4096, 16384])
        options.hidden = options.hidden or ([64, 128] if options.quick else [512, 1024, 2048, 4096, 8192])
    else:
        options.tokens = options.tokens or ([256] if options.quick else [16384])
    options.milliseconds = 2.0 if options.quick else 120.0
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = banner()
    print_banner(facts)
    backends = able_backends(options.backends)
    gaps = report_gaps(options.presets, backends)
    if options.crossover:
        rows = [
            measure_crossover(preset, backend, hidden, tokens, options.milliseconds)
            for preset in options.presets
            for backend in backends
            if (preset, backend) not in gaps
            for hidden in options.hidden
            for tokens in options.tokens
        ]
        print_crossover(rows)
    else:
        size = SIZES[options.size]
        rows = [
            row
            for tokens in options.tokens
            for linear in size.linears()
            for row in measure_linear(size, linear, tokens, options.presets, backends, options.milliseconds)
        ]
        print_products(options.size, rows)
        print_totals(rows)
    if options.json:
        write_json(options.json, banner=facts, size=None if options.crossover else options.size, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
