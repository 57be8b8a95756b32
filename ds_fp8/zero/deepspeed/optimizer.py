"""DeepSpeed's ZeRO-3 optimizer as seen by this package's step, private names included.

Gradient shards, FP32 masters and the loss scale stay DeepSpeed's, where safe_get_*, checkpoints and schedulers look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

from ds_fp8.optim.adamw import AdamW
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.parameters import shard_of
from ds_fp8.zero.deepspeed.patches import replace

_FLUSH_BUCKET = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
_GRADIENT_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")


def why_no_own_step(engine: deepspeed.DeepSpeedEngine) -> str | None:
    """Return why DeepSpeed's step must stay with this engine, or None."""
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, AdamW):
        return f"{type(optimizer).__name__} steps by itself"
    if engine.zero_optimization_stage() != 3 or not has_optimizer(engine):
        return "ZeRO-3 with an optimizer is needed"
    zero = engine.optimizer
    reasons = {
        "offload_optimizer steps on the CPU": zero.offload_optimizer,
        "offload_param keeps the BF16 shards on the CPU": zero.offload_param,
        "Muon needs whole gradients": zero.use_muon,
        "tensor parallelism adds to the gradient norm": zero.model_parallel_group is not None,
        "sub-groups are sharded over different ranks": len(set(map(id, zero.sub_group_process_groups))) > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class ZeroStep:
    """One ZeRO-3 optimizer, taken apart for this package's step. `why_no_own_step` must have returned None."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        self._engine, self._zero = engine, engine.optimizer
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        # Of the parameters that the optimizer has, those too that were frozen since.
        self._trained = {names[id(p)]: p for parameters in self._zero.fp16_groups for p in parameters}
        self.group: object = self._zero.dp_process_group
        self.norm_dtype: torch.dtype = get_norm_dtype()
        # This rank's shards of all gradients, in the order of the flat masters; padding is zero.
        self.flat_gradient: torch.Tensor = self._zero.grad_partitions_flat_buffer

    def gradient_places(self) -> dict[str, tuple[int, int]]:
        """Return by parameter name where its shard begins in `flat_gradient`, and the shard's valid elements."""
        partitions = getattr(self._zero, _GRADIENT_PARTITIONS)
        return {name: (partitions[p.ds_id].storage_offset(), shard_of(p).valid) for name, p in self._trained.items()}

    def frozen(self) -> list[str]:
        return [name for name, parameter in self._trained.items() if not parameter.requires_grad]

    def sub_groups(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Yield (param group, flat FP32 masters, their gradients in `flat_gradient`) of every sub-group."""
        start = 0
        for index, masters in enumerate(self._zero.fp32_partitioned_groups_flat):
            group = self._zero.optimizer.param_groups[self._zero.sub_group_to_group_id[index]]
            yield group, masters, self.flat_gradient.narrow(0, start, masters.numel())
            start += masters.numel()

    # ---------------------------------------------------------------- gradients

    def leave_gradients_in_place(self) -> None:
        """Keep DeepSpeed from copying gradients into a bucket: they are cast from where autograd left them."""
        replace(self._engine, self._zero, "contiguous_gradients", False)
        for bucket in self._zero.ipg_buckets.values():
            # DeepSpeed would keep a bucket's worth of memory, a gigabyte by default, for copies that nobody makes.
            bucket.buffer = None

    def end_backward(self) -> None:
        """Reduce what waits for a full bucket; the stream of the next step, not the host, waits for the reductions."""
        zero = self._zero
        for dtype in sorted(zero.ipg_buckets, key=str):
            getattr(zero, _FLUSH_BUCKET)(dtype)
        zero.params_already_reduced = dict.fromkeys(zero.params_already_reduced, False)
        partitions = getattr(zero, _GRADIENT_PARTITIONS)
        zero.averaged_gradients = {
            index: [partitions[parameter.ds_id] for parameter in parameters]
            for index, parameters in enumerate(zero.fp16_groups)
        }
        # By it the next forward counts this backward (micro_step_id): its gradients are added, not written.
        zero._epilogue_ran_this_backward = True

    # ---------------------------------------------------------------- the step

    @property
    def loss_scale(self) -> float:
        return self._zero.loss_scale

    @property
    def clip(self) -> float:
        return self._zero.clip_grad

    def begin(self) -> None:
        """Do what DeepSpeed does before a step; gradients are complete on the current stream then."""
        self._zero._pre_step()
        # A weight that is still unsharded would keep its old values after the step.
        self._zero._partition_all_parameters()
        # The last buckets may still be summed there. No record_stream: gradient shards live as long as the engine.
        streams.wait_stream(self._zero.reduce_and_partition_stream)
        # Parameters that were not reduced (frozen midway) may still hold a gradient; its memory is free for the update.
        self._zero.zero_grad(set_to_none=True)

    def skip(self) -> None:
        """Close a step that was left out because the gradient norm was not finite."""
        self._zero.overflow = True
        self._zero._loss_scale_update_and_overflow_cleanup()

    def write_bf16(self) -> None:
        for bf16, masters in zip(
            self._zero.fp16_partitioned_groups_flat, self._zero.fp32_partitioned_groups_flat, strict=True
        ):
            bf16.copy_(masters.detach())

    def finish(self, norm: torch.Tensor) -> None:
        """Close a step that was taken; the norm without loss scale is for get_global_grad_norm()."""
        zero = self._zero
        zero.overflow = False
        zero._loss_scale_update_and_overflow_cleanup()
        zero._global_grad_norm = norm
        # As DeepSpeed's step leaves it: sub-groups without gradients, until the next backward ends.
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)

    def unshard_persistent(self) -> None:
        self._zero._post_step(set())


class FlatBf16:
    """DeepSpeed's flat buffer of all BF16 shards, which a ZeRO-3 optimizer holds beside its masters."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        self._zero = engine.optimizer
        self.parameters = [parameter for group in self._zero.fp16_groups for parameter in group]

    @property
    def exists(self) -> bool:
        return self._zero.lp_param_buffer is not None

    def round(self, masters: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Round masters into the BF16 shards of their parameters."""
        if masters:
            # One launch for all. On the stream of the step: the masters were written just before.
            torch._foreach_copy_([p.ds_tensor for p in masters], list(masters.values()))

    def restore(self) -> None:
        """Make the buffer, of the shards, all of which exist."""
        total = sum(parameter.partition_numel() for parameter in self.parameters)
        flat = torch.empty(total, dtype=self._zero.dtype, device=self._zero.device)
        # DeepSpeed's own layout again: successive views of one buffer, in the order of the sub-groups, which its flat
        # groups are narrowed from.
        parts = flat.split([parameter.partition_numel() for parameter in self.parameters])
        for parameter, mine in zip(self.parameters, parts, strict=True):
            parameter.ds_tensor.data = mine.copy_(parameter.ds_tensor)
        self._zero.lp_param_buffer = flat
        self._zero.fp16_partitioned_groups_flat.clear()
        self._zero._set_fp16_partitioned_groups_flat()

    def drop(self, kept: list[torch.nn.Parameter]) -> None:
        """Free the buffer; the shards of `kept` stay, in memory of their own."""
        for parameter in kept:
            parameter.ds_tensor.data = parameter.ds_tensor.clone()
        groups = self._zero.fp16_partitioned_groups_flat
        groups[:] = [torch.full((1,), torch.nan, dtype=x.dtype, device=x.device).expand(len(x)) for x in groups]
        self._zero.lp_param_buffer = None  # the last reference


def overflowed(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether DeepSpeed's last step was skipped."""
    return getattr(engine.optimizer, "overflow", False)


def reduce_gradient(engine: deepspeed.DeepSpeedEngine, parameter: torch.nn.Parameter) -> None:
    """Put the gradient of a parameter into a bucket, as DeepSpeed's hooks do."""
    engine.optimizer.reduce_ready_partitions_and_remove_grads(parameter)


def fetch_for_backward(engine: deepspeed.DeepSpeedEngine, module: torch.nn.Module) -> None:
    """Gather the parameters of a module, as DeepSpeed's hooks do when a gradient reaches its output. Collective."""
    engine.optimizer.parameter_offload.pre_sub_module_backward_function(module)
