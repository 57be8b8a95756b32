"""`initialize`: call deepspeed.initialize and apply the "fp8" section of its configuration."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import set_z3_leaf_modules

from ds_fp8.casts.quantization import check_triton
from ds_fp8.cluster import watchdog
from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError, show_without_traceback
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.config.log import is_first_rank, logger
from ds_fp8.config.presets import DEFAULT, FOR_TRAINED, leaves_preset_open
from ds_fp8.config.sequence_parallel import sequence_parallel_size
from ds_fp8.engine import preflight
from ds_fp8.engine.attach import attach, parameters_with_corrections
from ds_fp8.engine.model import added_in_bf16, apply_checkpointing_section, weights_are_trained, wider_prefetch
from ds_fp8.engine.optimizer import choose_optimizer
from ds_fp8.engine.plans import convert as convert_by_plans
from ds_fp8.engine.plans import plans_of, recipe_from_config
from ds_fp8.engine.report import log_report, start_report
from ds_fp8.engine.sequence_parallel import check_training_data, share_sequences
from ds_fp8.engine.state import FP8State
from ds_fp8.layers.attention.cudnn import load_cudnn
from ds_fp8.layers.attention.selective_checkpointing import keep_attention
from ds_fp8.layers.convert import Conversion
from ds_fp8.layers.convert import convert as convert_layers
from ds_fp8.layers.decoder.rotary import restore_inverse_frequencies
from ds_fp8.layers.head.loss import LossFusion, fuse_loss
from ds_fp8.layers.selection import Filter
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.optim import AdamW
from ds_fp8.zero.deepspeed import versions
from ds_fp8.zero.deepspeed.masters import without_fp32_masters
from ds_fp8.zero.deepspeed.patches import disable_shm_build

load_cudnn()  # before Transformer Engine, which the gemm backends and PEFT import, finds another one

_deepspeed_initialize = deepspeed.initialize  # DeepSpeed's own: `ds_fp8.install` puts `initialize` in its place


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | os.PathLike | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike | Mapping[str, Any] | None = None,
) -> tuple:
    """Initialize an engine as deepspeed.initialize does, with the FP8 that its configuration asks for.

    With FP8 enabled the linears of `model` are converted in place, and under ZeRO stage 3 the parameter all-gather and
    the gradient reduce-scatter of the engine are replaced, until engine.destroy(). Rank 0 logs one report.

    Arguments are those of deepspeed.initialize, of which `model` is required. `config` (or `config_params`, or
    `args.deepspeed_config`) is a file or a mapping, with or without an "fp8" section. With compressed state an AdamW of
    torch or DeepSpeed is taken over.

    Returns:
        (engine, optimizer, dataloader, scheduler), as deepspeed.initialize; `engine.fp8` is the FP8State of the engine.

    Raises:
        UserError: The configuration is wrong, or asks for what this machine cannot do.
    """
    show_without_traceback()
    args, given = _given(args, config_params if config is None else config)
    configuration = Configuration.read(given)
    file = configuration.file
    if configuration.fp8.enabled:
        _check(configuration, optimizer, model_parameters, lr_scheduler)
    if not dist.is_initialized():
        disable_shm_build()
    watchdog.join()  # before the first collective, where there is a process group
    preset_reason = None
    if model is not None and leaves_preset_open(configuration.values.get("fp8")):
        _meet(distributed_port, dist_init_required)
        configuration, preset_reason = _for_weights(configuration, model)
    mpu = _located(file, share_sequences, configuration.values, model, mpu, mesh_param)
    _located(file, check_training_data, training_data, mpu)
    if configuration.fp8.enabled:
        if model is None:
            raise UserError("initialize needs a model to put FP8 into", remedy="pass model=...")
        _located(file, preflight.check_parallelism, model, mpu)
    # Before the model is converted: an optimizer that is refused leaves the model as it was.
    own_optimizer = choose_optimizer(configuration, optimizer, model_parameters, _rank)
    state = _located(file, _prepare, configuration, model, preset_reason)
    apply_checkpointing_section(configuration, model)
    if configuration.fp8.enabled and configuration.fp8.activations.keep_attention:
        _located(file, keep_attention, model)
    if optimizer is None and own_optimizer is None:
        _say_what_is_compiled(configuration)
    # From here on ZeRO owns the parameters: modules are replaced above.
    without = state.plans is not None and state.plans.group.coded_masters
    with without_fp32_masters(parameters_with_corrections) if without else nullcontext():
        result = _deepspeed_initialize(
            args,
            model,
            optimizer if own_optimizer is None else own_optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            distributed_port,
            mpu,
            dist_init_required,
            collate_fn,
            _for_deepspeed(configuration, own_optimizer is not None, state, model),
            mesh_param,
        )
    atexit.register(_end_gloo)
    watchdog.join()  # where DeepSpeed has made the process group
    _attach(result[0], configuration, state)
    return result


def _given(args: Any, given: Any) -> tuple[Any, Any]:
    """Return the arguments without their configuration, and the configuration that is given."""
    of_args = getattr(args, "deepspeed_config", None)
    given = of_args if given is None else given
    if given is None:
        raise UserError("no DeepSpeed configuration", remedy="pass config=..., or launch with --deepspeed_config FILE")
    if of_args is not None:
        args = copy.copy(args)
        args.deepspeed_config = None  # DeepSpeed refuses the configuration in both places
    return args, given


def _check(configuration: Configuration, optimizer: Any, parameters: Any, scheduler: Any) -> None:
    _hush()
    preflight.check(configuration, optimizer=optimizer, scheduler_given=scheduler is not None)
    preflight.check_trains(configuration, optimizer, parameters)
    preflight.check_launch()
    if optimizer is None:
        preflight.check_compiles(configuration)


def _meet(port: int, init_required: bool | None) -> None:
    if not dist.is_initialized():
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(backend, distributed_port=port, dist_init_required=init_required)
    watchdog.join()


def _prepare(configuration: Configuration, model: torch.nn.Module | None, preset_reason: str | None) -> FP8State:
    """Convert a model and fuse its loss as the configuration asks, before ZeRO owns its parameters."""
    fp8 = configuration.fp8
    # Made before the model is converted: recipes keep a reference to the monitor that measures their casts.
    state = FP8State(fp8, CastMonitor(fp8.monitor.every if fp8.enabled else 0), preset_reason)
    if fp8.enabled:
        state.notes += added_in_bf16(model)
        state.plans = plans_of(fp8, state.monitor)
        conversion = state.conversion = convert_layers(model, state.plans.layers)
        if not conversion.converted and not conversion.experts.converted:
            state.monitor.every = 0  # a measured step runs outside graphs, and there is no cast to measure
        state.notes += restore_inverse_frequencies(model)
        named = fp8.preset if isinstance(fp8.preset, str) else fp8.preset.get("linear")
        asked = preset_reason is None and "preset" in fp8.model_fields_set and named == DEFAULT
        if asked and weights_are_trained(model)[0]:
            closer = f"{FOR_TRAINED} ends closer to BF16 (docs/configuration.md)"
            state.notes.append(f"preset {DEFAULT} on trained weights: {closer}")
        if conversion.leaf_classes:
            # A fused module computes with its submodules' weights without calling them: ZeRO-3 must gather them
            # together.
            set_z3_leaf_modules(model, sorted(conversion.leaf_classes, key=lambda leaf: leaf.__name__))
            deepspeed_logger.addFilter(_not_of_unmatched_leaves)
    if fp8.fuses_loss and model is not None:
        state.loss = _fuse_loss(model, fp8)
    return state


def _say_what_is_compiled(configuration: Configuration) -> None:
    made = preflight.made_by_deepspeed(configuration)
    if "fp8" in configuration.values and made is not None and made.__module__.startswith("deepspeed"):
        words = 'DeepSpeed\'s own %s%s is compiled once, for minutes ("torch_adam": true in its "params" avoids it)'
        off = "" if configuration.fp8.enabled else ", which steps where FP8 is off,"
        logger.info(words, configuration.optimizer_type, off)


def _attach(engine: deepspeed.DeepSpeedEngine, configuration: Configuration, state: FP8State) -> None:
    fp8, measured, given = configuration.fp8, "fp8" in configuration.values, configuration.given
    if fp8.enabled:
        check_triton(engine.device)  # before the first cast of weights
    # Also with FP8 disabled: a BF16 run has the same attributes and the same count of bytes.
    engine.fp8 = state
    ranks, length = sequence_parallel_size(configuration.values), given("data", "sequence_length")
    of_rows = length and length * engine.train_micro_batch_size_per_gpu() // ranks
    try:
        attach(engine, state, measured=measured)
        state.report = start_report(engine, state, given("data", "tokens_per_gpu") or of_rows)
    except BaseException as error:  # nobody gets this engine to destroy it: zero.Init's methods would stay replaced
        engine.destroy()
        if isinstance(error, AttributeError):
            versions.explain(error)
        raise
    if measured:
        log_report(state.report, full=fp8.report == "full")


def convert(
    model: torch.nn.Module,
    config: FP8Config | Mapping[str, Any] | str | None = None,
    monitor: CastMonitor | None = None,
    filter: Filter | None = None,
) -> Conversion:
    """Let the linear layers of a model compute in FP8, in place, and fuse its decoder layers where they can be.

    Parameters, their names and checkpoint keys do not change. docs/support.md lists the layers that stay in BF16. A
    model can be converted again, after adapters were added or with another configuration. Collective where several
    ranks run and `config` leaves the preset to the weights.

    Args:
        model: Any module, wrapped by PEFT or not.
        config: Casts, layers to skip, whether to fuse; a mapping or a preset's name, too. FP8Config() by default. Where
            it names no preset the weights decide, as in `initialize`.
        monitor: Counts saturated and flushed elements, until its `end_step` is called; by default nothing is counted,
            and the engine of a later `initialize` has a monitor of its own.
        filter: Called as `filter(name, layer)` for each linear layer that `config.linear.skip` does not name. Layers
            for which it returns False stay in BF16, in later conversions without a filter too.

    Returns:
        The names of all linear layers, converted or with the reason why not, and the fused layers.

    Raises:
        UserError: No linear layer can be converted and no override keeps one in BF16, an override matches no layer, or
            this machine cannot run the casts of `config`.
    """
    if not isinstance(config, FP8Config):
        config = parse_fp8({"fp8": {} if config is None else config})
    if config.leaves_preset_open:
        config, _ = _for_weights(config, model)
    return convert_by_plans(model, config, monitor or CastMonitor(0), filter)


def _end_gloo() -> None:
    """Let gloo's threads end before Python does, where a program does not destroy its process group.

    A collective that nobody waits for, such as a last prefetch, frees its tensors in one of these threads. Python ends
    a thread that asks for its lock while it shuts down, and C++ takes that for an error: "terminate called without an
    active exception", after all work was done.
    """
    # After an exception other ranks may not come to collectives that are under way: waiting for them would hang.
    failed = getattr(sys, "last_value", None) is not None
    if not failed and torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def _hush() -> None:
    """Leave out what torch and DeepSpeed warn of, on every rank or at every start, that is no trouble here."""
    deprecated = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning)  # DeepSpeed calls them
    # "untested optimizer": it is tested here.
    if AdamW not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(AdamW)
    if _of_one_rank not in deepspeed_logger.filters:
        deepspeed_logger.addFilter(_of_one_rank)


def _of_one_rank(record: logging.LogRecord) -> bool:
    return "leaf module configuration" not in str(record.msg) or is_first_rank()


def _not_of_unmatched_leaves(record: logging.LogRecord) -> bool:
    return "leaf module configuration did not match any" not in str(record.msg)


def _for_weights(open_: Configuration | FP8Config, model: torch.nn.Module) -> tuple[Any, str]:
    """Return a configuration with the preset that fits the weights of a model, and why. Collective."""
    trained, reason = weights_are_trained(model)
    if trained:
        try:
            chosen = open_.with_preset(FOR_TRAINED)
            recipe_from_config(chosen.fp8 if isinstance(chosen, Configuration) else chosen, CastMonitor(0))
        except UserError as error:
            return open_.with_preset(DEFAULT), f"{reason}, but {FOR_TRAINED} cannot run here: {error.problem}"
        return chosen, reason
    return open_.with_preset(DEFAULT), reason


def _for_deepspeed(
    configuration: Configuration, own_optimizer: bool, state: FP8State, model: torch.nn.Module | None
) -> dict[str, Any]:
    """Return the JSON for deepspeed.initialize: what was given, with what this package needs.

    Nothing else changes a configuration. What the user has set stays, but for the two keys by which DeepSpeed accepts
    an optimizer that it does not know, and for limits of the prefetch that are too small for a layer with experts.
    """
    values = copy.deepcopy(dict(configuration.values))
    if configuration.fp8.enabled:
        # DeepSpeed would drain the device twice a step to print its throughput to the millisecond.
        values.setdefault("timers", {}).setdefault("throughput", {}).setdefault("synchronized", False)
        if configuration.stage == 3:
            # The sum over ranks arrives in FP32: an accumulator in BF16 would round it at every micro-batch.
            values.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        prefetch, notes = wider_prefetch(configuration.zero, model) if model is not None else ({}, [])
        state.notes += notes
        if prefetch:
            values["zero_optimization"] |= prefetch
    if own_optimizer:
        values |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return values


def _fuse_loss(model: torch.nn.Module, fp8: FP8Config) -> LossFusion:
    if not fp8.multiplies_head_in_fp8:
        return fuse_loss(model)
    # The monitor does not measure the head: no layer could fall back to BF16 for it.
    loss = fuse_loss(model, recipe_from_config(fp8, CastMonitor(0)))
    if not loss.fused:
        raise UserError(
            f"the head cannot be computed in FP8, because the loss stays {loss.description}",
            key="fp8.loss.head",
            remedy='remove "head": "fp8"',
        )
    return loss


def _located(file: str | None, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except UserError as error:
        raise error.located(file) from None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
