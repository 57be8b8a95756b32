"""Madam: weights are multiplied, not added to, and live on the grid of a logarithmic number system.

    w = s · 2^e                                     s = ±1 never changes
    v ← β v + (1 - β) g²                            v̂ = v / (1 - β^t)
    e ← e - lr · (s · clamp(g / √v̂, ±bound) + weight_decay)
    e ← round(steps · e) / steps                    at least log2(smallest)

Madam is of Bernstein et al. (arXiv 2006.14560), its form in exponents of base 2, with lr = 1/128, of LNS-Madam (Zhao et
al., arXiv 2106.13914). There weights are kept in 16 bits, 8 · 2^8 = 2048 steps an octave, and products read them in 8
bits, 8 steps an octave: here linear.weight and param_gather in the format "log8". The magnitudes that the paper bounds
by three times their root mean square at the start are not bounded here: a shard does not know it.

A weight of zero, as biases begin, has no exponent: it gets the smallest magnitude and the sign that its first gradient
asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ds_fp8.config.errors import UserError
from ds_fp8.optim.adamw import check_hyperparameters


class Madam(torch.optim.Optimizer):
    """Multiplicative updates of FP32 weights, which afterwards are numbers ±2^(k / steps).

    lr and weight_decay are octaves (of lr) in a step, bound is the largest gradient in units of the root of exp_avg_sq,
    smallest the least magnitude of a weight. State: exp_avg_sq, and mass, FP32 [], what bias correction divides by.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1 / 128,
        beta: float = 0.999,
        eps: float = 1e-15,
        bound: float = 10.0,
        weight_decay: float = 0.0,
        steps: int = 2048,
        smallest: float = 2.0**-20,
    ):
        in_range = {
            "lr": (lr, lr >= 0),
            "beta": (beta, 0 <= beta < 1),
            "eps": (eps, eps >= 0),
            "bound": (bound, bound > 0),
            "weight_decay": (weight_decay, weight_decay >= 0),
            "steps": (steps, isinstance(steps, int) and steps > 0 and steps & (steps - 1) == 0),
            "smallest": (smallest, 2.0**-126 <= smallest < 1),
        }
        remedy = (
            "beta from 0 up to but not 1, steps a power of two, smallest from 2^-126 up to but not 1, bound above 0, "
            "the others at least 0"
        )
        check_hyperparameters(in_range, remedy)
        options = {"beta": beta, "eps": eps, "bound": bound, "weight_decay": weight_decay, "steps": steps}
        super().__init__(params, {"lr": lr, **options, "smallest": smallest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dtype is not torch.float32:
                    raise UserError(f"a parameter is {p.dtype}", remedy="FP32 weights, as ZeRO's masters are")
                state = self.state[p]
                if not state:
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["mass"] = torch.zeros((), device=p.device)
                madam_step(p, p.grad.float(), state["exp_avg_sq"], state["mass"], group)
        return loss


def madam_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    mass: torch.Tensor,
    options: dict[str, Any],
) -> None:
    beta, lowest = options["beta"], math.log2(options["smallest"])
    exp_avg_sq.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
    # Steps count from the first gradient that is not zero: DeepSpeed takes one without gradients to make the state. On
    # the device: the host does not wait to learn whether all gradients were zero.
    begun = (mass > 0) | gradient.any()
    # 1 - beta^t of the steps that count, without their number.
    mass.mul_(beta).add_((1 - beta) * begun)
    root = (exp_avg_sq / mass.clamp_min(torch.finfo(torch.float32).tiny)).sqrt_().add_(options["eps"])
    normed = (gradient / root.clamp_min(torch.finfo(torch.float32).tiny)).clamp_(-options["bound"], options["bound"])
    sign = torch.where(weight == 0, -gradient.sign(), weight.sign())
    exponent = weight.abs().clamp_min(options["smallest"]).log2()
    exponent -= options["lr"] * (sign * normed + options["weight_decay"])
    # The number of steps is a power of two, so that the division is exact.
    exponent.mul_(options["steps"]).round_().div_(options["steps"])
    moved = sign * exponent.clamp_min_(lowest).exp2_()
    weight.copy_(torch.where(begun, moved, weight))
