"""AdamW's step and the cast of weights behind it: FP32 masters in two passes and in one, codes and corrections.

    python scripts/bench/update.py                             ms for 1e9 parameters, bytes of state a parameter
    python scripts/bench/update.py --tiles 16x8x3,8x4x5        shapes of the kernel beside each other
    python scripts/bench/update.py --quick                     seconds on a CPU, by the references

"bytes" are those of masters, moments and codes with their scales; gradients (BF16 beside compressed moments) not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from common import WEIGHT_STD, argument_parser, begin, device, measure, positive, print_table, words, write_json
from torch import nn

from ds_fp8.casts import scale_from_amax
from ds_fp8.config.errors import main_entry
from ds_fp8.config.formats import CastSpec
from ds_fp8.optim.adamw import AdamStep, step_on
from ds_fp8.optim.masters import stored_amax
from ds_fp8.optim.moments import CODECS, Layout, Moment
from ds_fp8.zero.coded_masters import ReferenceStep
from ds_fp8.zero.deepspeed.parameters import Shard
from ds_fp8.zero.param import FP8Param, stacks_of
from ds_fp8.zero.quantizer import make_shard_cast, place_scales

STEP = AdamStep(3, 1e-4, 0.9, 0.95, 1e-8, 0.1)
COLUMNS = 4096
TWO_PASSES, ONE_PASS = "FP32, and a cast", "FP32, in one pass"


def moments(kept: str, numel: int) -> tuple[torch.Tensor | Moment, torch.Tensor | Moment]:
    def moment(never_zero: bool) -> torch.Tensor | Moment:
        if CODECS[kept].max is None:
            return torch.full((numel,), 1e-8, dtype=CODECS[kept].dtype, device=device())
        return Moment(CODECS[kept], Layout(numel, "1x128", "fp32", ()), device(), never_zero=never_zero)

    return moment(False), moment(True)


def sharded(rows: int, weights: int, scale: str) -> tuple[list[FP8Param], torch.Tensor]:
    """Weights of one rank, and their scales."""
    spec, made = CastSpec(granularity="128x128", scale=scale), []
    for _ in range(weights):
        parameter = nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=device()))
        shard = Shard(torch.Size((rows, COLUMNS)), 0, rows * COLUMNS, rows * COLUMNS, 1, None)
        made.append(FP8Param(parameter, shard, spec))
    scales = torch.full((place_scales(stacks_of(made)),), 5 * WEIGHT_STD, device=device())
    scales = scale_from_amax(stored_amax(scales, scale), "e4m3", scale)
    codes = torch.randint(0, 120, (rows * COLUMNS * weights,), dtype=torch.uint8, device=device())
    corrections = torch.zeros(len(codes), dtype=torch.int16, device=device())
    for weight, mine, correction in zip(
        made, codes.split(rows * COLUMNS), corrections.split(rows * COLUMNS), strict=True
    ):
        weight.data, weight.correction, weight.scale = mine, correction, weight.scales_in(scales)
    return made, scales


def two_kernels(weights: list[FP8Param], scales: torch.Tensor, kept: str) -> Callable[[], None]:
    numel, codes = sum(weight.shard.numel for weight in weights), weights[0].data._base
    exp_avg, exp_avg_sq = moments(kept, numel)
    master = torch.randn(numel, device=device()) * WEIGHT_STD
    parts = dict(zip(weights, master.split(weights[0].shard.numel), strict=True))
    gradient, step = gradients(kept, numel), step_on(device(), (exp_avg, exp_avg_sq))
    cast, skip = make_shard_cast(weights, codes, weights[0].spec), torch.zeros(1, dtype=torch.int32, device=device())

    def update() -> None:
        step(master, gradient, exp_avg, exp_avg_sq, replace(STEP, skip=skip, seed=7, stochastic=("exp_avg_sq",)))
        amax = torch.zeros_like(scales)
        cast.write_amax(amax, parts.__getitem__)
        cast.cast(scale_from_amax(amax, "e4m3", weights[0].spec.scale), parts.__getitem__)

    return update


def one_pass(weights: list[FP8Param], scales: torch.Tensor) -> Callable[[], None]:
    from ds_fp8.zero.one_pass_triton import StepAndCast

    size, numel = weights[0].shard.numel, sum(weight.shard.numel for weight in weights)
    kernel = StepAndCast([(weight, size * index) for index, weight in enumerate(weights)], numel, weights[0].data)
    master, (exp_avg, exp_avg_sq) = torch.randn(numel, device=device()) * WEIGHT_STD, moments("fp32", numel)
    gradient, skip = gradients("fp32", numel), torch.zeros(1, dtype=torch.int32, device=device())

    def update() -> None:
        amax = torch.zeros_like(scales)
        kernel(master, amax, gradient, exp_avg, exp_avg_sq, replace(STEP, skip=skip))
        scale_from_amax(amax, "e4m3", weights[0].spec.scale)  # of the whole weights, as the cast has them

    return update


def one_kernel(
    weights: list[FP8Param], scales: torch.Tensor, kept: str, tile: tuple[int, int, int] | None
) -> Callable[[], None]:
    size = weights[0].shard.numel
    numel, starts = size * len(weights), range(0, len(weights) * size, size)
    exp_avg, exp_avg_sq = moments(kept, numel)
    gradient, skip = gradients(kept, numel), torch.zeros(1, dtype=torch.int32, device=device())
    make = ReferenceStep
    if device().type == "cuda":
        from ds_fp8.zero import coded_masters_triton

        make = coded_masters_triton.TileStep
        if tile is not None:
            coded_masters_triton.PART, coded_masters_triton.WARPS, coded_masters_triton.PROGRAMS = tile
    step = make(list(zip(weights, starts, strict=True)))

    def update() -> None:
        of_step = replace(STEP, skip=skip, seed=7, stochastic=("exp_avg_sq",))
        step(scales, torch.zeros_like(scales), gradient, exp_avg, exp_avg_sq, of_step)(scales)

    return update


def gradients(kept: str, numel: int) -> torch.Tensor:
    return torch.randn(numel, device=device(), dtype=torch.float32 if kept == "fp32" else torch.bfloat16) * 1e-4


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--numel", type=positive, default=10**9, help="parameters of the weights")
    parser.add_argument(
        "--tiles",
        default="",
        metavar="ROWSxWARPSxPROGRAMS,...",
        help="rows, warps and programs a multiprocessor, all tried",
    )
    options = parser.parse_args(arguments)
    facts, found = begin(), []
    rows = 256 if options.quick else 4096
    count = 1 if options.quick else math.ceil(options.numel / (rows * COLUMNS))
    tiles = [tuple(map(int, one.split("x"))) for one in words(options.tiles)] or [None]
    for moments_in, scale in itertools.product(("fp32", "e4m3_expanded"), ("pow2", "fp32")):
        of_moments = 8 if moments_in == "fp32" else 2 + 10 / 128
        # Of FP32 masters in one pass there is a kernel where moments are in FP32, too, and on GPUs alone.
        in_one_pass = moments_in == "fp32" and device().type == "cuda"
        for tile in (TWO_PASSES, *([ONE_PASS] if in_one_pass else []), *tiles):
            weights, scales = sharded(rows, count, scale)
            if tile == TWO_PASSES:
                update = two_kernels(weights, scales, moments_in)
            elif tile == ONE_PASS:
                update = one_pass(weights, scales)
            else:
                update = one_kernel(weights, scales, moments_in, tile)
            milliseconds = measure(update)
            found.append({
                "masters": tile if tile in (TWO_PASSES, ONE_PASS) else f"code and correction {tile or ''}",
                "moments": moments_in, "scales": scale, "milliseconds": milliseconds * 1e9 / (count * rows * COLUMNS),
                "bytes": (4 if tile in (TWO_PASSES, ONE_PASS) else 2) + of_moments + 1 + 4 / 128**2,
            })  # fmt: skip
            del weights, scales, update
            if device().type == "cuda":
                torch.cuda.empty_cache()
    print_table("Update and cast of 1e9 parameters", list(found[0]), [list(row.values()) for row in found])
    if options.json:
        write_json(options.json, banner=facts, rows=found)
    return 0


if __name__ == "__main__":
    main_entry(main)
