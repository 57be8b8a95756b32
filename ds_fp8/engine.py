"""`initialize`: deepspeed.initialize, with the "fp8" section of its configuration put to work."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import set_z3_leaf_modules

from ds_fp8.compatibility import check_deepspeed
from ds_fp8.config import FP8Config, parse_fp8, section_of
from ds_fp8.errors import UserError
from ds_fp8.health import Health
from ds_fp8.modules.convert import Conversion, convert
from ds_fp8.modules.linear import FP8Linear
from ds_fp8.modules.loss import LossFusion, fuse_loss
from ds_fp8.modules.monitor import CastMonitor
from ds_fp8.optim import AdamW
from ds_fp8.optim.from_config import make_adamw, uses_own_optimizer
from ds_fp8.report import print_report, start_report
from ds_fp8.schema import read_json
from ds_fp8.zero import seams
from ds_fp8.zero.gradient_reduce import GradientReduce
from ds_fp8.zero.nodes import Nodes, find_nodes
from ds_fp8.zero.parameter_gather import ParameterGather
from ds_fp8.zero.wire import WireMeter


class FP8State:
    """What `initialize` hangs on an engine as `engine.fp8`, with FP8 enabled or not."""

    def __init__(self, config: FP8Config, monitor: CastMonitor, wire: WireMeter):
        self.config, self.monitor, self.wire = config, monitor, wire
        self.conversion: Conversion | None = None
        self.loss: LossFusion | None = None
        self.health: Health | None = None
        self.parameter_gather: ParameterGather | None = None
        self.nodes: Nodes | None = None
        self.optimizer: AdamW | None = None
        """The optimizer inside DeepSpeed's, where it is this package's."""
        self.report: dict[str, Any] = {}
        """The start report, ready for JSON."""

    def saturation(self) -> dict[str, float] | None:
        """Shares of elements {"saturated", "underflow"} in the casts of the last measured step; None before one."""
        return self.monitor.last


def read_config(config: str | os.PathLike | Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A private copy of a DeepSpeed configuration given as a mapping or a JSON file, and the file's name.

    Raises UserError for a file that is missing or no JSON object.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config)), None
    return read_json(config), os.fspath(config)


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    *more: Any,
    config: str | os.PathLike | Mapping[str, Any] | None = None,
    config_params: str | os.PathLike | Mapping[str, Any] | None = None,
    **keywords: Any,
) -> tuple:
    """deepspeed.initialize for a configuration that may hold an "fp8" section: same arguments, same result.

    With FP8 enabled the linears of `model` are converted in place, and under ZeRO stage 3 the parameter all-gather and
    the gradient reduce-scatter of the engine are replaced. `engine.fp8` is the FP8State of the engine. Rank 0 prints
    one report. Raises UserError for a configuration that is wrong or asks for what this machine cannot do.
    """
    given = config if config is not None else config_params
    if given is None and args is not None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise UserError("no DeepSpeed configuration", remedy="pass config=..., or launch with --deepspeed_config FILE")
    raw, file = read_config(given)
    fp8 = parse_fp8(raw, file)
    check_deepspeed(raw, fp8, file)

    monitor = CastMonitor(fp8.monitor.every if fp8.enabled else 0)
    conversion = loss = None
    if fp8.enabled:
        if model is None:
            raise UserError("initialize needs a model to put FP8 into", remedy="pass model=...")
        conversion = _located(file, convert, model, fp8, monitor)
        if fp8.grad_reduce.format != "bf16":
            raw.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")

    if fp8.fuses_loss and model is not None:
        loss = fuse_loss(model)
    if uses_own_optimizer(fp8):
        optimizer = _own_optimizer(raw, fp8, file, optimizer)
    if conversion is not None and conversion.fusion.classes:
        # A fused module computes with its submodules' weights without calling them: ZeRO-3 must gather them together.
        set_z3_leaf_modules(model, sorted(conversion.fusion.classes, key=lambda fused: fused.__name__))
    if not dist.is_initialized():
        seams.spare_shared_memory_op()
    if getattr(args, "deepspeed_config", None) is not None:
        # DeepSpeed refuses the configuration in both places.
        args = copy.copy(args)
        args.deepspeed_config = None
    result = deepspeed.initialize(args, model, optimizer, model_parameters, *more, config=raw, **keywords)
    engine = result[0]

    state = FP8State(fp8, monitor, WireMeter())
    engine.fp8 = state
    state.conversion, state.loss = conversion, loss
    if conversion is not None:
        state.health = Health(engine, monitor, fp8)
        _install(engine, state)
        # Last, so that the weights have been cast anew.
        seams.on_step(engine, state.health.end_step)
        _tell_optimizer(engine, state)
    state.report = start_report(engine, state, _micro_batch_tokens(raw, engine))
    if dist.get_rank() == 0:
        print_report(state.report)
    return result


def _micro_batch_tokens(raw: Mapping[str, Any], engine: deepspeed.DeepSpeedEngine) -> int | None:
    """Tokens of one micro-batch on one GPU, where the configuration has a "data" section that says so."""
    data = section_of(raw, "data")
    length = data.get("sequence_length")
    return data.get("tokens_per_gpu") or (length and length * engine.train_micro_batch_size_per_gpu())


def _located(file: str | None, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except UserError as error:
        raise error.located(file) from None


def _own_optimizer(raw: dict[str, Any], fp8: FP8Config, file: str | None, optimizer: Any) -> Any:
    """What DeepSpeed gets as the user's optimizer, so that its state is as `fp8` says; `raw` is changed to allow it."""
    if optimizer is not None and not isinstance(optimizer, AdamW):
        raise UserError(
            f"fp8.optimizer describes an optimizer, and initialize was given another ({type(optimizer).__name__})",
            key="fp8.optimizer",
            file=file,
            remedy='leave "optimizer" out of the call and in the configuration, or pass a ds_fp8.optim.AdamW',
        )
    if optimizer is not None:
        optimizer.precision.check_flattened()
    # DeepSpeed asks these before it accepts an optimizer that it does not know.
    raw["zero_allow_untested_optimizer"] = True
    raw["zero_force_ds_cpu_optimizer"] = False
    return optimizer or make_adamw(raw, fp8, file, dist.get_rank)


