"""Masters that are codes, or BF16, and corrections: the step that writes both, and DeepSpeed's view of them in FP32.

A step is one pass over a weight, block by block: decode, update, amax, scale, encode (optim/masters.py). Blocks that
lie on two ranks need an amax that both have a part in. They are updated twice, first for the amax alone:

    update     every sub-group: blocks of this rank alone, and the amax of the others
    finish     one all-reduce MAX of the amax of all sub-groups; then the others

Those in BF16 need neither: AdamW's kernel reads and writes them in place of FP32 masters (SplitMasters).

All of it on the stream of the step, before the host knows whether the step counts: where `skip` is not zero nothing is
changed. Loads and users write FP32 numbers, which are encoded by the next cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_fp8.casts import scale_from_amax
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.optim.adamw import AdamStep, step_on
from ds_fp8.optim.masters import SplitMasters, kept_amax
from ds_fp8.optim.moments import Moment
from ds_fp8.zero import streams
from ds_fp8.zero.cast_set import CastSet
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.deepspeed.masters import FlatMasters
from ds_fp8.zero.deepspeed.parameters import bf16_shard, shard_of
from ds_fp8.zero.weight import ReferenceShardCast, ShardedWeight, Source

Members = list[tuple[Any, int]]
"""Parameters of a sub-group, each with the first of its elements there: ShardedWeights, or one SplitParameter."""
Finish = Callable[[torch.Tensor, torch.Tensor | None], None]
"""Takes the new scales of all weights, and `skip`."""


class ReferenceStep:
    """The step of one sub-group in torch, on any device; the oracle of the kernel. It has all of the FP32 masters."""

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
        **options: Any,
    ) -> Finish:
        """Update moments, and raise the amax of all weights; return what writes codes and corrections."""
        flat = torch.zeros(gradient.numel(), device=gradient.device)
        masters = {weight: flat[start : start + weight.shard.numel] for weight, start in self._members}
        for weight, master in masters.items():
            master.copy_(weight.master())
        step_on(gradient.device, (exp_avg, exp_avg_sq))(flat, gradient, exp_avg, exp_avg_sq, step, **options)
        for weight in masters:
            ReferenceShardCast([weight], weight.spec).write_amax(amax, masters.__getitem__)

        def finish(new_scales: torch.Tensor, skip: torch.Tensor | None) -> None:
            for weight, master in masters.items():
                if weight.shard.valid:
                    weight.write_master(master, new_scales, skip)

        return finish


class SplitParameter:
    """A parameter whose masters are its BF16 shard and corrections, in a sub-group of its own."""

    def __init__(self, parameter: nn.Parameter):
        self.parameter, self.shard = parameter, shard_of(parameter)
        _, self._correction, self._ties = SplitMasters.of(bf16_shard(parameter))
        self.apart: torch.Tensor | None = None
        """Its masters where the BF16 shard is not their rounding, for a user wrote either, until a step is taken."""
        self._stepped: torch.Tensor | None = None

    @property
    def kept(self) -> SplitMasters:
        return SplitMasters(bf16_shard(self.parameter), self._correction, self._ties)

    def master(self) -> torch.Tensor:
        return self.kept.decode() if self.apart is None else self.apart

    def load(self, masters: torch.Tensor) -> None:
        self.kept.encode(masters)
        self.apart = self._stepped = None

    def bf16_wrote(self, before: torch.Tensor) -> None:
        """Note that a user has written to the BF16 shard, which was `before`."""
        if self.apart is None:
            self.apart = self.kept._replace(bf16=before).decode()

    def step(self, gradient: torch.Tensor, exp_avg: Any, exp_avg_sq: Any, step: AdamStep, **options: Any) -> None:
        """Take AdamW's step; of masters that are apart on a copy, until it is known to count."""
        self._stepped = None if self.apart is None else self.apart.to(gradient.device, copy=True)
        masters = self.kept if self._stepped is None else self._stepped
        step_on(gradient.device, (exp_avg, exp_avg_sq))(masters, gradient, exp_avg, exp_avg_sq, step, **options)

    def taken(self) -> None:
        if self._stepped is not None:
            self.load(self._stepped)


