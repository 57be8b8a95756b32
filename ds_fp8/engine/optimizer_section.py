"""Try the "optimizer" section of a DeepSpeed configuration on a few numbers before the model is built."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.runtime.config import ADAM_W_MODE, DEEPSPEED_OPTIMIZERS, TORCH_ADAM_PARAM
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.schema import nearest, shown
from ds_fp8.optim.madam import Madam

_USUAL = {"lr": "1e-4", "betas": "[0.9, 0.95]", "eps": "1e-8", "weight_decay": "0.1"}
_TRIED = tuple(_USUAL)
_REMEDY = ", ".join(f'"{key}": {value}' for key, value in _USUAL.items()) + " are usual"
_COMPILED = {
    "adam": ("deepspeed.ops.adam", "FusedAdam", "DeepSpeedCPUAdam"),
    "adamw": ("deepspeed.ops.adam", "FusedAdam", "DeepSpeedCPUAdam"),
    "lion": ("deepspeed.ops.lion", "FusedLion", "DeepSpeedCPULion"),
    "adagrad": ("deepspeed.ops.adagrad", None, "DeepSpeedCPUAdagrad"),
}
"""DeepSpeed's own optimizers: where they are, on an accelerator and, offloaded, on a CPU."""
_UNFIT = {
    "lamb": "LAMB compares the norms of whole tensors, and ZeRO gives it shards of all of them in one",
    "LBFGS": "L-BFGS computes the loss several times in a step",
    "SparseAdam": "SparseAdam needs sparse gradients",
    "muadam": "muP's optimizers need a model with its base shapes",
    "muadamw": "muP's optimizers need a model with its base shapes",
    "musgd": "muP's optimizers need a model with its base shapes",
}
MAX_WEIGHT = 100.0
"""Largest magnitude of a weight of 1 after three steps with gradients of at most 1: larger ones end in infinity or
NaN."""


def check_optimizer(configuration: Configuration, *, own: bool = False) -> None:
    """Check the "optimizer" section of a configuration against the optimizer that is made of it.

    Args:
        configuration: what was given.
        own: ds_fp8.optim.AdamW takes the place of DeepSpeed's Adam.

    Raises:
        UserError: there is no such optimizer, it does not work on ZeRO's flat shards or on this machine, it does not
            take the params, or two steps with them are not finite.
    """
    try:
        _check(configuration, own)
    except UserError as error:
        raise error.located(configuration.file) from None


def _check(configuration: Configuration, own: bool) -> None:
    section = configuration.given("optimizer")
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        raise UserError(
            "the optimizer is missing",
            key="optimizer",
            remedy='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true}}',
        )
    name, params = section["type"], section.get("params", {})
    name = name.lower() if name.lower() in (*DEEPSPEED_OPTIMIZERS, "madam") else name
    if name in _UNFIT:
        raise UserError(f"{name} cannot run here: {_UNFIT[name]}", key="optimizer.type", remedy='"type": "AdamW"')
    if not isinstance(params, Mapping):
        raise UserError("the optimizer's params must be an object", key="optimizer.params", remedy='"params": {...}')
    if "max_grad_norm" in params:
        raise UserError(
            "max_grad_norm is not a parameter of an optimizer",
            key="optimizer.params.max_grad_norm",
            remedy='"gradient_clipping": 1.0, beside "optimizer"',
        )
    _check_kinds(params)
    if own:
        _try(torch.optim.AdamW, {key: params[key] for key in _TRIED if key in params})
        return
    # Its parameters are matrices, which the trial on a flat parameter cannot stand for.
    if name == "muon":
        if configuration.zero.reduce_scatter:
            raise UserError(
                "DeepSpeed's Muon does not go with ZeRO's reduce-scatter",
                key="optimizer.type",
                remedy='"type": "AdamW"',
            )
        return
    kind, arguments = _resolve(name, dict(params), configuration.optimizer_device != "none")
    if (
        kind not in (*ZERO_SUPPORTED_OPTIMIZERS, Madam)
        and configuration.stage
        and not configuration.given("zero_allow_untested_optimizer")
    ):
        raise UserError(
            f"DeepSpeed has not tested {kind.__name__} with ZeRO",
            key="optimizer.type",
            remedy='"zero_allow_untested_optimizer": true, to use it nevertheless',
        )
    _check_arguments(kind, arguments)
    tried = kind
    if kind.__module__.startswith("deepspeed."):
        _check_compiler(kind)
        # Its kernel may have to be compiled; torch's Adam has the same parameters and conditions.
        tried, arguments = torch.optim.AdamW, {key: arguments[key] for key in _TRIED if key in arguments}
    _try(tried, arguments)


def compiled_operation(configuration: Configuration) -> str | None:
    """Return the name of the kernel that DeepSpeed compiles for a valid "optimizer" section, or None."""
    name = configuration.optimizer_type
    if name not in _COMPILED:
        return None
    kind, _ = _resolve(name, configuration.optimizer_params, configuration.optimizer_device != "none")
    if not kind.__module__.startswith("deepspeed."):
        return None
    operation = get_accelerator().create_op_builder(_builder(kind)).name
    return None if installed_ops.get(operation, False) else operation


