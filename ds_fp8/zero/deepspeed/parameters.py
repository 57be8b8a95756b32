"""Partitioned parameters: their shards and masters, the marks of their gathers, persistent ones."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fp8.zero.deepspeed.patches import replace


def data_parallel_group(engine: deepspeed.DeepSpeedEngine) -> object:
    """Return the group of the ranks that train one model, those that share a sequence among them."""
    return engine.seq_data_parallel_group


@dataclass(frozen=True)
class Shard:
    """Position of this rank's shard in a partitioned parameter."""

    # Unsharded shape of the parameter as a matrix: the rows of stacked matrices (of experts) follow one another.
    shape: torch.Size
    start: int  # flat index of the shard's first element
    numel: int  # elements of the shard with its padding; equal on all ranks
    valid: int  # elements of the shard that belong to the parameter; the rest is uninitialised memory
    world: int
    group: object


def is_partitioned(parameter: torch.nn.Parameter) -> bool:
    """Return whether ZeRO-3 owns this parameter and gathers it for use (persistent ones stay unsharded)."""
    return hasattr(parameter, "ds_id") and not parameter.ds_persist


def is_zero_parameter(parameter: torch.nn.Parameter) -> bool:
    """Return whether ZeRO-3 manages this parameter, partitioned or not."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Return the unsharded shape of a parameter, partitioned or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


def shard_of(parameter: torch.nn.Parameter) -> Shard:
    """Return the position of this rank's shard in a partitioned parameter."""
    group = parameter.ds_process_group
    numel = parameter.ds_tensor.ds_numel
    # Shards are equal in size; the last ranks' may reach beyond the parameter, or lie beyond it as a whole.
    start = numel * dist.get_rank(group)
    valid = max(0, min(numel, parameter.ds_numel - start))
    shape = parameter.ds_shape
    if len(shape) > 2:
        shape = torch.Size((shape[:-1].numel(), shape[-1]))
    return Shard(shape, start, numel, valid, dist.get_world_size(group), group)


def values_here(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the values of a parameter that this rank holds, flat: its shard, or all of one that is not sharded."""
    if not is_zero_parameter(parameter):
        return parameter.detach().flatten()
    return parameter.ds_tensor.detach().flatten()[: shard_of(parameter).valid]


def shard_group(parameter: torch.nn.Parameter) -> object:
    """Return the process group that a parameter is sharded over."""
    return parameter.ds_process_group


def master_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's flat FP32 master shard with its padding, where it lies; where there is none the BF16 shard.

    As safe_get_local_fp32_param gives it, which makes the host wait for the stream of the gradients at every call.
    """
    position = master_position(parameter)
    if position is None:
        return bf16_shard(parameter)
    group, start, numel = position
    return parameter._z3_optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, start, numel)


def is_trained(parameter: torch.nn.Parameter) -> bool:
    """Return whether the ZeRO-3 optimizer of the parameter's engine has masters of it, which its step updates.

    `requires_grad` tells neither: an optimizer may be given some of a model's parameters only, and what is frozen after
    the start keeps its masters.
    """
    return master_position(parameter) is not None


def untrained_parameters(engine: deepspeed.DeepSpeedEngine) -> list[str]:
    """Return the names of the parameters that require gradients and that the optimizer of a ZeRO-3 engine lacks."""
    # The optimizer of stages 1 and 2 has a grad_position as well, where it is offloaded.
    if engine.zero_optimization_stage() != 3 or not hasattr(engine.optimizer, "grad_position"):
        return []
    named = engine.module.named_parameters()
    return [name for name, p in named if p.requires_grad and p.ds_numel and not is_trained(p)]


def master_position(parameter: torch.nn.Parameter) -> list[int] | None:
    """Return (sub-group, first element, elements) of this rank's masters of a parameter; None where there are none."""
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if not hasattr(optimizer, "grad_position"):  # an engine without an optimizer
        return None
    return optimizer.grad_position.get(optimizer.get_param_id(parameter))


