"""Checks of a DeepSpeed configuration before a model is converted: all mistakes in one error, each with its remedy.

DeepSpeed ignores keys that it does not know, and meets wrong values of optimizer and scheduler after the model has been
converted, as exceptions of Python. What the "fp8" section may contain is checked where it is parsed (config/fp8.py).
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.moe.layer import MoE
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import ADAM_W_MODE, DEEPSPEED_OPTIMIZERS, TORCH_ADAM_PARAM
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import nn
from torch.optim import LBFGS, Muon, SparseAdam

from ds_fp8.config import registry
from ds_fp8.config.deepspeed_json import Configuration, DeepSpeedValues, known_keys
from ds_fp8.config.errors import UserError, clipped, joined
from ds_fp8.config.files import flat
from ds_fp8.config.fp8 import section_of
from ds_fp8.config.refusals import DEEPSPEED, FP8, OPTIMIZER, STAGE_3, refusals
from ds_fp8.config.schema import clipped_repr, nearest
from ds_fp8.engine.optimizer import make_adamw, research_optimizer, uses_own_optimizer
from ds_fp8.zero.deepspeed import versions as deepspeed_versions

OWN_SECTIONS = ("fp8", "model", "data", "train")  # sections of this package in a DeepSpeed JSON
AUTO = "auto"  # value that Trainer and Accelerate replace by one of their own
# Keys that DeepSpeed looks up among running ranks alone
_OF_DEVICE_MESHES = ("sequence_parallel_size", "data_parallel_size")
_WORDS_FOR_BOOLEANS = {"true": "true", "yes": "true", "false": "false", "no": "false"}
# Sections with texts of the user's: names, paths
_NOT_BOOLEAN = (*OWN_SECTIONS[1:], "wandb", "tensorboard", "csv_monitor", "comet")
# Keys of sections that DeepSpeed reads key by key
_LISTED_KEYS = {"optimizer": {"type", "params", "legacy_fusion"}, "scheduler": {"type", "params"}}
# DeepSpeed's optimizers with an Adam of its own, and params that it removes before it makes that
_ADAMS, _POPPED = ("adam", "adamw", "muon"), {ADAM_W_MODE, TORCH_ADAM_PARAM, "fp32_optimizer_states"}
# Classes of DeepSpeed's optimizers (for Muon that of its Adam), with state on the device and offloaded
_OF_DEEPSPEED = {
    **dict.fromkeys(_ADAMS, (FusedAdam, DeepSpeedCPUAdam)),
    "adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    "lion": (FusedLion, DeepSpeedCPULion),
    "lamb": (FusedLamb, FusedLamb),
}
_USUAL = {"lr": "1e-4", "betas": "[0.9, 0.95]", "eps": "1e-8", "weight_decay": "0.1"}
Refuse = Callable[[str, str, str], None]


def check(configuration: Configuration, *, optimizer: Any = None, scheduler_given: bool = False) -> None:
    """Check everything in a configuration but the batch sizes, which depend on the number of ranks.

    "auto" is accepted: the programs that fill it in come before DeepSpeed. The caller's `optimizer` is judged in place
    of its section, and no section where the caller passes a scheduler.
    """
    mistakes: list[UserError] = []

    def refuse(key: str, problem: str, remedy: str) -> None:
        mistakes.append(UserError(problem, key=key, file=configuration.file, remedy=remedy))

    def attempt(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except UserError as error:
            mistakes.extend(error.located(configuration.file).all)

    fp8 = attempt(lambda: configuration.fp8)
    auto = frozenset(key for key, value in flat(configuration.values) if value == AUTO)
    filled = Configuration(_without_auto(configuration.values), configuration.file, auto)
    _check_keys(configuration.values, refuse)
    enabled = fp8 is not None and fp8.enabled
    parsed = attempt(lambda: filled.deepspeed)
    if parsed is not None:  # nothing is known of the values of a section that DeepSpeed cannot parse
        of = [FP8] + [STAGE_3] * (filled.stage == 3) if enabled else []
        of += [OPTIMIZER] * (optimizer is None and configuration.has_optimizer)
        mistakes += refusals(filled, *of, DEEPSPEED, file=configuration.file)
    if enabled:
        attempt(lambda: deepspeed_versions.check(deepspeed.__version__))
    if optimizer is None and configuration.has_optimizer:
        _check_optimizer(filled, parsed, refuse, attempt)
    if isinstance(optimizer, torch.optim.Optimizer) and not mistakes and not uses_own_optimizer(filled, optimizer):
        _check_stepped(filled, type(optimizer).__name__, type(optimizer), True, refuse)
    if not scheduler_given and "scheduler" in configuration.values:
        _check_scheduler(configuration.values["scheduler"], refuse)
    if mistakes:
        raise joined(mistakes)


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_auto(inner) for key, inner in value.items() if key in OWN_SECTIONS or inner != AUTO}
    return value


def _check_keys(values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse keys that nobody reads, and words where booleans are meant, which Python takes for true."""
    known = known_keys() | DeepSpeedValues.model_fields.keys() | {*OWN_SECTIONS, *_OF_DEVICE_MESHES}
    for key in values:
        # Comments of JSON files; and dotted keys that TRL writes beside the sections of a reference model.
        ignored = key.startswith(("_", "//", "#")) or key.partition(".")[0] in known
        if not ignored:
            refuse(
                clipped(key), f"DeepSpeed does not know the key {clipped_repr(key)}", nearest(key, known) or "remove it"
            )
    for section, listed in _LISTED_KEYS.items():
        given = values.get(section)
        for key in given if isinstance(given, Mapping) else ():
            if key not in listed:
                refuse(f"{section}.{clipped(key)}", f'"{section}" has no key {clipped_repr(key)}', nearest(key, listed))
    for key, word in flat({key: value for key, value in values.items() if key not in _NOT_BOOLEAN}):
        if isinstance(word, str) and (boolean := _WORDS_FOR_BOOLEANS.get(word.lower())):
            refuse(
                key, f"{key} is the text {clipped_repr(word)}, not true or false", f"{boolean}, without quotation marks"
            )


