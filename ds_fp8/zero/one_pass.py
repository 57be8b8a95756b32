"""Trained weights with FP32 masters and moments whose casts are the step's own: one pass over memory where two were.

A step finds codes and amax as it updates (one_pass_triton.py); the cast that follows has only the all-reduce of the
amax left to do, and the blocks that lie on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_fp8.config.fp8 import MOMENTS
from ds_fp8.optim.adamw import AdamStep, AdamW
from ds_fp8.zero.cast_set import CastSet, has_kernels, in_runs
from ds_fp8.zero.deepspeed.parameters import master_position


class OnePass:
    """Steps all sub-groups that hold weights of one set, and casts those."""

    def __init__(self, weights: CastSet, kernels: dict[int, Any]):
        """Step the sub-groups of `kernels`, which are all that have weights of the set."""
        self._weights, self._kernels = weights, kernels

    def begin(self) -> None:
        """Begin a step, behind the last reads of codes."""
        # Held until the next step: the cast reads it on another stream than it is allocated on.
        self._amax = torch.zeros(self._weights.num_scales, device=self._weights.device)

    def update(self, sub_group: int, masters: torch.Tensor) -> Callable[..., None] | None:
        """Return what takes AdamW's step of a sub-group; None for one without weights of the set."""
        if sub_group not in self._kernels:
            return None

        def update(
            gradient: torch.Tensor,
            exp_avg: torch.Tensor,
            exp_avg_sq: torch.Tensor,
            step: AdamStep,
            *,
            skip: torch.Tensor | None,
            factor: torch.Tensor | None,
            **of_compressed_moments: object,
        ) -> None:
            kernel = self._kernels[sub_group]
            kernel(masters, self._amax, gradient, exp_avg, exp_avg_sq, step, skip=skip, factor=factor)

        return update

    def finish(self, skip: torch.Tensor) -> None:
        """Do nothing: the amax of other ranks, and blocks that they have a part of, are left to the next cast."""

    def taken(self) -> None:
        """Note that the step was taken: its amax are those of the masters, and most codes their casts."""
        self._weights.amax = self._amax


def one_pass_of(weights: CastSet, optimizer: AdamW, numels: Sequence[int]) -> OnePass | None:
    """Return the step that casts trained `weights`; None where two passes are needed or faster.

    `numels`: elements of all sub-groups. The weights have their codes.
    """
    codes, precision = weights.weights[0].data, optimizer.precision
    if not has_kernels(codes.device) or any(getattr(precision, key) != "fp32" for key in MOMENTS):
        return None
    from ds_fp8.zero import one_pass_triton

    places = [master_position(weight.parameter) for weight in weights.weights]
    if None in places:  # frozen, beside trained ones of a product
        return None
    kernels = {}
    for some in in_runs(zip(weights.weights, places, strict=True), lambda one: one[1][0]):
        index, members = some[0][1][0], [(weight, start) for weight, (_, start, _) in some]
        if not one_pass_triton.can_take(members, numels[index]):
            return None
        kernels[index] = one_pass_triton.StepAndCast(members, numels[index], codes)
    return OnePass(weights, kernels)
