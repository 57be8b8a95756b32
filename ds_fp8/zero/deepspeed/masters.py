"""ZeRO-3's flat FP32 masters of sub-groups that have none: whose masters are quantized data, or BF16, and corrections.

DeepSpeed makes a flat tensor of FP32 masters for every sub-group, and reads, writes, saves and loads it. The parameters
named here get sub-groups of their own, whose flat tensors have a size and no memory: they are NaN with stride 0, so
that a reader nobody thought of finds NaN, and a writer an error. For DeepSpeed's getters, setters, loads and saves they
have memory on the host for as long as a call takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import FP32_FLAT_GROUPS, DeepSpeedZeroOptimizer_Stage3
from torch import nn

_MADE = ("_create_fp16_sub_groups", "_create_fp32_partitions")
# Takes a model and the ids of the parameters that are trained; returns the ids of those without FP32 masters, each with
# whether it has a sub-group of its own.
Choose = Callable[[nn.Module, set[int]], dict[int, bool]]


@contextmanager
def without_fp32_masters(choose: Choose) -> Iterator[None]:
    """Let the ZeRO-3 optimizers that are made within have no FP32 masters of the parameters that `choose` returns."""
    made = {name: getattr(DeepSpeedZeroOptimizer_Stage3, name) for name in _MADE}

    def sub_groups(zero: Any, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        if not hasattr(zero, "_ds_fp8_coded"):
            trained = {id(p) for group in zero.trainable_param_groups for p in group["params"]}
            zero._ds_fp8_coded = choose(zero.parameter_offload.module, trained)
        kinds = {kind: [p for p in parameters if zero._ds_fp8_coded.get(id(p)) is kind] for kind in (None, True, False)}
        lists = (kinds[None], *([p] for p in kinds[True]), kinds[False])
        return [group for some in lists if some for group in made[_MADE[0]](zero, some)]

    def partitions(zero: Any) -> None:
        flat, shards = zero.fp16_partitioned_groups_flat, list(zero.fp16_partitioned_groups_flat)
        coded = [id(group[0]) in zero._ds_fp8_coded for group in zero.fp16_groups]
        flat[:] = [bf16[:0] if without else bf16 for bf16, without in zip(shards, coded, strict=True)]
        made[_MADE[1]](zero)
        flat[:] = shards
        for index, masters in enumerate(zero.fp32_partitioned_groups_flat):
            if coded[index]:
                masters.data = _absent(len(shards[index]), masters.device)

    try:
        for name, function in zip(_MADE, (sub_groups, partitions), strict=True):
            setattr(DeepSpeedZeroOptimizer_Stage3, name, function)
        yield
    finally:
        for name, function in made.items():
            setattr(DeepSpeedZeroOptimizer_Stage3, name, function)


def _absent(numel: int, device: torch.device) -> torch.Tensor:
    return torch.full((1,), torch.nan, device=device).expand(numel)


def has_fp32_master(parameter: nn.Parameter) -> bool:
    """Return False for the parameters that `choose` of `without_fp32_masters` has returned."""
    zero = getattr(parameter, "_z3_optimizer", None)
    return id(parameter) not in getattr(zero, "_ds_fp8_coded", ())


class FlatMasters:
    """The flat tensors without memory of one engine."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        self._zero = engine.optimizer
        # By the id of a parameter, the object whose master() dequantizes its masters; set by the owner.
        self.holders: dict[int, Any] = {}
        coded: dict[int, bool] = getattr(self._zero, "_ds_fp8_coded", {})
        # Ids of the parameters that have sub-groups of their own.
        self.alone = {key for key, alone in coded.items() if alone}
        # By sub-group without FP32 masters its parameters, each with its first element there and their number.
        self.sub_groups: dict[int, list[tuple[nn.Parameter, int, int]]] = {}
        for index, group in enumerate(self._zero.fp16_groups):
            if id(group[0]) in coded:
                places = [self._zero.grad_position[self._zero.get_param_id(parameter)] for parameter in group]
                self.sub_groups[index] = [(p, start, numel) for p, (_, start, numel) in zip(group, places, strict=True)]

    @contextmanager
    def on_host(self, only: nn.Parameter | None = None) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
        """Give the flat tensors memory with the masters of all their parameters or of one; yield these.

        Memory that nobody writes to costs nothing: one parameter's masters are what they cost, not their sub-group's.
        """
        there: dict[nn.Parameter, torch.Tensor] = {}
        flat = self._zero.fp32_partitioned_groups_flat
        opened = [
            index for index, members in self.sub_groups.items() if only is None or any(p is only for p, *_ in members)
        ]
        devices = [flat[index].device for index in opened]
        try:
            for index in opened:
                flat[index].data = torch.empty(flat[index].numel())
                for parameter, start, numel in self.sub_groups[index]:
                    if only is None or parameter is only:
                        there[parameter] = (
                            flat[index].detach()[start : start + numel].copy_(self.holders[id(parameter)].master())
                        )
            yield there
        finally:
            for index, device in zip(opened, devices, strict=True):
                flat[index].data = _absent(flat[index].numel(), device)

    def in_state(self, state: dict[str, Any]) -> None:
        """Put FP32 masters, on the host, into a state dict of the ZeRO optimizer."""
        saved = state[FP32_FLAT_GROUPS] = list(state[FP32_FLAT_GROUPS])
        for index, members in self.sub_groups.items():
            saved[index] = torch.empty(saved[index].numel())
            for parameter, start, numel in members:
                saved[index][start : start + numel] = self.holders[id(parameter)].master()
