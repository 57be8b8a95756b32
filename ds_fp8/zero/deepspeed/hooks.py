"""Methods of DeepSpeed that are replaced, by name, and what is called in their place; until engine.destroy().

A replacement gets DeepSpeed's own method before the arguments: it decides when that runs, and whether it does. Parts of
this package that an engine lacks are None: their calls go to DeepSpeed.

CUDA graphs hold forward and backward of a micro-batch, with their gathers and reductions. They are replayed before the
step (graphs/driver.py), which no graph contains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed import versions
from ds_fp8.zero.deepspeed.optimizer import has_optimizer, overflowed
from ds_fp8.zero.deepspeed.parameters import bytes_to_gather, link_moments, order
from ds_fp8.zero.deepspeed.patches import on_destroy, replace
from ds_fp8.zero.streams import profiled

if TYPE_CHECKING:  # of packages whose files import this folder
    from ds_fp8.optim.adamw import AdamW
    from ds_fp8.zero.group import FP8ParamGroup
    from ds_fp8.zero.leaf_modules import LeafCalls
    from ds_fp8.zero.reduce import ReduceScatter
    from ds_fp8.zero.step import Step

Stock = Callable[..., Any]  # DeepSpeed's own method

_HOOKS = "_ds_fp8_hooks"  # attribute of an engine and its parameters
_AVERAGE_GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_engines_alive = 0  # engines whose parameters' lists are handed to them


class CheckpointState(NamedTuple):
    """State that is kept in checkpoints next to the user's; both functions are called on all ranks."""

    save: Callable[[], dict[str, Any]]
    # Called with what `save` returned, or None, after all else has been loaded; not for a load of the model alone.
    load: Callable[[dict[str, Any] | None], None]


class Handle:
    """Handle that DeepSpeed waits on: FP8 gathers in flight, and its own handle for parameters gathered in BF16."""

    def __init__(self, finish: list[Callable[[], None]], stock: object | None):
        self._finish, self._stock = finish, stock

    def wait(self, handle_dependency: bool = True) -> None:
        """Let the current stream wait for all of them; the parameters are available then."""
        with profiled("gather"):
            if self._stock is not None:
                self._stock.wait(handle_dependency=handle_dependency)
                self._stock = None
            while self._finish:
                self._finish.pop(0)()


