"""One AdamW step in plain torch: any device, any codec, the oracle of the kernel.

Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW computes it. Compressed
moments are decoded piece by piece, so that their FP32 copies stay small.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ds_fp8.optim.codecs import CODECS, encode
from ds_fp8.optim.moment import CHUNK, Moment, draw
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
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    *,
    low: torch.Tensor | None = None,
    master_amax: torch.Tensor | None = None,
    seed: int | None = None,
    stochastic: Collection[str] = MOMENTS,
) -> None:
    """One step in place on flat tensors of n elements. Arguments as of kernels.adamw_step.

    The random numbers of a seed are torch's, not the kernel's: the same distribution, other bits.
    """
    noise = None if seed is None else torch.Generator(master.device).manual_seed(seed)
    for elements, groups in _pieces(exp_avg, exp_avg_sq, master.numel()):
        g = grad[elements].float()
        m = _read(exp_avg, elements, groups).lerp_(g, 1 - step.beta1)
        v = _read(exp_avg_sq, elements, groups).mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        denominator = v.sqrt().mul_(step.root_factor).add_(step.eps)
        w = master[elements].mul_(step.decay).addcdiv_(m, denominator, value=-step.step_size)
        if low is not None:
            low[elements] = w.to(low.dtype)
        _write(exp_avg, elements, groups, m, noise if "exp_avg" in stochastic else None)
        _write(exp_avg_sq, elements, groups, v, noise if "exp_avg_sq" in stochastic else None)
    if master_amax is not None:
        magnitude = torch.nn.functional.pad(master, (0, -master.numel() % 128)).view(-1, 128).abs()
        master_amax.copy_(magnitude.amax(1))


def _pieces(exp_avg: torch.Tensor | Moment, exp_avg_sq: torch.Tensor | Moment, numel: int):
    for moment in (exp_avg, exp_avg_sq):
        if isinstance(moment, Moment):
            return moment.layout.pieces()
    return [(slice(start, min(start + CHUNK, numel)), slice(None)) for start in range(0, numel, CHUNK)]


def _read(moment: torch.Tensor | Moment, elements: slice, groups: slice) -> torch.Tensor:
    """FP32 numbers, in place where they are stored as such."""
    return moment.read(elements, groups) if isinstance(moment, Moment) else moment[elements].float()


def _write(
    moment: torch.Tensor | Moment, elements: slice, groups: slice, numbers: torch.Tensor, noise: torch.Generator | None
) -> None:
    if not isinstance(moment, Moment) and moment.dtype is torch.float32:
        return  # changed in place
    drawn = draw(noise, numbers)
    if isinstance(moment, Moment):
        moment.write(elements, groups, numbers, drawn)
    else:
        moment[elements] = encode(numbers, CODECS["bf16"], noise=drawn).codes
