"""Masters stored as quantized data, or BF16, and corrections: their step, and DeepSpeed's view of them in FP32.

A step is one pass over a weight, block by block: dequantize, update, amax, scale, quantize (optim/masters.py). Blocks
that two ranks share need a common amax and are updated twice, first for the amax alone:

    update     every sub-group: blocks of this rank alone, and the amax of shared blocks
    finish     one all-reduce MAX of the amax of all sub-groups; then the shared blocks

BF16 needs neither: AdamW's kernel reads and writes SplitMasters in place of FP32 masters.

Everything runs on the stream of the step, before the host knows whether it is skipped: no change where `skip` is not
zero. Loads and users write FP32 masters, which the next requantize quantizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.optim.adamw import AdamStep, step_on
from ds_fp8.optim.masters import SplitMasters, stored_amax
from ds_fp8.optim.moments import Moment
from ds_fp8.zero import streams
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.deepspeed.masters import FlatMasters
from ds_fp8.zero.deepspeed.parameters import bf16_shard, shard_of
from ds_fp8.zero.param import FP8Param, ReferenceShardCast, Stack
from ds_fp8.zero.quantizer import Quantizer

# Parameters of a sub-group with their offsets in it: FP8Params, or one SplitParameter
Members = list[tuple[Any, int]]
Finish = Callable[[torch.Tensor], None]  # by the new scales of all weights


class ReferenceStep:
    """The step of one sub-group in torch, on any device; the reference of the kernel. Holds all its FP32 masters."""

    def __init__(self, members: Members):
        self._members = members

    def __call__(
        self,
        scales: torch.Tensor,
        amax: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor | Moment,
        exp_avg_sq: torch.Tensor | Moment,
        step: AdamStep,
    ) -> Finish:
        """Update moments and `amax`; return the function that writes data and corrections."""
        flat = torch.zeros(gradient.numel(), device=gradient.device)
        masters = {weight: flat[start : start + weight.shard.numel] for weight, start in self._members}
        for weight, master in masters.items():
            master.copy_(weight.master())
        step_on(gradient.device, (exp_avg, exp_avg_sq))(flat, gradient, exp_avg, exp_avg_sq, step)
        for weight in masters:
            ReferenceShardCast([weight], weight.spec).write_amax(amax, masters.__getitem__)

        def finish(new_scales: torch.Tensor) -> None:
            for weight, master in masters.items():
                if weight.shard.valid:
                    weight.write_master(master, new_scales, step.skip)

        return finish


class SplitParameter:
    """A parameter whose masters are its BF16 shard and corrections, in a sub-group of its own."""

    def __init__(self, parameter: nn.Parameter):
        self.parameter, self.shard = parameter, shard_of(parameter)
        _, self._correction, self._ties = SplitMasters.of(bf16_shard(parameter))
        # FP32 masters where the BF16 shard is not their rounding, for a user wrote either; dropped at the next step.
        self.master_override: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None

    @property
    def split(self) -> SplitMasters:
        return SplitMasters(bf16_shard(self.parameter), self._correction, self._ties)

    def master(self) -> torch.Tensor:
        return self.split.read_all() if self.master_override is None else self.master_override

    def load(self, masters: torch.Tensor) -> None:
        self.split.write_all(masters)
        self.master_override = self._staged = None

    def bf16_written(self, before: torch.Tensor) -> None:
        """Note that a user has written to the BF16 shard, which was `before`."""
        if self.master_override is None:
            self.master_override = self.split._replace(bf16=before).read_all()

    def step(self, gradient: torch.Tensor, exp_avg: Any, exp_avg_sq: Any, step: AdamStep) -> None:
        """Take AdamW's step; where masters are overridden on a staged copy, committed unless the step is skipped."""
        self._staged = None if self.master_override is None else self.master_override.to(gradient.device, copy=True)
        masters = self.split if self._staged is None else self._staged
        step_on(gradient.device, (exp_avg, exp_avg_sq))(masters, gradient, exp_avg, exp_avg_sq, step)

    def taken(self) -> None:
        if self._staged is not None:
            self.load(self._staged)


