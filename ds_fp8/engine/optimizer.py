"""The optimizer that the "fp8" section asks for, from DeepSpeed's "optimizer" section or the caller's own AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from inspect import signature
from typing import Any, NoReturn

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_fp8.config import registry
from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.schema import nearest
from ds_fp8.optim.adamw import AdamW

_ADAM = ("adam", "adamw")
_OWN = ("lr", "betas", "eps", "weight_decay")
_CHOOSE_AN_IMPLEMENTATION = ("torch_adam", "foreach", "fused", "capturable", "fp32_optimizer_states", "set_grad_none")
# Options of which DeepSpeed and torch offer more: the one value that this optimizer has.
_ONLY = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False, "differentiable": False}
# Hooks of torch's optimizers.
_HOOKS = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
)


def uses_own_optimizer(configuration: Configuration, given: Any = None) -> bool:
    """Return whether ds_fp8.optim.AdamW takes the place of the configuration's optimizer, or of the caller's, `given`.

    It must where state is compressed or the configuration asks for it. It does wherever it computes the same under
    ZeRO-3 on the device, for it is what the step of zero/step.py needs.
    """
    fp8 = configuration.fp8
    if not fp8.enabled or needs_own_optimizer(fp8):
        return fp8.enabled
    if configuration.stage != 3 or configuration.optimizer_device != "none":
        return False
    if given is not None:
        return isinstance(given, AdamW) or (_is_adamw(given) and not any(map(_unlike_ours, given.param_groups)))
    params = configuration.optimizer_params
    known = set(params) <= {*_OWN, *_CHOOSE_AN_IMPLEMENTATION, *_ONLY}
    return configuration.optimizer_type in _ADAM and known and not _unlike_ours(params)


def research_optimizer(name: str) -> type | None:
    """Return the optimizer of ds_fp8.research that a "type" names, None if it is another's."""
    if name.lower() in ("", *DEEPSPEED_OPTIMIZERS, *(own.lower() for own in vars(torch.optim))):
        return None
    registry.load()
    return registry.OPTIMIZERS.get(name.lower())


def needs_own_optimizer(fp8: FP8Config) -> bool:
    """Return whether only ds_fp8.optim.AdamW does what this section asks for."""
    kept = fp8.optimizer
    return fp8.enabled and (kept.precision().compressed or kept.master != "fp32" or kept.implementation == "ds_fp8")


def _is_adamw(optimizer: Any) -> bool:
    deepspeeds = type(optimizer).__name__ in ("FusedAdam", "DeepSpeedCPUAdam") and getattr(optimizer, "adam_w_mode", 0)
    return type(optimizer) is torch.optim.AdamW or bool(deepspeeds)


def _unlike_ours(params: Mapping[str, Any]) -> str | None:
    return next((name for name, only in _ONLY.items() if params.get(name, only) not in (only, None)), None)


def choose_optimizer(
    configuration: Configuration, given: Any, parameters: Any, rank: Callable[[], int]
) -> AdamW | Callable[[Iterable], torch.optim.Optimizer] | None:
    """Return this package's optimizer to hand to deepspeed.initialize, or None for the one that it has.

    Returns:
        An optimizer; a function of parameters that makes one; None for DeepSpeed's own, for the caller's, and for an
        engine without one, such as a reference model's.

    Raises:
        UserError: the given optimizer, or the "optimizer" section, is not Adam with decoupled weight decay.
    """
    if not uses_own_optimizer(configuration, given):
        name, params = configuration.optimizer_type, configuration.optimizer_params
        kind = None if given is not None else research_optimizer(name)
        return None if kind is None else lambda parameters: kind(parameters, **params)
    if given is None and parameters is None and not configuration.has_optimizer:
        return None
    if isinstance(given, AdamW):
        return given
    if given is None:
        return make_adamw(configuration, rank)
    return _take_over(given, configuration, rank)


