"""Handlers of DeepSpeed's calls: the order of a step, of gathers and releases, of a load and an offload.

A method of `Lifecycle` is called in place of one of DeepSpeed's (deepspeed/hooks.py), which it gets first:

    step                   of the optimizer                   update, requantize, gather persistent ones
    unshard                a parameter's all_gather_coalesced FP8 data for modules
    unshard_bf16           zero.Init._all_gather              numbers for users, and what stays whole between steps
    reshard                zero.Init._partition               and what users wrote
    reduce_grad, accumulate __avg_scatter_grads and on         gradients, added to the shards or handed to DeepSpeed
    write_..., offload ... load_state_dict, set_full_hp_param whatever else changes or moves masters, moments, gradients
    load_checkpoint        of the engine                      callbacks, load, states of this package

CUDA graphs hold forward and backward of a micro-batch, with their gathers and reductions. They are replayed before the
step (graphs/driver.py), which no graph contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.optim.adamw import AdamW
from ds_fp8.zero import streams
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.deepspeed.hooks import install
from ds_fp8.zero.deepspeed.optimizer import accumulates, accumulates_in_fp32, overflowed, reduce_gradient
from ds_fp8.zero.deepspeed.parameters import PersistentGather, bytes_to_gather, link_moments, order
from ds_fp8.zero.group import FP8ParamGroup
from ds_fp8.zero.leaf_modules import LeafCalls
from ds_fp8.zero.reduce import Reduction
from ds_fp8.zero.step import Step
from ds_fp8.zero.streams import profiled

Stock = Callable[..., Any]
"""DeepSpeed's own method."""


class CheckpointState(NamedTuple):
    """State that is kept in checkpoints beside the user's; both functions are called on all ranks."""

    save: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any] | None], None]
    """Called with what `save` returned, or None, after all else has been loaded; not for a load of the model alone."""


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


