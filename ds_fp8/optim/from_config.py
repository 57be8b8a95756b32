"""The optimizer that a DeepSpeed configuration asks for, where it is not DeepSpeed's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ds_fp8.config import FP8Config, section_of
from ds_fp8.errors import UserError
from ds_fp8.optim.adamw import AdamW
from ds_fp8.schema import nearest

_OWN = ("lr", "betas", "eps", "weight_decay")
_CHOOSE_AN_IMPLEMENTATION = ("torch_adam", "foreach", "fused", "capturable", "fp32_optimizer_states", "set_grad_none")
_ONLY = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False, "differentiable": False}
"""What DeepSpeed and torch offer more of: the one value that this optimizer has."""


def uses_own_optimizer(fp8: FP8Config) -> bool:
    """Whether ds_fp8.optim.AdamW takes the place of DeepSpeed's Adam."""
    return fp8.enabled and (fp8.optimizer.precision().compressed or fp8.optimizer.implementation == "ds_fp8")


def make_adamw(
    raw: Mapping[str, Any], fp8: FP8Config, file: str | os.PathLike | None, rank: Callable[[], int]
) -> Callable[[Iterable], AdamW]:
    """A function of parameters that makes the AdamW of `raw`'s "optimizer" section, with the state of `fp8`.

    rank: asked when the optimizer is made; ranks draw different random numbers. Raises UserError, here and not later,
    for a section that does not describe Adam with decoupled weight decay.
    """
    section = section_of(raw, "optimizer")
    name, params = section.get("type"), dict(section_of(section, "params"))

    def refuse(key: str, problem: str, remedy: str) -> None:
        raise UserError(problem, key=key, file=file, remedy=remedy)

    if str(name).lower() not in ("adam", "adamw"):
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
    precision = asdict(fp8.optimizer.precision())
    try:
        AdamW([torch.nn.Parameter(torch.zeros(1))], **arguments)
    except UserError as error:
        raise error.located(file) from None
    except TypeError as error:
        refuse("optimizer.params", f"the optimizer refuses its params: {error}", "lr, betas, eps and weight_decay")

    def make(parameters: Iterable) -> AdamW:
        # DeepSpeed itself leaves out steps with gradients that are not finite.
        return AdamW(parameters, **arguments, **{**precision, "seed": precision["seed"] + rank()}, check_finite=False)

    return make
