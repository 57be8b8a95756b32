"""The optimizer that the "fp8" section asks for, from DeepSpeed's "optimizer" section or the caller's own AdamW."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ds_fp8.config.errors import UserError, refusal_in
from ds_fp8.config.fp8 import FP8Config, section_of
from ds_fp8.config.schema import nearest
from ds_fp8.optim.adamw import AdamW
from ds_fp8.optim.madam import Madam

_ADAM = ("adam", "adamw")
_OWN = ("lr", "betas", "eps", "weight_decay")
_CHOOSE_AN_IMPLEMENTATION = ("torch_adam", "foreach", "fused", "capturable", "fp32_optimizer_states", "set_grad_none")
_ONLY = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False, "differentiable": False}
"""What DeepSpeed and torch offer more of: the one value that this optimizer has."""


def uses_own_optimizer(raw: Mapping[str, Any], fp8: FP8Config, given: Any = None) -> bool:
    """Return whether ds_fp8.optim.AdamW takes the place of the optimizer of `raw`, or of the caller's, `given`.

    It must where state is compressed or the configuration asks for it. It does wherever it computes the same under
    ZeRO-3 on the device, for it is what the step of zero/step.py needs.
    """
    if not fp8.enabled or needs_own_optimizer(fp8):
        return fp8.enabled
    zero = section_of(raw, "zero_optimization")
    if zero.get("stage") != 3 or section_of(zero, "offload_optimizer").get("device", "none") not in ("none", None):
        return False
    if given is not None:
        return isinstance(given, AdamW) or (_is_adamw(given) and not any(map(_unlike_ours, given.param_groups)))
    section = section_of(raw, "optimizer")
    params = section_of(section, "params")
    known = set(params) <= {*_OWN, *_CHOOSE_AN_IMPLEMENTATION, *_ONLY}
    return str(section.get("type")).lower() in _ADAM and known and not _unlike_ours(params)


def needs_own_optimizer(fp8: FP8Config) -> bool:
    """Return whether only ds_fp8.optim.AdamW does what this section asks for."""
    return fp8.enabled and (fp8.optimizer.precision().compressed or fp8.optimizer.implementation == "ds_fp8")


def _is_adamw(optimizer: Any) -> bool:
    """Return whether this is an AdamW of torch or of DeepSpeed."""
    deepspeeds = type(optimizer).__name__ in ("FusedAdam", "DeepSpeedCPUAdam") and getattr(optimizer, "adam_w_mode", 0)
    return type(optimizer) is torch.optim.AdamW or bool(deepspeeds)


def _unlike_ours(params: Mapping[str, Any]) -> str | None:
    """Return the first of Adam's options here that this optimizer does not have, or None."""
    return next((name for name, only in _ONLY.items() if params.get(name, only) not in (only, None)), None)


def choose_optimizer(
    raw: dict[str, Any],
    fp8: FP8Config,
    file: str | os.PathLike | None,
    given: Any,
    parameters: Any,
    rank: Callable[[], int],
) -> AdamW | Callable[[Iterable], AdamW] | None:
    """Return the optimizer to hand to deepspeed.initialize so that its state is as `fp8` says.

    Args:
        raw: The DeepSpeed configuration; changed so that DeepSpeed accepts the result.
        fp8: Its "fp8" section, which asks for this package's optimizer (`uses_own_optimizer`).
        file: The file that `raw` comes from, for errors.
        given: The caller's optimizer: None, a ds_fp8.optim.AdamW, or another AdamW, which is taken over.
        parameters: The caller's `model_parameters`.
        rank: Asked when the optimizer is made; ranks draw different random numbers.

    Returns:
        An optimizer; a function of parameters that makes one; None for an engine without one, such as a reference
        model's.

    Raises:
        UserError: the given optimizer, or the "optimizer" section, is not Adam with decoupled weight decay.
    """
    if given is None and parameters is None and not section_of(raw, "optimizer"):
        return None
    if isinstance(given, AdamW):
        given.precision.check_flattened()
        chosen = given
    elif given is None:
        chosen = make_adamw(raw, fp8, file, rank)
    else:
        chosen = _take_over(given, fp8, file, rank)
    # DeepSpeed asks these before it accepts an optimizer that it does not know.
    raw["zero_allow_untested_optimizer"] = True
    raw["zero_force_ds_cpu_optimizer"] = False
    return chosen


def is_madam(raw: Mapping[str, Any]) -> bool:
    """Return whether the "optimizer" section asks for ds_fp8.optim.Madam, which DeepSpeed does not know."""
    return str(section_of(raw, "optimizer").get("type")).lower() == "madam"


