"""The products of a mixture of experts, the casts around them, and a layer's experts as a whole, beside BF16.

    python scripts/bench/experts.py                        experts of Qwen3-30B-A3B, 2048 and 8192 tokens
    python scripts/bench/experts.py --sweep                sizes of the kernels' launches, too
    python scripts/bench/experts.py --quick                seconds on a CPU, in plain torch
    python scripts/bench/experts.py --compile              compiles the kernels for Hopper; needs no GPU

Products are counted in FLOPs of the tokens that there are: rows that fill up tiles of 128 cost time and count for
nothing. "grouped_mm" is torch's BF16 product of groups, "dense" one FP8 product of as many rows by one matrix.
Weights lie in FP8 already, as a gather leaves them. The parts of a layer's forward and backward are measured one by
one; their share is that of their sum.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import (
    GRADIENT_STD,
    WEIGHT_STD,
    argument_parser,
    begin,
    check_presets,
    device,
    integers,
    measure,
    normal,
    preset_recipe,
    print_table,
    refuse_on_cpu,
    write_json,
)

from ds_fp8.casts import quantize, transpose
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.gemm import scaled_matmul
from ds_fp8.gemm.grouped import grouped_matmul, grouped_wgrad
from ds_fp8.layers.experts.layout import ExpertLayout, expert_layout, permute_quantize, row_factors, unpermute
from ds_fp8.layers.experts.products import ExpertProducts, ExpertWeights, expert_products, unsupported
from ds_fp8.layers.experts.selection import recipe_of_experts
from ds_fp8.layers.linear.gated_activation import gated_activation_backward, gated_activation_forward
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED

# Stages, warps, panels and limits of registers of the product's launch; 4 warps spill in all of them
SWEEP = [
    *((stages, 8, panel, None) for stages in (3, 4, 5) for panel in (4, 8, 16)),
    *((stages, 8, panel, 128) for stages in (2, 3) for panel in (4, 8, 16)),
]


class Shape(NamedTuple):
    """Sizes of a layer's experts."""

    hidden: int
    features: int
    experts: int
    choices: int


SHAPES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "mixtral": Shape(4096, 14336, 8, 2),
    "olmoe": Shape(2048, 1024, 64, 8),
    "tiny": Shape(256, 128, 4, 2),
}


class Operands(NamedTuple):
    """Random tokens, their routing, and weights in BF16."""

    x: torch.Tensor
    dy: torch.Tensor
    index: torch.Tensor
    router_weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def operands(shape: Shape, tokens: int) -> Operands:
    hidden, features, experts, choices = shape
    scores = normal(tokens, experts, seed=3).float().softmax(-1)
    router_weights, index = scores.topk(choices)
    return Operands(
        normal(tokens, hidden, seed=0),
        normal(tokens, hidden, std=GRADIENT_STD, seed=1),
        index,
        (router_weights / router_weights.sum(-1, keepdim=True)).bfloat16(),
        normal(experts, 2 * features, hidden, std=WEIGHT_STD, seed=4),
        normal(experts, hidden, features, std=WEIGHT_STD, seed=5),
    )


def bf16_times(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, layout: ExpertLayout) -> dict[str, Callable]:
    """Return fprop, dgrad and wgrad in BF16 of sorted tokens x [P, K], w [E, N, K] and dy [P, N], without padding."""
    ends = layout.counts.cumsum(0).int()
    return {
        "fprop": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
        "dgrad": lambda: F.grouped_mm(dy, w, offs=ends),
        "wgrad": lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }


