"""The only file that uses DeepSpeed's private names; deepspeed_versions.py lists them.

ZeRO-3 (`deepspeed.runtime.zero`) is entered at four places:

    parameters      every partitioned Parameter carries the closures `all_gather_coalesced`, `all_gather` and
                    `partition`, set in partition_parameters.Init; the parameter coordinator calls nothing else
    gradients       stage3 calls the module-level `reduce_scatter_coalesced(gradients, group) -> local slices`
    master update   methods of the ZeRO-3 optimizer after which the FP32 master shards may differ
    wire            the communication backend object behind deepspeed.comm

Importing this module checks that the installed DeepSpeed is a version it knows and has every name, and says which not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import deepspeed
import deepspeed.comm.comm as deepspeed_comm
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters, stage3

from ds_fp8.zero import deepspeed_versions

deepspeed_versions.check(deepspeed.__version__)

_SHARED_MEMORY_OP = "deepspeed_shm_comm"
_MOMENT_WRITES = ("set_full_hp_param", "set_local_hp_param")


def spare_shared_memory_op() -> None:
    """Keep DeepSpeed, on a CPU, from compiling its shared-memory all-reduce when ranks meet.

    That takes a C++ compiler and a minute, and only inference calls it. Call before deepspeed.init_distributed.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False


# ---------------------------------------------------------------- partitioned parameters


@dataclass(frozen=True)
class Shard:
    """Where this rank's shard lies in a partitioned parameter."""

    shape: torch.Size
    """Shape of the whole parameter."""
    start: int
    """Flat index of the shard's first element."""
    numel: int
    """Elements of the shard with its padding; equal on all ranks."""
    valid: int
    """Elements of the shard that belong to the parameter; the rest is uninitialised memory."""
    world: int
    group: object


def is_partitioned(parameter: torch.nn.Parameter) -> bool:
    """Whether ZeRO-3 owns this parameter and gathers it for use (persistent ones stay whole)."""
    return hasattr(parameter, "ds_id") and not parameter.ds_persist