def _check_optimizer(configuration: Configuration, parsed: Any, refuse: Refuse, attempt: Callable) -> None:
    """Refuse an "optimizer" section that DeepSpeed cannot make an optimizer of, or ZeRO cannot step."""
    section = section_of(configuration.values, "optimizer")
    name, params = section.get("type"), section.get("params", {})
    if not isinstance(params, Mapping):
        refuse("optimizer.params", "the optimizer's params must be an object", '"params": {...}')
        return
    wrong = _check_numbers(params, refuse)
    if parsed is None or not isinstance(name, str):
        return  # refused already
    if uses_own_optimizer(configuration):
        if not wrong:
            attempt(lambda: make_adamw(configuration, rank=lambda: 0))
        return
    of_torch = {key for key, entry in vars(torch.optim).items() if isinstance(entry, type)} - {"Optimizer"}
    lower = name.lower()
    own = research_optimizer(name)
    if own is not None:
        kind = own
    elif lower in DEEPSPEED_OPTIMIZERS:
        kind = _muon if lower == "muon" else made_by_deepspeed(configuration)
        params = {key: value for key, value in params.items() if lower not in _ADAMS or key not in _POPPED}
    elif name in of_torch:
        kind = getattr(torch.optim, name)
    else:
        known = {*of_torch, "AdamW", *registry.OPTIMIZERS, *DEEPSPEED_OPTIMIZERS}
        refuse("optimizer.type", f"unknown optimizer {clipped_repr(name)}", nearest(name, known, "Known optimizers"))
        return
    _check_stepped(configuration, name, kind, False, refuse)
    wrong = kind is None or _check_call(name, kind, params, "optimizer.params", refuse)
    if own is not None and not wrong:
        attempt(lambda: own([nn.Parameter(torch.ones(1))], **params))  # which says itself what is out of range


def _muon(lr, muon_lr, adam_lr, momentum, ns_method, betas, eps, weight_decay) -> None:
    """Take what DeepSpeed's Muon reads of its params; it drops all others."""


