"""FP8 gradient reduce-scatter: an all-to-all of FP8 slices, summed in FP32.

A reduce-scatter in FP8 would add FP8 numbers. Instead every rank sends every other rank its slice of the gradient, cast
per 128 elements, and the receiver sums in FP32 (ZeRO++, arXiv 2306.10209, section 3.3):

    send[r]  = cast(gradient slice of rank r)              payload and scales in one uint8 buffer
    recv     = all_to_all(send)
    slice    = 1/W * sum over ranks of dequantize(recv[s])  FP32

Over several nodes it is done twice, inside the node first, so that between nodes only 1/(ranks per node) of the bytes
travel; the sums of the first round are cast once more for the second.

NaN or Inf anywhere in a group of 128 makes that group NaN on every rank's result: the gradient norm is then not finite
and ZeRO-3 skips the step on all ranks.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from deepspeed import comm as dist

from ds_fp8.formats import BLOCK, FORMATS
from ds_fp8.quantize import QuantizedTensor, quantize
from ds_fp8.zero.seams import ReduceScatter

SMALLEST = 4096
"""Gradients of fewer elements, and those of one dimension, go through DeepSpeed's own reduce-scatter."""


@dataclass(frozen=True)
class Nodes:
    """Process groups of the two-level reduction; ranks are numbered node by node."""

    inside: object
    """Group of the L ranks of this rank's node."""
    between: object
    """Group of the M ranks that have this rank's place in their nodes."""
    ranks_per_node: int
    count: int


def find_nodes(hierarchy: str, ranks_per_node: int | None = None) -> Nodes | None:
    """The two-level groups, or None for one flat all-to-all (`hierarchy` "flat", one node, or nodes of unequal size).

    ranks_per_node: read from the launcher's LOCAL_WORLD_SIZE or LOCAL_SIZE when None. Collective.
    """
    world = dist.get_world_size()
    if ranks_per_node is None:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
    sizes: list = [None] * world
    dist.all_gather_object(sizes, ranks_per_node)
    if hierarchy == "flat" or len(set(sizes)) > 1 or ranks_per_node in (1, world) or world % ranks_per_node:
        return None
    count, rank = world // ranks_per_node, dist.get_rank()
    inside = [dist.new_group([n * ranks_per_node + i for i in range(ranks_per_node)]) for n in range(count)]
    between = [dist.new_group([n * ranks_per_node + i for n in range(count)]) for i in range(ranks_per_node)]
    return Nodes(inside[rank // ranks_per_node], between[rank % ranks_per_node], ranks_per_node, count)


def pack(x: torch.Tensor, format: str) -> torch.Tensor:
    """Cast x [W, n] (n a multiple of 128) into one uint8 buffer [W, n + n/32]: n codes, then n/128 FP32 scales."""
    quantized = quantize(x, format, "1x128", "pow2")
    return torch.cat([quantized.data.view(torch.uint8), quantized.scale.contiguous().view(torch.uint8)], 1)


def unpack(buffer: torch.Tensor, n: int, format: str) -> torch.Tensor:
    """The FP32 numbers [W, n] of a packed buffer."""
    data = buffer[:, :n].contiguous().view(FORMATS[format].dtype)
    scale = buffer[:, n:].contiguous().view(torch.float32)
    return QuantizedTensor(data, scale, "1x128", "pow2").dequantize()


def all_to_all_sum(x: torch.Tensor, format: str, group: object) -> torch.Tensor:
    """Row r of x [W, n] goes to rank r of `group`; returns the FP32 sum [n] of the rows that came here."""
    send = pack(x, format)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return unpack(received, x.shape[1], format).sum(0)


def make_reduce_scatter(stock: ReduceScatter, format: str, nodes: Nodes | None = None) -> ReduceScatter:
    """A reduce-scatter with the contract of DeepSpeed's, in FP8 where a gradient is large enough to be worth it."""

    @torch.no_grad()
    def reduce_scatter(tensors: list[torch.Tensor], group: object = None) -> list[torch.Tensor]:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        slices: list[torch.Tensor | None] = [None] * len(tensors)
        large = [i for i, t in enumerate(tensors) if t.dim() > 1 and t.numel() >= SMALLEST]
        small = [i for i in range(len(tensors)) if i not in large]
        if small:
            for i, part in zip(small, stock([tensors[i] for i in small], group), strict=True):
                slices[i] = part
        if not large:
            return slices

        # ZeRO-3's slice is ceil(numel / W) elements; here each is padded to whole groups, and all lie side by side.
        lengths = [math.ceil(tensors[i].numel() / world) for i in large]
        padded = [math.ceil(length / BLOCK) * BLOCK for length in lengths]
        x = tensors[large[0]].new_zeros(world, sum(padded))
        for i, length, part in zip(large, lengths, x.split(padded, dim=1), strict=True):
            flat = tensors[i].flatten()
            whole = flat.numel() // length
            part[:whole, :length] = flat[: whole * length].view(whole, length)
            if whole < world:
                part[whole, : flat.numel() - whole * length] = flat[whole * length :]

        if nodes is None:
            total = all_to_all_sum(x, format, group)
        else:
            # [M·L, n] -> [L, M·n]: to each neighbour what goes to its place in every node
            by_place = x.view(nodes.count, nodes.ranks_per_node, -1).transpose(0, 1).flatten(1)
            inside = all_to_all_sum(by_place, format, nodes.inside)
            total = all_to_all_sum(inside.view(nodes.count, -1), format, nodes.between)
        total /= world

        for i, length, part in zip(large, lengths, total.split(padded), strict=True):
            slices[i] = part[: max(0, min(length, tensors[i].numel() - rank * length))]
        return slices

    return reduce_scatter