def is_zero_parameter(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Shape of the whole parameter, partitioned or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


def shard_of(parameter: torch.nn.Parameter) -> Shard:
    group = parameter.ds_process_group
    numel = parameter.ds_tensor.ds_numel
    start = numel * dist.get_rank(group)
    valid = max(0, min(numel, parameter.ds_numel - start))
    return Shard(parameter.ds_shape, start, numel, valid, dist.get_world_size(group), group)


def master_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's flat FP32 master shard with its padding, where it lies; where there is none the BF16 shard.

    As safe_get_local_fp32_param gives it, which makes the host wait for the stream of the gradients at every call.
    """
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None or not parameter.requires_grad:
        return bf16_shard(parameter)
    group, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, start, numel)


def bf16_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's flat shard of the BF16 parameter, where it lies."""
    return parameter.ds_tensor.detach()


def order(parameter: torch.nn.Parameter) -> int:
    """A number that sorts parameters alike on all ranks."""
    return parameter.ds_id


def begin_gather(parameter: torch.nn.Parameter) -> None:
    """Mark a gather as started. Raises RuntimeError when the parameter is not in its partitioned state."""
    status = partition_parameters.ZeroParamStatus
    if parameter.ds_status != status.NOT_AVAILABLE:
        raise RuntimeError(f"cannot gather a parameter that is not partitioned: {parameter.ds_summary()}")
    parameter.ds_status = status.INFLIGHT


def end_gather(parameter: torch.nn.Parameter) -> None:
    parameter.ds_status = partition_parameters.ZeroParamStatus.AVAILABLE


def in_use(parameter: torch.nn.Parameter) -> bool:
    """Whether a module is between its pre- and post-hook with this parameter."""
    return bool(parameter.ds_active_sub_modules)


def wrap_closure(parameter: torch.nn.Parameter, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace the closure `name` of a partitioned parameter by `wrapper(closure)`."""
    setattr(parameter, name, wrapper(getattr(parameter, name)))


# ---------------------------------------------------------------- gradients

_scope = threading.local()
_stock_reduce_scatter = stage3.reduce_scatter_coalesced

StockReduceScatter = Callable[[list[torch.Tensor], object], list[torch.Tensor]]
"""(full gradients, group) -> local slices."""
ReduceScatter = Callable[[list[torch.Tensor], object, list[int]], list[torch.Tensor]]
"""The same with a number for each gradient that names its parameter: alike on all ranks, and in every step."""


def stock_reduce_scatter() -> StockReduceScatter:
    """DeepSpeed's own reduce-scatter."""
    return _stock_reduce_scatter


def _dispatch_reduce_scatter(tensors: list[torch.Tensor], group: object = None) -> list[torch.Tensor]:
    scoped: Callable | None = getattr(_scope, "reduce_scatter", None)
    return (scoped or _stock_reduce_scatter)(tensors, group)


def replace_reduce_scatter(
    engine: deepspeed.DeepSpeedEngine, make: Callable[[StockReduceScatter], ReduceScatter]
) -> None:
    """Let the gradients of this engine, and of no other, go through `make(DeepSpeed's reduce-scatter)`.

    The result must be what DeepSpeed's own gives: for each full gradient the mean over ranks of this rank's flat slice
    of ceil(numel / world) elements, without padding.
    """
    replacement = make(_stock_reduce_scatter)
    average = getattr(engine.optimizer, deepspeed_versions.AVERAGE_GRADIENTS)

    def scoped(parameters: list[torch.nn.Parameter], *args, **kwargs):
        keys = [order(parameter) for parameter in parameters]
        _scope.reduce_scatter = lambda tensors, group: replacement(tensors, group, keys)
        try:
            return average(parameters, *args, **kwargs)
        finally:
            _scope.reduce_scatter = None

    setattr(engine.optimizer, deepspeed_versions.AVERAGE_GRADIENTS, scoped)
    stage3.reduce_scatter_coalesced = _dispatch_reduce_scatter


# ---------------------------------------------------------------- master update, steps, weights


def _around(owner: object, name: str, before: Callable[[], None] | None, after: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        if before is not None:
            before()
        result = method(*args, **kwargs)
        after()
        return result

    setattr(owner, name, wrapped)


def has_optimizer(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether the engine trains; without an optimizer ZeRO-3 still shards the weights, in BF16 only."""
    return hasattr(engine.optimizer, "step")


def around_master_update(
    engine: deepspeed.DeepSpeedEngine, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Call `before` and `after` around everything that may change the FP32 master shards of a ZeRO-3 engine.

    `after` is not called for a step that DeepSpeed left out because of an overflow, on all ranks alike.
    """

    def after_step() -> None:
        if not engine.optimizer.overflow:
            after()

    if has_optimizer(engine):
        for name in deepspeed_versions.MASTER_UPDATES:
            _around(engine.optimizer, name, before, after_step if name == "step" else after)


def on_step(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` after every optimizer step, of any ZeRO stage."""
    if has_optimizer(engine):
        _around(engine.optimizer, "step", None, callback)


def before_moment_write(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` before the user overwrites a part of a moment of a ZeRO-3 optimizer (safe_set_..._state)."""

    def announced(method: Callable) -> Callable:
        def wrapped(value, param, optim_state_key=None):
            if optim_state_key is not None:
                callback()
            return method(value, param, optim_state_key)

        return wrapped

    for name in _MOMENT_WRITES:
        if hasattr(engine.optimizer, name):
            setattr(engine.optimizer, name, announced(getattr(engine.optimizer, name)))


class Segment(NamedTuple):
    """A run of elements of a flat shard: this rank's part of a tensor, or padding."""

    numel: int
    is_vector: bool
    """Whether the tensor is a norm's weight, a bias, or the like."""


def flat_parameters(engine: deepspeed.DeepSpeedEngine) -> list[tuple[torch.Tensor, list[Segment]]]:
    """The flat master shards that DeepSpeed gives its basic optimizer as parameters, and what each is made of.

    Segments are in their order in the shard; padding is uninitialised memory. Empty where no ZeRO stage flattens
    parameters.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        spans: list[dict[int, Segment]] = [{} for _ in optimizer.fp32_partitioned_groups_flat]
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                group, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                # Of tensors that have nothing here the place is another's.
                if shard_of(parameter).valid:
                    spans[group][start] = Segment(shard_of(parameter).valid, len(full_shape(parameter)) <= 1)
        flat = optimizer.fp32_partitioned_groups_flat
    elif engine.zero_optimization_stage() in (1, 2):
        vectors = {name for name, parameter in engine.module.named_parameters() if parameter.dim() <= 1}
        spans = [
            {part.start: Segment(part.numel, name in vectors) for name, part in parts.items() if part.numel}
            for parts in optimizer._param_slice_mappings
        ]
        flat = [group["params"][0] for group in optimizer.param_groups]
    else:
        return []
    return [
        (shard, _with_gaps(spans_of_shard, shard.numel())) for shard, spans_of_shard in zip(flat, spans, strict=True)
    ]


def _with_gaps(spans: dict[int, Segment], total: int) -> list[Segment]:
    """Segments, by where they start in a range of `total`, in order, and the gaps around them."""
    segments: list[Segment] = []
    end = 0
    for start, segment in sorted(spans.items()):
        segments += [Segment(start - end, False)] * (start > end) + [segment]
        end = start + segment.numel
    return segments + [Segment(total - end, False)] * (total > end)


def consolidated_state_dict(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
    """The whole BF16 state dict on rank 0's CPU, None on the other ranks. Collective in ZeRO stage 3."""
    if engine.zero_optimization_partition_weights():
        return engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() != 0:
        return None
    return {name: tensor.cpu() for name, tensor in engine.module.state_dict().items()}


# ---------------------------------------------------------------- wire


@contextmanager
def _inside(flag: threading.local) -> Iterator[bool]:
    """True for the outermost of nested calls in this thread."""
    outermost = not getattr(flag, "inside", False)
    flag.inside = True
    try:
        yield outermost
    finally:
        if outermost:
            flag.inside = False


def observe_collectives(names: list[str], observe: Callable[[str, tuple, dict], None]) -> None:
    """Call `observe(name, args, kwargs)` before every collective of these names that DeepSpeed sends.

    One observer a process: a later call replaces the earlier observer. Calls that a collective makes of another are not
    observed a second time.
    """
    backend = deepspeed_comm.cdb
    if not hasattr(backend, "ds_fp8_observer"):
        flag = threading.local()
        for name in names:
            method = getattr(backend, name)

            def wrapped(*args, _method=method, _name=name, **kwargs):
                with _inside(flag) as outermost:
                    if outermost:
                        backend.ds_fp8_observer(_name, args, kwargs)
                    return _method(*args, **kwargs)

            setattr(backend, name, wrapped)
    backend.ds_fp8_observer = observe