def measure_products(given: Operands, recipe: LinearRecipe, milliseconds: float, sweep: bool) -> list[dict[str, Any]]:
    rows = []
    layout = expert_layout(given.index, len(given.gate_up))
    used, pairs = layout.source >= 0, given.index.numel()
    for name, weight in (("gate_up", given.gate_up), ("down", given.down)):
        experts, columns, contraction = weight.shape
        x = normal(len(layout.source), contraction, seed=6) * used[:, None]
        dy = normal(len(layout.source), columns, std=GRADIENT_STD, seed=7) * used[:, None]
        x_RK, x_KR = recipe.quantize_input_both(x)
        dy_RN, dy_NR = recipe.quantize_grad_output(dy)
        w = recipe.quantize_weight(weight.flatten(0, 1))
        w_turned = transpose(w, experts)
        backend, some = recipe.backend, pairs // 16 * 16
        multiply = functools.partial(grouped_matmul, groups=layout.groups, backend=backend)
        along_rows = functools.partial(grouped_wgrad, groups=layout.groups, backend=backend)
        one = quantize(weight[0], granularity="128x128")
        ours = {
            "fprop": functools.partial(multiply, x_RK, w),
            "dgrad": functools.partial(multiply, dy_RN, w_turned),
            "wgrad": functools.partial(along_rows, dy_NR, x_KR),
        }
        dense_of = functools.partial(scaled_matmul, backend=backend)
        dense = {
            "fprop": functools.partial(dense_of, quantize(x[:some]), one),
            "dgrad": functools.partial(dense_of, quantize(dy[:some]), transpose(one)),
            "wgrad": functools.partial(dense_of, dy_NR, x_KR),
        }
        in_bf16 = bf16_times(x[used], weight, dy[used], layout)
        flops = 2 * pairs * columns * contraction
        for pass_, product in ours.items():
            times = [measure(run, milliseconds=milliseconds) for run in (product, in_bf16[pass_], dense[pass_])]
            rows.append(
                {
                    "product": f"{name} {pass_}",
                    **dict(zip(("milliseconds", "grouped_mm", "dense"), times, strict=True)),
                    "teraflops": flops / times[0] / 1e9,
                    "teraflops_grouped_mm": flops / times[1] / 1e9,
                    "teraflops_dense": flops / times[2] / 1e9,
                    "speedup": times[1] / times[0],
                    "best_launch": best_launch(product, milliseconds) if sweep else None,
                }
            )
    return rows


def best_launch(product: Callable[[], object], milliseconds: float) -> str:
    from ds_fp8.gemm import grouped_triton as kernels

    names = ("STAGES", "WARPS", "PANEL", "REGISTERS")
    before = [getattr(kernels, name) for name in names]
    times = {}
    for launch in SWEEP:
        vars(kernels).update(zip(names, launch, strict=True))
        times[launch] = measure(product, milliseconds=milliseconds)
    vars(kernels).update(zip(names, before, strict=True))
    best = min(times, key=times.__getitem__)
    return "stages {} warps {} panel {} registers {}: {:.3g} ms".format(*best, times[best])


def parts(given: Operands, recipe: LinearRecipe) -> dict[str, tuple[str, Callable[[], object]]]:
    """Return kind and call of every part of a layer's forward and backward, by name."""
    x, dy, index, router_weights, gate_up, down = given
    experts, backend, save = len(gate_up), recipe.backend, recipe.input
    layout = expert_layout(index, experts)
    groups, factors = layout.groups, row_factors(router_weights, layout)
    first, second = (recipe.quantize_weight(weight.flatten(0, 1)) for weight in (gate_up, down))
    first_turned, second_turned = transpose(first, experts), transpose(second, experts)
    dy_scale = recipe.grad_output.scale
    rows, _ = permute_quantize(x, layout, save.format, scale=save.scale)
    hidden = grouped_matmul(rows, first, groups, backend=backend)
    product, saved, *_ = gated_activation_forward(hidden, "silu", recipe, True, factors)
    output = grouped_matmul(product, second, groups, backend=backend)
    dy_rows, dy_columns = permute_quantize(dy, layout, columnwise="1x128", scale=dy_scale)
    dproduct = grouped_matmul(dy_rows, second_turned, groups, backend=backend)
    casts = gated_activation_backward(dproduct, saved, "silu", recipe, recipe, row_factor=factors)
    _, x_columns = permute_quantize(x, layout, rowwise=None, columnwise=recipe.wgrad_input, scale=save.scale)
    dx_rows = grouped_matmul(casts.dgate_up, first_turned, groups, backend=backend)

    def multiply(a, b):
        return lambda: grouped_matmul(a, b, groups, backend=backend)

    def along_rows(a, b):
        return lambda: grouped_wgrad(a, b, groups, backend=backend)

    backward = casts.dgate_up_columnwise, casts.product_columnwise
    return {
        "layout": ("layout", lambda: (expert_layout(index, experts), row_factors(router_weights, layout))),
        "x, permuted": ("cast", lambda: permute_quantize(x, layout, save.format, scale=save.scale)),
        "gate_up fprop": ("product", multiply(rows, first)),
        "activation": ("cast", lambda: gated_activation_forward(hidden, "silu", recipe, True, factors)),
        "down fprop": ("product", multiply(product, second)),
        "y, summed": ("sum", lambda: unpermute(output, layout)),
        "dy, permuted, both ways": ("cast", lambda: permute_quantize(dy, layout, columnwise="1x128", scale=dy_scale)),
        "weights transposed": ("cast", lambda: (transpose(first, experts), transpose(second, experts))),
        "down dgrad": ("product", multiply(dy_rows, second_turned)),
        "activation's gradients": (
            "cast",
            lambda: gated_activation_backward(dproduct, saved, "silu", recipe, recipe, row_factor=factors),
        ),
        "down wgrad": ("product", along_rows(dy_columns, backward[1])),
        "gate_up dgrad": ("product", multiply(casts.dgate_up, first_turned)),
        "dx, summed": ("sum", lambda: unpermute(dx_rows, layout)),
        "x, permuted, along the rows": (
            "cast",
            lambda: permute_quantize(x, layout, rowwise=None, columnwise=recipe.wgrad_input, scale=save.scale),
        ),
        "gate_up wgrad": ("product", along_rows(backward[0], x_columns)),
    }


