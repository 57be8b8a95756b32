"""AdamW whose moments, and master weights, may be kept in 8 or 16 bits.

    optimizer = AdamW(model.parameters(), lr=1e-4, exp_avg="e4m3_expanded", exp_avg_sq="e4m3_expanded")

On a GPU one Triton kernel does the whole step of a parameter; elsewhere plain torch does (adamw_step.py). Under ZeRO
the parameters are DeepSpeed's flat FP32 shards, and step() runs once for each: nothing in it looks further.

State of a parameter, in `optimizer.state[p]`:

    step                 FP32 scalar on the CPU, as torch.optim.AdamW keeps it
    exp_avg, exp_avg_sq  a tensor of p's shape (fp32, bf16), otherwise a Moment (codes and scales)
    master               of parameters in BF16 or FP16 only: an FP32 tensor, or a Moment for fp16_scaled

state_dict() holds none of these codes: it gives FP32 moments under Adam's own keys, on the CPU, and load_state_dict()
encodes them again to the same codes. Checkpoints therefore move between this optimizer, torch.optim.AdamW and
DeepSpeed's Adam, and between precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ds_fp8.casts.stochastic import random_key
from ds_fp8.config.errors import UserError
from ds_fp8.config.optimizer_state import AUTO, MOMENTS, StatePrecision
from ds_fp8.optim import checkpoints
from ds_fp8.optim.adamw_step import adamw_step
from ds_fp8.optim.checkpoints import MASTER
from ds_fp8.optim.finite import FiniteCheck
from ds_fp8.optim.hyperparameters import check_hyperparameters
from ds_fp8.optim.moment import Moment
from ds_fp8.optim.state_formats import StateFormats
from ds_fp8.optim.step_numbers import AdamStep


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101) and compressed state.

    Args:
        params: As torch.optim.AdamW takes them, floating point and with dense gradients.
        lr: Learning rate.
        betas: Decay rates of exp_avg and exp_avg_sq.
        eps: Added to the root of exp_avg_sq.
        weight_decay: Relative to lr, as in torch.optim.AdamW.
        exp_avg: How the first moment is stored: "fp32", "bf16", "fp16", "e4m3", "e5m2", "e4m3_expanded" (codecs.py), or
            a format of config.formats, such as "log8", which is emulated: the step is torch's on a GPU too.
        exp_avg_sq: How the second moment is stored; likewise.
        master: "fp32": a parameter in FP32 is its own master, one in BF16 or FP16 gets an FP32 copy. "fp16_scaled":
            masters are FP16 numbers in units of one power of two a tensor. An FP32 parameter holds such numbers in its
            4 bytes from the first step on; a BF16 or FP16 one gets a copy of 2 bytes an element. Steps of less than
            half of FP16's spacing, 1/2048 to 1/4096 of the weight, are lost unless rounding is stochastic. Vectors
            (weights of norms, biases) keep FP32: they lie around 1, where FP16's spacing is many steps wide.
        granularity: Which elements of a moment share a scale: "1x128" or "tensor".
        scale: "fp32" stores the largest of a group all but exactly, so that a moment goes on decaying when gradients
            stay zero. "pow2": rounded to nearest in units of a power of two it gets stuck where a step changes it by
            less than half of E4M3's spacing, which with beta2 above 0.94 is often.
        stochastic_rounding: State that is rounded stochastically (unbiased): some of "exp_avg", "exp_avg_sq" and
            "master", True for all, or "auto" for moments in FP8 and masters in FP16. Those need it: a step changes most
            elements of exp_avg_sq by less than half of E4M3's spacing, which nearest rounding loses, and their steps
            come out too long; exp_avg lags behind gradients that point the same way for a while. Only an exp_avg that
            is expanded does without, being finer.
        seed: Seed of stochastic rounding: the same numbers on the same device, also after a resume.
        check_finite: Skip the step on non-finite gradients, without a host sync; all gradients are read once more.
            `skipped_steps` counts them. DeepSpeed and GradScaler check by themselves.

    Raises:
        UserError: For unknown options, and in step() for sparse gradients and for parameters of other dtypes.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exp_avg: str = "fp32",
        exp_avg_sq: str = "fp32",
        master: str = "fp32",
        granularity: str = "1x128",
        scale: str = "fp32",
        stochastic_rounding: bool | str | Sequence[str] = AUTO,
        seed: int = 0,
        check_finite: bool = True,
    ):
        in_range = {
            "lr": (lr, lr >= 0),
            "betas": (betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
            "eps": (eps, eps >= 0),
            "weight_decay": (weight_decay, weight_decay >= 0),
        }
        check_hyperparameters(in_range, "lr, eps and weight_decay at least 0, betas two numbers from 0 up to but not 1")
        named = not isinstance(stochastic_rounding, bool | str)
        at_random = tuple(stochastic_rounding) if named else stochastic_rounding
        self.precision = StatePrecision(exp_avg, exp_avg_sq, master, granularity, scale, at_random, seed)
        self.compact = False
        """True if state_dict() holds codes and scales as they are, readable by this optimizer alone."""
        # DeepSpeed and GradScaler check before the step; as a plain torch optimizer this class has to do so itself.
        self._finite = FiniteCheck() if check_finite else None
        self._formats = StateFormats(self.precision)
        # Keyed by tensor: torch's tensors hash by identity, and the optimizer keeps them alive.
        self._streams: dict[torch.Tensor, int] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        own = ("precision", "compact", "_finite", "_formats", "_streams")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch.optim.Optimizer does."""
        super().add_param_group(param_group)
        # Separate random numbers for each parameter, by its position: the same after a resume.
        for p in self.param_groups[-1]["params"]:
            self._streams.setdefault(p, len(self._streams))

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps skipped because gradients were not finite."""
        return self._finite.resolve() if self._finite else 0

    def state_bytes(self) -> int:
        """Return the memory of all moments and separate master weights."""
        return sum(
            value.nbytes for state in self.state.values() for key, value in state.items() if key in (*MOMENTS, MASTER)
        )

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        work: Iterable[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] | None = None,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> Any:
        """Take one step over all parameters that have gradients, or over those of `work`.

        Args:
            closure: called first, with gradients enabled.
            work: (param group, parameter, gradient of its number of elements in any floating point dtype), where
                gradients lie elsewhere than in `p.grad`; the host then waits for nothing.
            factor: with `work`: FP32 with one element on the parameters' device, multiplied into every gradient as it
                is read.
            skip: with `work`: int32 with one element there; not zero leaves all parameters and moments as they are.
                The steps count nevertheless: call `take_back` once the host knows.

        Returns:
            What `closure` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if work is not None:
            for group, p, gradient in work:
                self._advance(p, gradient, self._state_of(p), group, skip, factor)
            return loss
        with_gradients = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p in with_gradients:
            _check_gradient(p)
        # All states before the first step of any: making one may fail, and then nothing has been changed.
        states = [self._state_of(p) for _, p in with_gradients]
        skips = None
        if self._finite is not None and any(p.numel() for _, p in with_gradients):
            self._finite.resolve()
            # A tensor per device that the kernels read. True: the gradients are on a CPU, where the answer is known at
            # once.
            skips = self._finite.begin([p.grad for _, p in with_gradients if p.numel()], states)
            if skips is True:
                return loss
        for (group, p), state in zip(with_gradients, states, strict=True):
            self._advance(p, p.grad, state, group, None if skips is None else skips[p.device])
        return loss

    def take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Decrement the step counts of `parameters`, whose last step `skip` turned off."""
        for p in parameters:
            self.state[p]["step"] = self.state[p]["step"] - 1

    def _advance(
        self,
        p: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        skip: torch.Tensor | None,
        factor: torch.Tensor | None = None,
    ) -> None:
        # A new tensor: DeepSpeed's universal checkpoints give several parameters one and the same.
        state["step"] = state["step"] + 1
        if not p.numel():
            return
        beta1, beta2 = group["betas"]
        # `step` lies on the CPU, so that bias corrections are computed there without waiting for the device.
        number = state["step"].item()
        step = AdamStep(number, float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
        seed, at_random = None, self.precision.stochastic_parts
        if at_random:
            seed = random_key(self.precision.seed, self._streams[p], int(number))
        # A copy where p is not contiguous; it is written back below.
        parameter = p.detach().contiguous().view(-1)
        master, options = parameter, {}
        if MASTER in state:
            master, options = _flat(state[MASTER]), {"low": parameter}
        elif self._formats.has_scaled_master(p):
            options = {"fp16_masters": self._formats.layout(p, "tensor", "pow2"), "exact": self._formats.vectors(p)}
        moments = [_flat(state[key]) for key in MOMENTS]
        arguments = (master, gradient.detach().contiguous().view(-1), *moments, step)
        options = {**options, "skip": skip, "factor": factor, "seed": seed, "stochastic": at_random}
        # Triton launches on the current device.
        with torch.cuda.device(p.device) if p.is_cuda else nullcontext():
            adamw_step(*arguments, **options)
        if not p.is_contiguous():
            p.copy_(parameter.view(p.shape))

    def _state_of(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the state of p in the form that step() works on; made if there is none."""
        state = self.state[p]
        self._streams.setdefault(p, len(self._streams))
        self._formats.complete(p, state)
        return state

    def set_segments(self, p: torch.Tensor, sizes: Sequence[int], vectors: Sequence[int] = ()) -> None:
        """Register the tensors that the flat parameter p is made of, each with a separate scale.

        Args:
            p: A parameter of this optimizer.
            sizes: Elements of the tensors, in order; their sum is p.numel().
            vectors: Indices of those that are vectors, not flattened matrices: their masters stay FP32.

        Raises:
            ValueError: Some of the masters of a 16-bit parameter were to be FP16 and some not: they are one state.
        """
        self._formats.set_segments(p, sizes, vectors)
        for key, value in self.state.get(p, {}).items():
            # Groups of 128 do not depend on the segments; scales by tensor do, and are found again.
            if key == MASTER or (isinstance(value, Moment) and value.layout.granularity == "tensor"):
                self.state[p][key] = self._formats.encoded(p, key, value)

    def expand_moments(self) -> None:
        """Turn compressed moments into FP32 tensors that may be written to; the next step compresses them again."""
        for p, state in self.state.items():
            for key in MOMENTS:
                if isinstance(state.get(key), Moment):
                    state[key] = state[key].decode().view(p.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch.optim.AdamW: FP32 moments under `exp_avg` and `exp_avg_sq`.

        Compressed moments come decoded, on the CPU. Those in e4m3_expanded have their exponents beside them
        (`exp_avg_exponent`, uint8), which others ignore: with them the same codes are found again, without them ones as
        good.
        """
        if self._finite:
            self._finite.resolve()
        result = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [index for group in result["param_groups"] for index in group["params"]]
        result["state"] = {
            index: checkpoints.exported(result["state"][index], p.shape, self.compact)
            for index, p in zip(numbers, parameters, strict=True)
            if index in result["state"]
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer in any precision, of torch.optim.AdamW or of DeepSpeed's Adam.

        The precision stays this optimizer's own.

        Args:
            state_dict: As one of them returned it.

        Raises:
            UserError: For a checkpoint of something else.
        """
        checkpoints.check(state_dict)
        # torch would cast every state to the parameter's dtype, and cannot cast a Moment.
        super().load_state_dict({**state_dict, "state": {}})
        self._finite = FiniteCheck() if self._finite else None
        saved_groups = state_dict["param_groups"]
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group["betas"] = tuple(group["betas"])
            for p, index in zip(group["params"], saved_group["params"], strict=True):
                self._streams.setdefault(p, len(self._streams))
                if index in state_dict["state"]:
                    step = group.get("step", 0.0)  # where DeepSpeed's FusedAdam counts
                    saved = checkpoints.imported({"step": step, **state_dict["state"][index]}, p)
                    self.state[p] = {"step": saved.step} | {
                        key: self._formats.encoded(p, key, *numbers) for key, numbers in saved.numbers.items()
                    }


def _flat(state: torch.Tensor | Moment) -> torch.Tensor | Moment:
    return state if isinstance(state, Moment) else state.view(-1)


def _check_gradient(p: torch.Tensor) -> None:
    if p.grad.layout is not torch.strided:
        raise UserError("a gradient is sparse, and moments are dense", remedy="torch.nn.Embedding(..., sparse=False)")
    if not p.is_floating_point():
        raise UserError(f"a parameter is {p.dtype}", remedy="optimise floating point parameters only")