def choose_madam(raw: dict[str, Any]) -> Callable[[Iterable], Madam]:
    """Return deepspeed.initialize's optimizer for a section of Madam; `raw` is changed so that it is accepted."""
    params = dict(section_of(section_of(raw, "optimizer"), "params"))
    raw["zero_allow_untested_optimizer"] = True
    raw["zero_force_ds_cpu_optimizer"] = False
    return lambda parameters: Madam(parameters, **params)


def _take_over(given: Any, fp8: FP8Config, file: str | os.PathLike | None, rank: Callable[[], int]) -> AdamW:
    """Return an AdamW in the place of the caller's, with the same parameter groups.

    Both share the groups from now on, so that a learning-rate scheduler bound to the one moves the other.
    """
    if not _is_adamw(given):
        raise UserError(
            f"fp8.optimizer keeps the state of AdamW, and the optimizer given is another ({type(given).__name__})",
            key="fp8.optimizer",
            file=file,
            remedy='a torch.optim.AdamW (Trainer: optim="adamw_torch"), or a preset with FP32 moments such as "infir2"',
        )
    for group in given.param_groups:
        if (name := _unlike_ours(group)) is not None:
            raise UserError(
                f"{name}={group[name]} does not go with the optimizer state that fp8.optimizer asks for",
                key="fp8.optimizer",
                file=file,
                remedy=f"{name}={_ONLY[name]} in the optimizer, or exp_avg, exp_avg_sq and master fp32",
            )
    ours = AdamW([{key: group[key] for key in ("params", *_OWN)} for group in given.param_groups], **_state(fp8, rank))
    for mine, theirs in zip(ours.param_groups, given.param_groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key not in mine})

    def share_groups(optimizer: AdamW) -> None:
        given.param_groups = optimizer.param_groups

    share_groups(ours)
    ours.register_load_state_dict_post_hook(share_groups)  # loading makes new groups
    return ours


def _state(fp8: FP8Config, rank: Callable[[], int]) -> dict[str, Any]:
    """Return AdamW's arguments for the state that `fp8` asks for."""
    precision = asdict(fp8.optimizer.precision())
    # DeepSpeed itself leaves out steps with gradients that are not finite.
    return {**precision, "seed": precision["seed"] + rank(), "check_finite": False}


def make_adamw(
    raw: Mapping[str, Any], fp8: FP8Config, file: str | os.PathLike | None, rank: Callable[[], int]
) -> Callable[[Iterable], AdamW]:
    """Return a function of parameters that makes the AdamW that a configuration asks for.

    Args:
        raw: DeepSpeed's configuration, whose "optimizer" section is read.
        fp8: Says in what formats the state is kept.
        file: File of the configuration, for errors.
        rank: Asked for this process's rank when the optimizer is made; ranks draw different random numbers.

    Raises:
        UserError: Here and not later: the section does not describe Adam with decoupled weight decay.
    """
    section = section_of(raw, "optimizer")
    name, params = section.get("type"), dict(section_of(section, "params"))
    refuse = refusal_in(file)

    if str(name).lower() not in _ADAM:
        refuse(
            "optimizer.type",
            f"fp8.optimizer keeps the state of AdamW, and the optimizer is {name!r}",
            '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        )
    for key, value in params.items():
        if key in _ONLY and value != _ONLY[key]:
            refuse(
                f"optimizer.params.{key}",
                f"{key} {value!r} does not go with the optimizer state that fp8.optimizer asks for",
                f"remove the key, or keep exp_avg, exp_avg_sq and master fp32 (it is {_ONLY[key]} then)",
            )
        if key not in (*_OWN, *_CHOOSE_AN_IMPLEMENTATION, *_ONLY):
            known = (*_OWN, *_CHOOSE_AN_IMPLEMENTATION, *_ONLY)
            refuse(f"optimizer.params.{key}", f'AdamW has no "{key}"', nearest(key, known))
    # The default is that of the Adam this one takes the place of.
    decay = torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"] if params.get("torch_adam") else 0.0
    arguments = {"weight_decay": decay} | {key: params[key] for key in _OWN if key in params}
    try:
        AdamW([torch.nn.Parameter(torch.zeros(1))], **arguments)
    except UserError as error:
        raise error.located(file) from None
    except TypeError as error:
        refuse("optimizer.params", f"the optimizer refuses its params: {error}", "lr, betas, eps and weight_decay")

    def make(parameters: Iterable) -> AdamW:
        return AdamW(parameters, **arguments, **_state(fp8, rank))

    return make