def layer(given: Operands, recipe: LinearRecipe) -> Callable[[], torch.Tensor]:
    x, router_weights = (t.detach().clone().requires_grad_() for t in (given.x, given.router_weights))
    weights = []
    for weight in (given.gate_up, given.down):
        parameter = torch.nn.Parameter(weight)
        setattr(parameter, UNSHARDED, recipe.quantize_weight(weight.flatten(0, 1)))
        weights.append(parameter)
    products = ExpertProducts("silu", recipe, recipe)

    def step() -> torch.Tensor:
        y = expert_products(x, given.index, router_weights, ExpertWeights(*weights), products)
        torch.autograd.grad(y, [x, router_weights, *weights], given.dy)
        return y

    return step


def bf16_layer(given: Operands) -> Callable[[], torch.Tensor]:
    """Return a step, forward and backward, of transformers' experts with torch's grouped product in BF16."""
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, hidden, features = given.down.shape
    config = AutoConfig.for_model("qwen3_moe", hidden_size=hidden, moe_intermediate_size=features, num_experts=experts)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(given.gate_up), torch.nn.Parameter(given.down)
    x, router_weights = (t.detach().clone().requires_grad_() for t in (given.x, given.router_weights))

    def step() -> torch.Tensor:
        y = module(x, given.index, router_weights)
        torch.autograd.grad(y, [x, router_weights, *module.parameters()], given.dy)
        return y

    return step


def measure_layer(given: Operands, recipe: LinearRecipe, milliseconds: float) -> dict[str, Any]:
    """Return the times of a layer's experts, FP8 and BF16, their difference, and the share of what is no product."""
    ours, bf16 = layer(given, recipe), bf16_layer(given)
    found, expected = ours().double(), bf16().double()
    figures = {
        "milliseconds": measure(ours, milliseconds=milliseconds),
        "bf16": measure(bf16, milliseconds=milliseconds),
        "error_vs_bf16": ((found - expected).norm() / expected.norm()).item(),
    }
    times: dict[str, float] = {}
    shares: dict[str, float] = {}
    for name, (kind, run) in parts(given, recipe).items():
        times[name] = measure(run, milliseconds=milliseconds)
        shares[kind] = shares.get(kind, 0) + times[name]
    total = sum(times.values())
    return {**figures, "parts": times, "shares": {kind: time / total for kind, time in shares.items()}}


TILE = "tensordesc<fp8e4nv[128, 128]>"