def _take_over(given: Any, configuration: Configuration, rank: Callable[[], int]) -> AdamW:
    """Return an AdamW in the place of the caller's. Both share parameter groups, state and hooks from now on."""
    if not _is_adamw(given):
        raise UserError(
            f"fp8.optimizer needs AdamW, but the optimizer given is another ({type(given).__name__})",
            key="fp8.optimizer",
            file=configuration.file,
            remedy='a torch.optim.AdamW (Trainer: optim="adamw_torch"), or a preset with FP32 moments such as "infir2"',
        )
    for group in given.param_groups:
        if (name := _unlike_ours(group)) is not None:
            raise UserError(
                f"{name}={group[name]} does not go with the optimizer state that fp8.optimizer asks for",
                key="fp8.optimizer",
                file=configuration.file,
                remedy=f"{name}={_ONLY[name]} in the optimizer, or exp_avg and exp_avg_sq fp32",
            )
    ours = AdamW(
        [{key: group[key] for key in ("params", *_OWN)} for group in given.param_groups],
        **_state(configuration, rank),
    )
    for mine, theirs in zip(ours.param_groups, given.param_groups, strict=True):
        # What schedulers and the caller keep in groups, such as initial_lr.
        mine.update({key: value for key, value in theirs.items() if key not in mine})

    def share(optimizer: AdamW) -> None:
        # One list for both: schedulers hold the caller's optimizer and write into its groups.
        given.param_groups, given.state = optimizer.param_groups, optimizer.state

    def mark_stepped(*_: Any) -> None:
        # Where torch's schedulers look, before they warn that no step came before theirs.
        given._opt_called = True

    share(ours)
    ours.register_load_state_dict_post_hook(share)  # loading makes new groups
    # One set of hooks for both, too: those that the caller registers later, on either, are called as well.
    for hooks in _HOOKS:
        setattr(ours, hooks, getattr(given, hooks))
    ours.register_step_post_hook(mark_stepped)
    return ours


def _state(configuration: Configuration, rank: Callable[[], int]) -> dict[str, Any]:
    # Ranks with shards draw different numbers. In stage 0 each keeps all of the state: other numbers would let their
    # weights drift apart.
    seed = rank() if configuration.stage else 0
    return {**asdict(configuration.fp8.optimizer.precision()), "seed": seed}


def make_adamw(configuration: Configuration, rank: Callable[[], int]) -> Callable[[Iterable], AdamW]:
    """Return a function of parameters that makes the AdamW that a configuration asks for.

    Raises:
        UserError: Here and not later: the section does not describe Adam with decoupled weight decay.
    """
    name, params = configuration.optimizer_type, configuration.optimizer_params

    def refuse(key: str, problem: str, remedy: str) -> NoReturn:
        raise UserError(problem, key=key, file=configuration.file, remedy=remedy)

    if name not in _ADAM:
        refuse(
            "optimizer.type",
            f"fp8.optimizer needs AdamW, but the optimizer is {name!r}",
            '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        )
    for key, value in params.items():
        if key in _ONLY and value != _ONLY[key]:
            refuse(
                f"optimizer.params.{key}",
                f"{key} {value!r} does not go with the optimizer state that fp8.optimizer asks for",
                f"remove the key, or keep exp_avg and exp_avg_sq fp32 (it is {_ONLY[key]} then)",
            )
        if key not in (*_OWN, *_CHOOSE_AN_IMPLEMENTATION, *_ONLY):
            known = (*_OWN, *_CHOOSE_AN_IMPLEMENTATION, *_ONLY)
            refuse(f"optimizer.params.{key}", f'AdamW has no "{key}"', nearest(key, known))
    # The default is that of the Adam this one takes the place of.
    decay = signature(torch.optim.AdamW).parameters["weight_decay"].default if params.get("torch_adam") else 0.0
    arguments = {"weight_decay": decay} | {key: params[key] for key in _OWN if key in params}
    try:
        # Made once on nothing, so that mistakes show here, with file and key, and not inside DeepSpeed. With a
        # parameter torch would import its compiler, which takes a second.
        with suppress(ValueError):  # an empty list, once all else is accepted
            AdamW([], **arguments)
    except UserError as error:
        raise error.located(configuration.file) from None
    except TypeError as error:
        refuse("optimizer.params", f"the optimizer rejects its params: {error}", "lr, betas, eps and weight_decay")

    def make(parameters: Iterable) -> AdamW:
        return AdamW(parameters, **arguments, **_state(configuration, rank))

    return make