def link_moments(engine: deepspeed.DeepSpeedEngine, adamw: torch.optim.Optimizer) -> None:
    """Let safe_get_full_optimizer_state and safe_set_full_optimizer_state find compressed moments in stages 1 and 2.

    DeepSpeed links a parameter to views of its states once, of those that are tensors; the closures of a parameter are
    replaced by others that link the states of the moment, which `adamw` makes tensors of.
    """
    for parameter in engine.module.parameters():
        if hasattr(parameter, "_hp_mapping"):
            for name in ("get_full_hp_param", "set_full_hp_param"):
                stock = getattr(parameter, name)
                setattr(parameter, name, functools.partial(_with_state, parameter, adamw, stock))


def _with_state(parameter, adamw, stock, *args, **kwargs):
    """Call a getter or setter while this rank's part of a parameter's state is linked, as the optimizer has it."""
    given = signature(stock).bind(*args, **kwargs).arguments
    part, key = parameter._hp_mapping, given.get("optim_state_key")
    if key is not None and "value" in given:
        adamw.expand_moments()
    flat = None if part is None else adamw.param_groups[part.param_group_index]["params"][0]
    state = None if flat is None else adamw.state.get(flat, {}).get(key)
    if state is None:  # a rank without a part, the master, or a state that there is not
        return stock(*args, **kwargs)
    address, before = part.get_hp_fragment_address(), part.optim_fragment
    part.optim_fragment = {**(before or {}), key: state.narrow(0, address.start, address.numel)}
    try:
        return stock(*args, **kwargs)
    finally:
        part.optim_fragment = before


def bf16_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's flat shard of the BF16 parameter, where it lies."""
    return parameter.ds_tensor.detach()


