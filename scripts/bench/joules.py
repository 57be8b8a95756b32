"""Joules of the kernels of a training step, in BF16 and in FP8, by NVML's counter (pip install nvidia-ml-py).

    python scripts/bench/joules.py --size 7b                           all parts but experts, at 8192 tokens
    python scripts/bench/joules.py --parts products --ways deep_gemm --sms 132,128 --two-bits
    python scripts/bench/joules.py --parts experts --tokens 2048,8192  experts of Qwen3-30B-A3B
    python scripts/bench/joules.py --quick                             seconds on a CPU, where nothing is counted

Each kernel runs back to back for --seconds, at the clock that the power limit leaves it then: "ms" are more than those
of a short burst with an empty cache (gemms.py and others). "pJ" are those of a FLOP or of a byte that has to move,
"of first" is over the first row of the same kernel, in BF16 where there is such a row. J are of the whole GPU, idle
power included.

Parts: products of a decoder layer's linears; casts, and what is fused with them; attention; update, the optimizer step
with the quantization of as many parameters as a layer has (in BF16 torch's fused AdamW and a copy), and a plain copy;
layers, forward and backward of whole ones (gradients of weights dropped); experts. "two bits" clears the lowest
mantissa bit of output gradients: E4M3 with as many bits that change as E5M2 has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import attention
import casts
import experts
import gemms
import torch
import update
from common import (
    GRADIENT_STD,
    SIZES,
    Sustained,
    able_backends,
    argument_parser,
    begin,
    check_presets,
    device,
    first_line,
    integers,
    normal,
    positive,
    preset_recipe,
    print_table,
    random_operands,
    refuse_on_cpu,
    sustained,
    words,
    write_json,
)
from decoder_stacks import Shape, contestants
from layers import operands
from torch import nn

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.schema import nearest
from ds_fp8.gemm import scaled_matmul
from ds_fp8.layers.attention import cudnn as fp8_attention_cudnn
from ds_fp8.layers.experts.layout import expert_layout
from ds_fp8.layers.experts.selection import recipe_of_experts
from ds_fp8.monitor.energy import energy_counter
from ds_fp8.research import mxfp8

FLOP, BYTE = "FLOP", "B"


class Kernel(NamedTuple):
    """What runs, and the work in it, in FLOPs or bytes; `sms`: how many multiprocessors it may use, None for all."""

    part: str
    name: str
    way: str
    run: Callable[[], Any]
    work: int | None = None
    unit: str = FLOP
    sms: int | None = None
    replay: bool = True


@contextlib.contextmanager
def on_multiprocessors(count: int | None) -> Iterator[None]:
    """Let products of DeepGEMM and of cuBLASLt use so many multiprocessors."""
    if count is None:
        yield
        return
    import deep_gemm

    total = torch.cuda.get_device_properties(device()).multi_processor_count
    torch._C._set_sm_carveout_experimental(total - count)
    deep_gemm.set_num_sms(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        deep_gemm.set_num_sms(total)


def with_two_bits(q: QuantizedTensor) -> QuantizedTensor:
    return replace(q, data=(q.data.view(torch.uint8) & 0xFE).view(q.data.dtype))


def bf16_products(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Iterator[tuple[str, str, Callable]]:
    """Yield (pass, way, call) of the products of a linear in BF16."""
    for name, a, b in zip(gemms.PASSES, (x, dy, dy.t()), (w.t(), w, x), strict=True):
        yield name, "BF16, cuBLAS", partial(torch.matmul, a, b)
    if device().type == "cuda" and importlib.util.find_spec("deep_gemm"):
        import deep_gemm

        for name, call, a, b, shape in (
            ("fprop", deep_gemm.bf16_gemm_nt, x, w, (len(x), len(w))),
            ("dgrad", deep_gemm.bf16_gemm_nn, dy, w, (len(x), w.shape[1])),
            ("wgrad", deep_gemm.bf16_gemm_tn, dy, x, w.shape),
        ):
            yield name, "BF16, DeepGEMM", partial(call, a, b, x.new_empty(shape))


def products(options: argparse.Namespace, tokens: int) -> Iterator[Kernel]:
    backends = able_backends(options.backends)
    for linear, (n, k) in SIZES[options.size].linears().items():
        given = random_operands(tokens, n, k)
        found = {name: [] for name in gemms.PASSES}
        for name, way, run in bf16_products(*given):
            found[name].append((way, run, None))
        for preset in options.presets:
            for product in gemms.products(preset_recipe(preset), *given):
                for backend in backends:
                    for sms in options.sms if backend != "reference" else [None]:
                        run = partial(scaled_matmul, product.a, product.b, backend=backend)
                        found[product.name].append((f"{preset}, {backend}", run, sms))
                    if options.two_bits and product.name != "fprop":
                        run = partial(scaled_matmul, with_two_bits(product.a), product.b, backend=backend)
                        found[product.name].append((f"{preset}, {backend}, two bits", run, None))
        for name, ways in found.items():
            for way, run, sms in ways:
                yield Kernel("products", f"{linear} {name}", way, run, 2 * tokens * n * k, sms=sms)


def cast_kernels(options: argparse.Namespace, tokens: int) -> Iterator[Kernel]:
    seen = set()
    for preset in options.presets:
        for one in casts.operations(preset_recipe(preset), SIZES[options.size], tokens):
            if (one.name, one.casts) not in seen:
                seen.add((one.name, one.casts))
                yield Kernel("casts", f"{one.name}: {one.casts}", preset, one.run, one.bytes, BYTE)


def attention_kernels(options: argparse.Namespace, tokens: int) -> Iterator[Kernel]:
    size, length = SIZES[options.size], options.length or tokens
    given, gradient = attention.operands_of(size, tokens // length, length)
    forward = attention.floating_point_operations(size, tokens // length, length)
    for name, make in attention.contestants(size).items():
        if name.startswith("te"):
            continue
        attend = make()

        def only_forward(attend: attention.Attention = attend) -> None:
            with torch.no_grad():
                attend(*given)

        yield Kernel("attention", f"{tokens // length} x {length} forward", name, only_forward, forward)
        both = partial(attention.step, attend, given, gradient)
        yield Kernel("attention", f"{tokens // length} x {length} both", name, both, 7 * forward // 2)


def in_torch(numel: int) -> Callable[[], None]:
    """Return a step of torch's fused AdamW over FP32 masters, and the copy of them to BF16 weights."""
    master = nn.Parameter(torch.randn(numel, device=device()) * 0.02)
    master.grad, weights = torch.randn_like(master) * 1e-4, torch.empty_like(master, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([master], lr=1e-4, fused=True, capturable=device().type == "cuda")

    def step() -> None:
        optimizer.step()
        weights.copy_(master.detach())

    return step


def updates(options: argparse.Namespace, tokens: int) -> Iterator[Kernel]:
    rows = 256 if options.quick else 4096
    weights = sum(n * k for n, k in SIZES[options.size].linears().values())
    count = max(1, round(weights / (rows * update.COLUMNS)))
    numel = count * rows * update.COLUMNS
    name = f"{numel / 1e6:.0f}M parameters"
    # Bytes of a parameter: masters, moments and gradients read, all but these written, the weight written.
    yield Kernel("update", name, "FP32, torch, and BF16", in_torch(numel), numel * (16 + 12 + 4 + 2), BYTE)
    weights, scales = update.sharded(rows, count, "pow2")
    if device().type == "cuda":
        run = update.one_pass(weights, scales)
        yield Kernel("update", name, "FP32, FP8 weights, one pass", run, numel * (16 + 12 + 1), BYTE)
    run = update.two_kernels(weights, scales, "e4m3_expanded")
    yield Kernel("update", name, "moments of coat, FP8 weights", run, numel * (8 + 6 + 4 + 4 + 1), BYTE)
    source = torch.randint(0, 255, (2**20 if options.quick else 2**29,), dtype=torch.uint8, device=device())
    run = partial(torch.empty_like(source).copy_, source)
    yield Kernel("update", f"copy of {source.nbytes >> 20} MiB", "copy", run, 2 * source.nbytes, BYTE)


def layer_kernels(options: argparse.Namespace, tokens: int) -> Iterator[Kernel]:
    length = options.length or tokens
    shape = Shape(SIZES[options.size], 1, tokens // length, length)
    x, dy = operands(shape)
    for one in contestants():
        weights = "fp8" if one.name == "te-block" or not one.is_peer else "bf16"
        if one.name.partition("/")[0] not in (*options.presets, "hf", "te-bf16", "te-block") or one.weights != weights:
            continue
        if (reason := one.missing()) is not None:
            print(f"not measured: layer of {one.name} ({reason})")
            continue
        stack = one.build(shape)
        name = f"{shape.sequences} x {length}, forward and backward"
        yield Kernel("layers", name, one.name, partial(stack.step, x, dy), replay=False)


def expert_kernels(options: argparse.Namespace, tokens: int) -> Iterator[Kernel]:
    shape = "tiny" if options.quick else "qwen3-30b"
    given = experts.operands(experts.SHAPES[shape], tokens)
    layout = expert_layout(given.index, len(given.gate_up))
    pairs = given.index.numel()
    recipe = recipe_of_experts(preset_recipe(options.presets[0]), "experts")
    in_bf16 = {}
    for linear, weight in (("gate_up", given.gate_up), ("down", given.down)):
        x, dy = normal(pairs, weight.shape[2], seed=6), normal(pairs, weight.shape[1], std=GRADIENT_STD, seed=7)
        for name, run in experts.bf16_times(x, weight, dy, layout).items():
            in_bf16[f"{linear} {name}"] = run, 2 * pairs * weight[0].numel()
    parts = experts.parts(given, recipe)
    for name, (run, work) in in_bf16.items():
        yield Kernel("experts", f"{shape}, {tokens}, {name}", "BF16, grouped_mm", run, work)
        yield Kernel("experts", f"{shape}, {tokens}, {name}", options.presets[0], parts[name][1], work)
    for name, (kind, run) in parts.items():
        if kind != "product":
            yield Kernel("experts", f"{shape}, {tokens}, {name}", options.presets[0], run)
    for way, step in (
        ("BF16, grouped_mm", experts.bf16_layer(given)),
        (options.presets[0], experts.layer(given, recipe)),
    ):
        yield Kernel("experts", f"{shape}, {tokens}, forward and backward", way, step, replay=False)


PARTS = {
    "products": products,
    "attention": attention_kernels,
    "layers": layer_kernels,
    "update": updates,
    "casts": cast_kernels,
    "experts": expert_kernels,
}


def row_of(kernel: Kernel, found: Sustained, first: dict[str, Any] | None) -> dict[str, Any]:
    of_work = kernel.work and {"tera_per_second": kernel.work / found.milliseconds / 1e9}
    row = {
        **{name: getattr(kernel, name) for name in ("part", "name", "way", "sms", "work", "unit")},
        "milliseconds": found.milliseconds,
        "joules": found.joules,
        "watts": found.watts,
        **(of_work or {"tera_per_second": None}),
        "picojoules": found.joules and kernel.work and found.joules / kernel.work * 1e12,
    }
    for key in ("milliseconds", "joules"):
        row[f"{key}_of_first"] = row[key] / first[key] if first and row[key] and first[key] else None
    return row


def measure_all(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each kernel, and those that failed; print each as it is found."""
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    firsts: dict[tuple[str, str], dict[str, Any]] = {}
    began = time.monotonic()
    for part in options.parts:
        for tokens in options.tokens:
            for kernel in PARTS[part](options, tokens):
                if options.ways and not any(word in kernel.way for word in options.ways):
                    continue
                if options.limit and time.monotonic() - began > options.limit:
                    failed.append(f"{part} from {kernel.name} on: --limit is over")
                    break
                what = f"{kernel.part}: {kernel.name}, {kernel.way}, {kernel.sms or 'all'} SMs"
                try:
                    with on_multiprocessors(kernel.sms):
                        found = sustained(kernel.run, options.seconds, kernel.replay)
                except Exception as error:  # one kernel's: the others are measured
                    failed.append(f"{what}: {first_line(error)}")
                    print(f"not measured: {failed[-1]}", flush=True)
                    continue
                row = row_of(kernel, found, firsts.get((part, kernel.name)))
                firsts.setdefault((part, kernel.name), row)
                rows.append({"tokens": tokens, **row})
                joules = f"{found.joules:.4f} J, {found.watts:.0f} W" if found.joules else "no counter"
                print(f"{what}: {found.milliseconds:.4f} ms, {joules}", flush=True)
            if device().type == "cuda":
                torch.cuda.empty_cache()
    return rows, failed


def print_rows(rows: list[dict[str, Any]]) -> None:
    columns = {
        "kernel": "name", "way": "way", "SMs": "sms", "ms": "milliseconds", "J": "joules", "W": "watts",
        "T/s": "tera_per_second", "pJ": "picojoules", "of": "unit", "ms of first": "milliseconds_of_first",
        "J of first": "joules_of_first",
    }  # fmt: skip
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        print_table(part, list(columns), [[row[key] for key in columns.values()] for row in mine])
    totals: dict[tuple[int, str, int | None], list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "products":
            totals.setdefault((row["tokens"], row["way"], row["sms"]), []).append(row)
    most = max(map(len, totals.values()), default=0)
    whole = {key: found for key, found in totals.items() if len(found) == most}
    lines = []
    for (tokens, way, sms), found in whole.items():
        joules = None if any(row["joules"] is None for row in found) else sum(row["joules"] for row in found)
        lines.append(
            (tokens, way, sms, sum(row["milliseconds"] for row in found), joules, joules and joules / tokens * 1e3)
        )
    if lines:
        print_table("products of one layer", ("tokens", "way", "SMs", "ms", "J", "mJ a token"), lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults that follow from --quick and the machine."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), help="whose kernels (default 7b, --quick: tiny)")
    parser.add_argument("--tokens", type=integers, metavar="T,...", help="of a micro-batch (default 8192)")
    parser.add_argument("--length", type=positive, metavar="S", help="of a row (default: all tokens are one row)")
    parser.add_argument("--presets", type=words, metavar="NAME,...", help="whose casts (default hybrid_fast)")
    parser.add_argument("--backends", type=words, metavar="NAME,...", help="of products (default all that run)")
    parser.add_argument("--sms", type=integers, metavar="N,...", help="multiprocessors of FP8 products (default all)")
    parser.add_argument("--two-bits", action="store_true", help="also output gradients with two bits of mantissa")
    parser.add_argument("--parts", type=words, metavar="NAME,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ways", type=words, metavar="WORD,...", help="only rows with one of these words in their way")
    parser.add_argument("--seconds", type=float, help="of a kernel (default 2; --quick: 0.02)")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds after which no other kernel is begun")
    options = parser.parse_args(arguments)
    options.presets = check_presets(options.presets or ["hybrid_fast"])
    options.parts = options.parts or [part for part in PARTS if part != "experts" or options.quick]
    for part in options.parts:
        if part not in PARTS:
            raise UserError(f'no part is called "{part}"', key="--parts", remedy=nearest(part, PARTS))
    if not options.quick:
        refuse_on_cpu("--quick")
    options.size = options.size or ("tiny" if options.quick else "7b")
    options.tokens = options.tokens or [64 if options.quick else 8192]
    options.seconds = options.seconds or (0.02 if options.quick else 2.0)
    options.sms = options.sms or [None]
    if options.sms != [None] and not (device().type == "cuda" and importlib.util.find_spec("deep_gemm")):
        raise UserError("DeepGEMM sets how many multiprocessors it uses, and is not here", key="--sms")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    mxfp8.missing()  # loads Transformer Engine, which fails once torch has loaded another cuDNN
    fp8_attention_cudnn.unavailable()  # the same
    facts = begin()
    if energy_counter(device()) is None:
        print("nothing counts joules here: a GPU with NVML's counter and nvidia-ml-py do")
    rows, failed = measure_all(options)
    print_rows(rows)
    for one in failed:
        print(f"not measured: {one}")
    if options.json:
        shape = {key: getattr(options, key) for key in ("size", "length", "seconds")}
        write_json(options.json, banner=facts, shape=shape, rows=rows, failed=failed)
    return bool(failed)


if __name__ == "__main__":
    main_entry(main)