def _builder(kind: type) -> str:
    return f"{kind.__name__.removeprefix('DeepSpeed')}Builder"


def _check_kinds(params: Mapping[str, Any]) -> None:
    """Check that the usual params are numbers, and betas a pair: what optimizers themselves say of it is cryptic."""
    for key in _TRIED:
        value = params.get(key, (0.9, 0.95) if key == "betas" else 0.0)
        numbers = value if key == "betas" else [value]
        is_sequence = isinstance(numbers, list | tuple)
        if not is_sequence or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            problem = (
                f"{key} {shown(value)} is not a number" if key != "betas" else f"betas {shown(value)} are not numbers"
            )
            raise UserError(problem, key=f"optimizer.params.{key}", remedy=f'"{key}": {_USUAL[key]}')
        if key == "betas" and len(numbers) != 2:
            raise UserError(
                f"betas {shown(value)} are not a pair", key="optimizer.params.betas", remedy=f'"betas": {_USUAL[key]}'
            )


def _resolve(name: str, params: dict[str, Any], offloaded: bool) -> tuple[type, dict[str, Any]]:
    """Return the class that DeepSpeed makes an optimizer of, and what it passes on of the params."""
    if name == "madam":
        return Madam, params
    if name in ("adam", "adamw"):
        decoupled = params.pop(ADAM_W_MODE, True) or name == "adamw"
        params.pop("fp32_optimizer_states", None)
        if params.pop(TORCH_ADAM_PARAM, False):
            return (torch.optim.AdamW if decoupled else torch.optim.Adam), params
    if name in _COMPILED:
        module, fused, on_cpu = _COMPILED[name]
        if chosen := on_cpu if offloaded else fused:
            return getattr(importlib.import_module(module), chosen), params
        return torch.optim.Adagrad, params
    of_torch = {key for key, entry in vars(torch.optim).items() if isinstance(entry, type)} - {"Optimizer"}
    if name not in of_torch:
        known = {*of_torch, "AdamW", "Madam", *DEEPSPEED_OPTIMIZERS} - set(_UNFIT)
        raise UserError(
            f"unknown optimizer {shown(name)}",
            key="optimizer.type",
            remedy=nearest(name, known, "Known optimizers"),
        )
    return getattr(torch.optim, name), params


def _check_arguments(kind: type, arguments: Mapping[str, Any]) -> None:
    taken = [name for name in inspect.signature(kind).parameters if name not in ("params", "model_params")]
    for key in arguments:
        if key not in taken:
            raise UserError(
                f"{kind.__name__} takes no {shown(key)}",
                key=f"optimizer.params.{clipped(key)}",
                remedy=f"{kind.__name__} takes {', '.join(taken)}",
            )


def _check_compiler(kind: type) -> None:
    """Refuse an optimizer whose kernel DeepSpeed would have to compile, and cannot."""
    builder = _builder(kind)
    instead = 'in its params "torch_adam": true' if "Adam" in kind.__name__ else '"type": "AdamW"'
    if get_accelerator().get_op_builder(builder).__name__ == "NotImplementedBuilder":
        raise UserError(
            f"DeepSpeed has no {kind.__name__} for {get_accelerator().device_name()}s",
            key="optimizer.type",
            remedy=instead,
        )
    operation = get_accelerator().create_op_builder(builder).name
    tools = ("ninja", os.environ.get("CXX", "c++"))
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing and not installed_ops.get(operation, False):
        raise UserError(
            f"DeepSpeed compiles {kind.__name__} when it is first used, but {' and '.join(missing)} cannot be found",
            key="optimizer",
            remedy=f"{instead}, or install {' and '.join(missing)}",
        )


def _try(kind: type, arguments: Mapping[str, Any]) -> None:
    """Step twice on a flat parameter: gradients of zero, as of tokens that do not occur, and others."""
    here = {key: value for key, value in arguments.items() if key != "capturable"}  # which CPU tensors are not
    parameter = torch.nn.Parameter(torch.ones(8))
    try:
        optimizer = kind([parameter], **here)
        for gradient in (0.0, 1.0, 1.0):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
    except Exception as error:  # an optimizer meets a value of the wrong kind with any exception
        raise UserError(
            f"{kind.__name__} rejects its params: {clipped(str(error))}",
            key=_key_at_fault(kind, here),
            remedy=_REMEDY,
        ) from None
    if not bool((parameter.abs() <= MAX_WEIGHT).all()):
        raise UserError(
            f"{kind.__name__} makes a weight of 1 into {parameter[0]:g} in three steps with these params",
            key="optimizer.params",
            remedy=_REMEDY,
        )


def _key_at_fault(kind: type, arguments: Mapping[str, Any]) -> str:
    """Return the dotted key of the one param that the optimizer refuses by itself."""
    for key, value in arguments.items():
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        try:
            kind([parameter], **{key: value}).step()
        except Exception:
            return f"optimizer.params.{key}"
    return "optimizer.params"
