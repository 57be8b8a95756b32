"""AdamW whose moments may be kept in 8 or 16 bits.

    optimizer = AdamW(model.parameters(), lr=1e-4, exp_avg="e4m3_expanded", exp_avg_sq="e4m3_expanded")

On a GPU one Triton kernel does the whole step of a parameter; elsewhere plain torch does (adamw_step.py). Under ZeRO
the parameters are DeepSpeed's flat FP32 shards, and step() runs once for each: nothing in it looks further.

State of a parameter, in `optimizer.state[p]`:

    step                 FP32 scalar on the CPU, as torch.optim.AdamW keeps it
    exp_avg, exp_avg_sq  a tensor of p's shape (fp32, bf16), otherwise a Moment (codes and scales)
    master               of parameters in BF16 or FP16 only: an FP32 tensor

state_dict() holds none of these codes: it gives FP32 moments under Adam's own keys, on the CPU, and load_state_dict()
encodes them again to the same codes. Checkpoints therefore move between this optimizer, torch.optim.AdamW and
DeepSpeed's Adam, and between precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ds_fp8.casts.stochastic import random_key
from ds_fp8.config.errors import UserError
from ds_fp8.config.optimizer_state import AUTO, MOMENTS, StatePrecision
from ds_fp8.optim import checkpoints
from ds_fp8.optim.adamw_step import AdamStep, adamw_step_reference
from ds_fp8.optim.checkpoints import MASTER
from ds_fp8.optim.codecs import CODECS
from ds_fp8.optim.moment import Layout, Moment, is_kept_as


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
        granularity: Which elements of a moment share a scale: "1x128" or "tensor".
        scale: "fp32" stores the largest of a group all but exactly, so that a moment goes on decaying when gradients
            stay zero. "pow2": rounded to nearest in units of a power of two it gets stuck where a step changes it by
            less than half of E4M3's spacing, which with beta2 above 0.94 is often.
        stochastic_rounding: Moments that are rounded stochastically (unbiased): some of "exp_avg" and "exp_avg_sq",
            True for both, or "auto" for those in FP8. Those need it: a step changes most elements of exp_avg_sq by less
            than half of E4M3's spacing, which nearest rounding loses, and their steps come out too long; exp_avg lags
            behind gradients that point the same way for a while. Only an expanded exp_avg, being finer, does without.
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
        self.precision = StatePrecision(exp_avg, exp_avg_sq, granularity, scale, at_random, seed)
        self.compact = False
        """True if state_dict() holds codes and scales as they are, readable by this optimizer alone."""
        # DeepSpeed and GradScaler check before the step; as a plain torch optimizer this class has to do so itself.
        self._finite = _FiniteCheck() if check_finite else None
        self._segments: dict[torch.Tensor, tuple[int, ...]] = {}
        # Keyed by tensor: torch's tensors hash by identity, and the optimizer keeps them alive.
        self._streams: dict[torch.Tensor, int] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        own = ("precision", "compact", "_finite", "_segments", "_streams")
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
        master, low = (_flat(state[MASTER]), parameter) if MASTER in state else (parameter, None)
        moments = [_flat(state[key]) for key in MOMENTS]
        arguments = (master, gradient.detach().contiguous().view(-1), *moments, step)
        options = {"low": low, "skip": skip, "factor": factor, "seed": seed, "stochastic": at_random}
        # Triton launches on the current device.
        with torch.cuda.device(p.device) if p.is_cuda else nullcontext():
            _step_on(p.device, moments)(*arguments, **options)
        if not p.is_contiguous():
            p.copy_(parameter.view(p.shape))

    def _state_of(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the state of p in the form that step() works on; made if there is none."""
        state = self.state[p]
        self._streams.setdefault(p, len(self._streams))
        # Loading may leave it as a number or move it; on the GPU every step would wait for it.
        if not isinstance(state.get("step"), torch.Tensor) or state["step"].device.type != "cpu":
            state["step"] = torch.tensor(float(state.get("step", 0.0)))
        for key in MOMENTS:
            if not is_kept_as(state.get(key), getattr(self.precision, key), p.device):
                state[key] = self._encoded(p, key, state.get(key))
        # The first master is the parameter itself; from then on the parameter is its copy.
        if p.dtype is not torch.float32 and state.get(MASTER) is None:
            state[MASTER] = self._encoded(p, MASTER, p.detach().float())
        return state

    def _encoded(
        self, p: torch.Tensor, key: str, numbers: torch.Tensor | Moment | None, exponent: torch.Tensor | None = None
    ) -> torch.Tensor | Moment:
        """Return the state `key` of p as it is kept, from its numbers in any form; zeros from None."""
        codec = CODECS["fp32" if key == MASTER else getattr(self.precision, key)]
        if isinstance(numbers, Moment):
            numbers, exponent = numbers.decode(), numbers.exponent
        if codec.max is None:
            if numbers is None:
                return torch.zeros(p.shape, dtype=codec.dtype, device=p.device)
            return numbers.detach().to(p.device, codec.dtype, copy=True).reshape(p.shape).contiguous()
        granularity, scale = self.precision.granularity, self.precision.scale
        segments = self._segments.get(p, ()) if granularity == "tensor" else ()
        layout = Layout(p.numel(), granularity, scale, segments)
        moment = Moment(codec, layout, p.device, never_zero=key == "exp_avg_sq")
        if numbers is not None:
            moment.encode(numbers, exponent)
        return moment

    def set_segments(self, p: torch.Tensor, sizes: Sequence[int]) -> None:
        """Register the sizes of the tensors that the flat parameter p is made of, each with a separate scale."""
        self._segments[p] = tuple(sizes)
        for key, value in self.state.get(p, {}).items():
            # Groups of 128 do not depend on the segments; scales by tensor do, and are found again.
            if isinstance(value, Moment) and value.layout.granularity == "tensor":
                self.state[p][key] = self._encoded(p, key, value)

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
        self._finite = _FiniteCheck() if self._finite else None
        saved_groups = state_dict["param_groups"]
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group["betas"] = tuple(group["betas"])
            for p, index in zip(group["params"], saved_group["params"], strict=True):
                self._streams.setdefault(p, len(self._streams))
                if index in state_dict["state"]:
                    step = group.get("step", 0.0)  # where DeepSpeed's FusedAdam counts
                    saved = checkpoints.imported({"step": step, **state_dict["state"][index]}, p)
                    self.state[p] = {"step": saved.step} | {
                        key: self._encoded(p, key, *numbers) for key, numbers in saved.numbers.items()
                    }