def _check_stepped(configuration: Configuration, name: str, kind: Any, given: bool, refuse: Refuse) -> None:
    """Refuse optimizers, of the section or `given` as objects, that an engine cannot step or that DeepSpeed refuses."""
    stage, parsed, key = configuration.stage, configuration.deepspeed, "optimizer.type"
    tested = kind in (_muon, *ZERO_SUPPORTED_OPTIMIZERS, *registry.OPTIMIZERS.values())
    untested = stage and not tested and not parsed.zero_allow_untested_optimizer
    offloads = given and configuration.optimizer_device != "none" and kind not in (DeepSpeedCPUAdam, DeepSpeedCPULion)
    allow, force = "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"
    for found, where, problem, remedy in (
        (kind in (LBFGS, SparseAdam), key, f"{name} needs a closure or sparse gradients", '"type": "AdamW"'),
        (stage and kind is Muon, key, "torch's Muon steps matrices, and ZeRO's parts are flat", '"type": "Muon"'),
        (untested, key, f"DeepSpeed has not tested {name} with ZeRO", f'"{allow}": true, to use it nevertheless'),
        (offloads and parsed.zero_force_ds_cpu_optimizer, force, f"DeepSpeed offloads no {name}", f'"{force}": false'),
    ):
        if found:
            refuse(where, problem, remedy)


def made_by_deepspeed(configuration: Configuration) -> type | None:
    """Return the class that DeepSpeed makes of the "optimizer" section, None where it is not its choice."""
    kinds = _OF_DEEPSPEED.get(configuration.optimizer_type, (None, None))
    if kinds[0] is FusedAdam and configuration.optimizer_params.get(TORCH_ADAM_PARAM):
        return torch.optim.AdamW
    return kinds[configuration.optimizer_device != "none"]


def check_compiles(configuration: Configuration) -> None:
    """Raise UserError where DeepSpeed's own optimizer is asked for and cannot be compiled on this machine."""
    kind = made_by_deepspeed(configuration)
    if kind is None or kind.__module__.startswith("torch") or uses_own_optimizer(configuration):
        return
    from torch.utils import cpp_extension  # looks for compilers

    device, name = get_accelerator().device_name(), kind.__name__.removeprefix("DeepSpeed")
    builder = get_accelerator().create_op_builder(f"{name}Builder")
    needed = {
        f"an implementation for the device {device!r}": builder.sources(),
        "ninja": cpp_extension.is_ninja_available(),
        "a C++ compiler": shutil.which(cpp_extension.get_cxx_compiler()),
        "nvcc of a CUDA toolkit": device != "cuda" or cpp_extension.CUDA_HOME,
    }
    missing = next((what for what, found in needed.items() if not found), None)
    if missing and not installed_ops.get(builder.name):
        problem = f"DeepSpeed's {name} needs {missing}, and this machine has none"
        remedy = '"params": {"torch_adam": true}' if "Adam" in name else '"type": "AdamW"'
        raise UserError(problem, key="optimizer.type", file=configuration.file, remedy=remedy)


def _check_numbers(params: Mapping[str, Any], refuse: Refuse) -> bool:
    """Refuse usual params that are no numbers, and betas no pair: what optimizers say of it is cryptic. True if any."""
    wrong = False
    for key in _USUAL.keys() & params.keys():
        value = params[key]
        numbers = value if key == "betas" else [value]
        right = isinstance(numbers, list | tuple) and all(type(number) in (int, float) for number in numbers)
        if not right or (key == "betas" and len(numbers) != 2):
            what = "a pair of numbers" if key == "betas" else "a number"
            refuse(f"optimizer.params.{key}", f"{key} {clipped_repr(value)} is not {what}", f'"{key}": {_USUAL[key]}')
            wrong = True
    return wrong


