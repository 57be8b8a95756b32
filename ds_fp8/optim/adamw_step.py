"""One AdamW step on flat state: in Triton on a GPU, in plain torch elsewhere, which is the oracle of the kernel.

Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW computes it. Compressed
moments are decoded piece by piece, so that their FP32 copies stay small.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from ds_fp8.config.optimizer_state import MOMENTS
from ds_fp8.optim.codecs import CODECS, decode, encode
from ds_fp8.optim.moment import CHUNK, Layout, Moment, draw, shared_layout
from ds_fp8.optim.step_numbers import AdamStep


def adamw_step(
    master: torch.Tensor | Moment,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    *,
    low: torch.Tensor | None = None,
    fp16_masters: Layout | None = None,
    exact: Collection[int] = (),
    skip: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    seed: int | None = None,
    stochastic: Collection[str] = MOMENTS,
) -> None:
    """Do one AdamW step in place, on flat contiguous tensors of n elements on one device.

    Args:
        master: FP32 [n], or a Moment in fp16 with pow2 scales by tensor.
        grad: The gradient [n], of any floating point dtype.
        exp_avg: FP32 or BF16 [n], or a Moment of n elements. By tensor, all have the same segments; in groups of 128
            elements they allow only one segment.
        exp_avg_sq: Likewise.
        step: The step's numbers.
        low: BF16 or FP16 [n], receives the new master rounded to nearest, before `fp16_masters` changes it.
        fp16_masters: By tensor; lets the FP32 master take values of FP16 in units of one power of two a tensor.
        exact: Those tensors of `fp16_masters` whose master stays FP32.
        skip: One element; where it is not zero nothing is changed.
        factor: FP32 with one element, multiplied into the gradient as it is read.
        seed: At least 0 and below 2**31: round what `stochastic` names with random numbers of this seed. They are the
            same distribution on every device, but other bits on a GPU.
        stochastic: Some of the moments' names and "master".

    Raises:
        ValueError: Moments in groups of 128 elements beside a state with several segments.
    """
    emulated = any(isinstance(state, Moment) and state.codec.emulated for state in (exp_avg, exp_avg_sq))
    if grad.is_cuda and not emulated:
        from ds_fp8.optim import adamw_step_triton

        step_on_device = adamw_step_triton.adamw_step
    else:
        step_on_device = adamw_step_reference
    step_on_device(
        master, grad, exp_avg, exp_avg_sq, step, low=low, fp16_masters=fp16_masters,
        exact=exact, skip=skip, factor=factor, seed=seed, stochastic=stochastic,
    )  # fmt: skip


def adamw_step_reference(
    master: torch.Tensor | Moment,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    *,
    low: torch.Tensor | None = None,
    fp16_masters: Layout | None = None,
    exact: Collection[int] = (),
    skip: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    seed: int | None = None,
    stochastic: Collection[str] = MOMENTS,
) -> None:
    """Do adamw_step in plain torch, on any device."""
    if skip is not None and skip.item():
        return
    noise = None if seed is None else torch.Generator(grad.device).manual_seed(seed)
    layout, numel = shared_layout(fp16_masters, master, exp_avg, exp_avg_sq), grad.numel()
    chunks = [(slice(start, min(start + CHUNK, numel)), slice(None)) for start in range(0, numel, CHUNK)]
    # Pieces of whole groups: a scale is found from all of its elements, and FP32 copies exist of one piece at a time.
    for elements, groups in chunks if layout is None else layout.pieces():
        pieces = [_piece(state, elements, groups, layout) for state in (master, exp_avg, exp_avg_sq)]
        g = grad[elements].float() if factor is None else grad[elements].float() * factor
        w, m, v = (_read(*piece) for piece in pieces)
        # m + (1 - beta1) (g - m), as torch.optim.AdamW computes it: the same bits for FP32 state.
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        denominator = v.sqrt().mul_(step.root_factor).add_(step.eps)
        w.mul_(step.decay).addcdiv_(m, denominator, value=-step.step_size)
        if low is not None:
            # Before the master is rounded to FP16: the model gets the better of the two values.
            low[elements] = w.to(low.dtype)
        if fp16_masters is not None and groups.start not in exact:
            codec, drawn = CODECS["fp16"], draw(noise if "master" in stochastic else None, w)
            w.copy_(decode(encode(w, codec, "tensor", "pow2", noise=drawn), codec, "tensor"))
        for piece, numbers, name in zip(pieces, (w, m, v), ("master", *MOMENTS), strict=True):
            _write(*piece, numbers, noise if name in stochastic else None)


class _Piece(NamedTuple):
    """Elements of a state, and their groups."""

    state: torch.Tensor | Moment
    elements: slice
    groups: slice


def _piece(state: torch.Tensor | Moment, elements: slice, groups: slice, layout: Layout | None) -> _Piece:
    """Return a piece of a state; where its groups are finer than the pieces of `layout`, the piece is all of it."""
    # One segment only (shared_layout): groups of 128 beside a state with one scale for all of it.
    finer = isinstance(state, Moment) and state.layout.granularity != layout.granularity
    return _Piece(state, elements, slice(None) if finer else groups)


def _read(state: torch.Tensor | Moment, elements: slice, groups: slice) -> torch.Tensor:
    """Return FP32 numbers, in place where they are stored as such."""
    return state.read(elements, groups) if isinstance(state, Moment) else state[elements].float()


def _write(
    state: torch.Tensor | Moment, elements: slice, groups: slice, numbers: torch.Tensor, noise: torch.Generator | None
) -> None:
    if isinstance(state, Moment):
        state.write(elements, groups, numbers, draw(noise, numbers))
    elif state.dtype is not torch.float32:  # otherwise it was changed in place
        state[elements] = encode(numbers, CODECS["bf16"], noise=draw(noise, numbers)).codes
