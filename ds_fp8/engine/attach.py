"""Attach the FP8 parts to an engine of deepspeed.initialize: collectives, step, graphs, health."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed import comm as dist
from torch import nn

from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.engine.health import Health, check_labels
from ds_fp8.engine.model import default_to_no_cache, score_all_positions
from ds_fp8.engine.state import CHECKPOINT_KEY, FP8State
from ds_fp8.graphs.conditions import why_no_graphs
from ds_fp8.graphs.driver import GraphDriver
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import group_of
from ds_fp8.optim import AdamW
from ds_fp8.optim.masters import why_no_correction
from ds_fp8.zero.collectives import GATHER, WireMeter, first_reason
from ds_fp8.zero.deepspeed.checkpoints import gathers_of_files, tensors_only
from ds_fp8.zero.deepspeed.hooks import CheckpointState, Hooks
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from ds_fp8.zero.deepspeed.optimizer import has_optimizer, overflowed, why_no_own_step
from ds_fp8.zero.deepspeed.parameters import (
    data_parallel_group,
    fetch_from_host,
    flat_parameters,
    is_partitioned,
    link_moments,
    untrained_parameters,
)
from ds_fp8.zero.deepspeed.patches import on_destroy, replace
from ds_fp8.zero.group import FP8ParamGroup
from ds_fp8.zero.hosts import find_hosts, find_nodes
from ds_fp8.zero.leaf_modules import LeafCalls, weights_read_in_leaf_modules
from ds_fp8.zero.reduce import ReduceScatter
from ds_fp8.zero.step import Step


def attach(engine: deepspeed.DeepSpeedEngine, state: FP8State, measured: bool) -> None:
    """Replace collectives and step of an engine as its configuration asks, until engine.destroy(). Collective."""
    state.engine = engine
    if measured and not state.config.trust_checkpoints:
        reading = tensors_only("the checkpoint", "fp8.trust_checkpoints", ', with "trust_checkpoints": true')
        replace(engine, engine, "load_checkpoint", reading(engine.load_checkpoint))
    if measured:
        _wait_where_one_is_late(engine)
    sharded = engine.zero_optimization_partition_weights()
    if sharded and measured:
        state.wire = WireMeter()
    if state.conversion is None and state.wire is None and state.loss is None:
        return
    # First of all: it replaces DeepSpeed's methods, and every part below is only hooked into it. Parts that stay None
    # leave their calls to DeepSpeed.
    count = None if state.wire is None else functools.partial(state.wire.count, GATHER, "all_gather")
    hooks = state.hooks = Hooks(engine, count)
    # By the norm of the gradients all ranks know of a loss that is NaN: nothing else is read or sent.
    hooks.after_step.append(lambda: check_labels(data_parallel_group(engine)) if overflowed(engine) else None)
    if state.conversion is not None:
        _refuse_later_parameters(engine)
        state.hosts = find_hosts()
        state.health = Health(engine, state.monitor, state.plans.step)
        # Before the gather: BF16 shards may be freed only if the step here, and not DeepSpeed's, writes them.
        state.why_no_step = why_no_own_step(engine)
        if state.why_no_step is None:
            state.step = hooks.own_step = Step(engine, engine.basic_optimizer)
        elif state.plans.group.coded_masters and has_optimizer(engine):
            raise UserError(
                f"masters of quantized weights and corrections need this package's step, but {state.why_no_step}",
                key="fp8.optimizer.master",
                remedy='"master": "fp32"',
            )
        if sharded:
            hooks.leaf_calls = LeafCalls(engine)
            _gather_in_fp8(engine, state, hooks)
            offload = engine.zero_offload_param()
            if offload is None or offload.device == "none":
                coded = state.weights
                fetch_from_host(p for p in engine.module.parameters() if coded is None or not coded.on_host(p))
        # Needs the flat shards in their final place, and must come before the first step allocates moments.
        _register_segments(engine, state, hooks)
    if sharded and has_optimizer(engine):
        hooks.reduce_scatter = _reduction(state)
    if state.conversion is not None:
        default_to_no_cache(engine)
        if state.plans.step.graph != "off":
            score_all_positions(engine)
        # Last of the parts: it asks them for reasons against graphs, and wraps the call of the module that includes
        # them all.
        _capture_graphs(engine, state)
        # Behind the callbacks of the graphs: a layer that moves to BF16 here resets graphs that are still there.
        hooks.after_step.append(state.health.end_step)
        hooks.states[CHECKPOINT_KEY] = CheckpointState(state.state_dict, state.load_state_dict)


def _wait_where_one_is_late(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let ranks wait for all before the first collective behind what one of them may do for long.

    A rank may write or evaluate more than others; the first alone writes models, and deletes old ones. Before forwards
    only in ZeRO stage 3, where they are collective.
    """
    watchdog.wait_at_barriers()
    doing = ""

    def wait(owner: Any, name: str, phase: Callable[[], str]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def waiting(*args: Any, **options: Any) -> Any:
            nonlocal doing
            before, doing = doing, phase()
            if before != doing or doing == "files":
                watchdog.wait_for_all()
            return method(*args, **options)

        replace(engine, owner, name, waiting)

    if not engine.zero_optimization_partition_weights():
        return
    over_all = dist.get_world_size(data_parallel_group(engine)) == dist.get_world_size()
    for owner, name in gathers_of_files(engine, over_all):
        wait(owner, name, lambda: "files")
    if over_all:
        wait(engine, "forward", lambda: "training" if engine.module.training else "evaluation")


def _refuse_later_parameters(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let the first forward raise UserError where parameters were added since: they would stay untrained."""
    known = {id(parameter) for parameter in engine.module.parameters()}

    def check(model: nn.Module, _: tuple) -> None:
        if not known:
            return
        later = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
        known.clear()  # asked once; graphs would take the hook's removal for a change of the model
        if later:
            raise UserError(
                f"{later[0]}, one of {len(later)} parameters that were added after initialize, would not be trained",
                remedy="add adapters to the model before deepspeed.initialize",
            )

    on_destroy(engine, engine.module.register_forward_pre_hook(check).remove)


def _gather_in_fp8(engine: deepspeed.DeepSpeedEngine, state: FP8State, hooks: Hooks) -> None:
    weights = _gathered(engine.module) if state.plans.group.gathers else []
    if not weights:
        return
    group = state.weights = state.health.weights = hooks.group = FP8ParamGroup(
        engine, weights, state.wire, frees_bf16=state.step is not None
    )
    if state.step is not None:
        group.free_bf16_shards()
        state.step.quantize(group)
    if state.plans.group.frozen_unsharded:
        group.keep_frozen_unsharded()  # behind the BF16 shards: there may be no room for both


def _gathered(model: nn.Module) -> list[tuple[nn.Parameter, CastSpec, OutlierChannels | None]]:
    """Return the weights that can be gathered in FP8, each with its cast and outlier channels."""
    read = {id(weight) for weight in weights_read_in_leaf_modules(model)}
    weights = [
        (module.weight, module.recipe.weight, module.recipe.outliers)
        for module in model.modules()
        if isinstance(module, FP8Linear)
        and module.recipe.weight.why_not_gathered is None
        # Persistent weights stay whole in BF16; nothing of them is sent.
        and is_partitioned(module.weight)
        # A parent reads these without calling the linear: gathered in FP8 they would be NaN to it.
        and id(module.weight) not in read
    ]
    weights += [
        (parameter, recipe.weight, None)
        for module in model.modules()
        if isinstance(module, FP8Experts)
        for parameter, recipe in module.recipes_of_weights()
        if is_partitioned(parameter)
    ]
    return weights


def parameters_with_corrections(model: nn.Module, trained: set[int]) -> dict[int, bool]:
    """Return the ids of ZeRO-3's parameters whose masters can be FP8 or BF16 with corrections; True: BF16.

    A weight of a fused product only with the others: their scales lie side by side. Parameters that stay whole, which
    are small, keep FP32 masters; all do if no weight has data for masters.
    """
    gathered = {id(p): (p, spec) for p, spec, _ in _gathered(model) if id(p) in trained}
    can = {key: p for key, (p, spec) in gathered.items() if why_no_correction(spec) is None}
    coded = {key: False for key, p in can.items() if all(id(one) in can for one in group_of(p))}
    others = (p for p in model.parameters() if id(p) in trained and id(p) not in gathered and is_partitioned(p))
    return coded and coded | {id(p): True for p in others}


def _reduction(state: FP8State) -> ReduceScatter:
    shards = state.step.gradients if state.step is not None else None
    plan = state.plans.step.reduction if state.plans is not None else None
    if plan is None:
        return ReduceScatter(state.wire, shards)
    state.nodes = find_nodes(state.hosts)
    reduction = ReduceScatter(state.wire, shards, plan, state.nodes, state.health.observe_gradient)
    state.gradient_reduce = state.health.gradient_reduce = reduction
    return reduction


def _register_segments(engine: deepspeed.DeepSpeedEngine, state: FP8State, hooks: Hooks) -> None:
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, AdamW):
        return
    state.optimizer = hooks.moments = optimizer
    for shard, lengths in flat_parameters(engine):
        optimizer.set_segments(shard, lengths)
    if engine.zero_optimization_stage() in (1, 2):
        link_moments(engine, optimizer)


def _capture_graphs(engine: deepspeed.DeepSpeedEngine, state: FP8State) -> None:
    why = why_no_graphs(engine, state.plans.step, state.why_no_step)
    if state.step is not None and untrained_parameters(engine):
        why = why or "some parameters have gradients but are not in the optimizer"
    # All ranks capture or none: a captured collective must not meet an eager one of another rank.
    state.why_no_graphs = first_reason(why)
    if state.why_no_graphs is None:
        health = state.health
        state.graphs = GraphDriver(
            engine,
            MicroStep(engine, state.step.gradients, state.weights, state.wire),
            lambda line: health.say(line),  # what `say` is then, which a program may set
            state.monitor,
            auto=state.plans.step.graph == "auto",
        )
        # A layer in BF16 runs other kernels than those that were captured.
        state.health.on_move = state.graphs.reset