def _tell_optimizer(engine: deepspeed.DeepSpeedEngine, state: FP8State) -> None:
    """Introduce this package's optimizer, if it is there, to the flat shards that it steps."""
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, AdamW):
        return
    state.optimizer = optimizer
    for shard, segments in seams.flat_parameters(engine):
        vectors = [index for index, segment in enumerate(segments) if segment.is_vector]
        optimizer.set_segments(shard, [segment.numel for segment in segments], vectors)
    seams.before_moment_write(engine, optimizer.expand_moments)


def _install(engine: deepspeed.DeepSpeedEngine, state: FP8State) -> None:
    """Replace the collectives of a ZeRO-3 engine by the FP8 ones that the configuration asks for."""
    fp8 = state.config
    if fp8.param_gather.format != "bf16":
        weights = [
            module.weight
            for module in engine.module.modules()
            if isinstance(module, FP8Linear) and seams.is_partitioned(module.weight)
        ]
        if weights:
            state.parameter_gather = ParameterGather(engine, weights, fp8.linear.weight, state.wire)
            state.health.parameter_gather = state.parameter_gather
    if fp8.grad_reduce.format != "bf16" and seams.has_optimizer(engine):
        state.nodes = find_nodes(fp8.grad_reduce.hierarchy)

        def clock() -> int:
            return engine.micro_steps

        def reduction(stock: seams.StockReduceScatter) -> GradientReduce:
            observe = state.health.observe_gradient
            reduce = GradientReduce(stock, fp8.grad_reduce, state.wire, state.nodes, clock, observe)
            state.health.gradient_reduce = reduce
            return reduce

        seams.replace_reduce_scatter(engine, reduction)
