"""One AdamW step on flat state in plain torch: what a CPU does, and the oracle of the kernel in adamw_step_triton.py.

Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW computes it. Compressed
moments are decoded piece by piece, so that their FP32 copies stay small.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ds_fp8.config.optimizer_state import MOMENTS
from ds_fp8.optim.codecs import CODECS, encode
from ds_fp8.optim.moment import CHUNK, Moment, draw, shared_layout


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
        """Return the factor of weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """Return the learning rate with exp_avg's bias corrected."""
        return self.lr / (1 - self.beta1**self.number)

    @property
    def root_factor(self) -> float:
        """Return the factor that corrects the bias of the root of exp_avg_sq."""
        return 1 / math.sqrt(1 - self.beta2**self.number)


def adamw_step_reference(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    *,
    low: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    seed: int | None = None,
    stochastic: Collection[str] = MOMENTS,
) -> None:
    """Do one AdamW step in place, on flat contiguous tensors of n elements on one device.

    Args:
        master: FP32 [n].
        grad: The gradient [n], of any floating point dtype.
        exp_avg: FP32 or BF16 [n], or a Moment of n elements; two Moments have the same layout.
        exp_avg_sq: Likewise.
        step: The step's numbers.
        low: BF16 or FP16 [n], receives the new master rounded to nearest.
        skip: One element; where it is not zero nothing is changed.
        factor: FP32 with one element, multiplied into the gradient as it is read.
        seed: At least 0 and below 2**31: round the moments that `stochastic` names with random numbers of this seed.
            They are the same distribution on every device, but other bits on a GPU.
        stochastic: Some of the moments' names.
    """
    if skip is not None and skip.item():
        return
    noise = None if seed is None else torch.Generator(grad.device).manual_seed(seed)
    layout, numel = shared_layout(exp_avg, exp_avg_sq), grad.numel()
    chunks = [(slice(start, min(start + CHUNK, numel)), slice(None)) for start in range(0, numel, CHUNK)]
    # Pieces of whole groups: a scale is found from all of its elements, and FP32 copies exist of one piece at a time.
    for elements, groups in chunks if layout is None else layout.pieces():
        g = grad[elements].float() if factor is None else grad[elements].float() * factor
        w, m, v = (_read(state, elements, groups) for state in (master, exp_avg, exp_avg_sq))
        # m + (1 - beta1) (g - m), as torch.optim.AdamW computes it: the same bits for FP32 state.
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        denominator = v.sqrt().mul_(step.root_factor).add_(step.eps)
        w.mul_(step.decay).addcdiv_(m, denominator, value=-step.step_size)
        if low is not None:
            low[elements] = w.to(low.dtype)
        for state, numbers, name in ((exp_avg, m, MOMENTS[0]), (exp_avg_sq, v, MOMENTS[1])):
            _write(state, elements, groups, numbers, noise if name in stochastic else None)


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
