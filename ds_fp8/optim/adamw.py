"""AdamW with moments in 8 or 16 bits.

    optimizer = AdamW(model.parameters(), lr=1e-4, exp_avg="e4m3_expanded", exp_avg_sq="e4m3_expanded")

Adam with decoupled weight decay (arXiv 1711.05101), as torch.optim.AdamW computes it. On a GPU one Triton kernel does
the step of a parameter (adamw_step_triton.py); elsewhere plain torch, its reference. Under ZeRO parameters are
DeepSpeed's flat FP32 shards.

State of a parameter, in `optimizer.state[p]`:

    step                 FP32 scalar on the CPU, as in torch.optim.AdamW
    exp_avg, exp_avg_sq  a tensor of p's shape (fp32, bf16), otherwise a Moment (data and scales)
    master               FP32; of parameters in BF16 or FP16 only

state_dict() returns dequantized FP32 moments under Adam's keys, on the CPU, and load_state_dict() quantizes them again:
checkpoints are compatible with torch.optim.AdamW, DeepSpeed's Adam and other precisions. For e4m3_expanded they also
hold `exp_avg_exponent`, uint8 [groups], for which the same data result. Compact checkpoints hold data and scales
instead (Moment.packed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ds_fp8.casts.primitives import random_key
from ds_fp8.config.errors import UserError
from ds_fp8.config.plans import MOMENTS, StatePrecision
from ds_fp8.optim.masters import SplitMasters
from ds_fp8.optim.moments import CHUNK, CODECS, Layout, Moment, draw, is_stored_as, quantize_moment, shared_layout

MASTER = "master"
_NOT_OF_ADAM = "the checkpoint is not of an Adam optimizer"
_WITHOUT = "resume without the optimizer's state"


@dataclass(frozen=True)
class AdamStep:
    """Scalars of one step of a parameter, and where they live on the device; `number` counts from 1."""

    number: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    skip: torch.Tensor | None = None  # one element: no update unless zero
    factor: torch.Tensor | None = None  # FP32, one element, multiplied into the gradient
    # From 0 to 2**31 - 1: moments in `stochastic` are rounded stochastically; random bits differ between devices.
    seed: int | None = None
    stochastic: Collection[str] = MOMENTS

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """Learning rate with the bias correction of exp_avg."""
        return self.lr / (1 - self.beta1**self.number)

    @property
    def root_factor(self) -> float:
        """Bias correction of sqrt(exp_avg_sq)."""
        return 1 / math.sqrt(1 - self.beta2**self.number)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Arguments of kernels: beta1, beta2, eps, decay, step_size, root_factor."""
        return self.beta1, self.beta2, self.eps, self.decay, self.step_size, self.root_factor


def adamw_step_reference(
    master: torch.Tensor | SplitMasters,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    low: torch.Tensor | None = None,
) -> None:
    """Do one AdamW step in place on flat contiguous tensors of n elements on one device.

    Args:
        master: FP32 [n], or SplitMasters.
        grad: The gradient [n], of any floating point dtype.
        exp_avg: FP32 or BF16 [n], or a Moment of n elements; two Moments have the same layout.
        exp_avg_sq: Likewise.
        step: Hyperparameters, skip, factor and seed.
        low: BF16 or FP16 [n], set to the new master rounded to nearest.
    """
    if step.skip is not None and step.skip.item():
        return
    noise = None if step.seed is None else torch.Generator(grad.device).manual_seed(step.seed)
    layout, numel = shared_layout(exp_avg, exp_avg_sq), grad.numel()
    chunks = [(slice(start, min(start + CHUNK, numel)), slice(None)) for start in range(0, numel, CHUNK)]
    # In pieces of full groups, which bounds the FP32 copies.
    for elements, groups in chunks if layout is None else layout.pieces():
        g = grad[elements].float() if step.factor is None else grad[elements].float() * step.factor
        w, m, v = (_read(state, elements, groups) for state in (master, exp_avg, exp_avg_sq))
        # m + (1 - beta1) (g - m): bitwise as torch.optim.AdamW for FP32 state.
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        denominator = v.sqrt().mul_(step.root_factor).add_(step.eps)
        w.mul_(step.decay).addcdiv_(m, denominator, value=-step.step_size)
        if isinstance(master, SplitMasters):
            master.write(elements, w)
        if low is not None:
            low[elements] = w.to(low.dtype)
        for state, numbers, name in ((exp_avg, m, MOMENTS[0]), (exp_avg_sq, v, MOMENTS[1])):
            _write(state, elements, groups, numbers, noise if name in step.stochastic else None)