class Hooks:
    """Replacements of the methods of one engine of any ZeRO stage, in the order of `install`."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, count_gather: Callable[[int, object], None] | None = None):
        """Replace the methods of an engine; `count_gather` gets the bytes and the group of DeepSpeed's own gathers."""
        self.own_step: Step | None = None  # in place of the optimizer's
        self.group: FP8ParamGroup | None = None  # weights that are unsharded in FP8
        self.leaf_calls: LeafCalls | None = None  # knows when a gradient is complete
        self.reduce_scatter: ReduceScatter | None = None
        self.moments: AdamW | None = None  # holds the moments in formats of its own
        # Called in order after every step, also after one that was skipped because of an overflow.
        self.after_step: list[Callable[[], None]] = []
        # Called in order, on all ranks, before the engine loads a checkpoint.
        self.before_load: list[Callable[[], None]] = []
        # By their key in the client state of checkpoints; whoever loads a checkpoint does not get to see it.
        self.states: dict[str, CheckpointState] = {}
        self._engine, self._count_gather = engine, count_gather
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._write_event: object | None = None  # behind the last write to shards, by a step or a user
        self._writes_masters = False  # true while all masters are overwritten
        self._install(engine)

    @staticmethod
    def of(engine: deepspeed.DeepSpeedEngine) -> Hooks:
        return vars(engine)[_HOOKS]

    def _install(self, engine: deepspeed.DeepSpeedEngine) -> None:
        replace(engine, engine, _HOOKS, self)
        hook(engine, engine, "save_checkpoint", self.save_checkpoint)
        hook(engine, engine, "load_checkpoint", self.load_checkpoint)
        for parameter in engine.module.parameters():
            if hasattr(parameter, "ds_id"):
                replace(engine, parameter, _HOOKS, self)
                # A closure that DeepSpeed puts on every parameter of ZeRO-3; fetches of one engine call it.
                hook(engine, parameter, "all_gather_coalesced", self.all_gather_coalesced)
        if engine.zero_optimization_partition_weights():
            _hand_out_lists(engine)  # Init._all_gather, Init._partition
        if not has_optimizer(engine):
            return
        zero = engine.optimizer
        hook(engine, zero, "step", self.step)
        if engine.zero_optimization_stage() != 3:
            if hasattr(zero, "_link_all_hp_params"):
                hook(engine, zero, "_link_all_hp_params", self.link_all_hp_params)
            return
        # Gradients, in the order of their way to the shards.
        hook(engine, zero, "reduce_ready_partitions_and_remove_grads", self.reduce_ready_partitions)
        hook(engine, zero, _AVERAGE_GRADIENTS, self.avg_scatter_grads)
        hook(engine, zero, "partition_grads", self.partition_grads)
        hook(engine, zero, "independent_gradient_partition_epilogue", self.gradient_partition_epilogue)
        hook(engine, zero, "set_fp32_grad_for_param", self.set_grad)
        hook(engine, zero, "set_local_grad_for_param", self.set_grad)
        hook(engine, zero, "update_fp32_grad_for_param_vectorized", self.set_grad)
        # Masters and moments.
        hook(engine, zero, "set_full_hp_param", self.set_full_hp_param)
        hook(engine, zero, "set_local_hp_param", self.set_local_hp_param)
        hook(engine, zero, "get_full_hp_param", self.get_hp_param)
        hook(engine, zero, "get_local_fp32_param", self.get_hp_param)
        hook(engine, zero, "state_dict", self.state_dict)
        hook(engine, zero, "load_state_dict", self.write_masters)
        hook(engine, zero, "_restore_from_bit16_weights", self.restore_from_bit16_weights)
        hook(engine, zero, "offload_states", self.offload_states)
        hook(engine, zero, "reload_states", self.reload_states)

    # ---------------------------------------------------------------- a step

    def step(self, stock: Stock, *args, **kwargs) -> Any:
        """Take an optimizer step, and requantize what it has changed."""
        with profiled("step"):
            try:
                if self.own_step is not None:
                    result = self.own_step()
                elif self.group is not None:
                    result = self._stock_step(stock, *args, **kwargs)
                else:
                    result = stock(*args, **kwargs)
            finally:
                # After update, requantize and the all-gather of persistent parameters: the next all-gathers, on other
                # streams, wait for it.
                self._write_event = streams.record_event()
            # Last, but before DeepSpeed advances its scheduler and counters: callbacks may save, evaluate or measure,
            # with the weights of the next forward.
            for callback in self.after_step:
                callback()
            return result

    def _stock_step(self, stock: Stock, *args, **kwargs) -> Any:
        self.group.wait_for_requantize()  # it reads masters, on a stream of its own
        try:
            result = stock(*args, **kwargs)
            if not overflowed(self._engine):
                self.group.step_wrote()
            self.group.requantize()
            return result
        except BaseException:
            self.group.step_ended_midway()
            raise

    # ---------------------------------------------------------------- parameters

    def all_gather_coalesced(self, stock: Stock, params: Iterable[nn.Parameter], *args, **kwargs) -> Handle | Any:
        """Begin to gather parameters for the modules that compute with them."""
        # DeepSpeed's all-gather stream waits for no other: without this it would read shards that are being written.
        streams.wait_event(self._write_event)
        with profiled("gather"):
            if self.group is None:
                return stock(self._counted(params), *args, **kwargs)
            # DeepSpeed hands over sets, whose order differs from rank to rank; that of collectives must not.
            params = sorted(params, key=order)
            in_fp8 = [p for p in params if self.group.in_fp8(p)]
            others = [p for p in params if not self.group.in_fp8(p)]
            if in_fp8:
                # Masters may have been written since the step (a checkpoint, a user); no-op if nothing is stale.
                self.group.requantize()
            self.group.unshard_bf16(others)
            handle = stock(self._counted(others), *args, **kwargs) if others else None
            return Handle(self.group.unshard(in_fp8), handle)

    def all_gather(self, stock: Stock, params: list[nn.Parameter], async_op: bool = False, **options) -> Any:
        """Gather parameters of this engine for readers of BF16, and those that stay unsharded between steps."""
        streams.wait_event(self._write_event)  # as in `all_gather_coalesced`
        with profiled("gather"):
            params = self._counted(params)
            if self.group is not None:
                self.group.unshard_bf16(params)
            if self.own_step is not None and not async_op and self.own_step.gather_persistent(params):
                return None
            handles = stock(params, async_op=async_op, **options)
            if self.group is not None:
                self.group.copy_from_shards(params)
            return handles

    def partition(self, stock: Stock, params: list[nn.Parameter], *, has_been_updated: bool = False, **options) -> None:
        """Reshard parameters; where `has_been_updated`, what a rank wrote to them becomes their shards."""
        # Before DeepSpeed frees the data: it compares the BF16 shards from before with those from after.
        before = self.group.reshard(params, has_been_updated) if self.group is not None else None
        stock(params, has_been_updated=has_been_updated, **options)
        if self.group is not None:
            self.group.resharded(params, before)
        # Only then were shards written: an ordinary release frees the unsharded copy alone, and later gathers
        # need not wait.
        if has_been_updated:
            self._write_event = streams.record_event()

    def _counted(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters, the bytes that DeepSpeed gathers of them counted."""
        params = list(params)
        if self._count_gather is not None:
            for group, nbytes in bytes_to_gather(params).items():
                self._count_gather(nbytes, group)
        return params

    # ---------------------------------------------------------------- gradients

    def reduce_ready_partitions(self, stock: Stock, parameter: nn.Parameter) -> None:
        """Put a gradient into a bucket, unless a leaf module is going to add to it."""
        if self.leaf_calls is None or not self.leaf_calls.delays(parameter):
            stock(parameter)

    def avg_scatter_grads(self, stock: Stock, parameters: list[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
        """Reduce a bucket of gradients, on the stream of reductions; return this rank's slices for DeepSpeed to add."""
        zero = self._engine.optimizer
        accumulate = zero.micro_step_id > 0  # to the gradients of earlier micro-batches of the step
        with profiled("reduce"):
            if accumulate and zero.gradient_accumulation_dtype != torch.float32:
                # The JSON names one micro-batch; programs such as Accelerate set boundaries themselves.
                raise UserError(
                    "gradients of several micro-batches would be summed in BF16",
                    key="data_types.grad_accum_dtype",
                    remedy='"data_types": {"grad_accum_dtype": "fp32"}',
                )
            if self.reduce_scatter is None:
                return stock(parameters, dtype)
            named = {self._names[id(parameter)]: parameter for parameter in parameters}
            return self.reduce_scatter(named, dtype, accumulate, lambda some: stock(some, dtype))

    def partition_grads(self, stock: Stock, parameters: list[nn.Parameter], slices: list[torch.Tensor]) -> Any:
        """Add reduced slices to the gradient shards, where `avg_scatter_grads` has not done so."""
        if self.own_step is None:
            return stock(parameters, slices)
        for parameter in parameters:
            # Allocated on the stream of the products, where its memory is reused; this stream has read it. See
            # [Note: lifetimes across streams] in streams.py.
            streams.used_by_current_stream(parameter.grad)
            parameter.grad = None
        return []

    def gradient_partition_epilogue(self, stock: Stock) -> None:
        """Reduce the bucket that is not full."""
        if self.leaf_calls is not None:
            for parameter in self.leaf_calls.take_delayed():
                self._engine.optimizer.reduce_ready_partitions_and_remove_grads(parameter)
        stock() if self.own_step is None else self.own_step.end_backward()

    def set_grad(self, stock: Stock, value: object, written: nn.Parameter | list[nn.Parameter]) -> None:
        """Overwrite gradients (safe_set_full_grad and its kin)."""
        stock(value, written)
        if self.own_step is not None:
            parameters = written if isinstance(written, list) else [written]
            self.own_step.gradients.written([self._names[id(parameter)] for parameter in parameters])

    # ---------------------------------------------------------------- masters and moments

    def set_full_hp_param(
        self, stock: Stock, value: torch.Tensor, parameter: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite the masters of a parameter on all ranks, or a moment (safe_set_full_fp32_param and its kin)."""
        self.set_local_hp_param(stock, value, parameter, optim_state_key)
        if optim_state_key is None and self.group is not None:
            self.group.user_wrote(parameter)

    def set_local_hp_param(
        self, stock: Stock, value: torch.Tensor, parameter: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite this rank's masters of a parameter, or a moment (safe_set_local_fp32_param and its kin).

        Others may write nothing, and requantize is collective: as in DeepSpeed masters count from the next step on.
        """
        if optim_state_key is not None and self.moments is not None:
            # DeepSpeed writes into FP32 tensors; a compressed moment is expanded until the next step compresses it
            # again.
            self.moments.expand_moments()
        writes_master = optim_state_key is None and self.group is not None
        with self.group.write_master(parameter) if writes_master else nullcontext():
            stock(value, parameter, optim_state_key)

    def get_hp_param(self, stock: Stock, parameter: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
        """Return the masters of a parameter, or a moment (safe_get_full_fp32_param and its kin)."""
        reads_master = optim_state_key is None and self.group is not None
        with self.group.read_master(parameter) if reads_master else nullcontext():
            return stock(parameter, optim_state_key)

    def link_all_hp_params(self, stock: Stock) -> None:
        """Let a parameter's getters and setters (stages 1 and 2) find its moments in formats of their own."""
        stock()
        if self.moments is not None:
            link_moments(self._engine, self.moments)

    def restore_from_bit16_weights(self, stock: Stock) -> Any:
        """Overwrite all masters from the BF16 shards; in the midst of a load, from those that it has loaded."""
        if self.group is not None and not self._writes_masters:
            self.group.check_masters()
        return self.write_masters(stock)

    def write_masters(self, stock: Stock, *args, **kwargs) -> Any:
        """Overwrite all masters, from a checkpoint (load_state_dict) or from the BF16 shards."""
        if self._writes_masters or self.group is None:
            # DeepSpeed's load of weights alone refreshes the masters in its midst, and reads the BF16 shards after.
            return stock(*args, **kwargs)
        self.group.restore_bf16()  # may run out of memory: nothing is being written then
        self._writes_masters = True
        try:
            with self.group.write_master():
                return stock(*args, **kwargs)
        finally:  # a load that fails may have written some of them, and leaves all BF16 shards behind
            self._writes_masters = False
            self.group.load_wrote()
            self.group.drop_bf16()

    def state_dict(self, stock: Stock) -> dict[str, Any]:
        """Return the state dict of the ZeRO optimizer, with FP32 masters in any case."""
        return stock() if self.group is None else self.group.into_state(stock())

    def offload_states(self, stock: Stock, *args, **kwargs) -> Any:
        """Move states of the engine to the CPU; all BF16 shards exist until they are back, where they are moved."""
        included = signature(stock).bind(*args, **kwargs).arguments.get("include")
        if self.group is not None and (included is None or any(one.value == "lp_params" for one in included)):
            self.group.restore_bf16()
        try:
            return stock(*args, **kwargs)
        except AssertionError as error:  # DeepSpeed asks before it moves anything
            if self.group is not None:
                self.group.drop_bf16()
            if self.moments is None:
                raise
            # DeepSpeed moves masters and moments of its FusedAdam alone.
            raise UserError(
                f"engine.offload_states cannot move the masters and moments of ds_fp8.optim.AdamW ({error})",
                key="optimizer",
                remedy="leave optim_states and hp_params out: include=[OffloadStateTypeEnum.lp_params, "
                "OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer]",
            ) from error

    def reload_states(self, stock: Stock, *args, **kwargs) -> Any:
        result = stock(*args, **kwargs)
        if self.group is not None:
            self.group.drop_bf16()
        return result

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, stock: Stock, save_dir, tag=None, client_state=None, *args, **kwargs) -> Any:
        # On all ranks, before DeepSpeed writes on some: saving a state may be collective.
        states = {key: state.save() for key, state in self.states.items()}
        return stock(save_dir, tag, {**(client_state or {}), **states}, *args, **kwargs)

    def load_checkpoint(self, stock: Stock, *args, **kwargs) -> Any:
        """Load a checkpoint, and the states of this package last."""
        for callback in self.before_load:
            callback()
        try:
            path, client_state = stock(*args, **kwargs)
        finally:
            if self.group is not None:
                self.group.load_wrote(frozen_only=True)  # DeepSpeed writes their shards, and calls nothing
        # Popped, whether it is loaded or not: the user gets back the client state that was saved, and no more.
        states = {key: client_state.pop(key, None) if client_state else None for key in self.states}
        if path is not None and not signature(stock).bind(*args, **kwargs).arguments.get("load_module_only", False):
            for key, state in self.states.items():
                state.load(states[key])
        return path, client_state


def hook(engine: deepspeed.DeepSpeedEngine, owner: object, name: str, handler: Callable[..., Any]) -> None:
    """Call `handler` in place of a method, with that method first, until the engine is destroyed."""
    stock = getattr(owner, name, None)
    if stock is None:
        raise UserError(
            f"DeepSpeed {deepspeed.__version__} lacks {type(owner).__name__}.{name}, which FP8 replaces",
            remedy=f"pip install 'deepspeed=={versions.TESTED}'",
        )

    def method(*args, **kwargs):
        try:
            return handler(stock, *args, **kwargs)
        except AttributeError as error:
            versions.explain(error)
            raise

    # With its signature, which DeepSpeed's callers read.
    replace(engine, owner, name, functools.update_wrapper(method, stock, assigned=()))


def _hand_out_lists(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let every engine take the lists of its parameters, until the last such engine is destroyed.

    GatheredParameters hands the parameters of several engines to the closure of the first, which may be of an engine
    without FP8. So the methods of the class are replaced that all closures call: without effect on parameters that no
    engine with FP8 owns.
    """
    global _engines_alive
    if _engines_alive == 0:
        Init._all_gather = _handed_out(Init._all_gather, Hooks.all_gather)
        Init._partition = _handed_out(Init._partition, Hooks.partition)
    _engines_alive += 1

    def forget() -> None:
        global _engines_alive
        _engines_alive -= 1
        if _engines_alive == 0:
            Init._all_gather, Init._partition = Init._all_gather.__wrapped__, Init._partition.__wrapped__

    on_destroy(engine, forget)


def _handed_out(stock: Stock, handler: Callable[..., Any]) -> Stock:
    def method(init: Init, param_list: Iterable[nn.Parameter], *args, **kwargs):
        # In the order of the list, which is one on all ranks: what handlers do is collective. Stock engines come last.
        by_owner: dict[int, tuple[Hooks, list[nn.Parameter]]] = {}
        stock_parameters = []
        for parameter in param_list:
            owner = vars(parameter).get(_HOOKS)
            if owner is None:
                stock_parameters.append(parameter)
            else:
                by_owner.setdefault(id(owner), (owner, []))[1].append(parameter)
        own = functools.partial(stock, init)
        results = [handler(owner, own, some, *args, **kwargs) for owner, some in by_owner.values()]
        if stock_parameters:
            results.append(own(stock_parameters, *args, **kwargs))
        handles = [handle for result in results if result is not None for handle in result]
        return handles if any(result is not None for result in results) else None

    return functools.wraps(stock)(method)
