"""Gradient reduction: large gradients in FP8, by an all-to-all of slices that are summed in FP32.

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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.config.formats import BLOCK
from ds_fp8.config.fp8 import GradientReduceConfig
from ds_fp8.zero import seams
from ds_fp8.zero.automatic_scale import AutomaticScale
from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.gradient_wire import pack, sum_rows
from ds_fp8.zero.message import CastOptions, Message, Slices
from ds_fp8.zero.nodes import Nodes
from ds_fp8.zero.wire import GRADIENT, WireMeter

SMALLEST = 4096
"""Gradients of fewer elements, and those of one dimension, go through DeepSpeed's own reduce-scatter."""

ROW_ALIGNMENT = 4 * BLOCK
"""Codes of a place are a multiple of this, so that every row of a message begins at a multiple of 16 bytes."""

Observer = Callable[[torch.Tensor, str, torch.Tensor | None], None]
"""(full gradient, name, its scale or None where every 128 elements have their own)."""


def is_reduced_in_fp8(shape: torch.Size) -> bool:
    """Return whether a gradient of this shape is worth a cast."""
    return len(shape) > 1 and math.prod(shape) >= SMALLEST


class Reduction:
    """Reduces gradients: some in FP8, the others as DeepSpeed does."""

    def __init__(self, wire: WireMeter, in_fp8: GradientReduce | None, shards: GradientShards | None):
        """Make a reduction.

        Args:
            wire: Counts the bytes.
            in_fp8: Reduces those that it accepts.
            shards: What the means are added to; None where DeepSpeed adds the slices that are returned.
        """
        self._wire, self._in_fp8, self._shards = wire, in_fp8, shards

    @torch.no_grad()
    def __call__(
        self,
        named: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        accumulate: bool,
        average: Callable[[list[nn.Parameter]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Reduce the full gradients of parameters of one process group. Collective.

        Args:
            named: Parameters by their names, the same on every rank.
            dtype: What DeepSpeed sends gradients in.
            accumulate: Add the means to those of earlier micro-batches.
            average: DeepSpeed's reduction of some of them: from their gradients to this rank's slices of the means.

        Returns:
            This rank's slice of every mean, of ceil(numel / ranks) elements without padding; none where they are added
            to the shards.
        """
        group = seams.shard_group(next(iter(named.values())))
        accepts = self._in_fp8.casts if self._in_fp8 is not None else lambda shape, name: False
        cast = [name for name, parameter in named.items() if accepts(parameter.grad.shape, name)]
        # Both lists keep the order of `named`: collectives come in one order on all ranks.
        others = [name for name in named if name not in cast]
        slices: dict[str, torch.Tensor] = {}
        if others:
            world = dist.get_world_size(group)  # every gradient is padded to a multiple of it
            sent = sum(math.ceil(named[name].grad.numel() / world) * world for name in others) * dtype.itemsize
            self._wire.count(GRADIENT, "reduce_scatter", sent, group)
            parts = average([named[name] for name in others])
            if self._shards is not None:
                self._shards.add_slices(parts, others, accumulate)
            slices.update(zip(others, parts, strict=True))
        if cast:
            gradients = [named[name].grad for name in cast]
            parts = self._in_fp8.reduce(gradients, group, cast, self._shards, accumulate)
            slices.update(zip(cast, parts, strict=False))
        return [] if self._shards is not None else [slices[name] for name in named]


class GradientReduce:
    """The part of the reduction in FP8, for gradients that are large enough to be worth a cast."""

    def __init__(
        self,
        config: GradientReduceConfig,
        wire: WireMeter,
        nodes: Nodes | None = None,
        observe: Observer | None = None,
    ):
        """Make a reduction with these settings.

        Args:
            config: The section "grad_reduce", of an FP8 format.
            wire: Counts the bytes that this rank sends.
            nodes: Groups of two levels for reductions over all ranks; those over fewer ranks are flat.
            observe: Is shown every gradient that is cast.
        """
        self._observe, self._left_out = observe, frozenset[str]()
        self._config, self._wire, self._nodes = config, wire, nodes
        self._automatic_scale = AutomaticScale(config.format) if config.scale == "tensor" else None

    def leave_out(self, names: Iterable[str]) -> None:
        """Reduce the gradients of these parameters as DeepSpeed does from now on, on all ranks alike."""
        self._left_out |= frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later reductions depend on. Collective."""
        return {} if self._automatic_scale is None else {"scale": self._automatic_scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, what state_dict() returned on any number of ranks. What it lacks starts afresh."""
        if self._automatic_scale is not None:
            self._automatic_scale = AutomaticScale(self._config.format)
            if "scale" in state:
                self._automatic_scale.load_state_dict(state["scale"])

    def casts(self, shape: torch.Size, name: str) -> bool:
        """Return whether a gradient of this shape, of the parameter `name`, travels in FP8."""
        return is_reduced_in_fp8(shape) and name not in self._left_out

    def reduce(
        self,
        tensors: list[torch.Tensor],
        group: object,
        names: list[str],
        shards: GradientShards | None = None,
        accumulate: bool = False,
    ) -> list[torch.Tensor]:
        """Reduce full gradients, all of which `casts` accepts. Collective.

        Args:
            tensors: Gradients of any shape, FP32 or BF16; read once, and not kept.
            group: Process group.
            names: Names of the parameters, the same on every rank.
            shards: What the means over ranks of this rank's slices are added to.
            accumulate: Add to what the shards hold rather than replace it.

        Returns:
            Those slices, FP32, without padding, where there are no shards.
        """
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        message, shape, places = self._send(tensors, group, names)
        if shards is not None:
            shards.add_message(message, shape, self._config.format, world, places, names, accumulate)
            return []
        total = sum_rows(message, shape, self._config.format, world)
        return [
            total[place.column :][: max(0, min(place.length, tensor.numel() - rank * place.length))]
            for tensor, place in zip(tensors, places, strict=True)
        ]

    def _send(
        self, tensors: list[torch.Tensor], group: object, names: list[str]
    ) -> tuple[torch.Tensor, Message, list[Slices]]:
        """Cast and exchange gradients; return the message that came, whose rows are to be summed, and its layout."""
        world = dist.get_world_size(group)
        # The slices of all gradients lie side by side, each from a whole group on.
        # Groups of fewer ranks (experts, sequence parallelism) may span nodes unevenly; they are exchanged flat.
        nodes = self._nodes if world == dist.get_world_size() else None
        places, width = [], 0
        for tensor in tensors:
            places.append(Slices(math.ceil(tensor.numel() / world), width))
            width += places[-1].padded
        # 512 codes with their 4 scales of 4 bytes: rows start at multiples of 16 bytes, for wide loads of both.
        width = math.ceil(width / ROW_ALIGNMENT) * ROW_ALIGNMENT
        count = 1 if nodes is None else nodes.count
        shape = Message(world // count, count, width)
        message = shape.empty(tensors[0].device)
        self._pack(tensors, names, message, shape, places, group)
        if nodes is None:
            return self._exchange(message, group), shape, places
        # What this node's ranks found for its place in every node: to each node's rank at that place.
        #     inside a host:   every rank sums what its host has for the places with its number, in FP32
        #     between hosts:   those sums are cast again and exchanged: 1 / ranks-a-host of the bytes leave the host
        inside = sum_rows(self._exchange(message, nodes.inside), shape, self._config.format)
        shape = Message(count, 1, width)
        message = shape.empty(inside.device)
        pack(inside, message, shape, Slices(width, 0), CastOptions(self._config.format))
        return self._exchange(message, nodes.between), shape, places

    def _pack(
        self,
        tensors: list[torch.Tensor],
        names: list[str],
        message: torch.Tensor,
        shape: Message,
        places: list[Slices],
        group: object,
    ) -> None:
        scales = clipped = [None] * len(tensors)
        if self._automatic_scale is not None:
            scales = self._automatic_scale.scales(tensors, names, group)
            self._wire.count(GRADIENT, "all_reduce", 2 * scales.nbytes, group)  # amax and saturated shares
            clipped = torch.zeros(len(tensors), dtype=torch.int32, device=message.device)
        for tensor, name, place, scale, count in zip(tensors, names, places, scales, clipped, strict=True):
            if self._observe is not None:
                self._observe(tensor, name, scale)
            pack(tensor, message, shape, place, CastOptions(self._config.format, scale, count))
        if self._automatic_scale is not None:
            self._automatic_scale.saturated(clipped, [tensor.numel() for tensor in tensors], names)

    def _exchange(self, message: torch.Tensor, group: object) -> torch.Tensor:
        """Send row r to rank r of `group`; return the rows that came here, [ranks of the group, row bytes]."""
        if dist.get_world_size(group) == 1:
            return message
        # Both on the stream of reductions, where they are allocated, cast, sent and summed: nothing has to be recorded.
        received = torch.empty_like(message)
        self._wire.count(GRADIENT, "all_to_all", message.nbytes, group)
        dist.all_to_all_single(received, message, group=group)
        return received
