"""How near to the memory's bandwidth are the parts of ZeRO-3's step, from received gradients to FP8 shards?

    python scripts/experiments/zero_step.py                              one GPU, the share of one of 2 ranks of 7.62B
    python scripts/experiments/zero_step.py --quick                      seconds on a CPU
    torchrun --nproc_per_node=2 scripts/experiments/zero_step.py --gather    the gather of a layer of 7B, in three ways

Answer (2026-11-22, H200): 3.61 TB/s for sums straight into the shards, whose 6.4 ms for half of 7.62B were 39 with
a copy and a norm besides; AdamW takes 17.6 ms, casts 4.8; a layer's gather 0.59 in place, 1.06 copied side by side.

"GB" is what a part must at least read and write, "TB/s" that by its time. "ms of 7.62B" is its time on a share of
that model, by elements.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import bench_path  # noqa: F401  (for `common` and its neighbours)
import torch
from common import argument_parser, banner, device, measure, print_banner, print_table, write_json
from deepspeed import comm as dist
from zero_ranks import is_first, join_ranks, leave_ranks, timed

from ds_fp8.config.errors import main_entry
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.presets import PRESETS
from ds_fp8.optim import AdamW
from ds_fp8.zero import grouped
from ds_fp8.zero.gradient_sum import add_rows
from ds_fp8.zero.gradient_wire import pack, sum_rows
from ds_fp8.zero.message import CastOptions, Message, Slices, Target, span_count
from ds_fp8.zero.peer_memory import PeerMemory, share
from ds_fp8.zero.seams import Shard
from ds_fp8.zero.shard_cast import make_shard_cast
from ds_fp8.zero.shards import ShardedWeight, place_scales

RANKS = 2
MODEL = 7_615_616_512
LAYER = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)]
"""Weights of a layer of Qwen2.5-7B: q, k, v, o, gate, up, down."""
STACKS = [(0, 1, 2), (3,), (4, 5), (6,)]
SMALL = [(256, 512), (128, 512), (512, 256)]


def gradients(shapes: list[tuple[int, int]]) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the parts of the reduction of one layer: (function, bytes it must move)."""
    numels = [math.prod(shape) for shape in shapes]
    places, width = [], 0
    for numel in numels:
        places.append(Slices(math.ceil(numel / RANKS), width))
        width += places[-1].padded
    width = math.ceil(width / 512) * 512
    layout = Message(RANKS, 1, width)
    message = layout.empty(device())
    full = [(torch.randn(numel, device=device()) * 1e-3).bfloat16() for numel in numels]
    options = CastOptions("e4m3")
    targets, start, span = [], 0, 0
    for place in places:
        targets.append(Target(place.column, start, place.length, span))
        start, span = start + place.length, span + span_count(place.length)
    shards = torch.zeros(start, device=device())
    squares = torch.zeros(span, dtype=torch.float64, device=device())

    def send() -> None:
        for gradient, place in zip(full, places, strict=True):
            pack(gradient, message, layout, place, options)

    def add(accumulate: bool) -> Callable[[], None]:
        return lambda: add_rows(message, layout, "e4m3", RANKS, targets, shards, squares, accumulate)

    def as_deepspeed() -> None:
        total = sum_rows(message, layout, "e4m3", RANKS)
        for target in targets:
            shards[target.start : target.start + target.numel] = total[target.column : target.column + target.numel]

    total = sum(numels)
    send()
    return {
        "cast of full gradients": (send, 3 * total + message.nbytes - total),
        "sum of rows, copy to shards": (as_deepspeed, message.nbytes + 4 * start),
        "sum of rows into shards, squares": (add(False), message.nbytes + 4 * start),
        "the same, accumulating": (add(True), message.nbytes + 8 * start),
        "norm of the shards in float64": (lambda: torch.linalg.vector_norm(shards, dtype=torch.float64), 4 * start),
    }


