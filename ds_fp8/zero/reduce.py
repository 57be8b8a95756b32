"""Gradient reduction: large gradients in FP8, by an all-to-all of slices that are summed in FP32.

A reduce-scatter in FP8 would add FP8 numbers. Instead every rank sends every other rank its slice of the gradient,
quantized per 128 elements, and the receiver sums in FP32 (ZeRO++, arXiv 2306.10209, section 3.3):

    send[r]      = quantize(gradient slice of rank r)              payload and scales in one uint8 buffer
    recv         = all_to_all(send)
    gradient[i]  = 1/W * sum over ranks of data * scale            first micro-batch of a step, FP32
    gradient[i] += the same                                        later ones
    squares[s]   = sum of gradient[i]² over the SPAN elements i of span s, after that

Over several nodes it is done twice, inside the node first, so that between nodes only 1/(ranks per node) of the bytes
are sent; the sums of the first round are quantized for the second.

A message is uint8 [rows, places * width * 33/32], one row for each rank it goes to: first the data, `width` for each
of `places` slices, then one FP32 scale for every 128 of them. The slice of rank r lies in row r mod rows, place r div
rows; one flat exchange has as many rows as ranks and one place, the first of two levels has a place for every node.

The receiver makes one pass: each message byte is read once, each accumulated element written once. The sums of squares
make up the gradient norm without another read. They are FP64 and each is written by one program, so that runs are
bitwise reproducible and a norm does not overflow before its gradient does.

NaN or Inf anywhere in a group of 128 makes that group NaN on every rank's result: the gradient norm is then not finite
and ZeRO-3 skips the step on all ranks.

Each function has a kernel in reduce_triton.py; formats with a codec have the reference only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import nn
from torch.nn.functional import pad

from ds_fp8.casts import group_amax, scale_from_amax
from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.config.formats import BLOCK, FORMATS
from ds_fp8.config.plans import GradientReduction
from ds_fp8.zero.automatic_scale import AutomaticScale
from ds_fp8.zero.collectives import GRADIENT, WireMeter
from ds_fp8.zero.deepspeed.parameters import shard_group
from ds_fp8.zero.hosts import Nodes

SMALLEST = 4096  # gradients of fewer elements, and those of one dimension, go through DeepSpeed's own reduce-scatter

# The width of a place is a multiple of this: with the 4 scales of 4 bytes every row of a message begins at a multiple
# of 16 bytes, for wide loads of both.
ROW_ALIGNMENT = 4 * BLOCK
LIMIT = 1024  # tables of messages that are kept: far fewer where all steps have the same, endless where they vary
SPAN = 4096  # elements of a gradient slice that share one sum of squares


@dataclass(frozen=True)
class Message:
    """The shape of a message; `width` is a multiple of 128."""

    rows: int
    places: int
    width: int

    @property
    def row_numel(self) -> int:
        return self.places * self.width

    @property
    def row_bytes(self) -> int:
        return self.row_numel + self.row_numel // BLOCK * torch.float32.itemsize

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of data, uint8 [rows, places, width], and scales, FP32 [rows, places, width/128]."""
        data = message[:, : self.row_numel].unflatten(1, (self.places, self.width))
        scales = message.view(torch.float32)[:, self.row_numel // 4 :]
        return data, scales.unflatten(1, (self.places, self.width // BLOCK))

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.rows, self.row_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Slices:
    """Offsets of one flat gradient in a message: rank r gets its elements [r * length, (r + 1) * length)."""

    length: int
    column: int  # where its slice begins in the `width` elements of every place; a multiple of 128

    @property
    def padded(self) -> int:
        """Elements of a slice, padded to full groups."""
        return -(-self.length // BLOCK) * BLOCK


class Target(NamedTuple):
    """Offset of one gradient's slice in a message, and the destination of its sum."""

    column: int  # first element in every row of the message; a multiple of 128
    start: int  # first element in the flat gradient shards
    numel: int  # elements of the slice
    span: int  # first of its sums of squares


def span_count(numel: int) -> int:
    """Return the number of sums of squares of a slice of `numel` elements."""
    return -(-numel // SPAN)


def kernels_for(tensor: torch.Tensor, format: str) -> Any:
    """Return what has pack, sum_rows and add_rows, by where messages lie and their format: kernels or references."""
    if tensor.device.type != "cuda" or FORMATS[format].codec is not None:
        return SimpleNamespace(pack=pack_reference, sum_rows=sum_rows_reference, add_rows=add_rows_reference)
    from ds_fp8.zero import reduce_triton

    return reduce_triton


# ---------------------------------------------------------------- quantize into messages, sum their rows


def pack_reference(
    gradient: torch.Tensor,
    message: torch.Tensor,
    shape: Message,
    slices: Slices,
    format: str,
    scale: torch.Tensor | None = None,
    clipped: torch.Tensor | None = None,
) -> None:
    """Quantize a gradient, FP32 or BF16 of any shape, into its slices of a message; zeros behind the ends of slices.

    With `scale`, FP32 [], the whole gradient has one and saturates, and `clipped`, int32 [], counts the elements that
    do, NaN left out; without it every group of 128 has its own. In torch, on any device; the reference of the kernel,
    bitwise equal for scales that are powers of two.
    """
    flat = gradient.flatten().float()
    world = shape.rows * shape.places
    x = pad(flat, (0, world * slices.length - flat.numel())).view(world, slices.length)
    x = pad(x, (0, slices.padded - slices.length))
    if scale is None:
        scales = scale_from_amax(group_amax(x, "1x128"), format, "pow2")
    else:
        scales = scale.expand(world, slices.padded // BLOCK)
    target = FORMATS[format]
    in_units = x / scales.repeat_interleave(BLOCK, 1)
    if clipped is not None:
        clipped.add_((in_units.abs() > target.max).sum())
    in_units = in_units.clamp(-target.max, target.max)
    if target.codec is not None:
        data = target.codec.encode(in_units, None)
    else:
        data = in_units.to(target.dtype).view(torch.uint8)
    groups = slice(slices.column // BLOCK, (slices.column + slices.padded) // BLOCK)
    columns = slice(slices.column, slices.column + slices.padded)
    all_data, all_scales = shape.parts(message)
    by_place = (shape.places, shape.rows, -1)
    all_data[:, :, columns] = data.view(by_place).transpose(0, 1)
    all_scales[:, :, groups] = scales.reshape(by_place).transpose(0, 1)


def sum_rows_reference(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """Sum the rows of a message in order, in FP32, and divide the sum; returns FP32 [places * width]."""
    total = torch.zeros(shape.row_numel // BLOCK, BLOCK, device=message.device)
    for row, scale in zip(*shape.parts(message), strict=True):
        numbers = dequantize_unscaled(row.contiguous().view(FORMATS[format].dtype), format=format)
        total += numbers.view(-1, BLOCK) * scale.reshape(-1, 1)
    return (total / divisor).flatten()


def add_rows_reference(
    message: torch.Tensor,
    shape: Message,
    format: str,
    divisor: int,
    targets: Sequence[Target],
    gradient: torch.Tensor,
    squares: torch.Tensor,
    accumulate: bool,
) -> None:
    """Sum the rows of a received message into the gradient shards, in torch; the reference of the kernel.

    `targets`, of which none overlap, are added to the flat shards of all gradients, FP32 or BF16, or replace what they
    hold; `squares`, FP64 [spans], are sums over what `gradient` then holds.
    """
    total = sum_rows_reference(message, shape, format, divisor)
    for target in targets:
        found = total[target.column : target.column + target.numel]
        place = gradient[target.start : target.start + target.numel]
        place.copy_(place + found if accumulate else found)
        spans = pad(place, (0, -target.numel % SPAN)).view(-1, SPAN)
        squares[target.span : target.span + len(spans)] = spans.double().square().sum(1)


# ---------------------------------------------------------------- shards


class GradientShards:
    """Accumulates reduced gradients in DeepSpeed's own buffer, and knows the sum of their squares.

    A gradient that arrives as a message has its sums of squares from the pass that adds it. The others, few and small,
    are read once at the step, as are those that users write into the buffer themselves, who must say so (`written`).

    A gradient that no micro-batch of a step brought is zero in that step; DeepSpeed would take the last one again.
    """

    def __init__(self, flat: torch.Tensor, places: Mapping[str, tuple[int, int]]):
        """Take over `flat`, this rank's shards of all gradients, zeros where nothing has been added.

        `places` has by name the first element of a gradient in it, and how many are here, unpadded.
        """
        self._flat, self._places = flat, places
        self._spans: dict[str, slice] = {}
        spans = 0
        for name, (_, numel) in places.items():
            self._spans[name] = slice(spans, spans := spans + span_count(numel))
        # Overwritten by each pass, never added to: a sum per span of 4096 elements, final after the last micro-batch.
        self._squares = torch.zeros(spans, dtype=torch.float64, device=flat.device)
        # Names, in the order of their arrival, for the last bit of the sum depends on it.
        self._unsummed: dict[str, None] = {}
        self.arrived: set[str] = set()  # names of the gradients that were added since the last step
        self._written: dict[str, None] = {}  # names of the gradients that users wrote since the last step, in order

    def add_message(
        self,
        message: torch.Tensor,
        shape: Message,
        format: str,
        divisor: int,
        places: Mapping[str, Slices],
        accumulate: bool,
    ) -> None:
        """Add the rows of a message of one place, divided, to gradients, or put them there."""
        self._expect(places.keys(), accumulate)
        targets = []
        for name, place in places.items():
            start, numel = self._places[name]
            if numel:  # a rank may have no part of a gradient
                targets.append(Target(place.column, start, numel, self._spans[name].start))
        add_rows = kernels_for(message, format).add_rows
        add_rows(message, shape, format, divisor, targets, self._flat, self._squares, accumulate)

    def add_slices(self, slices: Sequence[torch.Tensor], names: Sequence[str], accumulate: bool) -> None:
        """Add this rank's slices of gradients, without padding, that did not travel in a message."""
        self._expect(names, accumulate)
        for part, name in zip(slices, names, strict=True):
            place = self._shard(name)
            if len(place):
                place.add_(part.view(-1)) if accumulate else place.copy_(part.view(-1))
                if name not in self._unsummed:
                    self._unsummed[name] = None
                    # The message may have left a sum here: these squares are taken from the shard itself at the step.
                    self._squares[self._spans[name]] = 0

    def written(self, names: Iterable[str]) -> None:
        """Note that a user has changed these gradients: they count in this step, arrived or not."""
        known = dict.fromkeys(name for name in names if name in self._places)
        self._written.update(known)
        self.arrived.update(known)

    def clear_missing(self, frozen: Iterable[str]) -> None:
        """Clear the gradients that did not arrive since the last step, and those of the parameters `frozen`."""
        self.clear((self._places.keys() - self.arrived).union(frozen))

    def close_step(self) -> None:
        """Let the next gradients be those of another step."""
        self.arrived.clear()
        self._written.clear()

    def clear(self, names: Iterable[str]) -> None:
        for name in names:
            self._shard(name).zero_()
            # Together with the gradients: stale sums of squares would enter the norm.
            self._squares[self._spans[name]] = 0

    def sum_of_squares(self) -> torch.Tensor:
        """Return the sum of the squares of all gradients of this rank, FP64 []. The host waits for nothing."""
        for name in self._written:  # the sums there are older than what was written, or of a micro-batch after it
            self._squares[self._spans[name]] = 0
        total = self._squares.sum()
        names = [*self._unsummed, *(name for name in self._written if name not in self._unsummed)]
        if names:
            # Sliced again: offload_states and reload_states move the buffer. In FP64: squares of gradients below 1e-19
            # are subnormal in FP32.
            norms = torch._foreach_norm([self._shard(name) for name in names], 2, torch.float64)
            total = total + torch.stack(norms).square().sum()
        return total

    def _shard(self, name: str) -> torch.Tensor:
        start, numel = self._places[name]
        return self._flat[start : start + numel]

    def _expect(self, names: Iterable[str], accumulate: bool) -> None:
        if accumulate:
            self.clear(name for name in names if name not in self.arrived)
        self.arrived.update(names)


class ReduceScatter:
    """Reduces gradients: large ones in FP8, others as DeepSpeed does."""

    def __init__(
        self,
        wire: WireMeter,
        shards: GradientShards | None = None,
        config: GradientReduction | None = None,
        nodes: Nodes | None = None,
        observe: Callable[[torch.Tensor, str, torch.Tensor | None], None] | None = None,
    ):
        """Make a reduction of the section "grad_reduce", of an FP8 format; without a section nothing is quantized.

        Args:
            wire: Counts the bytes that this rank sends.
            shards: What the means are added to; None where DeepSpeed adds the slices that are returned.
            config: Format and scale in FP8; None casts nothing.
            nodes: Groups of two levels for reductions over all ranks; those over fewer ranks are flat.
            observe: Gets every gradient that is quantized, its name, and its scale (None: one every 128 elements).
        """
        self._wire, self._shards, self._config, self._nodes, self._observe = wire, shards, config, nodes, observe
        self._in_bf16 = frozenset[str]()
        self._automatic_scale: AutomaticScale | None = None
        if config is not None and config.scale == "tensor":
            self._automatic_scale = AutomaticScale(config.format)

    @torch.no_grad()
    def __call__(
        self,
        named: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        accumulate: bool,
        average: Callable[[list[nn.Parameter]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Reduce the full gradients of parameters of one process group. Collective.

        `named` has the same names on every rank; what is not in FP8 travels in `dtype`, by DeepSpeed's `average`, which
        takes parameters and returns this rank's slices of the means. `accumulate`: add to those of earlier
        micro-batches.
        Returns this rank's slice of every mean, of ceil(numel / ranks) elements without padding; none where they are
        added to the shards.
        """
        group = shard_group(next(iter(named.values())))
        cast = [name for name, parameter in named.items() if self.casts(parameter.grad.shape, name)]
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
            slices |= self._reduce_in_fp8({name: named[name].grad for name in cast}, group, accumulate)
        return [] if self._shards is not None else [slices[name] for name in named]

    def leave_fp8(self, names: Iterable[str]) -> None:
        """Reduce the gradients of these parameters as DeepSpeed does from now on, on all ranks alike."""
        self._in_bf16 |= frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later reductions depend on. Collective."""
        return {} if self._automatic_scale is None else {"scale": self._automatic_scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, what state_dict() returned on any number of ranks; what it lacks starts afresh."""
        if self._automatic_scale is not None:
            self._automatic_scale = AutomaticScale(self._config.format)
            if "scale" in state:
                self._automatic_scale.load_state_dict(state["scale"])

    def casts(self, shape: torch.Size, name: str) -> bool:
        """Return whether a gradient of this shape, of the parameter `name`, travels in FP8."""
        large = len(shape) > 1 and shape.numel() >= SMALLEST
        return self._config is not None and large and name not in self._in_bf16

    def _reduce_in_fp8(
        self, gradients: dict[str, torch.Tensor], group: object, accumulate: bool
    ) -> dict[str, torch.Tensor]:
        """Reduce full gradients; return FP32 slices if there are no gradient shards."""
        world, rank, format = dist.get_world_size(group), dist.get_rank(group), self._config.format
        message, shape, places = self._send(gradients, group)
        if self._shards is not None:
            self._shards.add_message(message, shape, format, world, places, accumulate)
            return {}
        total = kernels_for(message, format).sum_rows(message, shape, format, world)
        return {
            name: total[place.column :][: max(0, min(place.length, gradients[name].numel() - rank * place.length))]
            for name, place in places.items()
        }

    def _send(
        self, gradients: dict[str, torch.Tensor], group: object
    ) -> tuple[torch.Tensor, Message, dict[str, Slices]]:
        """Quantize and exchange gradients; return the received message, whose rows are to be summed, and its layout."""
        world, format = dist.get_world_size(group), self._config.format
        # Groups of fewer ranks (experts, sequence parallelism) may span nodes unevenly; they are exchanged flat.
        nodes = self._nodes if world == dist.get_world_size() else None
        # The slices of all gradients lie side by side, each from a whole group on.
        places, width = {}, 0
        for name, gradient in gradients.items():
            places[name] = Slices(math.ceil(gradient.numel() / world), width)
            width += places[name].padded
        width = math.ceil(width / ROW_ALIGNMENT) * ROW_ALIGNMENT
        count = 1 if nodes is None else nodes.count
        shape = Message(world // count, count, width)
        message = shape.empty(next(iter(gradients.values())).device)
        kernels = kernels_for(message, format)
        scales = clipped = [None] * len(gradients)
        if self._automatic_scale is not None:
            scales = self._automatic_scale.scales(list(gradients.values()), list(gradients), group)
            self._wire.count(GRADIENT, "all_reduce", 2 * scales.nbytes, group)  # amax and saturated shares
            clipped = torch.zeros(len(gradients), dtype=torch.int32, device=message.device)
        for (name, gradient), scale, saturated in zip(gradients.items(), scales, clipped, strict=True):
            if self._observe is not None:
                self._observe(gradient, name, scale)
            kernels.pack(gradient, message, shape, places[name], format, scale, saturated)
        if self._automatic_scale is not None:
            numels = [gradient.numel() for gradient in gradients.values()]
            self._automatic_scale.saturated(clipped, numels, list(gradients))
        if nodes is None:
            return self._exchange(message, group), shape, places
        #     inside a host:   every rank sums what its host has for the places with its number, in FP32
        #     between hosts:   those sums are quantized and exchanged: 1 / ranks-a-host of the bytes leave the host
        inside = kernels.sum_rows(self._exchange(message, nodes.inside), shape, format, 1)
        shape = Message(count, 1, width)
        message = shape.empty(inside.device)
        kernels.pack(inside, message, shape, Slices(width, 0), format)
        return self._exchange(message, nodes.between), shape, places

    def _exchange(self, message: torch.Tensor, group: object) -> torch.Tensor:
        """Send row r to rank r of `group`; return the rows that came here, [ranks of the group, row bytes]."""
        if dist.get_world_size(group) == 1:
            return message
        # Both on the stream of reductions, where they are allocated, quantized, sent and summed: nothing has to be
        # recorded.
        received = torch.empty_like(message)
        self._wire.count(GRADIENT, "all_to_all", message.nbytes, group)
        dist.all_to_all_single(received, message, group=group)
        return received