class MasterSet(CastSet):
    """Weights with scales in one buffer whose masters are codes and corrections; beside them parameters in BF16."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, stacks: Iterable[list[ShardedWeight]], wire: WireMeter):
        super().__init__(stacks)
        self._wire, self._flat = wire, FlatMasters(engine)
        without = {id(p): p for some in self._flat.sub_groups.values() for p, *_ in some}
        self.split = {key: SplitParameter(p) for key, p in without.items() if key in self._flat.alone}
        """By the id of their parameters."""
        self._of = {id(weight.parameter): weight for weight in self.weights} | self.split
        if without.keys() != self._of.keys():
            raise RuntimeError(f"{len(without)} weights have no FP32 masters, and {len(self._of)} are gathered as such")
        self._members: dict[int, Members] = {
            index: [(self._of[id(p)], start) for p, start, _ in some] for index, some in self._flat.sub_groups.items()
        }
        self._tiles: dict[int, Any] = {}
        """Kernels by sub-group, on a GPU."""
        self._residuals_due = self._finished = False
        """Whether residuals are older than codes; whether a step was launched whole that is not noted as taken."""
        self._torn: torch.Tensor | None = None
        """`skip` of a step of which a part was launched: codes are neither old nor new where it is zero."""

    def place(self, codes: torch.Tensor) -> None:
        super().place(codes)
        numels = [weight.shard.numel for weight in self.weights]
        corrections = torch.zeros(sum(numels), dtype=torch.int16, device=codes.device)
        self._scales = torch.ones(self.num_scales, device=codes.device)
        for weight, correction in zip(self.weights, corrections.split(numels), strict=True):
            weight.correction, weight.scale = correction, weight.scales_in(self._scales)
            weight.apart = bf16_shard(weight.parameter)  # which DeepSpeed's masters would be copies of
        if codes.device.type == "cuda":
            from ds_fp8.zero.masters_triton import TileStep

            coded = {index: members for index, members in self._members.items() if members[0][0] in self.weights}
            self._tiles = {index: TileStep(members) for index, members in coded.items()}

    @property
    def stepped_in_torch(self) -> int:
        """Return the number of weights that no kernel steps, on a GPU: each takes tens of launches a step."""
        return sum(len(self._members[index]) for index, kernel in self._tiles.items() if not kernel.whole)

    # ---------------------------------------------------------------- casts of what loads and users wrote

    @property
    def stale(self) -> bool:
        """Return whether a cast is due, or residuals of what a step wrote."""
        return self._residuals_due or super().stale

    def cast(self, wire: WireMeter) -> None:
        """Cast what is stale, weight by weight, in torch: it is rare, and of FP32 numbers there is no room for many."""
        stale = [weight for weight in self.weights if weight.stale]
        if stale:
            amax = torch.zeros(self.num_scales, device=self.device)
            for weight in stale:
                ReferenceShardCast([weight], weight.spec).write_amax(amax, ShardedWeight.numbers)
            agreed, scales = self._agreed(amax, wire), self._scales.clone()
            for weight in stale:
                weight.scales_in(scales).copy_(weight.scales_in(agreed))
            for weight in stale:
                if weight.source is Source.BF16:
                    ReferenceShardCast([weight], weight.spec).cast(scales, ShardedWeight.numbers)
                elif weight.shard.valid:
                    if weight.apart is not None and weight.apart.device == self.device:
                        # Freed below, maybe before this stream has read it.
                        streams.used_by_current_stream(weight.apart)
                    weight.write_master(weight.master().to(self.device, torch.float32), scales)
            self._take(scales)
            self._residuals_due = True
            self._are_cast(stale)
        self.write_residuals(wire)
        self._residuals_due = False

    def _scale_of(self, amax: torch.Tensor, spec: CastSpec) -> torch.Tensor:
        return scale_from_amax(kept_amax(amax, spec.scale), spec.format, spec.scale)

    def _take(self, scales: torch.Tensor) -> None:
        self._scales = scales if self._pinned is None else self._pinned.copy_(scales)
        for weight in self.weights:
            weight.scale = weight.scales_in(self._scales)

    def _are_cast(self, weights: Iterable[ShardedWeight]) -> None:
        """Note that the codes are the casts of the present numbers."""
        for weight in weights:
            weight.stale = False
            if weight.source is Source.MASTER:
                weight.apart = None

    # ---------------------------------------------------------------- a step

    def begin(self) -> None:
        """Begin a step, behind the last reads of codes and scales."""
        self._finished = False
        self._amax = torch.zeros(self.num_scales, device=self.device)
        self._unfinished: list[Finish] = []

    def update(self, sub_group: int, masters: torch.Tensor) -> Callable[..., None] | None:
        """Return what takes AdamW's step of a sub-group; None for one with FP32 masters."""
        if sub_group not in self._members:
            return None
        members = self._members[sub_group]

        def update(gradient: torch.Tensor, exp_avg: Any, exp_avg_sq: Any, step: AdamStep, **options: Any) -> None:
            self._torn = options["skip"]
            if isinstance(members[0][0], SplitParameter):
                members[0][0].step(gradient, exp_avg, exp_avg_sq, step, **options)
                return
            kernel = self._tiles.get(sub_group)
            takes = kernel is not None and kernel.takes(exp_avg, exp_avg_sq)
            taken = kernel if takes else ReferenceStep(members)
            finish = taken(self._scales, self._amax, gradient, exp_avg, exp_avg_sq, step, **options)
            self._unfinished.append(finish)

        return update

    def finish(self, skip: torch.Tensor) -> None:
        """Write what needs the amax of other ranks. Collective; the host waits for nothing."""
        scales = self._agreed(self._amax, self._wire)
        while self._unfinished:
            self._unfinished.pop(0)(scales, skip)
        # At once, and not when the host knows whether the step counts: no scales of other codes, should it end midway.
        self._take(torch.where(skip != 0, self._scales, scales))
        self._torn, self._finished = None, True

    def taken(self) -> None:
        """Note that the step was taken: the codes are those of new masters, over what a user wrote."""
        for one in self.split.values():
            one.taken()
        for weight in self.weights:
            weight.source = Source.MASTER
        self._are_cast(self.weights)
        self._residuals_due, self._finished = True, False

    def step_ended_midway(self) -> None:
        """Note a step that counts as taken if all of it was launched; else its masters are refused from now on."""
        if self._finished:
            self.taken()

    def check(self) -> None:
        """Raise UserError where codes and corrections are those of half a step."""
        if self._torn is not None and not self._torn.item():
            raise UserError(
                "an optimizer step ended midway, and masters that are codes and corrections are neither old nor new",
                remedy="load a checkpoint (load_module_only does not load masters), or end the program",
            )

    # ---------------------------------------------------------------- DeepSpeed's view

    @contextmanager
    def read(self, parameter: nn.Parameter) -> Iterator[None]:
        """Let DeepSpeed find the FP32 masters of one parameter."""
        if id(parameter) not in self._of:
            yield
            return
        self.check()
        with self._flat.on_host(self._master, parameter):
            yield

    @contextmanager
    def written(self, parameter: nn.Parameter | None = None) -> Iterator[None]:
        """Let DeepSpeed write the FP32 masters of one parameter, or of all, which the next cast or step reads."""
        if parameter is not None and id(parameter) not in self._of:
            yield
            return
        there: dict[nn.Parameter, torch.Tensor] = {}
        try:
            with self._flat.on_host(self._master, parameter) as there:
                yield
            if parameter is None:  # a load has all of them
                self._torn = None
        finally:
            for one, masters in there.items():
                if parameter is None and id(one) in self.split:
                    self.split[id(one)].load(masters)  # of which DeepSpeed's loads make BF16 shards, too
                else:
                    self._of[id(one)].apart = masters if parameter is None else masters.clone()

    def into_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put FP32 masters into a state dict of the ZeRO optimizer."""
        self.check()
        self._flat.in_state(state, self._master)
        return state

    def _master(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._of[id(parameter)].master()