def _read(state: torch.Tensor | SplitMasters | Moment, elements: slice, groups: slice) -> torch.Tensor:
    """Return FP32 values, a view of FP32 state."""
    if isinstance(state, SplitMasters):
        return state.read(elements)
    return state.read(elements, groups) if isinstance(state, Moment) else state[elements].float()


def _write(
    state: torch.Tensor | Moment, elements: slice, groups: slice, numbers: torch.Tensor, noise: torch.Generator | None
) -> None:
    if isinstance(state, Moment):
        state.write(elements, groups, numbers, draw(noise, numbers))
    elif state.dtype is not torch.float32:  # FP32 was updated in place
        state[elements] = quantize_moment(numbers, CODECS["bf16"], noise=draw(noise, numbers)).data


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101) and compressed state.

    Args:
        params: As torch.optim.AdamW takes them, floating point and with dense gradients.
        lr: Learning rate.
        betas: Decay rates of exp_avg and exp_avg_sq.
        eps: Added to the root of exp_avg_sq.
        weight_decay: Relative to lr, as in torch.optim.AdamW.
        exp_avg: How the first moment is stored: "fp32", "bf16", "fp16", "e4m3", "e5m2", "e4m3_expanded" (moments.py),
            or an emulated format of config.formats, such as "log8", for which the step is torch's on a GPU, too.
        exp_avg_sq: How the second moment is stored; likewise.
        granularity: Of scales: "1x128" or "tensor".
        scale: "fp32" stores the amax of a group almost exactly, so that moments decay while gradients are zero. "pow2"
            with rounding to nearest gets stuck where a step changes a moment by less than half of E4M3's spacing, often
            for beta2 above 0.94.
        stochastic_rounding: Round moments of one byte stochastically (unbiased). A step changes most elements of
            exp_avg_sq by less than half of E4M3's spacing, which rounding to nearest loses: updates become too large,
            and exp_avg lags behind constant gradients. An expanded exp_avg is finer and always rounded to nearest.
        seed: Of stochastic rounding: reproducible on the same device, also after a resume.

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
        stochastic_rounding: bool = True,
        seed: int = 0,
    ):
        in_range = {
            "lr": (lr, lr >= 0),
            "betas": (betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
            "eps": (eps, eps >= 0),
            "weight_decay": (weight_decay, weight_decay >= 0),
        }
        check_hyperparameters(in_range, "lr, eps and weight_decay at least 0, betas two numbers from 0 up to but not 1")
        self.precision = StatePrecision(exp_avg, exp_avg_sq, granularity, scale, stochastic_rounding, seed)
        # Whether state_dict() holds data and scales, for this optimizer alone.
        self.compact = False
        # Keyed by tensor: hashed by identity, and kept alive by the optimizer.
        self._streams: dict[torch.Tensor, int] = {}
        # Of flat parameters: the device of their states, for they may be offloaded themselves, and their segments.
        self._flat: dict[torch.Tensor, tuple[torch.device, tuple[int, ...]]] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        own = ("precision", "compact", "_streams", "_flat")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # A random stream per parameter, by its position: equal after a resume.
        for p in self.param_groups[-1]["params"]:
            self._streams.setdefault(p, len(self._streams))

    def state_bytes(self) -> int:
        """Return the bytes of all moments and separate master weights."""
        return sum(
            value.nbytes for state in self.state.values() for key, value in state.items() if key in (*MOMENTS, MASTER)
        )

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        work: Iterable[tuple[dict[str, Any], torch.Tensor, torch.Tensor, Callable[..., None] | None]] | None = None,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> Any:
        """Step all parameters with gradients, or those of `work`.

        Args:
            closure: Called first, with gradients enabled.
            work: (param group, parameter, gradient with as many elements of any floating point dtype, update or None),
                for gradients that are not in `p.grad`; no host sync. `update` takes the arguments of
                adamw_step_reference but the first, for masters elsewhere or a step that also quantizes.
            factor: With `work`: FP32, one element on the parameters' device, multiplied into every gradient.
            skip: With `work`: int32, one element on that device; parameters and moments stay unless zero. Step counts
                advance nevertheless; the function that `prepare` returns takes them back.

        Returns:
            What `closure` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if work is None:
            work = [(g, p, p.grad, None) for g in self.param_groups for p in g["params"] if p.grad is not None]
            for _, p, gradient, _ in work:
                if gradient.layout is not torch.strided:
                    remedy = "torch.nn.Embedding(..., sparse=False)"
                    raise UserError("a gradient is sparse, and moments are dense", remedy=remedy)
                if not p.is_floating_point():
                    raise UserError(f"a parameter is {p.dtype}", remedy="optimise floating point parameters only")
        # All states first: if an allocation fails, nothing has changed.
        prepared = [(group, p, gradient, self._state_of(p), update) for group, p, gradient, update in work]
        for group, p, gradient, state, update in prepared:
            self._advance(p, gradient, state, group, skip, factor, update)
        return loss

    def prepare(self, parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Allocate the states of `parameters`; return a function that undoes their step counts after a skipped step."""
        counts = [(state, state["step"]) for state in map(self._state_of, parameters)]

        def take_back() -> None:
            for state, count in counts:
                state["step"] = count

        return take_back

    def _advance(
        self,
        p: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        skip: torch.Tensor | None,
        factor: torch.Tensor | None,
        update: Callable[..., None] | None,
    ) -> None:
        # A new tensor: DeepSpeed's universal checkpoints share one among parameters.
        state["step"] = state["step"] + 1
        if not p.numel():
            return
        beta1, beta2 = group["betas"]
        # On the CPU: no host sync for bias corrections.
        number = state["step"].item()
        seed, at_random = None, self.precision.stochastic_parts
        if at_random:
            seed = random_key(self.precision.seed, self._streams[p], int(number))
        moments = [_flat(state[key]) for key in MOMENTS]
        hyperparameters = number, float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"]
        step = AdamStep(*hyperparameters, skip, factor, seed, at_random)
        # Triton launches on the current device.
        here = torch.cuda.device(p.device) if p.is_cuda else nullcontext()
        if update is not None:
            with here:
                update(gradient, *moments, step)
            return
        # A copy if p is not contiguous; written back below.
        parameter = p.detach().contiguous().view(-1)
        master, low = (_flat(state[MASTER]), parameter) if MASTER in state else (parameter, None)
        with here:
            step_on(p.device, moments)(master, gradient.detach().contiguous().view(-1), *moments, step, low)
        if not p.is_contiguous():
            p.copy_(parameter.view(p.shape))

    def _state_of(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the state of p as step() needs it; created if missing."""
        state = self.state[p]
        self._streams.setdefault(p, len(self._streams))
        # Loading may make it a number, or move it to the GPU, where every step would sync.
        if not isinstance(state.get("step"), torch.Tensor) or state["step"].device.type != "cpu":
            state["step"] = torch.tensor(float(state.get("step", 0.0)))
        for key in MOMENTS:
            if not is_stored_as(state.get(key), getattr(self.precision, key), p.device):
                state[key] = self._quantized(p, key, state.get(key))
        # The first master is the parameter; afterwards the parameter is its rounding.
        if p.dtype is not torch.float32 and state.get(MASTER) is None:
            state[MASTER] = self._quantized(p, MASTER, p.detach().float())
        return state

    def _quantized(
        self, p: torch.Tensor, key: str, numbers: torch.Tensor | Moment | None, exponent: torch.Tensor | None = None
    ) -> torch.Tensor | Moment:
        """Return the state `key` of p in its precision, from values in any form; zeros from None."""
        codec = CODECS["fp32" if key == MASTER else getattr(self.precision, key)]
        device, segments = self._flat.get(p, (p.device, ()))
        if isinstance(numbers, Moment):
            numbers, exponent = numbers.dequantize(), numbers.exponent
        if codec.max is None:
            if numbers is None:
                return torch.zeros(p.shape, dtype=codec.dtype, device=device)
            return numbers.detach().to(device, codec.dtype, copy=True).reshape(p.shape).contiguous()
        granularity, scale = self.precision.granularity, self.precision.scale
        layout = Layout(p.numel(), granularity, scale, segments if granularity == "tensor" else ())
        moment = Moment(codec, layout, device, never_zero=key == "exp_avg_sq")
        if numbers is not None:
            moment.quantize(numbers, exponent)
        return moment

    def set_segments(self, p: torch.Tensor, sizes: Sequence[int]) -> None:
        """Register the sizes of the tensors in the flat parameter p, each with a separate scale."""
        self._flat[p] = p.device, tuple(sizes)
        for key, value in self.state.get(p, {}).items():
            # Scales per tensor depend on the segments; groups of 128 do not.
            if isinstance(value, Moment) and value.layout.granularity == "tensor":
                self.state[p][key] = self._quantized(p, key, value)

    def expand_moments(self) -> None:
        """Dequantize moments in place, so that they can be written; the next step quantizes them again."""
        for p, state in self.state.items():
            for key in MOMENTS:
                if isinstance(state.get(key), Moment):
                    state[key] = state[key].dequantize().view(p.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch.optim.AdamW: FP32 moments under `exp_avg` and `exp_avg_sq`."""
        result = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [index for group in result["param_groups"] for index in group["params"]]
        result["state"] = {
            index: _exported(result["state"][index], p.shape, self.compact)
            for index, p in zip(numbers, parameters, strict=True)
            if index in result["state"]
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer in any precision, of torch.optim.AdamW or of DeepSpeed's Adam.

        The precision stays this optimizer's own. Raises UserError for a checkpoint of something else.
        """
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise UserError(
                "the checkpoint has other parameter groups or sub-groups",
                remedy="make a universal checkpoint of it (DeepSpeed's ds_to_universal), or load it with the same "
                "stage3 sub_group_size, ranks and fp8.optimizer.master as before",
            )
        if any("betas" not in group for group in groups):
            raise UserError(_NOT_OF_ADAM, remedy=_WITHOUT)
        if any(group.get("amsgrad") for group in groups):
            problem = "the checkpoint is of AMSGrad, whose state this optimizer does not have"
            raise UserError(problem, key="optimizer.params.amsgrad", remedy=_WITHOUT)
        # torch would convert every state to the parameter's dtype, and fail for a Moment.
        super().load_state_dict({**state_dict, "state": {}})
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            group["betas"] = tuple(group["betas"])
            for p, index in zip(group["params"], saved_group["params"], strict=True):
                self._streams.setdefault(p, len(self._streams))
                if index in state_dict["state"]:
                    saved = state_dict["state"][index]
                    step = saved.get("step", group.get("step", 0.0))  # DeepSpeed's FusedAdam counts in the group
                    numbers = {key: self._quantized(p, key, *found) for key, found in _imported(saved, p).items()}
                    self.state[p] = {"step": torch.tensor(float(step)), **numbers}


def _exported(state: dict[str, Any], shape: torch.Size, compact: bool) -> dict[str, Any]:
    """Return the state of a parameter for a checkpoint, Moments on the CPU."""
    result = {}
    for key, value in state.items():
        if not isinstance(value, Moment):
            result[key] = value.float() if key in MOMENTS else value
        elif compact:
            result[key] = value.packed()
        else:
            result[key] = value.dequantize("cpu").view(shape)
            if value.exponent is not None:
                result[f"{key}_exponent"] = value.exponent.cpu()
    return result


def _imported(saved: dict[str, Any], p: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the state of p from a checkpoint: (FP32 values, their exponents or None)."""
    numbers = {}
    for key in MOMENTS if p.dtype is torch.float32 or MASTER not in saved else (*MOMENTS, MASTER):
        if key not in saved:
            raise UserError(f"{_NOT_OF_ADAM}: it has no {key}", remedy=_WITHOUT)
        value, exponent = saved[key], saved.get(f"{key}_exponent")
        if isinstance(value, dict):
            # Dequantized, since the caller's precision may differ; with the exponents the same data result.
            value, exponent = Moment.unpacked(value).dequantize(), value.get("exponent")
        if value.numel() != p.numel():
            raise UserError(
                f"the checkpoint has {value.numel()} elements of {key} for a parameter of {p.numel()}",
                remedy="load it into the model, and the number of ranks, that wrote it",
            )
        numbers[key] = value, exponent
    return numbers


def step_on(device: torch.device, moments: Sequence[torch.Tensor | Moment]) -> Callable[..., None]:
    """Return the step for a device: the kernel on a GPU, unless a moment's format is emulated."""
    if device.type != "cuda" or any(isinstance(moment, Moment) and moment.codec.emulated for moment in moments):
        return adamw_step_reference
    from ds_fp8.optim import adamw_step_triton

    return adamw_step_triton.adamw_step


def _flat(state: torch.Tensor | Moment) -> torch.Tensor | Moment:
    return state if isinstance(state, Moment) else state.view(-1)


def check_hyperparameters(values: Mapping[str, tuple[Any, bool]], remedy: str) -> None:
    """Raise UserError for the first of `values`, name -> (value, in range), that is out of range."""
    for name, (value, in_range) in values.items():
        if not in_range:
            raise UserError(f"{name} {value!r} is out of range", key=f"optimizer.params.{name}", remedy=remedy)
