"""Gradient reduction: large gradients in FP8, by an all-to-all of slices that are summed in FP32.

A reduce-scatter in FP8 would add FP8 numbers. Instead every rank sends every other rank its slice of the gradient,
quantized per 128 elements, and the receiver sums in FP32 (ZeRO++, arXiv 2306.10209, section 3.3):

    send[r]  = quantize(gradient slice of rank r)          payload and scales in one uint8 buffer
    recv     = all_to_all(send)
    slice    = 1/W * sum over ranks of dequantize(recv[s])  FP32

Over several nodes it is done twice, inside the node first, so that between nodes only 1/(ranks per node) of the bytes
are sent; the sums of the first round are quantized for the second.

NaN or Inf anywhere in a group of 128 makes that group NaN on every rank's result: the gradient norm is then not finite
and ZeRO-3 skips the step on all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn
from torch.nn.functional import pad

from ds_fp8.casts import group_amax, scale_from_amax
from ds_fp8.config.formats import BLOCK, FORMATS
from ds_fp8.config.plans import GradientReduction
from ds_fp8.zero.collectives import GRADIENT, WireMeter
from ds_fp8.zero.deepspeed.parameters import shard_group
from ds_fp8.zero.gradients import LIMIT, GradientShards, Message, Slices, has_kernel, sum_rows
from ds_fp8.zero.hosts import Nodes

SMALLEST = 4096  # gradients of fewer elements, and those of one dimension, go through DeepSpeed's own reduce-scatter

# The width of a place is a multiple of this: with the 4 scales of 4 bytes every row of a message begins at a multiple
# of 16 bytes, for wide loads of both.
ROW_ALIGNMENT = 4 * BLOCK

SATURATION_LIMIT = 1e-5
GROWTH = 2.0 ** (1 / 1000)
# Lower bound of amax, by which a division does not overflow; smaller gradients share its scale.
_SMALLEST_AMAX = 2.0**-100


def packer(gradient: torch.Tensor, format: str) -> Callable[..., None]:
    """Return `pack_reference` or its kernel, by where a gradient lies and its format."""
    if not has_kernel(gradient, format):
        return pack_reference
    from ds_fp8.zero.reduce_triton import pack

    return pack


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
            parts = self._reduce_in_fp8([named[name].grad for name in cast], group, cast, accumulate)
            slices.update(zip(cast, parts, strict=False))
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
        self, tensors: list[torch.Tensor], group: object, names: list[str], accumulate: bool
    ) -> list[torch.Tensor]:
        """Reduce full gradients; return FP32 slices if there are no gradient shards."""
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        message, shape, places = self._send(tensors, group, names)
        if self._shards is not None:
            self._shards.add_message(message, shape, self._config.format, world, places, names, accumulate)
            return []
        total = sum_rows(message, shape, self._config.format, world)
        return [
            total[place.column :][: max(0, min(place.length, tensor.numel() - rank * place.length))]
            for tensor, place in zip(tensors, places, strict=True)
        ]

    def _send(
        self, tensors: list[torch.Tensor], group: object, names: list[str]
    ) -> tuple[torch.Tensor, Message, list[Slices]]:
        """Quantize and exchange gradients; return the received message, whose rows are to be summed, and its layout."""
        world = dist.get_world_size(group)
        # Groups of fewer ranks (experts, sequence parallelism) may span nodes unevenly; they are exchanged flat.
        nodes = self._nodes if world == dist.get_world_size() else None
        # The slices of all gradients lie side by side, each from a whole group on.
        places, width = [], 0
        for tensor in tensors:
            places.append(Slices(math.ceil(tensor.numel() / world), width))
            width += places[-1].padded
        width = math.ceil(width / ROW_ALIGNMENT) * ROW_ALIGNMENT
        count = 1 if nodes is None else nodes.count
        shape = Message(world // count, count, width)
        message = shape.empty(tensors[0].device)
        self._pack(tensors, names, message, shape, places, group)
        if nodes is None:
            return self._exchange(message, group), shape, places
        #     inside a host:   every rank sums what its host has for the places with its number, in FP32
        #     between hosts:   those sums are quantized and exchanged: 1 / ranks-a-host of the bytes leave the host
        inside = sum_rows(self._exchange(message, nodes.inside), shape, self._config.format)
        shape = Message(count, 1, width)
        message = shape.empty(inside.device)
        packer(inside, self._config.format)(inside, message, shape, Slices(width, 0), self._config.format)
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
            packer(tensor, self._config.format)(tensor, message, shape, place, self._config.format, scale, count)
        if self._automatic_scale is not None:
            self._automatic_scale.saturated(clipped, [tensor.numel() for tensor in tensors], names)

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


class AutomaticScale:
    """One scale per gradient that all ranks agree on, adapted over time (FP8-LM, arXiv 2310.18313, section 2.1).

        amax   = max over all ranks of |g|
        scale  = 1 / (mu * 2^floor(log2(largest / amax)))        data are round(g / scale), saturated

    mu starts at 1. It halves after a reduction in which more than 0.001% of the tensor's elements saturated on any
    rank, and otherwise grows so as to double in 1000 reductions (one a micro-batch): the small elements of a gradient
    gain range as long as hardly any large one is lost. A tensor of zeros has scale 1, one that is not finite NaN; both
    leave mu alone. No step makes the host wait.
    """

    def __init__(self, format: str):
        self._largest = FORMATS[format].max
        self._slots: dict[str, int] = {}
        self._index = functools.lru_cache(LIMIT)(self._make_index)
        self._mu = self._share = torch.empty(0)
        self._group: object = None

    def scales(self, gradients: list[torch.Tensor], names: list[str], group: object = None) -> torch.Tensor:
        """Return the scales of `gradients`, FP32 [T], equal on all ranks. Collective."""
        index, self._group = self._index(tuple(names), gradients[0].device), group
        #     amax, share = max over ranks                           one all-reduce for all gradients of the message
        #     mu          = mu / 2 if share > limit else mu * 2^(1/1000)
        #     scale       = amax / largest rounded to a power of two, over mu
        # Saturation is that of the last reduction: this one's is known only after it is
        # quantized.
        amax = torch.stack([_amax(gradient) for gradient in gradients])
        agreed = torch.cat([amax, self._share[index]])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        amax, share = agreed.chunk(2)
        mu = self._mu[index]
        adapted = torch.where(share > SATURATION_LIMIT, mu / 2, mu * GROWTH)
        mu = torch.where((amax > 0) & amax.isfinite(), adapted, mu)
        self._mu[index] = mu
        # On the device: Python would have to wait for amax, at every bucket.
        _, exponent = torch.frexp(self._largest / amax.clamp_min(_SMALLEST_AMAX))  # 2^(exponent - 1) is the floor
        scale = torch.ldexp(torch.ones_like(mu), 1 - exponent) / mu
        return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))

    def saturated(self, counts: torch.Tensor, numels: list[int], names: list[str]) -> None:
        index = self._index(tuple(names), counts.device)
        self._share[index] = torch.stack([count / numel for count, numel in zip(counts, numels, strict=True)])

    def mu(self, name: str) -> float:
        return self._mu[self._slots[name]].item()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next scales depend on, alike on all ranks. Collective; the host waits."""
        share = self._share.clone()
        if self._slots:
            dist.all_reduce(share, op=dist.ReduceOp.MAX, group=self._group)
        return {"names": list(self._slots), "mu": self._mu.cpu(), "saturated": share.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, what state_dict() returned on any number of ranks; other gradients start afresh."""
        self._index.cache_clear()
        self._slots = {name: slot for slot, name in enumerate(state["names"])}
        self._mu, self._share = state["mu"].to(self._mu.device), state["saturated"].to(self._mu.device)

    def _make_index(self, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
        new = [name for name in names if name not in self._slots]
        self._slots |= {name: len(self._slots) + i for i, name in enumerate(new)}
        self._mu = torch.cat([self._mu.to(device), torch.ones(len(new), device=device)])
        self._share = torch.cat([self._share.to(device), torch.zeros(len(new), device=device)])
        return torch.tensor([self._slots[name] for name in names], device=device)


def _amax(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, FP32 []; Inf for NaN or Inf."""
    low, high = gradient.aminmax()
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