def compiled() -> dict[str, Any]:
    """Return the grouped products' kernels, compiled by Triton for a Hopper GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ds_fp8.gemm import grouped_triton as kernels

    size = {"N": 1536, "K": 2048}
    launches = {
        "fprop": (
            kernels._multiply_tiles,
            {"a": TILE, "a_scale": "*fp32", "b": TILE, "b_scale": "*fp32", "of_tile": "*i32", "result": "*bf16",
             "tiles": "i32", "a_scale_along": "i32", "b_scale_across": "i32"},
            {**size, "PANEL": kernels.PANEL},
        ),
        **{
            f"wgrad {granularity}": (
                kernels._multiply_along_rows,
                {"dy": TILE, "dy_scale": "*fp32", "x": TILE, "x_scale": "*fp32", "starts": "*i32", "counts": "*i32",
                 "result": "*bf16", "dy_scale_along": "i32", "x_scale_along": "i32", "x_scale_across": "i32"},
                {**size, "BLOCKS": granularity == "128x128"},
            )
            for granularity in ("1x128", "128x128")
        },
    }  # fmt: skip
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    result = {}
    for name, (kernel, arguments, constants) in launches.items():
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {argument: arguments.get(argument, "constexpr") for argument in names},
            {(names.index(argument),): value for argument, value in constants.items()},
            {
                (names.index(argument),): [["tt.divisibility", 16]]
                for argument in arguments
                if arguments[argument] != TILE
            },
        )
        result[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return result


def compiled_figures() -> dict[str, dict[str, int]]:
    """Return counts of instructions and the shared memory of each compiled kernel."""
    figures = {}
    for name, kernel in compiled().items():
        ptx = kernel.asm["ptx"]
        counts = {word: len(re.findall(word, ptx)) for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "st.local")}
        figures[name] = {**counts, "shared bytes": kernel.metadata.shared}
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default=None, help="experts of a model (qwen3-30b)")
    parser.add_argument("--tokens", type=integers, default=None, help="tokens, separated by commas (2048,8192)")
    parser.add_argument("--preset", default="hybrid_fast", help="casts (%(default)s)")
    parser.add_argument("--backend", default="auto", help="cublas means the Triton kernels of groups (%(default)s)")
    parser.add_argument("--sweep", action="store_true", help="also the best launch of every product")
    parser.add_argument("--compile", action="store_true", help="compile the kernels for Hopper, and stop")
    options = parser.parse_args(arguments)
    if options.compile:
        figures = compiled_figures()
        columns = next(iter(figures.values()))
        print_table(
            "compiled for sm_90", ("kernel", *columns), [(name, *row.values()) for name, row in figures.items()]
        )
        return
    run(options)


def run(options: argparse.Namespace) -> None:
    """Measure what the options ask for. Raise UserError where that needs a GPU."""
    if not options.quick:
        refuse_on_cpu("--shape tiny --quick")
    if options.sweep and device().type != "cuda":
        raise UserError("there is no GPU whose launches could be compared", remedy="leave --sweep out")
    facts = begin()
    shape = options.shape or ("tiny" if options.quick else "qwen3-30b")
    (preset,) = check_presets([options.preset])
    recipe = recipe_of_experts(preset_recipe(preset, backend=options.backend), "experts")
    milliseconds = 5.0 if options.quick else 120.0
    if (reason := unsupported(recipe)) is not None:
        raise UserError(f'experts cannot have the preset "{preset}": {reason}', remedy="--preset hybrid_fast")
    written = []
    for tokens in options.tokens or ([64] if options.quick else [2048, 8192]):
        given = operands(SHAPES[shape], tokens)
        products = measure_products(given, recipe, milliseconds, options.sweep)
        whole = measure_layer(given, recipe, milliseconds)
        columns = list(products[0])
        title = f"{shape}, {tokens} tokens, {options.preset}, backend {recipe.backend}"
        print_table(f"products of {title}", columns, [[row[c] for c in columns] for row in products])
        print_table(f"parts of a layer of {title}", ("part", "ms"), whole["parts"].items())
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in whole["shares"].items())
        print(
            f"forward and backward {whole['milliseconds']:.3g} ms, BF16 {whole['bf16']:.3g} ms; parts: {shares}; "
            f"output differs by {whole['error_vs_bf16']:.2g}"
        )
        written.append({"tokens": tokens, "products": products, "layer": whole})
    if options.json:
        write_json(options.json, banner=facts, shape=SHAPES[shape]._asdict(), preset=options.preset, rows=written)


if __name__ == "__main__":
    main_entry(main)
