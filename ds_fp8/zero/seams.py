"""The only file that names DeepSpeed's private names.

ZeRO-3 (`deepspeed.runtime.zero`) is entered at four places:

    parameters      every partitioned Parameter carries the closures `all_gather_coalesced`, `all_gather` and
                    `partition`, set in partition_parameters.Init; the parameter coordinator calls nothing else
    gradients       stage3 calls the module-level `reduce_scatter_coalesced(gradients, group) -> local slices`
    master update   methods of the ZeRO-3 optimizer after which the FP32 master shards may differ
    wire            the communication backend object behind deepspeed.comm

Importing this module checks that every name used exists in the installed DeepSpeed, and says which is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import deepspeed
import deepspeed.comm.comm as deepspeed_comm
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero import partition_parameters, stage3

from ds_fp8.errors import UserError

TESTED_VERSIONS = ("0.19.8",)

_SHARED_MEMORY_OP = "deepspeed_shm_comm"
_OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
_AVERAGE_GRADIENTS = f"_{_OPTIMIZER}__avg_scatter_grads"
_MASTER_UPDATES = ("step", "load_state_dict", "refresh_fp32_params", "set_full_hp_param", "set_local_hp_param")
_REQUIRED = {
    partition_parameters: ("ZeroParamStatus", "Init"),
    partition_parameters.ZeroParamStatus: ("NOT_AVAILABLE", "INFLIGHT", "AVAILABLE"),
    stage3: (_OPTIMIZER, "reduce_scatter_coalesced"),
    getattr(stage3, _OPTIMIZER, None): (_AVERAGE_GRADIENTS, "get_param_id", *_MASTER_UPDATES),
    deepspeed_comm: ("cdb",),
    deepspeed.ops: ("__compatible_ops__",),
    deepspeed_engine.DeepSpeedEngine: ("_zero3_consolidated_16bit_state_dict",),
}


_SET_BY = {"__init__": ("grad_position", "fp32_partitioned_groups_flat"), "_link_all_hp_params": ("_z3_optimizer",)}
"""Methods of the optimizer, and the attributes set there that `master_shard` reads."""


def missing_names() -> list[str]:
    """Names of DeepSpeed that this package needs and the installed version lacks."""
    missing = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in _REQUIRED.items()
        for name in names
        if not hasattr(owner, name)
    ]
    for method, attributes in _SET_BY.items():
        code = getattr(getattr(getattr(stage3, _OPTIMIZER, None), method, None), "__code__", None)
        missing += [f"{_OPTIMIZER}.{name}" for name in attributes if name not in getattr(code, "co_names", ())]
    return missing


if missing_names():
    raise UserError(
        f"DeepSpeed {deepspeed.__version__} lacks {', '.join(missing_names())}, which the FP8 path of ZeRO-3 needs",
        remedy=f"install a tested version: {', '.join(TESTED_VERSIONS)}",
    )


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
    """This rank's flat FP32 master shard with its padding; the BF16 shard of a frozen parameter, as FP32.

    As safe_get_local_fp32_param gives it, which makes the host wait for the stream of the gradients at every call.
    """
    if not parameter.requires_grad:
        return bf16_shard(parameter)
    optimizer = parameter._z3_optimizer
    group, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    master = optimizer.fp32_partitioned_groups_flat[group].narrow(0, start, numel)
    return master.to(get_accelerator().current_device_name())


def bf16_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's flat shard of the BF16 parameter, as FP32 on the device."""
    return parameter.ds_tensor.to(get_accelerator().current_device_name()).float()


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

ReduceScatter = Callable[[list[torch.Tensor], object], list[torch.Tensor]]


def _dispatch_reduce_scatter(tensors: list[torch.Tensor], group: object = None) -> list[torch.Tensor]:
    reduce_scatter: ReduceScatter = getattr(_scope, "reduce_scatter", None) or _stock_reduce_scatter
    return reduce_scatter(tensors, group)


def replace_reduce_scatter(engine: deepspeed.DeepSpeedEngine, make: Callable[[ReduceScatter], ReduceScatter]) -> None:
    """Let the gradients of this engine, and of no other, go through `make(DeepSpeed's reduce-scatter)`.

    The result must be what DeepSpeed's own gives: for each full gradient the mean over ranks of this rank's flat slice
    of ceil(numel / world) elements, without padding.
    """
    replacement = make(_stock_reduce_scatter)
    average = getattr(engine.optimizer, _AVERAGE_GRADIENTS)

    def scoped(*args, **kwargs):
        _scope.reduce_scatter = replacement
        try:
            return average(*args, **kwargs)
        finally:
            _scope.reduce_scatter = None

    setattr(engine.optimizer, _AVERAGE_GRADIENTS, scoped)
    stage3.reduce_scatter_coalesced = _dispatch_reduce_scatter


# ---------------------------------------------------------------- master update, steps, weights


def _after(owner: object, name: str, callback: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        result = method(*args, **kwargs)
        callback()
        return result

    setattr(owner, name, wrapped)


def on_master_update(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` after everything that may have changed the FP32 master shards."""
    for name in _MASTER_UPDATES:
        _after(engine.optimizer, name, callback)


def on_step(engine: deepspeed.DeepSpeedEngine, callback: Callable[[], None]) -> None:
    """Call `callback` after every optimizer step, of any ZeRO stage."""
    if engine.optimizer is not None:
        _after(engine.optimizer, "step", callback)


def consolidated_state_dict(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
    """The whole BF16 state dict on rank 0's CPU, None on the other ranks. Collective in ZeRO stage 3."""
    if engine.zero_optimization_partition_weights():
        return engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() != 0:
        return None
    return {name: tensor.cpu() for name, tensor in engine.module.state_dict().items()}


# ---------------------------------------------------------------- streams


def record_event() -> object | None:
    """An event on the current stream; None on a device without streams."""
    if get_accelerator().is_synchronized_device():
        return None
    event = get_accelerator().Event()
    event.record()
    return event


def wait_event(event: object | None) -> None:
    """Let the current stream wait for `event`."""
    if event is not None:
        get_accelerator().current_stream().wait_event(event)


def used_by_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of `tensor` from reuse until the current stream has passed this point."""
    if not get_accelerator().is_synchronized_device():
        tensor.record_stream(get_accelerator().current_stream())


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
