"""Sharded weights without DeepSpeed, and numbers on which every way to cast them agrees."""

from __future__ import annotations

import math

import torch
from torch import nn

from ds_fp8.casts import scale_from_amax
from ds_fp8.config.formats import BLOCK, FORMATS, CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.zero.deepspeed.parameters import Shard
from ds_fp8.zero.param import FP8Param, stacks_of
from ds_fp8.zero.quantizer import place_scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(131, 301), (256, 128), (1, 5), (70, 131), (400, 16), (3, 1000), (128, 384)]


def weights_of(
    rank: int, world: int, granularity: str, device: str, shapes=SHAPES, spec: CastSpec | None = None, channels: int = 0
) -> list[FP8Param]:
    """Weights of these shapes as this rank of `world` would hold them, their codes zero.

    channels: outlier channels, for whose blocks those have room whose rows are not cut.
    """
    weights = []
    for rows, columns in shapes:
        parameter = nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=device))
        length = math.ceil(rows * columns / world)
        valid = max(0, min(length, rows * columns - rank * length))
        shard = Shard(torch.Size((rows, columns)), rank * length, length, valid, world, None)
        outliers = OutlierChannels(channels) if channels else None
        weights.append(FP8Param(parameter, shard, spec or CastSpec(granularity=granularity), outliers))
    place_scales(stacks_of(weights))
    numels = [weight.data_numel for weight in weights]
    codes = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
    for weight, data in zip(weights, codes.split(numels), strict=True):
        weight.data = data
    return weights


def buffer_of(weights: list[FP8Param]) -> torch.Tensor:
    """A zeroed flat buffer for the scales of `weights`."""
    end = max(weight.scale_start + weight.scale_numel for weight in weights)
    return torch.zeros(end, device=weights[0].data.device)


def exact_masters(shapes=SHAPES, seed: int = 0) -> list[torch.Tensor]:
    """Matrices whose elements are E4M3 numbers (no subnormals) times a power of two per 128x128 block, all amax 448."""
    generator = torch.Generator().manual_seed(seed)
    masters = []
    for rows, columns in shapes:
        codes = torch.randint(8 * 6, 8 * 15, (rows, columns), generator=generator, dtype=torch.uint8)
        x = codes.view(torch.float8_e4m3fn).float()
        x[::BLOCK, ::BLOCK] = FORMATS["e4m3"].max  # the first element of every block
        blocks = torch.randint(-9, 3, (-(-rows // BLOCK), -(-columns // BLOCK)), generator=generator).float().exp2()
        x *= blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        masters.append(x * torch.where(torch.rand(rows, columns, generator=generator) < 0.5, -1.0, 1.0))
    return masters


def shards_of(masters: list[torch.Tensor], weights: list[FP8Param]) -> dict[FP8Param, torch.Tensor]:
    """This rank's flat shards, with NaN where DeepSpeed leaves memory uninitialised."""
    result = {}
    for master, weight in zip(masters, weights, strict=True):
        flat = torch.full((weight.shard.numel,), torch.nan, device=weight.data.device)
        flat[: weight.shard.valid] = master.flatten()[weight.shard.start :][: weight.shard.valid]
        result[weight] = flat
    return result


def cast_on_all_ranks(make, masters, world, spec: CastSpec, device=DEVICE, to=lambda shard: shard, channels=0):
    """(amax, codes of every weight) after `make(weights, codes, spec)` has cast the shards of every rank."""
    shapes = [tuple(master.shape) for master in masters]
    ranks = [weights_of(rank, world, spec.granularity, device, shapes, spec, channels) for rank in range(world)]
    casts, sources, found = [], [], []
    for weights in ranks:
        shards = shards_of(masters, weights)
        shards = {weight: to(shard) for weight, shard in shards.items()}
        base = weights[0].data._base
        casts.append(make(weights, base, spec))
        sources.append(shards.__getitem__)
        found.append(buffer_of(weights))
        casts[-1].write_amax(found[-1], sources[-1])
    amax = torch.stack(found).amax(0)
    scales = scale_from_amax(amax, spec.format, spec.scale)
    codes = []
    for cast, source in zip(casts, sources, strict=True):
        cast.cast(scales, source)
    for index, (rows, columns) in enumerate(shapes):
        flat, pitch = torch.cat([weights[index].data for weights in ranks]), ranks[0][index].pitch
        codes.append(flat[: rows * pitch].view(rows, pitch)[:, :columns].cpu())
        assert not flat[: rows * pitch].view(rows, pitch)[:, columns:].any()
    scales_of = [weight.scales_in(scales).cpu() for weight in ranks[0]]
    return amax.cpu(), scales_of, codes
