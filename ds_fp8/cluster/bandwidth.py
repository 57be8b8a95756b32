"""Measure all-gather and all-to-all between the hosts, in BF16 and in FP8."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK
from ds_fp8.zero.gradient_wire import pack, sum_rows
from ds_fp8.zero.message import CastOptions, Message, Slices

_REPEATS = 5
_SCALE = torch.float32.itemsize
_ERROR = 0.05
"""Largest relative error of a sum of E4M3 numbers of one group's range; damaged messages are far off."""


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange, measured on all ranks."""

    name: str
    bytes_sent: int
    """By one rank to the others."""
    seconds: float
    """Seconds of the slowest rank, median of several."""

    @property
    def gigabytes_per_second(self) -> float:
        """Return the speed in 10^9 bytes a second."""
        return self.bytes_sent / self.seconds / 1e9


def measure(elements: int) -> list[Exchange]:
    """Exchange `elements` numbers a rank in every way, the FP8 gradient with its cast and its sum. Collective.

    Args:
        elements: rounded up to a multiple of 128 times the number of ranks.

    Returns:
        BF16 and FP8 all-gather, BF16 and FP8 all-to-all, and the gradient reduction that training does in FP8.

    Raises:
        UserError: on all ranks, where a reduction comes out wrong.
    """
    world, device = dist.get_world_size(), torch.device(get_accelerator().current_device_name())
    width = -(-elements // (BLOCK * world)) * BLOCK
    count = width * world
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    numbers = torch.randn(count, generator=generator, device=device).bfloat16()
    # A gathered weight has a scale for 128 x 128 elements, a gradient one for 128.
    codes = torch.zeros(count + -(-count // BLOCK**2) * _SCALE, dtype=torch.uint8, device=device)
    message = Message(world, 1, width)
    sent, received = message.empty(device), message.empty(device)

    def gather(part: torch.Tensor) -> Callable[[], None]:
        whole = torch.empty(world * part.numel(), dtype=part.dtype, device=device)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def exchange(out: torch.Tensor) -> Callable[[], None]:
        came = torch.empty_like(out)
        return lambda: dist.all_to_all_single(came, out)

    def reduce() -> torch.Tensor:
        pack(numbers, sent, message, Slices(width, 0), CastOptions("e4m3"))
        dist.all_to_all_single(received, sent)
        return sum_rows(received, message, "e4m3", divisor=world)

    pack(numbers, sent, message, Slices(width, 0), CastOptions("e4m3"))
    between = (world - 1) / world
    found = [
        Exchange(name, round(sent_bytes), _seconds(run, device))
        for name, sent_bytes, run in (
            ("all-gather, BF16", (world - 1) * numbers.nbytes, gather(numbers)),
            ("all-gather, FP8", (world - 1) * codes.nbytes, gather(codes)),
            ("all-to-all, BF16", between * numbers.nbytes, exchange(numbers)),
            ("all-to-all, FP8", between * sent.nbytes, exchange(sent)),
            ("gradient reduction, FP8: cast, all-to-all, sum", between * sent.nbytes, reduce),
        )
    ]
    _check_sum(reduce(), numbers)
    return found


def _check_sum(reduced: torch.Tensor, numbers: torch.Tensor) -> None:
    expected = numbers.float()
    dist.all_reduce(expected)
    expected = expected.view(dist.get_world_size(), -1)[dist.get_rank()] / dist.get_world_size()
    # As a whole, not by element: rounding to E4M3 is far from zero for single elements.
    wrong = ((reduced - expected).norm() / expected.norm() > _ERROR).float()
    dist.all_reduce(wrong)
    if wrong.item():
        raise UserError(
            f"on {wrong.item():.0f} ranks the sum of gradients in FP8 differs from the one in FP32",
            remedy="messages are damaged on the way: check the network's drivers and the versions of NCCL or Gloo",
        )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of `run` on the slowest rank, after a first one that is not counted. Collective."""
    # Each repetition begins behind a barrier and ends with the slowest rank, as a step does.
    times = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        run()
        get_accelerator().synchronize()
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    return sorted(times[1:])[_REPEATS // 2]
