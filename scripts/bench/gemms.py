"""The products of FP8 linears against BF16's, one by one: time, rate and error.

    python scripts/bench/gemms.py --size 7b                   every product of a decoder layer, every preset and backend
    python scripts/bench/gemms.py --quick                     seconds on a CPU, with the emulated product

The operands are cast by the library's own recipes, so a row is exactly what training multiplies: x [T, K] is the input
of a linear, w [N, K] its weight, dy [T, N] the gradient of its output. Presets that multiply the same casts share a
row.

Errors are relative (Frobenius norm), over a sample of rows and columns of the result:
    "vs FP64"   against the FP64 product of the same FP8 operands: what the product itself loses (BF16 output: 1.7e-3)
    "vs BF16"   against the BF16 product of the operands before their casts: what FP8 costs
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from common import (
    SIZES,
    ModelSize,
    able_backends,
    argument_parser,
    begin,
    check_presets,
    describe_cast,
    integers,
    measure,
    preset_recipe,
    print_table,
    random_operands,
    refuse_on_cpu,
    words,
    write_json,
)

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import main_entry
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.presets import PRESETS
from ds_fp8.gemm import BACKENDS, scaled_matmul, unavailable
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import transposed_weight

PASSES = "fprop", "dgrad", "wgrad"

SAMPLE = 128  # Rows and columns of a result that are compared with FP64


class Product(NamedTuple):
    """a [M, K] times b [N, K] transposed, and the same in BF16."""

    name: str
    a: QuantizedTensor
    b: QuantizedTensor
    a_bf16: torch.Tensor
    b_bf16: torch.Tensor

    @property
    def operands(self) -> tuple[CastSpec, CastSpec]:
        return self.a.spec, self.b.spec

    @property
    def casts(self) -> str:
        return f"{describe_cast(self.a)} · {describe_cast(self.b)}"

    def teraflops(self, milliseconds: float) -> float:
        return 2 * self.a.shape[0] * self.b.shape[0] * self.a.shape[1] / milliseconds / 1e9


def products(recipe: LinearRecipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[Product]:
    """Return the three products of a linear, x [T, K], w [N, K], dy [T, N] cast as `recipe` says."""
    x_TK, x_KT = recipe.quantize_input_both(x)
    w_NK = recipe.quantize_weight(w)
    w_KN, factor = transposed_weight(w_NK)
    dy_TN, dy_NT = recipe.quantize_grad_output(dy, column_factor=factor)
    return [
        Product("fprop", x_TK, w_NK, x, w),
        Product("dgrad", dy_TN, w_KN, dy, w.t()),
        Product("wgrad", dy_NT, x_KT, dy.t(), x.t()),
    ]


def sampled_errors(result: torch.Tensor, product: Product) -> dict[str, float]:
    """Return relative errors of `result` [M, N] on evenly spaced rows and columns, named as in the module docstring."""
    rows, columns = (
        torch.linspace(0, length - 1, min(length, SAMPLE), device=result.device).long() for length in result.shape
    )

    def relative(exact: torch.Tensor) -> float:
        sample = result[rows][:, columns].double()
        return ((sample - exact).norm() / exact.norm()).item()

    exact = product.a.dequantize()[rows].double() @ product.b.dequantize()[columns].double().t()
    bf16 = product.a_bf16[rows] @ product.b_bf16[columns].t()
    return {"error_vs_fp64": relative(exact), "error_vs_bf16": relative(bf16.double())}


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
    """Return a row for every distinct product of a linear under `presets`, times backend."""
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
                key = (product.name, product.casts, backend)
                if key not in rows:
                    rows[key] = _measure_product(product, backend, bf16_times[product.name], milliseconds)
                rows[key]["presets"].append(preset)
    by_pass = sorted(rows.values(), key=lambda row: PASSES.index(row["pass"]))
    return [{"linear": linear, "tokens": tokens, **row} for row in by_pass]


def _measure_product(product: Product, backend: str, bf16_time: float, milliseconds: float) -> dict[str, Any]:
    def multiply() -> torch.Tensor:
        return scaled_matmul(product.a, product.b, backend=backend)

    errors = sampled_errors(multiply(), product)
    time = measure(multiply, milliseconds=milliseconds)
    return {
        "pass": product.name,
        "shape": [product.a.shape[0], product.b.shape[0], product.a.shape[1]],
        "casts": product.casts,
        "backend": backend,
        "presets": [],
        "milliseconds": time,
        "teraflops": product.teraflops(time),
        "bf16_milliseconds": bf16_time,
        "bf16_teraflops": product.teraflops(bf16_time),
        "speedup": bf16_time / time,
        **errors,
    }


def print_products(size: str, rows: list[dict[str, Any]]) -> None:
    columns = "linear", "pass", "M x N x K", "casts", "backend", "ms", "TFLOP/s", "BF16", "speed-up"
    print_table(
        f"{size}: products, median times; speed-up over BF16",
        (*columns, "vs FP64", "vs BF16", "presets"),
        [
            (
                row["linear"], row["pass"], "x".join(map(str, row["shape"])), row["casts"],
                row["backend"], row["milliseconds"], row["teraflops"], row["bf16_teraflops"], row["speedup"],
                row["error_vs_fp64"], row["error_vs_bf16"], ", ".join(row["presets"]) or None,
            )
            for row in rows
        ],
    )  # fmt: skip


def print_totals(rows: list[dict[str, Any]]) -> None:
    """Print the time of a decoder layer's products by preset and backend, for backends that can multiply them all."""
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


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults that follow from --quick and the machine."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), help="whose linears to measure (default 7b, --quick: tiny)")
    parser.add_argument("--tokens", type=integers, metavar="T,...", help="tokens of a micro-batch (default 16384)")
    parser.add_argument("--presets", type=words, metavar="NAME,...", help=f"default all: {','.join(PRESETS)}")
    parser.add_argument(
        "--backends", type=words, metavar="NAME,...", help=f"default all that run: {','.join(BACKENDS)}"
    )
    options = parser.parse_args(arguments)
    options.presets = check_presets(options.presets)
    if not (options.quick or (options.tokens and options.size == "tiny")):
        refuse_on_cpu("--size tiny and --tokens")
    options.size = options.size or ("tiny" if options.quick else "7b")
    options.tokens = options.tokens or ([256] if options.quick else [16384])
    options.milliseconds = 2.0 if options.quick else 120.0
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    backends = able_backends(options.backends)
    report_gaps(options.presets, backends)
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
        write_json(options.json, banner=facts, size=options.size, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
