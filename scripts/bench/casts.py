"""Every cast that training does, alone and fused with what precedes it: time, and bandwidth against a copy.

    python scripts/bench/casts.py --size 7b                   the casts of every preset
    python scripts/bench/casts.py --quick                     seconds on a CPU, through the reference casts

T tokens, H hidden and F intermediate features. Each row names what is cast along its rows, for the product that
contracts over the features, and along its columns, for the one that contracts over the tokens. Presets that cast alike
share a row.

    "B/element"  bytes that have to move at least, over the elements of the tensor that is cast; scales not counted
    "of copy"    time of a copy that moves as many bytes, over the time; measured in the same run
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    SIZES,
    WEIGHT_STD,
    ModelSize,
    argument_parser,
    begin,
    check_presets,
    describe_cast,
    device,
    measure,
    normal,
    positive,
    preset_recipe,
    print_table,
    refuse_on_cpu,
    words,
    write_json,
)

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import main_entry
from ds_fp8.config.presets import PRESETS
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_quantize
from ds_fp8.layers.decoder.rotary import HeadLayout, HeadTransform, rotate, rotate_backward
from ds_fp8.layers.linear.gated_activation import gated_activation_backward, gated_activation_forward
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import transposed_weight

EPS = 1e-6  # Epsilon of RMSNorm


@dataclass(frozen=True)
class Operation:
    """Something to time."""

    name: str
    casts: str  # Description of its FP8 results; together with `name` it tells operations apart
    elements: int
    bytes_per_element: float
    run: Callable[[], Any]

    @property
    def bytes(self) -> int:
        return round(self.elements * self.bytes_per_element)


def in_words(rowwise: QuantizedTensor | None, columnwise: QuantizedTensor | None = None) -> str:
    """Describe the casts of a matrix along rows and columns: "rows 1x128, columns 128x128"."""
    parts = {"rows": rowwise, "columns": columnwise}
    return ", ".join(f"{along} {describe_cast(q)}" for along, q in parts.items() if q is not None)


def cast_operations(recipe: LinearRecipe, size: ModelSize, tokens: int) -> Iterator[Operation]:
    """Yield the casts of an input x [T, F], of an output gradient dy [T, F] and of a weight w [2F, H]."""
    x, w = normal(tokens, size.intermediate), normal(2 * size.intermediate, size.hidden, std=WEIGHT_STD)
    row, column = recipe.quantize_input_both(x)
    yield Operation("x", in_words(row, column), x.numel(), 4, lambda: recipe.quantize_input_both(x))
    yield Operation("x", in_words(row), x.numel(), 3, lambda: recipe.quantize_input(x))
    yield Operation("x", in_words(None, column), x.numel(), 3, lambda: recipe.quantize_input_columnwise(x))
    del row, column

    w_cast = recipe.quantize_weight(w)
    yield Operation("w", in_words(w_cast), w.numel(), 3, lambda: recipe.quantize_weight(w))
    yield Operation("w transposed", describe_cast(w_cast), w.numel(), 2, lambda: transposed_weight(w_cast))

    factor = None if transposed_weight(w_cast)[1] is None else torch.ones(x.shape[1], device=x.device)
    casts = in_words(*recipe.quantize_grad_output(x, column_factor=factor))
    name = "dy" if factor is None else "dy · weight scales"
    yield Operation(name, casts, x.numel(), 4, lambda: recipe.quantize_grad_output(x, column_factor=factor))


def norm_operations(recipe: LinearRecipe, size: ModelSize, tokens: int) -> Iterator[Operation]:
    x, residual, weight = normal(tokens, size.hidden), normal(tokens, size.hidden), normal(size.hidden)
    _, rstd, cast = rms_norm_quantize(x, weight, EPS, recipe)
    casts, columnwise = in_words(cast), in_words(None, recipe.quantize_input_columnwise(x, rstd, weight))
    del cast
    yield Operation("RMSNorm", casts, x.numel(), 3, lambda: rms_norm_quantize(x, weight, EPS, recipe))
    yield Operation("add, RMSNorm", casts, x.numel(), 7, lambda: rms_norm_quantize(x, weight, EPS, recipe, residual))
    yield Operation(
        "RMSNorm again", columnwise, x.numel(), 3, lambda: recipe.quantize_input_columnwise(x, rstd, weight)
    )  # fmt: skip
    yield Operation(
        "RMSNorm backward, add", "none", x.numel(), 8, lambda: rms_norm_backward(x, x, weight, rstd, residual)
    )


def swiglu_operations(recipe: LinearRecipe, size: ModelSize, tokens: int) -> Iterator[Operation]:
    """Yield SwiGLU of gate_up [T, 2F] with the casts of its product [T, F], and its backward with all casts."""
    gate_up, dproduct = normal(tokens, 2 * size.intermediate), normal(tokens, size.intermediate)
    elements = dproduct.numel()

    def forward(keep: bool) -> Any:
        return gated_activation_forward(gate_up, "silu", recipe, keep)

    product, saved, *_ = forward(True)
    casts = in_words(product)
    del product
    yield Operation("SwiGLU", casts, elements, 5, lambda: forward(False))
    kept = f"{casts}, gate and up {describe_cast(saved)}"
    yield Operation("SwiGLU, keeping", kept, elements, 7, lambda: forward(True))

    w = normal(2 * size.intermediate, 128, std=WEIGHT_STD)
    factor = transposed_weight(recipe.quantize_weight(w))[1]

    def backward() -> Any:
        return gated_activation_backward(dproduct, saved, "silu", recipe, recipe, factor)

    found = backward()
    of_gate_up = in_words(found.dgate_up, found.dgate_up_columnwise)
    casts = f"{of_gate_up}, product {in_words(None, found.product_columnwise)}"
    del found
    yield Operation("SwiGLU backward", casts, elements, 9, backward)


def rope_operations(size: ModelSize, tokens: int) -> Iterator[Operation]:
    """Yield the rotation of q, k and v [T, N] with their bias, and back; it casts nothing."""
    layout = HeadLayout(size.heads, size.kv_heads, size.head_dim)
    qkv, bias = normal(tokens, sum(layout.sizes)), normal(sum(layout.sizes))
    angles = torch.rand(1, tokens, size.head_dim, device=qkv.device) * 6
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    bytes_per_element = 4 + (cos.nbytes + sin.nbytes) / qkv.numel()
    transform = HeadTransform(cos, sin, layout, bias)
    yield Operation("bias, rotary", "none", qkv.numel(), bytes_per_element, lambda: rotate(qkv, transform))
    gradients = layout.split(normal(*qkv.shape), 1, len(qkv))
    yield Operation(
        "rotary backward", "none", qkv.numel(), bytes_per_element, lambda: rotate_backward(gradients, transform)
    )


def operations(recipe: LinearRecipe, size: ModelSize, tokens: int) -> Iterator[Operation]:
    """Yield all operations, one at a time: the operands of one are freed before the next are made."""
    for kind in (cast_operations, norm_operations, swiglu_operations):
        yield from kind(recipe, size, tokens)
    yield from rope_operations(size, tokens)


@functools.cache
def copy_time(bytes: int, milliseconds: float) -> float:
    """Return the milliseconds of a copy that reads and writes `bytes` together."""
    source = torch.zeros(max(1, bytes // 2), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), milliseconds=milliseconds)


def measure_operation(operation: Operation, milliseconds: float) -> dict[str, Any]:
    time, copy = measure(operation.run, milliseconds=milliseconds), copy_time(operation.bytes, milliseconds)
    return {
        "operation": operation.name,
        "casts": operation.casts,
        "elements": operation.elements,
        "bytes_per_element": operation.bytes_per_element,
        "milliseconds": time,
        "terabytes_per_second": operation.bytes / time / 1e9,
        "of_copy": copy / time,
        "presets": [],
    }


def measure_presets(presets: list[str], size: ModelSize, tokens: int, milliseconds: float) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for preset in presets:
        for operation in operations(preset_recipe(preset), size, tokens):
            key = operation.name, operation.casts
            if key not in rows:
                rows[key] = measure_operation(operation, milliseconds)
            rows[key]["presets"].append(preset)
    names = list(dict.fromkeys(name for name, _ in rows))
    return sorted(rows.values(), key=lambda row: names.index(row["operation"]))


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    columns = "operation", "casts", "B/element", "ms", "TB/s", "of copy", "presets"
    keys = "operation", "casts", "bytes_per_element", "milliseconds", "terabytes_per_second", "of_copy"
    print_table(
        title,
        columns,
        [(*(row[key] for key in keys), ", ".join(row["presets"])) for row in rows],
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults that follow from --quick and the machine."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), help="whose tensors to cast (default 7b, --quick: tiny)")
    parser.add_argument("--tokens", type=positive, metavar="T", help="tokens of a micro-batch (default 16384)")
    parser.add_argument("--presets", type=words, metavar="NAME,...", help=f"default all: {','.join(PRESETS)}")
    options = parser.parse_args(arguments)
    options.presets = check_presets(options.presets)
    if not (options.quick or (options.tokens and options.size == "tiny")):
        refuse_on_cpu("--size tiny and --tokens")
    options.size = options.size or ("tiny" if options.quick else "7b")
    options.tokens = options.tokens or (128 if options.quick else 16384)
    options.milliseconds = 2.0 if options.quick else 120.0
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    rows = measure_presets(options.presets, SIZES[options.size], options.tokens, options.milliseconds)
    print_rows(f"{options.size}, {options.tokens} tokens: casts, median times", rows)
    if options.json:
        write_json(options.json, banner=facts, size=options.size, tokens=options.tokens, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