class CodedQuantizer(Quantizer):
    """Weights with masters of data and corrections, and parameters with masters of BF16 and corrections."""

    steps = True
    _stored = staticmethod(stored_amax)

    def __init__(self, engine: deepspeed.DeepSpeedEngine, stacks: list[Stack], wire: WireMeter):
        super().__init__(stacks, wire)
        self._flat = FlatMasters(engine)
        without = {id(p): p for some in self._flat.sub_groups.values() for p, *_ in some}
        # By the id of their parameters.
        self.split = {key: SplitParameter(p) for key, p in without.items() if key in self._flat.alone}
        self._of = self._flat.holders = {id(weight.parameter): weight for weight in self.weights} | self.split
        if without.keys() != self._of.keys():
            raise RuntimeError(f"{len(without)} weights have no FP32 masters, and {len(self._of)} are sharded as such")
        self._members: dict[int, Members] = {
            index: [(self._of[id(p)], start) for p, start, _ in some] for index, some in self._flat.sub_groups.items()
        }
        numels = [weight.shard.numel for weight in self.weights]
        corrections = torch.zeros(sum(numels), dtype=torch.int16, device=self.device)
        for weight, correction in zip(self.weights, corrections.split(numels), strict=True):
            weight.correction = correction
            weight.master_override = bf16_shard(weight.parameter)  # initial masters, as DeepSpeed's
        self._kernels: dict[int, Any] = {}  # by sub-group, on a GPU
        if self.device.type == "cuda":
            from ds_fp8.zero.coded_masters_triton import TileStep

            coded = {index: some for index, some in self._members.items() if isinstance(some[0][0], FP8Param)}
            self._kernels = {index: TileStep(members) for index, members in coded.items()}
        self._residuals_due = False  # residuals are older than the data
        self._amax = torch.empty(0)
        self._unfinished: list[Finish] = []
        self._finished = False  # whether a step is completely launched, but not yet noted as taken
        # `skip` (found_inf) of a partially launched step: if zero, the masters are invalid.
        self._skip_of_part: torch.Tensor | None = None

    @property
    def stepped_in_torch(self) -> int:
        """Number of weights on a GPU that torch steps, by tens of launches each."""
        return sum(len(self._members[index]) for index, kernel in self._kernels.items() if not kernel.in_tiles)

    # ---------------------------------------------------------------- requantize what loads and users wrote

    @property
    def stale(self) -> bool:
        return self._residuals_due or super().stale

    def requantize(self) -> None:
        """Quantize stale weights one by one in torch: rare, and bounds the memory of FP32 masters."""
        stale = [weight for weight in self.weights if weight.stale]
        if stale:
            amax = torch.zeros(self.num_scales, device=self.device)
            for weight in stale:
                ReferenceShardCast([weight], weight.spec).write_amax(amax, FP8Param.numbers)
            agreed, scales = self._agree(amax), self._scales.clone()
            for weight in stale:
                weight.scales_in(scales).copy_(weight.scales_in(agreed))
            for weight in stale:
                if weight.from_bf16:
                    ReferenceShardCast([weight], weight.spec).cast(scales, FP8Param.numbers)
                elif weight.shard.valid:
                    if weight.master_override is not None and weight.master_override.device == self.device:
                        # Freed below, possibly before this stream has read it.
                        streams.used_by_current_stream(weight.master_override)
                    weight.write_master(weight.master().to(self.device, torch.float32), scales)
            self._use(scales)
            self._residuals_due = True
            for weight in stale:
                weight.requantized()
        self.write_residuals()
        self._residuals_due = False

    # ---------------------------------------------------------------- a step

    def begin(self) -> None:
        """Begin a step, after the last reads of data and scales."""
        self._finished = False
        self._amax = torch.zeros(self.num_scales, device=self.device)
        self._unfinished = []

    def update(self, sub_group: int, masters: torch.Tensor) -> Callable[..., None] | None:
        """Return the step of a sub-group; None for one with FP32 masters."""
        if sub_group not in self._members:
            return None
        members = self._members[sub_group]

        def update(gradient: torch.Tensor, exp_avg: Any, exp_avg_sq: Any, step: AdamStep) -> None:
            self._skip_of_part = step.skip
            if isinstance(members[0][0], SplitParameter):
                members[0][0].step(gradient, exp_avg, exp_avg_sq, step)
                return
            kernel = self._kernels.get(sub_group)
            takes = kernel is not None and kernel.takes(exp_avg, exp_avg_sq)
            taken = kernel if takes else ReferenceStep(members)
            finish = taken(self._scales, self._amax, gradient, exp_avg, exp_avg_sq, step)
            self._unfinished.append(finish)

        return update

    def finish(self, skip: torch.Tensor) -> None:
        """Write shared blocks, which need the amax of other ranks. Collective; no host sync."""
        scales = self._agree(self._amax)
        while self._unfinished:
            self._unfinished.pop(0)(scales)
        # Now, not when the host knows `skip`: data and scales stay consistent if the step is interrupted.
        self._use(torch.where(skip != 0, self._scales, scales))
        self._skip_of_part, self._finished = None, True

    def taken(self) -> None:
        """Commit the step: data are of the new masters, which override users' writes."""
        for one in self.split.values():
            one.taken()
        for weight in self.weights:
            weight.from_bf16 = False
            weight.requantized()
        self._residuals_due, self._finished = True, False

    def step_ended_midway(self) -> None:
        """Commit an interrupted step if it was launched completely; else `check` refuses the masters."""
        if self._finished:
            self.taken()

    def check(self) -> None:
        if self._skip_of_part is not None and not self._skip_of_part.item():
            raise UserError(
                "an optimizer step was interrupted: masters of quantized weights and corrections are partially updated",
                remedy="load a checkpoint (load_module_only does not load masters), or end the program",
            )

    # ---------------------------------------------------------------- in FP32, for DeepSpeed's getters, loads and saves

    def read(self, parameter: nn.Parameter) -> AbstractContextManager:
        if id(parameter) in self._of:
            self.check()
        return self._flat.on_host(parameter)

    @contextmanager
    def written(self, parameter: nn.Parameter | None = None) -> Iterator[None]:
        """Let DeepSpeed write the FP32 masters of one parameter, or of all; the next requantize or step reads them."""
        there: dict[nn.Parameter, torch.Tensor] = {}
        try:
            with self._flat.on_host(parameter) as there:
                yield
            if parameter is None:  # a load writes all
                self._skip_of_part = None
        finally:
            for one, masters in there.items():
                if parameter is None and id(one) in self.split:
                    self.split[id(one)].load(masters)  # of which DeepSpeed's loads make BF16 shards, too
                else:
                    self._of[id(one)].master_override = masters if parameter is None else masters.clone()

    def into_state(self, state: dict[str, Any]) -> dict[str, Any]:
        self.check()
        self._flat.in_state(state)
        return state