def _step_on(device: torch.device, moments: Sequence[torch.Tensor | Moment]) -> Callable[..., None]:
    """Return the function that steps there: the kernel, unless a moment's format is emulated by torch."""
    if device.type != "cuda" or any(isinstance(moment, Moment) and moment.codec.emulated for moment in moments):
        return adamw_step_reference
    from ds_fp8.optim import adamw_step_triton

    return adamw_step_triton.adamw_step


def _flat(state: torch.Tensor | Moment) -> torch.Tensor | Moment:
    return state if isinstance(state, Moment) else state.view(-1)


def _check_gradient(p: torch.Tensor) -> None:
    if p.grad.layout is not torch.strided:
        raise UserError("a gradient is sparse, and moments are dense", remedy="torch.nn.Embedding(..., sparse=False)")
    if not p.is_floating_point():
        raise UserError(f"a parameter is {p.dtype}", remedy="optimise floating point parameters only")


def check_hyperparameters(values: Mapping[str, tuple[Any, bool]], remedy: str) -> None:
    """Raise UserError for the first value that is out of range.

    Args:
        values: by name the value and whether it is in range.
        remedy: the ranges of all of them.
    """
    for name, (value, in_range) in values.items():
        if not in_range:
            raise UserError(f"{name} {value!r} is out of range", key=f"optimizer.params.{name}", remedy=remedy)


class _FiniteCheck:
    """Checks all gradients before a step, and counts the steps skipped.

    On a GPU the verdict stays a flag in device memory, which the kernel reads and obeys. The host counts the step as
    done, starts a copy of the flag, and takes the count back when it next looks, a whole step later.
    """

    def __init__(self) -> None:
        self._skipped = 0
        self._pending: tuple[torch.cuda.Event, torch.Tensor, list[dict[str, Any]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_skipped": self.resolve(), "_pending": None}

    def begin(
        self, gradients: list[torch.Tensor], states: list[dict[str, Any]]
    ) -> dict[torch.device, torch.Tensor] | bool | None:
        """Return whether to skip the step of `states`.

        Returns:
            True to skip it, None to take it; otherwise by device a flag that is not zero if it is to be skipped.
        """
        # The largest magnitude: NaN and Inf carry through it, and no sum can overflow.
        norm = torch.nn.utils.get_total_norm(gradients, norm_type=torch.inf)
        flag = norm.isfinite().logical_not().to(torch.int32)
        devices = {gradient.device for gradient in gradients}
        if not all(device.type == "cuda" for device in devices):
            self._skipped += int(flag.item())
            return bool(flag.item()) or None
        # Pinned: from pageable memory the copy would make the host wait.
        host = torch.empty((), dtype=torch.int32, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(flag.device))
        self._pending = (copied, host, states)
        return {device: flag.to(device) for device in devices}

    def resolve(self) -> int:
        """Take back the count of the last step if it was left out; returns how many steps were so far."""
        if self._pending is not None:
            copied, host, states = self._pending
            self._pending = None
            # A step later the copy has long been done.
            copied.synchronize()
            if host.item():
                self._skipped += 1
                for state in states:
                    state["step"] = state["step"] - 1
        return self._skipped