def _check_scheduler(section: Any, refuse: Refuse) -> None:
    kind = section.get("type") if isinstance(section, Mapping) else None
    if kind is None and isinstance(section, Mapping) and not section.get("params"):
        return  # DeepSpeed makes none
    of_torch = {key for key, entry in vars(torch.optim.lr_scheduler).items() if isinstance(entry, type)}
    known = {*lr_schedules.VALID_LR_SCHEDULES, *of_torch}
    if not isinstance(kind, str) or kind not in known:
        remedy = nearest(str(kind), lr_schedules.VALID_LR_SCHEDULES, "DeepSpeed has")
        refuse("scheduler.type", f"unknown scheduler {clipped_repr(kind)}", remedy)
        return
    params = section.get("params") or {}
    if not isinstance(params, Mapping):
        refuse("scheduler.params", "the scheduler's params must be an object", '"params": {...}')
        return
    scheduler = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind)
    # A list has one value for each parameter group, and those are not known yet.
    partial = AUTO in params.values() or any(isinstance(value, list) for value in params.values())
    wrong = _check_call(kind, scheduler, params, "scheduler.params", refuse, required=AUTO not in params.values())
    if not wrong and not partial:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
        try:
            scheduler(optimizer, **params)
        except Exception as error:  # a value of the wrong kind is met with any exception
            words = clipped(str(error) or type(error).__name__)
            refuse("scheduler.params", f"the params are refused: {words}", "change or remove the value")


def _check_call(name: str, kind: Any, given: Mapping, key: str, refuse: Refuse, required: bool = False) -> bool:
    """Refuse arguments that a class does not take, or lacks where they are `required`; return whether there are any."""
    skipped = ("self", "params", "model_params", "optimizer")
    taken = {word: part for word, part in inspect.signature(kind).parameters.items() if word not in skipped}
    if any(part.kind is part.VAR_KEYWORD for part in taken.values()):
        return False
    unknown = [word for word in given if word not in taken]
    for word in unknown:
        refuse(f"{key}.{clipped(word)}", f"{name} takes no {clipped_repr(word)}", nearest(word, taken, "It takes"))
    needed = [word for word, part in taken.items() if required and part.default is part.empty]
    missing = [word for word in needed if word not in given]
    for word in missing:
        refuse(f"{key}.{word}", f"{name} needs {word}", f'"params": {{"{word}": ...}}')
    return bool(unknown or missing)


def check_parallelism(model: nn.Module, mpu: Any) -> None:
    """Raise UserError for models and process groups of DeepSpeed's that have not been tried with FP8."""
    remedy = 'use ZeRO stage 3 alone, or "fp8": {"enabled": false}'
    splits = ["get_tensor_model_parallel_world_size", "get_slice_parallel_world_size"]
    if not hasattr(mpu, "get_sequence_parallel_world_size"):  # whose "model parallel" ranks share a sequence
        splits.append("get_model_parallel_world_size")
    size = next((getattr(mpu, name)() for name in splits if hasattr(mpu, name)), 1)
    untested = {
        "pipeline parallelism": isinstance(model, PipelineModule),
        "DeepSpeed's MoE layers": any(isinstance(module, MoE) for module in model.modules()),
        f"tensor parallelism (mpu, {size} ranks)": size > 1,
    }
    for what, found in untested.items():
        if found:
            raise UserError(f"FP8 with {what} is untested", key="fp8.enabled", remedy=remedy)


def check_trains(configuration: Configuration, optimizer: Any, parameters: Iterable | None) -> None:
    """Raise UserError where parameters are passed to be trained, and there is no optimizer for them."""
    if optimizer is None and parameters is not None and not configuration.has_optimizer:
        raise UserError(
            "model_parameters are to be trained, but there is no optimizer",
            key="optimizer",
            file=configuration.file,
            remedy='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, or optimizer=... of initialize; an engine '
            "that only evaluates takes no model_parameters",
        )


def check_launch() -> None:
    if torch.distributed.is_initialized():
        missing = [] if {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys() else ["LOCAL_RANK"]
    elif importlib.util.find_spec("mpi4py") or {"AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV"} & os.environ.keys():
        missing = []  # DeepSpeed asks MPI, or knows the cloud's launcher
    else:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
        missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"the environment has no {', '.join(missing)}, which launchers set",
            remedy="start with deepspeed, torchrun or accelerate launch; under srun and mpirun install mpi4py, or set "
            "them in a script (docs/many_hosts.md); a single process needs RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
        )
    local_rank, gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if get_accelerator().device_name() == "cuda" and local_rank.isdigit() and int(local_rank) >= gpus > 0:
        raise UserError(
            f"LOCAL_RANK is {local_rank}, but this process sees {gpus} GPU{'s' * (gpus != 1)}",
            remedy="set LOCAL_RANK=0 for ranks that each see one GPU, or let every rank see all GPUs of its host",
        )
