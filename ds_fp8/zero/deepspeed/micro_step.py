"""DeepSpeed's streams, waits and counters during the CUDA graph capture of a ZeRO-3 micro-batch.

DeepSpeed's hooks run while a graph is captured, and not when it is replayed. So a capture begins and ends in the state
that DeepSpeed is in between two micro-batches: all parameters sharded but the persistent ones, nothing in flight.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fp8.zero import streams

if TYPE_CHECKING:  # of zero/, whose files import this folder
    from ds_fp8.zero.collectives import WireMeter
    from ds_fp8.zero.group import FP8ParamGroup
    from ds_fp8.zero.reduce import GradientShards

_FETCH_EVENTS = "_PartitionedParameterCoordinator__ongoing_fetch_events"
_IN_FLIGHT = "_PartitionedParameterCoordinator__inflight_param_registry"
_GATHER_STREAM = "_PartitionedParameterCoordinator__allgather_stream"
_ACTIVE_BACKWARD = "_PartitionedParameterCoordinator__active_backward_submodules"
_AVAILABLE_PARAMETERS = "_PartitionedParameterCoordinator__n_available_params"
# Attributes of modules in which DeepSpeed's hooks count between forward and backward.
COUNTERS = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")


class _Discarded(deque):
    """Events that the host would wait for, so as not to run ahead; a captured one cannot be waited for."""

    def append(self, event: object) -> None:
        """Discard the event."""


class _GathersBehind(_Discarded):
    """Bounds what is gathered ahead in a capture: the stream of gathers waits for products in place of the host."""

    def __init__(self, products: object):
        super().__init__()
        self._products = products

    def append(self, event: object) -> None:
        # Called before a module runs, on the stream of gathers: what is fetched ahead comes behind the module before.
        streams.wait_stream(self._products)


class MicroStep:
    """State of a ZeRO-3 engine outside the model that forward and backward of one micro-batch read, write and count."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        gradients: GradientShards,
        group: FP8ParamGroup | None,
        wire: WireMeter,
    ):
        self._engine, self._zero = engine, engine.optimizer
        self._gradients, self._group, self._wire = gradients, group, wire
        self._coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self.modules = list(engine.module.modules())
        self.parameters = list(engine.module.parameters())

    @property
    def ready(self) -> bool:
        """Return whether DeepSpeed knows the order of all modules: what it fetches stays the same from now on."""
        return self._coordinator.is_complete_trace()

    @contextlib.contextmanager
    def order_recorded(self) -> Iterator[None]:
        """Let DeepSpeed learn the order of modules from one forward and backward inside. Collective.

        Where every step has other forwards in between (a reference model that is the same module), it never does.
        """
        coordinator = self._coordinator
        if not coordinator.is_invalid_trace():
            # A trace of other modules would end the recording at the first difference.
            coordinator._invalidate_trace()
        coordinator.reset_step()  # which begins to record
        # Every forward calls it; within a capture it would exchange what is recorded with other ranks.
        coordinator.reset_step = lambda: None
        try:
            yield
        finally:
            del coordinator.reset_step
        coordinator.reset_step()

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def progress(self) -> tuple[bool, frozenset[str]]:
        """Return whether this micro-batch adds to the gradient shards, and which of them this step has written."""
        return self._zero.micro_step_id > 0, frozenset(self._gradients.arrived)

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what decides, next to the batch, which kernels run; the same on all ranks.

        The first micro-batch of a step overwrites gradients and later ones add, but those that arrive for the first
        time are added to zeros. Frozen parameters have no wgrad, dropout depends on the mode of its module.
        """
        accumulates, arrived = self.progress
        trained = tuple(parameter.requires_grad for parameter in self.parameters)
        training = tuple(module.training for module in self.modules)
        return accumulates, tuple(sorted(arrived)) if accumulates else None, trained, training

    @property
    def persistent(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters if parameter.ds_persist]

    @property
    def groups(self) -> list[torch.distributed.ProcessGroup]:
        groups = [self._zero.dp_process_group, *(parameter.ds_process_group for parameter in self.parameters)]
        return [group or torch.distributed.group.WORLD for group in {id(group): group for group in groups}.values()]

    @property
    def reducing(self) -> bool:
        return any(bucket.params for bucket in self._zero.ipg_buckets.values())

    def addresses(self) -> tuple[int, ...]:
        """Return where gradients and shards lie, and which weights are gathered in FP8."""
        group = self._group
        in_bf16 = [p.ds_tensor for p in self.parameters if not (p.ds_persist or (group and group.in_fp8(p)))]
        of_deepspeed = [tensor.data_ptr() for tensor in (self._zero.grad_partitions_flat_buffer, *in_bf16)]
        return (*of_deepspeed, *(group.addresses() if group else ()))

    @property
    def reduced_later(self) -> bool:
        return self._engine.inside_no_sync_ctxt

    def start_clock(self) -> None:
        """Do what DeepSpeed's throughput does before a forward, in a hook that a replay does not run."""
        if self._engine.training_dataloader is None:
            self._engine.tput_timer.start()

    def side_streams(self) -> list[object]:
        return [getattr(self._coordinator, _GATHER_STREAM), self._zero.reduce_and_partition_stream]

    @contextlib.contextmanager
    def unthrottled(self) -> Iterator[None]:
        """Keep the host from waiting for gathers and reductions: what is captured does not run."""
        # DeepSpeed has the host wait for events, lest it run too far ahead with memory. In a capture nothing runs, so
        # that events never come, and memory is reused by the order of the graph: unsharded weights lie in that of a
        # module whose products are over, if gathers wait for these. Else every layer's would have memory of their own.
        fetches, reductions = getattr(self._coordinator, _FETCH_EVENTS), self._zero.param_reduce_events
        setattr(self._coordinator, _FETCH_EVENTS, _GathersBehind(streams.current_stream()))
        self._zero.param_reduce_events = _Discarded()
        try:
            yield
        finally:
            setattr(self._coordinator, _FETCH_EVENTS, fetches)
            self._zero.param_reduce_events = reductions

    def finish_gathers(self) -> None:
        """Let the current stream wait for all gathers in flight; their parameters are available then."""
        registry = getattr(self._coordinator, _IN_FLIGHT)
        for parameter in list(registry):
            # On the stream of gathers: buffers were allocated there, and what a wait copies must lie behind them in its
            # order.
            with streams.on_stream(self.side_streams()[0]):
                handle = registry.pop(parameter, None)
                if handle is not None:
                    handle.wait()
        # And only now may products of the current stream read.
        streams.wait_stream(self.side_streams()[0])

    def finish_backward(self) -> None:
        """Reduce the gradients that wait for a full bucket, and release what no hook has released."""
        self._zero.independent_gradient_partition_epilogue()
        self._zero.backward_epilogue()
        self.reshard()

    def reset(self) -> None:
        """Unshard persistent parameters and reshard all others, from the present masters. Collective.

        What was enqueued for earlier micro-batches lies before what the current stream gets next.
        """
        self.reshard()
        self.wait_for_sides()
        missing = [p for p in self.persistent if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            parameter = missing[0]  # any: it takes the list
            parameter.all_gather(missing)
        if self._group is not None:
            self._group.requantize_and_wait()

    def pin_scales(self) -> None:
        if self._group is not None:
            self._group.pin_scales()

    def wait_for_sides(self) -> None:
        for side in self.side_streams():
            streams.wait_stream(side)

    def reshard(self) -> None:
        """Partition every parameter that is available and not persistent."""
        self.finish_gathers()
        for parameter in self.parameters:
            if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
                parameter.ds_active_sub_modules.clear()
                parameter.partition()
        setattr(self._coordinator, _AVAILABLE_PARAMETERS, 0)

    def remember(self) -> dict[str, Any]:
        """Return the counters of DeepSpeed's hooks and of this package, for `restore`."""
        return {
            "arrived": frozenset(self._gradients.arrived),
            "sent": self._wire.sent(),
            "backward": dict(vars(self._zero._backward_hook_state)),
            "epilogue": self._zero.averaged_gradients,
            "modules": [{name: vars(m)[name] for name in COUNTERS if name in vars(m)} for m in self.modules],
            "stack": list(parameter_offload.FWD_MODULE_STACK),
        }

    def restore(self, state: dict[str, Any]) -> tuple[frozenset[str], Counter[str]]:
        """Take back what was counted since `remember`; returns gradients and bytes, for `count`."""
        counted = frozenset(self._gradients.arrived), self._wire.sent() - state["sent"]
        self._gradients.arrived = set(state["arrived"])
        self._wire.add(Counter({purpose: -nbytes for purpose, nbytes in counted[1].items()}))
        vars(self._zero._backward_hook_state).update(state["backward"])
        self._zero.averaged_gradients = state["epilogue"]
        for module, counters in zip(self.modules, state["modules"], strict=True):
            vars(module).update(counters)
        parameter_offload.FWD_MODULE_STACK[:] = state["stack"]
        return counted

    def count(self, counted: tuple[frozenset[str], Counter[str]]) -> None:
        """Count what a replay has reduced and sent, of which Python sees nothing."""
        self._gradients.arrived |= counted[0]
        self._wire.add(counted[1])

    def abandon(self) -> None:
        """Drop all that a capture that failed has begun: nothing of it is in any memory."""
        if self._group is not None:
            self._group.forget_unsharded()
        getattr(self._coordinator, _IN_FLIGHT).clear()
        getattr(self._coordinator, _ACTIVE_BACKWARD).clear()
        if self._coordinator.is_record_trace():
            self._coordinator._invalidate_trace()
        for bucket in self._zero.ipg_buckets.values():
            bucket.clear_params()
        for parameter in self.parameters:
            parameter.grad = None
            parameter.ds_active_sub_modules.clear()
            if not parameter.ds_persist and parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                # Its data lies in the pool of the failed capture, which is given back: nobody may read it any more.
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        setattr(self._coordinator, _AVAILABLE_PARAMETERS, 0)