class Lifecycle:
    """Takes the calls of every method of DeepSpeed that is replaced. A part that is None is left to DeepSpeed."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, wire: WireMeter | None = None):
        """Replace the methods of an engine of any ZeRO stage, until it is destroyed."""
        self.update: Step | None = None  # takes the optimizer's step
        self.group: FP8ParamGroup | None = None  # weights that are gathered in FP8
        self.leaf_calls: LeafCalls | None = None  # says which gradients are whole
        self.reduction: Reduction | None = None  # reduces gradients
        self.moments: AdamW | None = None  # holds the moments, in formats of its own
        self.after_step: list[Callable[[], None]] = []
        """Called in order after every step, also after one that was skipped because of an overflow."""
        self.before_load: list[Callable[[], None]] = []
        """Called in order, on all ranks, before the engine loads a checkpoint."""
        self.states: dict[str, CheckpointState] = {}
        """By their key in the client state of checkpoints; whoever loads a checkpoint does not get to see it."""
        self._engine, self._wire = engine, wire
        self._gather_persistent = PersistentGather(engine)
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._written: object | None = None  # event behind the last write to shards, by a step or a user
        self._writes_masters = False  # true while all masters are overwritten
        install(engine, self)

    # ---------------------------------------------------------------- a step

    def step(self, stock: Stock, *args, **kwargs) -> Any:
        """Take an optimizer step, and requantize what it has changed."""
        with profiled("step"):
            if self.group is not None:
                self.group.wait_for_requantize()  # it reads masters, on a stream of its own
            try:
                if self.update is not None:
                    result, taken = None, self.update()
                else:
                    result = stock(*args, **kwargs)
                    taken = not overflowed(self._engine)
                if self.group is not None:
                    # A skipped step has changed nothing: the shards of before are still right, and nothing is due.
                    if taken:
                        self.group.step_wrote()
                    self.group.requantize()
                if self.update is not None and taken:  # DeepSpeed's step has done so itself
                    self.update.gather_persistent()
            except BaseException:
                # The program may go on, behind the user's interrupt for one.
                if self.group is not None and (self.update is None or self.update.ended_midway()):
                    self.group.step_ended_midway()
                raise
            finally:
                if self.update is not None:
                    self.update.launched = None
                # Behind all that is launched, update, requantize and gather of persistent parameters: whoever gathers
                # next on another stream waits for it.
                self._written = streams.record_event()
            # Last here, and before DeepSpeed advances its scheduler and counters: callbacks may save, evaluate or
            # measure, and see what the next forward would.
            for callback in self.after_step:
                callback()
            return result

    # ---------------------------------------------------------------- parameters

    def unshard(self, stock: Stock, params: Iterable[nn.Parameter], *args, **kwargs) -> Handle | Any:
        """Begin to gather parameters for the modules that compute with them."""
        # DeepSpeed's stream of gathers waits for no other: nothing else keeps it from shards that are still written.
        streams.wait_event(self._written)
        with profiled("gather"):
            if self.group is None:
                return stock(self._counted(params), *args, **kwargs)
            # DeepSpeed hands over sets, whose order differs from rank to rank; that of collectives must not.
            params = sorted(params, key=order)
            in_fp8 = [p for p in params if self.group.in_fp8(p)]
            others = [p for p in params if not self.group.in_fp8(p)]
            if in_fp8:
                # Masters may have been written since the step (a checkpoint, a user): nothing where all is fresh.
                self.group.requantize()
            self.group.unshard_bf16(others)
            handle = stock(self._counted(others), *args, **kwargs) if others else None
            return Handle(self.group.unshard(in_fp8), handle)

    def unshard_bf16(
        self, stock: Stock, params: list[nn.Parameter], async_op: bool = False, hierarchy: int | None = None
    ) -> Any:
        """Gather parameters of this engine for readers of BF16, and those that stay whole between steps."""
        streams.wait_event(self._written)  # as in `unshard`
        with profiled("gather"):
            params = self._counted(params)
            if self.group is not None:
                self.group.unshard_bf16(params)
            if self.update is not None and not async_op and self._gather_persistent(params):
                return None
            handles = stock(params, async_op=async_op, hierarchy=hierarchy)
            if self.group is not None:
                self.group.part_from_shards(params)
            return handles

    def reshard(
        self,
        stock: Stock,
        params: list[nn.Parameter],
        force: bool = False,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Drop gathered parameters; where `has_been_updated`, what a rank wrote to them becomes their shards."""
        # Before DeepSpeed frees the data: it compares the BF16 shards from before with those from after.
        before = self.group.reshard(params, has_been_updated) if self.group is not None else None
        stock(params, force=force, has_been_updated=has_been_updated, free_data=free_data)
        if self.group is not None:
            self.group.resharded(params, before)
        # Only then were shards written: an ordinary release frees the gathered copy alone, and later gathers need not
        # wait.
        if has_been_updated:
            self._written = streams.record_event()

    def _counted(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters, the bytes that DeepSpeed gathers of them counted."""
        params = list(params)
        if self._wire is not None:
            for group, nbytes in bytes_to_gather(params).items():
                self._wire.count(GATHER, "all_gather", nbytes, group)
        return params

    # ---------------------------------------------------------------- gradients

    def gradient_ready(self, stock: Stock, parameter: nn.Parameter) -> None:
        """Put a gradient into a bucket, unless a leaf module is going to add to it."""
        if self.leaf_calls is None or not self.leaf_calls.delays(parameter):
            stock(parameter)

    def reduce_grad(self, stock: Stock, parameters: list[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
        """Reduce a bucket of gradients, on the stream of reductions; return this rank's slices for DeepSpeed to add."""
        with profiled("reduce"):
            if accumulates(self._engine) and not accumulates_in_fp32(self._engine):
                # The JSON names one micro-batch; programs such as Accelerate set boundaries themselves.
                raise UserError(
                    "gradients of several micro-batches would be summed in BF16",
                    key="data_types.grad_accum_dtype",
                    remedy='"data_types": {"grad_accum_dtype": "fp32"}',
                )
            if self.reduction is None:
                return stock(parameters, dtype)
            named = {self._names[id(parameter)]: parameter for parameter in parameters}
            return self.reduction(named, dtype, accumulates(self._engine), lambda some: stock(some, dtype))

    def accumulate(self, stock: Stock, parameters: list[nn.Parameter], slices: list[torch.Tensor]) -> Any:
        """Add reduced slices to the gradient shards, where `reduce_grad` has not done so."""
        if self.update is None:
            return stock(parameters, slices)
        for parameter in parameters:
            # Autograd wrote it on the stream of the products, and its memory goes back there: not before this stream,
            # which has read it, has come to this point.
            streams.used_by_current_stream(parameter.grad)
            parameter.grad = None
        return []

    def end_backward(self, stock: Stock) -> None:
        """Reduce the bucket that is not full."""
        if self.leaf_calls is not None:
            for parameter in self.leaf_calls.take_delayed():
                reduce_gradient(self._engine, parameter)
        stock() if self.update is None else self.update.end_backward()

    # ---------------------------------------------------------------- what users and loads write

    def write_gradients(self, stock: Stock, value: object, written: nn.Parameter | list[nn.Parameter]) -> None:
        """Overwrite gradients (safe_set_full_grad and its kin)."""
        stock(value, written)
        if self.update is not None:
            parameters = written if isinstance(written, list) else [written]
            self.update.gradients.written([self._names[id(parameter)] for parameter in parameters])

    def write_state(
        self, stock: Stock, value: torch.Tensor, parameter: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite the masters of a parameter on all ranks, or a moment (safe_set_full_fp32_param and its kin)."""
        self.write_local_state(stock, value, parameter, optim_state_key)
        if optim_state_key is None and self.group is not None:
            self.group.user_wrote(parameter)

    def write_local_state(
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

    def read_state(self, stock: Stock, parameter: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
        """Return the masters of a parameter, or a moment (safe_get_full_fp32_param and its kin)."""
        reads_master = optim_state_key is None and self.group is not None
        with self.group.read_master(parameter) if reads_master else nullcontext():
            return stock(parameter, optim_state_key)

    def link_state(self, stock: Stock) -> None:
        """Let a parameter's getters and setters (stages 1 and 2) find its moments in formats of their own."""
        stock()
        if self.moments is not None:
            link_moments(self._engine, self.moments)

    def refresh_masters(self, stock: Stock) -> Any:
        """Overwrite all masters from the BF16 shards; in the midst of a load, from those that it has loaded."""
        if self.group is not None and not self._writes_masters:
            self.group.check_masters()
        return self.write_masters(stock)

    def write_masters(self, stock: Stock, *args, **kwargs) -> Any:
        """Overwrite all masters, from a checkpoint or from the BF16 shards."""
        if self._writes_masters or self.group is None:
            # DeepSpeed's load of weights alone refreshes the masters in its midst, and reads the BF16 shards after.
            return stock(*args, **kwargs)
        self._writes_masters = True
        self.group.restore_bf16()
        try:
            with self.group.write_master():
                return stock(*args, **kwargs)
        finally:  # a load that fails may have written some of them, and leaves all BF16 shards behind
            self._writes_masters = False
            self.group.load_wrote()
            self.group.drop_bf16()

    def read_masters(self, stock: Stock) -> dict[str, Any]:
        """Return the state dict of the ZeRO optimizer, with FP32 masters in any case."""
        return stock() if self.group is None else self.group.into_state(stock())

    def offload(self, stock: Stock, *args, **kwargs) -> Any:
        """Move states of the engine to the CPU; BF16 shards are whole until they are back, where they are moved."""
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

    def reload(self, stock: Stock, *args, **kwargs) -> Any:
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
