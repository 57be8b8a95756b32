"""AdamW's state in checkpoints, written and read: the state of one parameter as plain tensors.

    step                 FP32 scalar on the CPU
    exp_avg, exp_avg_sq  FP32, of the parameter's shape: torch.optim.AdamW's keys, decoded
    exp_avg_exponent     uint8 [groups], of moments in e4m3_expanded: with it the same codes are found again
    master               of parameters in BF16 or FP16: FP32

A compact checkpoint holds each Moment as the dict of its codes and scales instead (Moment.packed).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.optimizer_state import MOMENTS
from ds_fp8.optim.moment import Moment

MASTER = "master"
_NOT_OF_ADAM = "the checkpoint is not of an Adam optimizer"
_WITHOUT = "start without the optimizer's state"


class SavedState(NamedTuple):
    """The state of one parameter, read from a checkpoint."""

    step: torch.Tensor
    numbers: dict[str, tuple[torch.Tensor, torch.Tensor | None]]
    """By key: FP32 numbers [numel], and the exponents they were decoded with where these are known."""


def exported(state: dict[str, Any], shape: torch.Size, compact: bool) -> dict[str, Any]:
    """Return the state of a parameter of this shape as a checkpoint holds it; compressed moments come to the CPU."""
    result = {}
    for key, value in state.items():
        if not isinstance(value, Moment):
            result[key] = value.float() if key in MOMENTS else value
        elif compact:
            result[key] = value.packed()
        else:
            result[key] = value.decode("cpu").view(shape)
            if value.exponent is not None:
                result[f"{key}_exponent"] = value.exponent.cpu()
    return result


def check(state_dict: dict[str, Any]) -> None:
    """Raise UserError for the state dict of another optimizer."""
    if any("betas" not in group for group in state_dict["param_groups"]):
        raise UserError(_NOT_OF_ADAM, remedy=_WITHOUT)
    if any(group.get("amsgrad") for group in state_dict["param_groups"]):
        raise UserError(
            "the checkpoint is of AMSGrad, whose state this optimizer does not have",
            key="optimizer.params.amsgrad",
            remedy=_WITHOUT,
        )


def imported(saved: dict[str, Any], p: torch.Tensor) -> SavedState:
    """Return the state of the parameter p in a checkpoint.

    Raises:
        UserError: It is incomplete or does not fit.
    """
    numbers = {}
    for key in MOMENTS if p.dtype is torch.float32 or MASTER not in saved else (*MOMENTS, MASTER):
        if key not in saved:
            raise UserError(f"{_NOT_OF_ADAM}: it has no {key}", remedy=_WITHOUT)
        value, exponent = saved[key], saved.get(f"{key}_exponent")
        if isinstance(value, dict):
            # Decoded and encoded again by the caller, whose precision may be another; with the exponents the codes stay
            # the same.
            value, exponent = Moment.unpacked(value).decode(), value.get("exponent")
        if value.numel() != p.numel():
            raise UserError(
                f"the checkpoint has {value.numel()} elements of {key} for a parameter of {p.numel()}",
                remedy="load it into the model, and the number of ranks, that wrote it",
            )
        numbers[key] = value, exponent
    return SavedState(torch.tensor(float(saved["step"])), numbers)
