"""BF16 shards of a ZeRO-3 optimizer, kept only where something is gathered in BF16.

DeepSpeed holds a BF16 shard of every parameter beside its FP32 master. Weights that are gathered in FP8 need none: what
reads their BF16 shards (GatheredParameters, saving, loading) gets them rounded from the masters at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import deepspeed
import torch

from ds_fp8.zero.seams.installation import on_destroy
from ds_fp8.zero.seams.parameters import master_shard


class Bf16Shards:
    """Set of BF16 shards that are allocated. One that is not is NaN with stride 0: writing to it is an error."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, unneeded: Iterable[torch.nn.Parameter]):
        """Free the shards of `unneeded`, until the engine is destroyed."""
        self._zero = engine.optimizer
        self._parameters = [parameter for group in self._zero.fp16_groups for parameter in group]
        trained = set(map(id, self._parameters))
        self._unneeded = {id(parameter): parameter for parameter in unneeded if id(parameter) in trained}
        on_destroy(engine, self.make_all)
        self.free_unneeded()

    def need(self, parameter: torch.nn.Parameter) -> None:
        """Keep this parameter's shard from now on; what a user wrote there stays."""
        self.make(parameter)
        self._unneeded.pop(id(parameter), None)

    def make(self, parameter: torch.nn.Parameter) -> None:
        """Give a parameter its shard, rounded from the masters, where it has none."""
        if id(parameter) in self._unneeded and not parameter.ds_tensor.is_contiguous():
            self._make(parameter)

    def free(self, parameter: torch.nn.Parameter) -> None:
        """Free a parameter's shard where it is not needed."""
        # An absent shard is one NaN with stride 0, hence not contiguous: the stride is the flag.
        if id(parameter) in self._unneeded and parameter.ds_tensor.is_contiguous():  # else it is absent already
            parameter.ds_tensor.data = _absent(parameter)

    def write(self) -> None:
        """Round the new FP32 masters into the shards that exist for good."""
        needed = [parameter for parameter in self._parameters if id(parameter) not in self._unneeded]
        if needed:
            shards = [parameter.ds_tensor for parameter in needed]
            # One launch for all. On the stream of the step: the masters were written just before.
            torch._foreach_copy_(shards, [master_shard(parameter) for parameter in needed])
        for parameter in self._unneeded.values():
            if parameter.ds_tensor.is_contiguous():  # what a user wrote there held until now
                self.free(parameter)

    def _make(self, parameter: torch.nn.Parameter) -> None:
        parameter.ds_tensor.data = master_shard(parameter).to(parameter.dtype)

    @property
    def all_made(self) -> bool:
        """Return whether DeepSpeed's flat buffer of all shards exists."""
        return self._zero.lp_param_buffer is not None

    def make_all(self) -> None:
        """Restore DeepSpeed's flat buffer of all shards, for code of its that reads or writes it."""
        total = sum(parameter.partition_numel() for parameter in self._parameters)
        flat = torch.empty(total, dtype=self._zero.dtype, device=self._zero.device)
        start = 0
        for parameter in self._parameters:
            shard = flat.narrow(0, start, parameter.partition_numel())
            self.make(parameter)
            shard.copy_(parameter.ds_tensor)
            # DeepSpeed's own layout again: successive views of one buffer, in the order of the sub-groups, which its
            # flat groups are narrowed from.
            parameter.ds_tensor.data = shard
            start += len(shard)
        self._zero.lp_param_buffer = flat
        self._zero.fp16_partitioned_groups_flat.clear()
        self._zero._set_fp16_partitioned_groups_flat()

    def free_unneeded(self, keep: Callable[[torch.nn.Parameter], bool] = lambda parameter: False) -> None:
        """Keep only the needed shards of the flat buffer.

        Args:
            keep: Says of a parameter that its shard is read until the next step, although it is not needed.
        """
        for parameter in self._parameters:
            if id(parameter) in self._unneeded and not keep(parameter):
                self.free(parameter)
            else:
                parameter.ds_tensor.data = parameter.ds_tensor.clone()
        flat = self._zero.fp16_partitioned_groups_flat
        flat[:] = [torch.full((1,), torch.nan, dtype=part.dtype, device=part.device).expand(len(part)) for part in flat]
        # The last reference to the flat buffer: needed shards were cloned above, so it is freed as a whole.
        self._zero.lp_param_buffer = None


def _absent(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.ds_tensor.new_full((1,), torch.nan).expand(parameter.partition_numel())
