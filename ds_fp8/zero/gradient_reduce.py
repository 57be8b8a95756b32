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

Error feedback (Seide et al., Interspeech 2014) adds what the last cast of a gradient lost to the next one; the second
cast of two levels is not covered.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Callable, Iterable

import torch
from deepspeed import comm as dist

from ds_fp8.config import GradientReduceConfig
from ds_fp8.formats import BLOCK
from ds_fp8.zero.automatic_scale import AutomaticScale
from ds_fp8.zero.gradient_wire import CastOptions, Message, Slices, pack, sum_rows
from ds_fp8.zero.nodes import Nodes
from ds_fp8.zero.seams import StockReduceScatter
from ds_fp8.zero.wire import GRADIENT, WireMeter

SMALLEST = 4096
"""Gradients of fewer elements, and those of one dimension, go through DeepSpeed's own reduce-scatter."""

ROW_ALIGNMENT = 4 * BLOCK
"""Codes of a place are a multiple of this, so that every row of a message begins at a multiple of 16 bytes."""

Observer = Callable[[torch.Tensor, int, torch.Tensor | None], None]
"""(full gradient, key, its scale or None where every 128 elements have their own)."""

_RESIDUALS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def is_reduced_in_fp8(shape: torch.Size) -> bool:
    """Whether a gradient of this shape is worth a cast."""
    return len(shape) > 1 and math.prod(shape) >= SMALLEST


def residual_bytes(shapes: Iterable[torch.Size], error_feedback: str) -> int:
    """Bytes that error feedback keeps on every rank for gradients of these shapes."""
    if error_feedback == "off":
        return 0
    return _RESIDUALS[error_feedback].itemsize * sum(math.prod(shape) for shape in shapes if is_reduced_in_fp8(shape))


class GradientReduce:
    """A reduce-scatter with the contract of DeepSpeed's, in FP8 where a gradient is large enough to be worth it."""

    def __init__(
        self,
        stock: StockReduceScatter,
        config: GradientReduceConfig,
        wire: WireMeter,
        nodes: Nodes | None = None,
        clock: Callable[[], int] | None = None,
        observe: Observer | None = None,
    ):
        """clock: a number that differs between micro-batches, and is the same again when a checkpoint is resumed.

        Without one the reductions are counted. observe: is shown every gradient that is cast.
        """
        self._observe, self._left_out = observe, frozenset[int]()
        self._stock, self._config, self._wire, self._nodes = stock, config, wire, nodes
        self._clock = clock or itertools.count().__next__
        self._automatic_scale = AutomaticScale(config.format) if config.scale == "tensor" else None
        self._residuals: dict[int, torch.Tensor] = {}

    def leave_out(self, keys: Iterable[int]) -> None:
        """Reduce the gradients of these keys as DeepSpeed does from now on, on all ranks alike."""
        self._left_out |= frozenset(keys)

    @torch.no_grad()
    def __call__(self, tensors: list[torch.Tensor], group: object, keys: list[int]) -> list[torch.Tensor]:
        """For each full gradient the mean over ranks of this rank's slice of ceil(numel / world) elements, unpadded.

        keys: a number for each gradient that is the same on every rank and in every step.
        """
        slices: list[torch.Tensor | None] = [None] * len(tensors)
        large = [i for i, t in enumerate(tensors) if is_reduced_in_fp8(t.shape) and keys[i] not in self._left_out]
        small = [i for i in range(len(tensors)) if i not in large]
        for choice, reduce in ((small, self._reduce_small), (large, self._reduce_large)):
            if choice:
                parts = reduce([tensors[i] for i in choice], group, [keys[i] for i in choice])
                for i, part in zip(choice, parts, strict=True):
                    slices[i] = part
        return slices

    def _reduce_small(self, tensors: list[torch.Tensor], group: object, keys: list[int]) -> list[torch.Tensor]:
        return self._stock(tensors, group)

    def _reduce_large(self, tensors: list[torch.Tensor], group: object, keys: list[int]) -> list[torch.Tensor]:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        # The slices of all gradients lie side by side, each from a whole group on.
        places, width = [], 0
        for tensor in tensors:
            places.append(Slices(math.ceil(tensor.numel() / world), width))
            width += places[-1].padded
        width = math.ceil(width / ROW_ALIGNMENT) * ROW_ALIGNMENT
        count = 1 if self._nodes is None else self._nodes.count
        shape = Message(world // count, count, width)
        message = shape.empty(tensors[0].device)
        self._pack(tensors, keys, message, shape, places, group)
        if self._nodes is None:
            total = self._exchange(message, shape, group, divisor=world)
        else:
            # What this node's ranks found for its place in every node: to each node's rank at that place.
            inside = self._exchange(message, shape, self._nodes.inside)
            shape = Message(count, 1, width)
            message = shape.empty(inside.device)
            key = self._rounding_key(-1 - keys[0])
            pack(inside, message, shape, Slices(width, 0), CastOptions(self._config.format, key))
            total = self._exchange(message, shape, self._nodes.between, divisor=world)
        return [
            total[place.column :][: max(0, min(place.length, tensor.numel() - rank * place.length))]
            for tensor, place in zip(tensors, places, strict=True)
        ]

    def _pack(
        self,
        tensors: list[torch.Tensor],
        keys: list[int],
        message: torch.Tensor,
        shape: Message,
        places: list[Slices],
        group: object,
    ) -> None:
        scales = clipped = [None] * len(tensors)
        if self._automatic_scale is not None:
            with self._wire.counted_as(GRADIENT):
                scales = self._automatic_scale.scales(tensors, keys, group)
            clipped = torch.zeros(len(tensors), dtype=torch.int32, device=message.device)
        for tensor, key, place, scale, count in zip(tensors, keys, places, scales, clipped, strict=True):
            if self._observe is not None:
                self._observe(tensor, key, scale)
            options = CastOptions(
                self._config.format, self._rounding_key(key), scale, count, self._residual(tensor, key)
            )
            pack(tensor, message, shape, place, options)
        if self._automatic_scale is not None:
            self._automatic_scale.saturated(clipped, [tensor.numel() for tensor in tensors], keys)

    def _exchange(self, message: torch.Tensor, shape: Message, group: object, divisor: int = 1) -> torch.Tensor:
        """Send row r to rank r of `group`; the FP32 sum of the rows that came here, divided."""
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        return sum_rows(received, shape, self._config.format, divisor)

    def _rounding_key(self, key: int) -> int | None:
        """31 bits that differ between ranks, gradients and micro-batches: equal roundings would not average out."""
        if self._config.rounding == "nearest":
            return None
        return zlib.crc32(struct.pack("4q", self._config.seed, dist.get_rank(), key, self._clock())) >> 1

    def _residual(self, tensor: torch.Tensor, key: int) -> torch.Tensor | None:
        """What the last cast of this gradient lost, flat; zeros at first."""
        if self._config.error_feedback == "off":
            return None
        if key not in self._residuals:
            dtype = _RESIDUALS[self._config.error_feedback]
            self._residuals[key] = torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)
        return self._residuals[key]
