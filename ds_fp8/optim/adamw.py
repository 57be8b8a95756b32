"""AdamW whose moments, and master weights, may be kept in 8 or 16 bits.

    optimizer = AdamW(model.parameters(), lr=1e-4, exp_avg="e4m3_expanded", exp_avg_sq="e4m3_expanded")

On a GPU one Triton kernel does the whole step of a parameter; elsewhere plain torch does (reference.py). Under ZeRO
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
from typing import Any

import torch

from ds_fp8.errors import UserError
from ds_fp8.optim import checkpoints, reference
from ds_fp8.optim.checkpoints import MASTER
from ds_fp8.optim.codecs import CODECS
from ds_fp8.optim.finite import FiniteCheck
from ds_fp8.optim.moment import Layout, Moment, is_kept_as
from ds_fp8.optim.reference import AdamStep
from ds_fp8.state_precision import AUTO, MOMENTS, StatePrecision


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101) and compressed state.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW takes them. The rest says how state is kept:

    exp_avg, exp_avg_sq: `fp32`, `bf16`, `fp16`, `e4m3`, `e5m2` or `e4m3_expanded` (codecs.py).
    master: `fp32`: a parameter in FP32 is its own master, one in BF16 or FP16 gets an FP32 copy. `fp16_scaled`: master
        weights are FP16 numbers in units of one power of two a tensor. An FP32 parameter holds such numbers in its 4
        bytes from the first step on; a BF16 or FP16 one gets a copy of 2 bytes an element. Steps of less than half of
        FP16's spacing, 1/2048 to 1/4096 of the weight, are lost to rounding unless it is stochastic. Vectors (weights
        of norms, biases) keep FP32: they lie around 1, where FP16's spacing is many steps wide, and are next to nothing
        in memory.
    granularity: `1x128` or `tensor`; scale: `fp32` or `pow2`. With `fp32` the largest of a group is stored all but
        exactly, so that a moment goes on decaying when gradients stay zero. Rounded to nearest in units of a power of
        two it gets stuck where a step changes it by less than half of E4M3's spacing, which with beta2 above 0.94 is
        often.
    stochastic_rounding: what is rounded up or down at random, right on average: some of `exp_avg`, `exp_avg_sq` and
        `master`, True for all, or `auto` for moments in FP8 and masters in FP16. Those need it: a step changes most
        elements of exp_avg_sq by less than half of E4M3's spacing, which nearest rounding loses, and their steps come
        out too long; exp_avg lags behind gradients that point the same way for a while. Only an exp_avg that is
        expanded does without, being finer. The same seed draws the same numbers on the same device, also after a
        resume.
    check_finite: leave a step out, whole, when any gradient holds Inf or NaN (it reads all gradients once more, and
        makes the host wait for nothing). `skipped_steps` counts them. DeepSpeed and GradScaler check by themselves.

    Raises UserError for words it does not know, and for sparse or complex gradients.
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
        _check_hyperparameters(lr, betas, eps, weight_decay)
        named = not isinstance(stochastic_rounding, bool | str)
        at_random = tuple(stochastic_rounding) if named else stochastic_rounding
        self.precision = StatePrecision(exp_avg, exp_avg_sq, master, granularity, scale, at_random, seed)
        self.compact = False
        """Whether state_dict() holds codes and scales as they are, readable by this optimizer alone."""
        self._finite = FiniteCheck() if check_finite else None
        self._segments: dict[torch.Tensor, tuple[int, ...]] = {}
        self._vectors: dict[torch.Tensor, tuple[int, ...]] = {}
        self._streams: dict[torch.Tensor, int] = {}
        self._outputs: dict[torch.Tensor, dict[str, torch.Tensor | None]] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        own = ("precision", "compact", "_finite", "_segments", "_vectors", "_streams", "_outputs")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # Random numbers of its own for each parameter, by its place: the same after a resume.
        for p in self.param_groups[-1]["params"]:
            self._streams.setdefault(p, len(self._streams))

    @property
    def skipped_steps(self) -> int:
        """Steps left out because of gradients that were not finite."""
        return self._finite.resolve() if self._finite else 0

    def state_bytes(self) -> int:
        """Memory of all moments and separate master weights."""
        return sum(
            value.nbytes for state in self.state.values() for key, value in state.items() if key in (*MOMENTS, MASTER)
        )

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have gradients; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p in work:
            _check_gradient(p)
        states = [self._state_of(p) for _, p in work]
        skip = None
        if self._finite is not None and any(p.numel() for _, p in work):
            self._finite.resolve()
            skip = self._finite.begin([p.grad for _, p in work if p.numel()], states)
            if skip is True:
                return loss
        for (group, p), state in zip(work, states, strict=True):
            # A new tensor: DeepSpeed's universal checkpoints give several parameters one and the same.
            state["step"] = state["step"] + 1
            if p.numel():
                self._update(p, state, group, None if skip is None else skip[p.device])
        return loss

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any], skip: torch.Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        number = state["step"].item()
        step = AdamStep(number, float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
        seed, at_random = None, self.precision.stochastic_parts
        if at_random:
            seed = hash((self.precision.seed, self._streams[p], int(number))) & 0x7FFFFFFF
        parameter = p.detach().contiguous().view(-1)
        master, options = parameter, self._outputs.get(p, {})
        if MASTER in state:
            master, options = _flat(state[MASTER]), {"low": parameter}
        elif self._has_scaled_master(p):
            options = {"fp16_masters": self._layout(p, "tensor", "pow2"), "exact": self._vectors.get(p, ())}
        moments = [_flat(state[key]) for key in MOMENTS]
        arguments = (master, p.grad.detach().contiguous().view(-1), *moments, step)
        if p.is_cuda:
            from ds_fp8.optim.kernels import adamw_step

            with torch.cuda.device(p.device):  # where Triton launches
                adamw_step(*arguments, **options, skip=skip, seed=seed, stochastic=at_random)
        else:
            reference.adamw_step(*arguments, **options, seed=seed, stochastic=at_random)
        if not p.is_contiguous():
            p.copy_(parameter.view(p.shape))

    def also_write(
        self, p: torch.Tensor, low: torch.Tensor | None = None, master_amax: torch.Tensor | None = None
    ) -> None:
        """Let every step of the FP32 parameter p also write, in the same pass, what reading it again would cost.

        low: flat BF16 or FP16 [p.numel()], p rounded to nearest. master_amax: FP32 [ceil(p.numel() / 128)], the largest
        magnitude in every 128 elements of the flat p. Raises ValueError where the step does not visit p in that order.
        """
        exact = self.precision.master == "fp32" and p.dtype is torch.float32 and p.is_contiguous()
        if not exact or (master_amax is not None and self.precision.granularity == "tensor"):
            raise ValueError(
                "only a contiguous FP32 parameter with FP32 master weights and groups of 128 is written so"
            )
        self._outputs[p] = {"low": low, "master_amax": master_amax}

    # ---------------------------------------------------------------- state

    def _state_of(self, p: torch.Tensor) -> dict[str, Any]:
        """The state of p in the form that step() works on; made if there is none."""
        state = self.state[p]
        self._streams.setdefault(p, len(self._streams))
        if not isinstance(state.get("step"), torch.Tensor) or state["step"].device.type != "cpu":
            state["step"] = torch.tensor(float(state.get("step", 0.0)))
        for key in MOMENTS:
            value = state.get(key)
            if not is_kept_as(value, getattr(self.precision, key), p.device):
                state[key] = self._encoded(p, key, value)
        if p.dtype is not torch.float32 and state.get(MASTER) is None:
            state[MASTER] = self._encoded(p, MASTER, p.detach().float())
        return state

    def _encoded(
        self, p: torch.Tensor, key: str, numbers: torch.Tensor | Moment | None, exponent: torch.Tensor | None = None
    ) -> torch.Tensor | Moment:
        """State `key` of p as it is kept, from its numbers in any form; zeros from None."""
        codec, granularity, scale = self._format(p, key)
        if isinstance(numbers, Moment):
            numbers, exponent = numbers.decode(), numbers.exponent
        if codec.max is None:
            if numbers is None:
                return torch.zeros(p.shape, dtype=codec.dtype, device=p.device)
            return numbers.detach().to(p.device, codec.dtype, copy=True).reshape(p.shape).contiguous()
        moment = Moment(codec, self._layout(p, granularity, scale), p.device, never_zero=key == "exp_avg_sq")
        if numbers is not None:
            moment.encode(numbers, exponent)
        return moment

    def _has_scaled_master(self, p: torch.Tensor) -> bool:
        """Whether the master weights of p, or of some of the tensors that p is made of, are FP16 numbers."""
        return self.precision.master == "fp16_scaled" and (p.dim() > 1 or p in self._segments)

    def _format(self, p: torch.Tensor, key: str) -> tuple:
        """(codec, granularity, scale type) of a state of p."""
        if key == MASTER:
            return CODECS["fp16" if self._has_scaled_master(p) else "fp32"], "tensor", "pow2"
        return CODECS[getattr(self.precision, key)], self.precision.granularity, self.precision.scale

    def _layout(self, p: torch.Tensor, granularity: str, scale: str) -> Layout:
        return Layout(p.numel(), granularity, scale, self._segments.get(p, ()) if granularity == "tensor" else ())

    def set_segments(self, p: torch.Tensor, sizes: Sequence[int], vectors: Sequence[int] = ()) -> None:
        """Say that the flat parameter p is tensors of these sizes one after the other, each to have its own scale.

        vectors: the indices of those that are vectors, not flattened matrices. Raises ValueError if some of the masters
        of a 16-bit parameter were to be FP16 and some not: they are one state.
        """
        if self.precision.master == "fp16_scaled" and vectors and p.dtype is not torch.float32:
            raise ValueError("a flat 16-bit parameter of vectors and matrices has no FP16 masters: flatten them apart")
        self._segments[p], self._vectors[p] = tuple(sizes), tuple(vectors)
        for key, value in self.state.get(p, {}).items():
            if key == MASTER or (isinstance(value, Moment) and value.layout.granularity == "tensor"):
                self.state[p][key] = self._encoded(p, key, value)

    def expand_moments(self) -> None:
        """Turn compressed moments into FP32 tensors that may be written to; the next step compresses them again."""
        for p, state in self.state.items():
            for key in MOMENTS:
                if isinstance(state.get(key), Moment):
                    state[key] = state[key].decode().view(p.shape)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's: FP32 moments under `exp_avg` and `exp_avg_sq`; compressed ones decoded on the CPU.

        Moments in e4m3_expanded come with their exponents beside them (`exp_avg_exponent`, uint8), which others
        ignore: with them the same codes are found again, without them ones as good.
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
        """Take over a checkpoint of this optimizer in any precision, of torch.optim.AdamW or of DeepSpeed's Adam.

        The precision stays this optimizer's own. Raises UserError for a checkpoint of something else.
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
                        key: self._encoded(p, key, *numbers) for key, numbers in saved.numbers.items()
                    }


def _flat(state: torch.Tensor | Moment) -> torch.Tensor | Moment:
    return state if isinstance(state, Moment) else state.view(-1)


def _check_hyperparameters(lr: float | torch.Tensor, betas: tuple[float, float], eps: float, decay: float) -> None:
    checked = {
        "lr": (lr, lr >= 0),
        "betas": (betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
        "eps": (eps, eps >= 0),
        "weight_decay": (decay, decay >= 0),
    }
    for name, (value, right) in checked.items():
        if not right:
            raise UserError(
                f"{name} {value!r} is out of range",
                key=f"optimizer.params.{name}",
                remedy="lr, eps and weight_decay at least 0, betas two numbers from 0 up to but not 1",
            )


def _check_gradient(p: torch.Tensor) -> None:
    if p.grad.layout is not torch.strided:
        raise UserError("a gradient is sparse, and moments are dense", remedy="torch.nn.Embedding(..., sparse=False)")
    if not p.is_floating_point():
        raise UserError(f"a parameter is {p.dtype}", remedy="optimise floating point parameters only")
