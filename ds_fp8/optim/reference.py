"""One AdamW step in plain torch: any device, any codec, the oracle of the kernel.

Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW computes it. Compressed
moments are decoded piece by piece, so that their FP32 copies stay small.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_fp8.optim.codecs import CODECS, decode, encode
from ds_fp8.optim.moment import CHUNK, Layout, Moment, draw
from ds_fp8.state_precision import MOMENTS


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step; `number` counts from 1."""

    number: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """What the parameter is multiplied by."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The learning rate with exp_avg's bias corrected."""
        return self.lr / (1 - self.beta1**self.number)

    @property
    def root_factor(self) -> float:
        """What the root of exp_avg_sq is multiplied by to correct its bias."""
        return 1 / math.sqrt(1 - self.beta2**self.number)


def adamw_step(
    master: torch.Tensor | Moment,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    *,
    low: torch.Tensor | None = None,
    master_amax: torch.Tensor | None = None,
    fp16_masters: Layout | None = None,
    exact: Collection[int] = (),
    seed: int | None = None,
    stochastic: Collection[str] = MOMENTS,
) -> None:
    """One step in place on flat tensors of n elements. Arguments as of kernels.adamw_step.

    The random numbers of a seed are torch's, not the kernel's: the same distribution, other bits.
    """
    noise = None if seed is None else torch.Generator(grad.device).manual_seed(seed)
    layout, numel = shared_layout(fp16_masters, master, exp_avg, exp_avg_sq), grad.numel()
    chunks = [(slice(start, min(start + CHUNK, numel)), slice(None)) for start in range(0, numel, CHUNK)]
    for elements, groups in chunks if layout is None else layout.pieces():
        pieces = [_piece(state, elements, groups, layout) for state in (master, exp_avg, exp_avg_sq)]
        g = grad[elements].float()
        w, m, v = (_read(*piece) for piece in pieces)
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        denominator = v.sqrt().mul_(step.root_factor).add_(step.eps)
        w.mul_(step.decay).addcdiv_(m, denominator, value=-step.step_size)
        if low is not None:
            low[elements] = w.to(low.dtype)
        if fp16_masters is not None and groups.start not in exact:
            codec, drawn = CODECS["fp16"], draw(noise if "master" in stochastic else None, w)
            w.copy_(decode(encode(w, codec, "tensor", "pow2", noise=drawn), codec, "tensor"))
        for piece, numbers, name in zip(pieces, (w, m, v), ("master", *MOMENTS), strict=True):
            _write(*piece, numbers, noise if name in stochastic else None)
    if master_amax is not None:
        magnitude = torch.nn.functional.pad(master, (0, -master.numel() % 128)).view(-1, 128).abs()
        master_amax.copy_(magnitude.amax(1))


def shared_layout(fp16_masters: Layout | None, *states: torch.Tensor | Moment) -> Layout | None:
    """The layout whose pieces are whole groups of all states; None if no state has groups.

    Raises ValueError if there is none: groups of 128 may lie across tensors that have scales of their own.
    """
    layouts = [state.layout for state in states if isinstance(state, Moment)]
    layouts += [] if fp16_masters is None else [fp16_masters]
    shared = max(layouts, key=lambda layout: layout.granularity == "tensor", default=None)
    if any(layout.granularity != shared.granularity for layout in layouts) and shared.groups > 1:
        raise ValueError("a state in groups of 128 beside one with scales for several tensors")
    return shared


class _Piece(NamedTuple):
    """Elements of a state, and their groups."""

    state: torch.Tensor | Moment
    elements: slice
    groups: slice


def _piece(state: torch.Tensor | Moment, elements: slice, groups: slice, layout: Layout | None) -> _Piece:
    """Of a state whose groups may be finer than the pieces of `layout`, which are all of it then."""
    finer = isinstance(state, Moment) and state.layout.granularity != layout.granularity
    return _Piece(state, elements, slice(None) if finer else groups)


def _read(state: torch.Tensor | Moment, elements: slice, groups: slice) -> torch.Tensor:
    """FP32 numbers, in place where they are stored as such."""
    return state.read(elements, groups) if isinstance(state, Moment) else state[elements].float()


def _write(
    state: torch.Tensor | Moment, elements: slice, groups: slice, numbers: torch.Tensor, noise: torch.Generator | None
) -> None:
    if isinstance(state, Moment):
        state.write(elements, groups, numbers, draw(noise, numbers))
    elif state.dtype is not torch.float32:  # otherwise it was changed in place
        state[elements] = encode(numbers, CODECS["bf16"], noise=draw(noise, numbers)).codes