def optimizer(numel: int, kept: dict[str, str]) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the parts of AdamW over one flat shard: (function, bytes it must move)."""
    p = torch.nn.Parameter(torch.randn(numel, device=device()) * 0.02)
    gradient = torch.randn(numel, device=device()) * 1e-3
    adam = AdamW([p], lr=1e-4, check_finite=False, **kept)
    factor, skip = torch.full((), 0.5, device=device()), torch.zeros((), dtype=torch.int32, device=device())
    group = adam.param_groups[0]

    def step(factor: torch.Tensor | None = None, skip: torch.Tensor | None = None) -> None:
        adam.step(work=[(group, p, gradient)], factor=factor, skip=skip)

    step()
    moved = numel * 12 + 2 * adam.state_bytes()
    name = f"AdamW {kept.get('exp_avg', 'fp32')}"
    bf16 = torch.empty(numel, dtype=torch.bfloat16, device=device())
    return {
        name: (step, moved),
        f"{name}, factor and flag": (lambda: step(factor, skip), moved),
        "FP32 masters to BF16": (lambda: bf16.copy_(p.detach()), 6 * numel),
    }


def shard_casts(shapes: list[tuple[int, int]]) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the cast of one layer's shards, and its first half alone: (function, bytes it must move)."""
    weights, masters, start = [], [], 0
    for shape in shapes:
        numel = math.prod(shape) // RANKS
        parameter = torch.nn.Parameter(torch.empty(0, device=device()), requires_grad=False)
        weights.append(
            ShardedWeight(
                parameter, Shard(torch.Size(shape), 0, numel, numel, RANKS, None), CastSpec(granularity="128x128")
            )
        )
        masters.append(torch.randn(numel, device=device()) * 0.02)
    shards = torch.zeros(sum(weight.shard.numel for weight in weights), dtype=torch.uint8, device=device())
    for weight in weights:
        weight.data = shards[start : start + weight.shard.numel]
        start += weight.shard.numel
    source = dict(zip(map(id, weights), masters, strict=True))
    amax = torch.zeros(place_scales([[weight] for weight in weights]), device=device())
    both = make_shard_cast(weights, shards, CastSpec(granularity="128x128"))
    scales = torch.full_like(amax, 2.0**-12)

    def first() -> None:
        both.write_amax(amax, lambda w: source[id(w)])

    def halves() -> None:
        first()
        both.cast(scales, lambda w: source[id(w)])

    return {"amax, and cast of whole blocks": (first, 5 * start), "cast of shards": (halves, 5 * start)}


def measure_parts(options: argparse.Namespace) -> list[dict[str, object]]:
    shapes = SMALL if options.quick else LAYER
    numel = 1 << 16 if options.quick else 1_000_000_000
    share, layer = MODEL / RANKS, sum(map(math.prod, shapes)) / RANKS
    rows = []

    def add(parts: dict[str, tuple[Callable[[], object], int]], elements: float) -> None:
        for name, (function, moved) in parts.items():
            ms = measure(function)
            figures = {"ms": ms, "GB": moved / 1e9, "TB/s": moved / ms / 1e9, "ms of 7.62B": ms * share / elements}
            rows.append({"part": name, **figures})

    add(gradients(shapes), layer)
    for kept in (PRESETS["coat"]["optimizer"], {}):
        add(optimizer(numel, kept), numel)
        if device().type == "cuda":
            torch.cuda.empty_cache()
    add(shard_casts(shapes), layer)
    return rows


def measure_gather(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the gather of a layer's weights in ms: in one piece, with copies after it, and in place."""
    world, group = dist.get_world_size(), dist.get_world_group()
    shapes = SMALL if options.quick else LAYER
    stacks = [(0, 1), (2,)] if options.quick else STACKS
    lengths = [math.prod(shape) // world for shape in shapes]
    shards = torch.zeros(sum(lengths), dtype=torch.uint8, device=device())

    def whole() -> torch.Tensor:
        buffer = shards.new_empty(world, len(shards))
        dist.all_gather_into_tensor(buffer.view(-1), shards, group=group)
        return buffer

    def copied() -> None:
        pieces = whole().split(lengths, dim=1)
        for stack in stacks:
            codes, begin = shards.new_empty(sum(world * lengths[i] for i in stack)), 0
            for i in stack:
                codes[begin : begin + world * lengths[i]].view(world, -1).copy_(pieces[i])
                begin += world * lengths[i]

    def in_place(peers: PeerMemory | None = None) -> None:
        outputs, inputs = [], (peers.local if peers else shards).split(lengths)
        for stack in stacks:
            sizes = [world * lengths[i] for i in stack]
            outputs += shards.new_empty(sum(sizes)).split(sizes)
        work = peers.gather(outputs, inputs) if peers else grouped.all_gather(outputs, inputs, group)
        work.wait()

    ways = {
        "one gather, layout of the wire": whole,
        "the same, copied side by side": copied,
        "grouped, in place": in_place,
    }
    shared = share(len(shards), device(), group)
    if isinstance(shared, PeerMemory):
        ways["copy engines, in place"] = lambda: in_place(shared)
    elif is_first():
        print(f"no copy engines: {shared}")
    received = (world - 1) * len(shards)
    return [
        {"part": name, "ms": (ms := timed(function, 20)), "GB": received / 1e9, "TB/s": received / ms / 1e9}
        for name, function in ways.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gather", action="store_true", help="the gather of a layer, under torchrun")
    options = parser.parse_args(arguments)
    if options.gather:
        join_ranks()
    rows = measure_gather(options) if options.gather else measure_parts(options)
    facts = banner()
    if not options.gather or is_first():
        print_banner(facts)
        print_table("parts of ZeRO-3's step", list(rows[0]), [list(row.values()) for row in rows])
        if options.json:
            write_json(options.json, banner=facts, rows=rows)
    if options.gather:
        leave_ranks()


if __name__ == "__main__":
    main_entry(main)
