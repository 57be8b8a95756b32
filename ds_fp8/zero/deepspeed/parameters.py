"""Partitioned parameters: their shards and masters, the marks of their gathers, persistent ones."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fp8.zero.deepspeed.patches import replace

_ALIGNMENT = 512  # bytes that the beginning of every parameter is a multiple of, as if torch had allocated it by itself


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
            parameter.get_full_hp_param = functools.partial(_read_state, parameter, adamw, parameter.get_full_hp_param)
            parameter.set_full_hp_param = functools.partial(_write_state, parameter, adamw, parameter.set_full_hp_param)


def _read_state(parameter, adamw, stock, optim_state_key: str | None = None) -> torch.Tensor:
    with _linked_state(parameter, adamw, optim_state_key):
        return stock(optim_state_key)


def _write_state(parameter, adamw, stock, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    if optim_state_key is not None:
        adamw.expand_moments()
    with _linked_state(parameter, adamw, optim_state_key):
        stock(value, optim_state_key)


@contextlib.contextmanager
def _linked_state(parameter: torch.nn.Parameter, adamw: torch.optim.Optimizer, key: str | None) -> Iterator[None]:
    """Link this rank's part of a parameter's state `key`, as the optimizer holds it now."""
    part = parameter._hp_mapping
    flat = None if part is None else adamw.param_groups[part.param_group_index]["params"][0]
    state = None if flat is None else adamw.state.get(flat, {}).get(key)
    if state is None:  # a rank without a part, the master, or a state that there is not
        yield
        return
    address, before = part.get_hp_fragment_address(), part.optim_fragment
    part.optim_fragment = {**(before or {}), key: state.narrow(0, address.start, address.numel)}
    try:
        yield
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


class Segment(NamedTuple):
    """A run of elements of a flat shard: this rank's part of a tensor, or padding."""

    numel: int
    is_vector: bool  # true if the tensor is a norm's weight, a bias, or the like


def flat_parameters(engine: deepspeed.DeepSpeedEngine) -> list[tuple[torch.Tensor, list[Segment]]]:
    """Return the flat master shards that DeepSpeed gives its basic optimizer as parameters, and what each is made of.

    Segments are in their order in the shard; padding is uninitialised memory. Empty where no ZeRO stage flattens
    parameters.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        spans: list[dict[int, Segment]] = [{} for _ in optimizer.fp32_partitioned_groups_flat]
        for parameter in engine.module.parameters():
            position = master_position(parameter)
            # Of tensors that have nothing here the place is another's.
            if position is not None and shard_of(parameter).valid:
                group, start, _ = position
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
    """Return the segments, by where they start in a range of `total`, in order, and the gaps around them."""
    segments: list[Segment] = []
    end = 0
    for start, segment in sorted(spans.items()):
        segments += [Segment(start - end, False)] * (start > end) + [segment]
        end = start + segment.numel
    return segments + [Segment(total - end, False)] * (total > end)


class PersistentGather:
    """Gathers the parameters that stay unsharded between steps by one collective, into memory that it keeps.

    DeepSpeed gathers them one collective each, and the host then waits for the device: 141 launches a step with 28
    layers of Qwen2.5, 449 with adapters, after which the GPU is idle until Python has issued the next kernels.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        self._engine = engine
        self._parameters: list[torch.nn.Parameter] = []  # those that the memory is for
        self._memory = torch.empty(0)
        self._gaps: list[torch.Tensor] = []
        self._unsharded: list[torch.Tensor] = []

    @torch.no_grad()
    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Gather parameters after a step, for an engine whose other gathers begin behind it.

        Returns:
            Whether that was done: not where one of those that are not gathered is not persistent, or there are none.
        """
        persistent = set(map(id, self._engine.optimizer.persistent_parameters))
        missing = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if not missing or not all(id(p) in persistent for p in missing) or not _alike(missing):
            return False
        shards, group = [p.ds_tensor.detach() for p in missing], missing[0].ds_process_group
        world = dist.get_world_size(group)
        if world == 1:
            unsharded = [shard[: p.ds_numel].view(p.ds_shape) for p, shard in zip(missing, shards, strict=True)]
        else:
            if list(map(id, missing)) != list(map(id, self._parameters)):
                self._allocate(missing, world)
            own = torch.cat(shards)
            received = own.new_empty(world * own.numel())
            # The current stream waits, not the host; products read the parameters on this stream, and have read there
            # what the memory held before.
            dist.all_gather_into_tensor(received, own, group=group)
            # Rank by rank as it comes; parameter by parameter, each with what aligns the next, as it is read.
            of_ranks, count = received.split([shard.numel() for shard in shards] * world), len(shards)
            parts = (one for i, gap in enumerate(self._gaps) for one in (*of_ranks[i::count], gap))
            torch.cat(list(parts), out=self._memory)
            unsharded = self._unsharded
        for parameter, mine in zip(missing, unsharded, strict=True):
            parameter.data = mine
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        return True

    def _allocate(self, parameters: list[torch.nn.Parameter], world: int) -> None:
        numels, like = [world * p.ds_tensor.numel() for p in parameters], parameters[0].ds_tensor
        step = _ALIGNMENT // like.element_size()
        zeros = like.new_zeros(step)
        self._parameters, self._gaps = parameters, [zeros[: -numel % step] for numel in numels]
        starts = [0, *accumulate(numel + gap.numel() for numel, gap in zip(numels, self._gaps, strict=True))]
        self._memory = like.new_empty(starts[-1])
        self._unsharded = [
            self._memory[start : start + p.ds_numel].view(p.ds_shape)
            for p, start in zip(parameters, starts, strict=False)
        ]


def _alike(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether one group has plain shards of one dtype of all these parameters on the device."""
    first = parameters[0]
    return all(
        p.ds_process_group is first.ds_process_group
        and p.ds_secondary_tensor is None
        and p.ds_tensor.dtype == first.ds_tensor.dtype
        and p.ds_tensor.device == first.device == p.device
        and not hasattr(p.ds_tensor, "ds_quant_scale")
        for p in parameters
    )
