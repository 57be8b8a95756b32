"""The optimizer step of ZeRO-3 in as few passes over memory as there can be.

    squares = sum over ranks of gradient²       summed where gradients were written (gradient_shards.py); 8 bytes travel
    norm    = sqrt(squares)
    factor  = 1 / (loss scale * max(1, (norm / loss scale + 1e-6) / clip))
    masters, moments = AdamW(masters, moments, factor * gradient)           unless norm is Inf or NaN

Norm, factor and the decision to skip stay on the device: AdamW's kernel reads them. The host learns at the very end,
when all of the step is enqueued, whether it was taken: schedulers and counters depend on it.

Values are those of DeepSpeed's step bit for bit, except that the norm is summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.optim.adamw import AdamW
from ds_fp8.zero import streams
from ds_fp8.zero.gradient_reduce import GradientReduce
from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.seams.step import ZeroStep, why_no_own_step


def why_not(engine: deepspeed.DeepSpeedEngine, optimizer: object) -> str | None:
    """Return why DeepSpeed's step must stay with this engine and its basic optimizer, or None."""
    if not isinstance(optimizer, AdamW):
        return f"{type(optimizer).__name__} steps by itself"
    return why_no_own_step(engine)


class Step:
    """Takes the place of a ZeRO-3 optimizer's step(), and of how it accumulates gradients.

    The engine, its counters, schedulers and checkpoints notice no difference.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, optimizer: AdamW, reduce: GradientReduce | None):
        """Install the step; `why_not` must have returned None.

        Args:
            engine: ZeRO-3 engine.
            optimizer: Its basic optimizer.
            reduce: Reduces gradients in FP8; None where they travel in BF16.
        """
        self._zero, self._optimizer, self._reduce = ZeroStep(engine), optimizer, reduce
        self.gradients = GradientShards(self._zero.flat_gradient, self._zero.gradient_places())
        self._zero.replace_reduction(self._add)
        self._zero.replace_epilogue()
        self._zero.on_gradient_write(self.gradients.written)
        self._zero.replace_step(self)
        self.write_bf16: Callable[[], None] = self._zero.write_bf16
        """Rounds the new masters into the BF16 shards; replaced where not all of those are needed."""

    @torch.no_grad()
    def _add(
        self,
        parameters: list[nn.Parameter],
        stock: Callable[[list[nn.Parameter]], list[torch.Tensor]],
        accumulate: bool,
    ) -> None:
        """Reduce the gradients of a bucket and add them to the shards."""
        names, cast, others = self._zero.name, [], []
        for parameter in parameters:
            in_fp8 = self._reduce is not None and self._reduce.casts(parameter.grad.shape, names(parameter))
            (cast if in_fp8 else others).append(parameter)
        if others:
            self.gradients.add_slices(stock(others), [names(p) for p in others], accumulate)
        if cast:
            gradients = [parameter.grad for parameter in cast]
            self._reduce.add_to(self.gradients, gradients, self._zero.group, [names(p) for p in cast], accumulate)

    @torch.no_grad()
    def __call__(self) -> None:
        """Take the optimizer step that DeepSpeed's step() would take; the host waits once, for whether it was."""
        zero = self._zero
        zero.begin()
        self.gradients.close_step(zero.frozen())
        norm = self._norm()
        skip = norm.isfinite().logical_not().to(torch.int32)
        verdict = streams.Fetch(skip)
        zero.clear_model_gradients()
        work = list(zero.sub_groups())
        self._optimizer.step(work=work, factor=self._factor(norm), skip=skip)
        if verdict.get():
            self._optimizer.take_back(masters for _, masters, _ in work)
            zero.skip()
            return
        self.write_bf16()
        zero.finish(norm / zero.loss_scale)

    def _norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients on all ranks, times the loss scale; FP64 []."""
        squares = self.gradients.sum_of_squares().to(self._zero.norm_dtype)
        dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=self._zero.group)
        return squares.sqrt()

    def _factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of the gradients, FP32 []; None for 1."""
        loss_scale, clip = self._zero.loss_scale, self._zero.clip
        if clip > 0:
            return (1.0 / (((norm / loss_scale + 1e-6) / clip).clamp(min=1.0) * loss_scale)).float()
        return None if loss_scale == 1 else norm.new_full((), 1.0 / loss_scale).float()
