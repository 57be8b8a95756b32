"""Master weights in scaled FP16: FP16 numbers in units of one power of two a tensor (FP8-LM, arXiv 2310.18313, O3)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ds_fp8.optim.codecs import CODECS
from ds_fp8.optim.moment import Layout, Moment, draw


def round_masters(
    numbers: torch.Tensor,
    layout: Layout,
    seed: int | None,
    into: Moment | None = None,
    exact: Collection[int] = (),
) -> None:
    """Round flat FP32 `numbers` [n], contiguous, to scaled FP16: in place, or into the Moment of n elements.

    layout: of n elements, granularity `tensor`. seed, at least 0 and below 2^31: round stochastically. exact: groups of
    the layout to leave as they are.
    """
    if numbers.is_cuda:
        from ds_fp8.optim import master_kernels

        with torch.cuda.device(numbers.device):  # where Triton launches
            master_kernels.round_masters(numbers, layout, seed, into, exact)
    else:
        round_masters_reference(numbers, layout, seed, into, exact)


def round_masters_reference(
    numbers: torch.Tensor,
    layout: Layout,
    seed: int | None,
    into: Moment | None = None,
    exact: Collection[int] = (),
) -> None:
    """round_masters in torch, on any device; the oracle of the kernels. Its random numbers are torch's."""
    rounded = Moment(CODECS["fp16"], layout, numbers.device, never_zero=False) if into is None else into
    noise = None if seed is None else torch.Generator(numbers.device).manual_seed(seed)
    for elements, groups in layout.pieces():
        if groups.start not in exact:
            rounded.write(elements, groups, numbers[elements], draw(noise, numbers[elements]))
            if into is None:
                numbers[elements] = rounded.read(elements, groups)
