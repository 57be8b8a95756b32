"""Optimizer step of ZeRO-3 with the fewest passes over memory.

    squares = sum over ranks of gradient²       summed where gradients were written (reduce.py); 8 bytes travel
    norm    = sqrt(squares)
    factor  = 1 / (loss scale * max(1, (norm / loss scale + 1e-6) / clip))
    masters, moments = AdamW(masters, moments, factor * gradient)           unless norm is Inf or NaN

Norm, factor and the decision to skip stay on the device: AdamW's kernel reads them. The host learns at the very end,
when all of the step is enqueued, whether it was taken: schedulers and counters depend on it.

The update writes FP8 data of the new masters, too: of masters that are data (coded_masters.py), and where a kernel can
of FP32 ones (one_pass_triton.py, by quantizer.py). The group requantizes the rest.

Values are those of DeepSpeed's step bit for bit, except that the norm is summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist

from ds_fp8.config.log import logger
from ds_fp8.optim.adamw import AdamW
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.optimizer import ZeroStep
from ds_fp8.zero.deepspeed.parameters import PersistentGather
from ds_fp8.zero.group import FP8ParamGroup
from ds_fp8.zero.quantizer import Quantizer
from ds_fp8.zero.reduce import GradientShards


class Launched(NamedTuple):
    """A step whose first kernel is launched, or about to be."""

    skip: torch.Tensor  # not zero where it changes nothing
    take_back: Callable[[], None]  # takes the step counts back


class Step:
    """Takes the place of a ZeRO-3 optimizer's step(), and of how it accumulates gradients.

    The engine, its counters, schedulers and checkpoints notice no difference.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, optimizer: AdamW):
        """Take the optimizer of a ZeRO-3 engine apart; `why_no_own_step` must have returned None."""
        self._zero, self._optimizer = ZeroStep(engine), optimizer
        self._group: FP8ParamGroup | None = None
        self._quantizers: list[Quantizer] = []  # of weights whose data the update writes
        self.gradients = GradientShards(self._zero.flat_gradient, self._zero.gradient_places())
        self._zero.leave_gradients_in_place()
        self.end_backward: Callable[[], None] = self._zero.end_backward
        self.gather_persistent = PersistentGather(engine)
        self._launched: Launched | None = None  # the step that is under way
        self._skipped = 0

    def quantize(self, group: FP8ParamGroup) -> None:
        """Let the update write the data of weights that it can, and of BF16 shards only those that the group keeps."""
        numels = [masters.numel() for _, masters, _ in self._zero.sub_groups()]
        if group.trained is not None:
            group.trained.quantize_in_step(self._optimizer, numels)
        self._group, self._quantizers = group, [some for some in group.quantizers if some.steps]

    @torch.no_grad()
    def __call__(self) -> None:
        """Take the optimizer step that DeepSpeed's step() would take, and requantize what it has changed."""
        group = self._group
        try:
            if group is not None:
                group.wait_for_requantize()  # it reads masters, on a stream of its own
            norm = self._norm()
            # [Note: one wait a step] The optimizer is launched before the host knows whether the step counts: its
            # kernels read `skip` on the device and change nothing then. The host waits for the verdict only after,
            # while the GPU computes.
            skip = norm.isfinite().logical_not().to(torch.int32)
            verdict = streams.Fetch(skip)
            self._update(norm, skip)
            # While the GPU is busy.
            write_bf16 = self._zero.write_bf16 if group is None else group.prepare_bf16()
            taken = not verdict.get()
            if taken:
                for some in self._quantizers:
                    some.taken()
                write_bf16()
                self._zero.finish(norm / self._zero.loss_scale)
            else:
                self._skip(norm)
            if group is not None:
                # A skipped step has changed nothing: the shards are not stale.
                if taken:
                    group.step_wrote()
                group.requantize()
            if taken:
                self._zero.unshard_persistent()
        except BaseException:
            # The program may go on, after an interrupt by the user for example.
            if self._masters_may_be_new() and group is not None:
                group.step_ended_midway()
            raise
        finally:
            self._launched = None

    def _norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients on all ranks, times the loss scale; FP64 []."""
        self._zero.begin()
        self.gradients.clear_missing(self._zero.frozen())
        squares = self.gradients.sum_of_squares().to(self._zero.norm_dtype)
        dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=self._zero.group)
        return squares.sqrt()

    def _update(self, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Launch the update of masters, moments and data; on the device it changes nothing where `skip` is not zero."""
        if self._quantizers:
            self._group.before_update()
        for some in self._quantizers:
            some.begin()
        work = [(*one, self._update_of(index, one[1])) for index, one in enumerate(self._zero.sub_groups())]
        factor = self._factor(norm)
        # After all that may fail before anything has changed.
        self._launched = Launched(skip, self._optimizer.prepare(masters for _, masters, *_ in work))
        self.gradients.close_step()
        self._optimizer.step(work=work, factor=factor, skip=skip)
        for some in self._quantizers:
            some.finish(skip)

    def _update_of(self, sub_group: int, masters: torch.Tensor) -> Callable[..., None] | None:
        """Return what takes AdamW's step of a sub-group in place of the optimizer, or None."""
        updates = (some.update(sub_group, masters) for some in self._quantizers)
        return next((update for update in updates if update is not None), None)

    def _factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of the gradients, FP32 []; None for 1."""
        loss_scale, clip = self._zero.loss_scale, self._zero.clip
        if clip > 0:
            # min(1, clip / (norm + 1e-6)), over the loss scale, in the order of DeepSpeed's operations: the same bits
            # as its step.
            return (1.0 / (((norm / loss_scale + 1e-6) / clip).clamp(min=1.0) * loss_scale)).float()
        return None if loss_scale == 1 else norm.new_full((), 1.0 / loss_scale).float()

    def _skip(self, norm: torch.Tensor) -> None:
        """Close a step that was skipped; warn of the 1st, 2nd, 4th, 8th ...: frozen weights look like a slow start."""
        # Its counters of steps were advanced with the launch: the masters are untouched, the counters go back.
        self._launched.take_back()
        self._zero.skip()
        self._skipped += 1
        if self._skipped.bit_count() == 1:
            logger.warning(f"a step was skipped, {self._skipped} so far: the gradient norm is {norm.item()}")

    def _masters_may_be_new(self) -> bool:
        """Return whether masters may be new, behind an exception: not where nothing was launched, or is skipped."""
        if self._launched is None:
            return False
        if self._launched.skip.item():
            self._launched.take_back()
            return False
        return True
