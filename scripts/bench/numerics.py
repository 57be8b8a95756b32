"""Errors of each part: outputs and gradients per preset and backend, over sizes that fit nothing among them.

    python scripts/bench/numerics.py                          every part, backend and preset (of those alike the first)
    python scripts/bench/numerics.py --quick                  two sizes of each part

A row is the worst over sizes that are multiples of 128 and of nothing, one token, and none: of the outputs of a part,
or of the gradients of its inputs (dgrad), or of its weights, biases and norms (wgrad). Errors are relative (Frobenius):

    "vs FP64"     against the same part on the CPU: reference casts, every product of the same casts summed in FP64, and
                  results rounded to BF16 where the part rounds them. One whole rounding to BF16 would be 1.7e-3. Where
                  a part casts what it has computed, a last bit may fall on the other side of a cast's rounding, too
    "vs first"    against the first backend of the table: whether backends agree
    "vs BF16"     against the part in plain BF16: what FP8 costs
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import torch
from common import (
    able_backends,
    argument_parser,
    begin,
    check_presets,
    device,
    distinct_presets,
    preset_recipe,
    print_table,
    words,
    write_json,
)
from numeric_parts import ACTIVATIONS, PARTS, Part, Tensors, random_tensors

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import main_entry
from ds_fp8.config.presets import PRESETS
from ds_fp8.gemm import BACKENDS
from ds_fp8.layers.linear.recipe import LinearRecipe

ERRORS = "error_vs_fp64", "error_vs_first", "error_vs_bf16"


class ExactRecipe(LinearRecipe):
    """The same casts, and products summed in FP64."""

    def multiply(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
        return (a.dequantize().double() @ b.dequantize().double().t()).to(out_dtype)


def exact(recipe: LinearRecipe) -> ExactRecipe:
    """Return `recipe` with products summed in FP64."""
    return ExactRecipe(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)})


def outputs_and_gradients(part: Part, recipe: LinearRecipe | None, tensors: Tensors, where: torch.device) -> Tensors:
    """Return FP64 results ("y", "dx", ...) of a part and its backward, in FP8 or, where `recipe` is None, plainly."""
    leaves = {name: torch.nn.Parameter(tensor.to(where)) for name, tensor in tensors.items()}
    outputs = part.plain(leaves) if recipe is None else part.fp8(recipe, leaves)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(output.shape, generator=generator).to(output) for output in outputs.values()]
    torch.autograd.backward(list(outputs.values()), gradients)
    results = {**outputs, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
    return {name: result.detach().double().cpu() for name, result in results.items()}


def kind_of(part: Part, result: str) -> str:
    """Return whether a result of `outputs_and_gradients` is an "output", of "dgrad" or of "wgrad"."""
    if result.removeprefix("d") not in part.inputs(*part.shapes[0]):
        return "output"
    return "dgrad" if result.removeprefix("d") in ACTIVATIONS else "wgrad"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over that of `expected`, or the former alone where `expected` is zero."""
    norm = expected.norm().item()
    return (found - expected).norm().item() / (norm or 1.0)


def measure_part(
    name: str, part: Part, shape: tuple[int, ...], preset: str, backends: list[str]
) -> list[dict[str, Any]]:
    """Return a row for every result of a part of one size, times backend."""
    recipe, tensors = preset_recipe(preset), random_tensors(part, shape)
    fp64 = outputs_and_gradients(part, exact(recipe), tensors, torch.device("cpu"))
    bf16 = outputs_and_gradients(part, None, tensors, device())
    rows, first = [], None
    for backend in backends:
        try:
            found = outputs_and_gradients(part, dataclasses.replace(recipe, backend=backend), tensors, device())
        except ValueError as reason:  # the backend has not all products of the part
            print(f"not measured: {name} {list(shape)}, {preset} on {backend} ({reason})")
            continue
        for result, values in found.items():
            errors = [relative_error(values, other[result]) if other else None for other in (fp64, first, bf16)]
            rows.append(
                {"part": name, "kind": kind_of(part, result), "result": result, "preset": preset, "backend": backend}
                | {"shape": list(shape), **dict(zip(ERRORS, errors, strict=True))}
            )
        first = first or found
    return rows


def worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows that differ in size or name of the result only, with the largest of each error; NaN is the largest."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = row["part"], row["kind"], row["preset"], row["backend"]
        kept = found.setdefault(key, dict(row))
        for error in ERRORS:
            both = [value for value in (kept[error], row[error]) if value is not None]
            kept[error] = math.nan if any(map(math.isnan, both)) else max(both, default=None)
    return list(found.values())


def print_rows(rows: list[dict[str, Any]]) -> None:
    keys = "part", "kind", "preset", "backend", *ERRORS
    columns = "part", "product", "preset", "backend", "vs FP64", "vs first", "vs BF16"
    print_table("relative errors, the worst of all sizes", columns, [[row[key] for key in keys] for row in rows])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--presets", type=words, metavar="NAME,...", help=f"default all: {','.join(PRESETS)}")
    parser.add_argument(
        "--backends", type=words, metavar="NAME,...", help=f"default all that run: {','.join(BACKENDS)}"
    )
    options = parser.parse_args(arguments)
    options.presets = check_presets(options.presets)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    backends = able_backends(options.backends)
    if options.backends is None and "reference" not in backends:
        backends.append("reference")
    rows = []
    for preset in distinct_presets(options.presets):
        for name, part in PARTS.items():
            for shape in part.shapes[:2] if options.quick else part.shapes:
                rows += measure_part(name, part, shape, preset, backends)
    print_rows(worst(rows))
    if options.json:
        write_json(options.json, banner=facts, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