def put_bf16_shard(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Let `data` be this rank's flat shard of the BF16 parameter."""
    parameter.ds_tensor.data = data


def fetch_from_host(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Move the shards of frozen parameters that zero.Init has left on the host to the device that gathers them."""
    for parameter in filter(is_zero_parameter, parameters):
        if not is_trained(parameter) and parameter.ds_tensor.device != parameter.device:
            parameter.ds_tensor.data = parameter.ds_tensor.to(parameter.device)


def order(parameter: torch.nn.Parameter) -> int:
    """Return a number that sorts parameters alike on all ranks."""
    return parameter.ds_id


def leaf_module_of(parameter: torch.nn.Parameter) -> torch.nn.Module | None:
    """Return the outermost leaf module that gathers this parameter with all its others, or None."""
    return getattr(parameter, "ds_z3_leaf_module", None)


def begin_gather(parameter: torch.nn.Parameter) -> None:
    """Mark a gather as started; RuntimeError if the parameter is not in its partitioned state."""
    if parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE:
        raise RuntimeError(f"cannot gather a parameter that is not partitioned: {parameter.ds_summary()}")
    parameter.ds_status = ZeroParamStatus.INFLIGHT


def end_gather(parameter: torch.nn.Parameter) -> None:
    """Mark a gather as done: modules may use the parameter."""
    parameter.ds_status = ZeroParamStatus.AVAILABLE


def reshard(parameter: torch.nn.Parameter) -> None:
    """Reshard a parameter, which no module uses."""
    parameter.partition()


def is_gathered(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is unsharded now, or about to be."""
    return parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE


def partition_all(engine: deepspeed.DeepSpeedEngine) -> None:
    """Partition every parameter of a ZeRO-3 engine, those too that stay unsharded between steps."""
    engine.optimizer._partition_all_parameters()


def in_use(parameter: torch.nn.Parameter) -> bool:
    """Return whether a module is between its pre- and post-hook with this parameter."""
    return bool(parameter.ds_active_sub_modules)


def bytes_to_gather(parameters: Iterable[torch.nn.Parameter]) -> dict[object, int]:
    """Return by process group the bytes of this rank's shards of those parameters that are not gathered."""
    nbytes: defaultdict[object, int] = defaultdict(int)
    for parameter in parameters:
        if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            shard = parameter.ds_tensor
            nbytes[parameter.ds_process_group] += shard.ds_numel * shard.element_size()
    return nbytes


class _Watched(dict):
    """The external parameters of a module, by id, that calls `callback` with every one that is registered."""

    def __init__(self, registered: Mapping[int, torch.nn.Parameter], callback: Callable[[torch.nn.Parameter], None]):
        super().__init__(registered)
        self._callback = callback

    def __setitem__(self, key: int, parameter: torch.nn.Parameter) -> None:
        super().__setitem__(key, parameter)
        self._callback(parameter)


def on_external_parameter(engine: deepspeed.DeepSpeedEngine, callback: Callable[[torch.nn.Parameter], None]) -> None:
    """Call `callback` with every parameter that a module reads which does not own it.

    Now with those that are registered, and later with those that the user registers or ZeRO-3 finds.
    """
    for module in engine.module.modules():
        registered = getattr(module, "_external_params", {})
        for parameter in registered.values():
            callback(parameter)
        replace(engine, module, "_external_params", _Watched(registered, callback))


def flat_parameters(engine: deepspeed.DeepSpeedEngine) -> list[tuple[torch.Tensor, list[int]]]:
    """Return the flat master shards that DeepSpeed gives its basic optimizer as parameters, and what each is made of.

    Lengths of this rank's parts of tensors and of padding, uninitialised memory, in their order in the shard. Empty
    where no ZeRO stage flattens parameters.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        spans: list[dict[int, int]] = [{} for _ in optimizer.fp32_partitioned_groups_flat]
        for parameter in engine.module.parameters():
            position = master_position(parameter)
            # Of tensors that have nothing here the place is another's.
            if position is not None and shard_of(parameter).valid:
                group, start, _ = position
                spans[group][start] = shard_of(parameter).valid
        flat = optimizer.fp32_partitioned_groups_flat
    elif engine.zero_optimization_stage() in (1, 2):
        spans = [{p.start: p.numel for p in parts.values() if p.numel} for parts in optimizer._param_slice_mappings]
        flat = [group["params"][0] for group in optimizer.param_groups]
    else:
        return []
    return [(shard, _with_gaps(lengths, shard.numel())) for shard, lengths in zip(flat, spans, strict=True)]


def _with_gaps(lengths: dict[int, int], total: int) -> list[int]:
    """Return lengths, by where they start in a range of `total`, in order, and those of the gaps around them."""
    result: list[int] = []
    end = 0
    for start, length in sorted(lengths.items()):
        result += [start - end] * (start > end) + [length]
        end = start + length
    return result + [total - end] * (total > end)


class PersistentGather:
    """Gathers the parameters that stay unsharded between steps by one collective, into memory that it keeps.

    DeepSpeed gathers them one collective each, and the host then waits for the device: 141 launches a step with 28
    layers of Qwen2.5, 449 with adapters, after which the GPU is idle until Python has issued the next kernels.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        self._engine = engine
        self._parameters: list[torch.nn.Parameter] = []  # those that the memory is for
        self._parts: list[torch.Tensor] = []  # of all ranks, one parameter behind the other
        self._unsharded: list[torch.Tensor] = []

    @torch.no_grad()
    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Gather parameters after a step, for an engine whose other gathers begin behind it.

        Returns:
            Whether that was done: not where some of those that are not gathered are not persistent or of another kind.
        """
        persistent = set(map(id, self._engine.optimizer.persistent_parameters))
        missing = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        kinds = {(id(p.ds_process_group), p.ds_tensor.dtype) for p in missing}  # of experts, of other ranks
        if len(kinds) != 1 or not all(id(p) in persistent for p in missing):
            return False
        shards, group = [p.ds_tensor.detach() for p in missing], missing[0].ds_process_group
        world, numels = dist.get_world_size(group), [shard.numel() for shard in shards]
        if world == 1:
            unsharded = _views(shards, missing)
        else:
            if list(map(id, missing)) != list(map(id, self._parameters)):
                memory = [shard.new_empty(world * shard.numel()) for shard in shards]
                self._parts = [part for one, n in zip(memory, numels, strict=True) for part in one.split(n)]
                self._parameters, self._unsharded = missing, _views(memory, missing)
            own = torch.cat(shards)
            received = own.new_empty(world * own.numel())
            # The current stream waits, not the host; products read the parameters on this stream, and have read there
            # what the memory held before.
            dist.all_gather_into_tensor(received, own, group=group)
            # Rank by rank as it comes; parameter by parameter as it is read.
            of_ranks = received.split(numels * world)
            count = len(missing)
            torch._foreach_copy_(self._parts, [part for i in range(count) for part in of_ranks[i::count]])
            unsharded = self._unsharded
        for parameter, mine in zip(missing, unsharded, strict=True):
            parameter.data = mine
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        return True


def _views(flat: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [one[: p.ds_numel].view(p.ds_shape) for one, p in zip(flat, parameters, strict=True)]
