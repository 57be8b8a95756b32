"""Numbers that moments are made of, easy and awkward, and the tolerances of the codecs."""

from __future__ import annotations

import torch

from ds_fp8.optim.moments import CODECS, Layout, Moment

COMPRESSED = ("fp16", "e4m3", "e5m2", "e4m3_expanded")
SCALES = ("fp32", "pow2")
SIZES = (1, 127, 128, 129, 1000, 4 * 1024 + 77)

# Largest relative error of a number in the normal range of the format, by rounding to nearest. The expansion's is
# E4M3's divided by its exponent, which is above 1 for the usual groups.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "e4m3": 2.0**-4, "e5m2": 2.0**-3, "e4m3_expanded": 2.0**-4}
COAT = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
FISHMAN = {"exp_avg": "e4m3", "exp_avg_sq": "e5m2", "granularity": "tensor"}
FP8LM_O2 = {"exp_avg": "e4m3", "exp_avg_sq": "fp16", "granularity": "tensor", "scale": "pow2"}


def combinations() -> list[tuple[str, str, str]]:
    """(codec, granularity, scale type) of every compressed way to keep a moment."""
    return [
        (codec, granularity, scale)
        for codec in COMPRESSED
        for granularity in ("1x128", "tensor")
        for scale in SCALES
        if not (codec == "e4m3_expanded" and granularity == "tensor")
    ]


def gradients(numel: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """FP32 numbers around 1e-4 whose magnitudes spread over `spread` powers of e, as gradients' do."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, numel, generator=generator)
    return normal[0] * torch.exp(normal[1] * spread) * 1e-4


def awkward() -> dict[str, torch.Tensor]:
    """Groups that break simple codecs, by what is awkward about them."""
    half_zero = gradients(128)
    half_zero[::2] = 0
    one = torch.zeros(128)
    one[77] = -3e-7
    huge_range = torch.ones(128)
    huge_range[0], huge_range[1] = 1e-30, 1e30
    subnormal = torch.full((128,), 1e-40)
    subnormal[5] = 1e-5
    return {
        "all zero": torch.zeros(128),
        "equal": torch.full((128,), 3e-5),
        "equal magnitudes": torch.full((128,), 3e-5) * (-1) ** torch.arange(128),
        "half zero": half_zero,
        "one not zero": one,
        "two values": torch.where(torch.arange(128) < 64, 1e-3, 1.0000001e-3),
        "huge range": huge_range,
        "subnormal": subnormal,
        "huge": gradients(128) * 1e38,
        "tiny": gradients(128) * 1e-33,
    }


def moment(
    numbers: torch.Tensor, codec: str, granularity: str = "1x128", scale: str = "fp32", *, never_zero: bool = False,
    segments: tuple[int, ...] = (), device: str = "cpu",
) -> torch.Tensor | Moment:  # fmt: skip
    """`numbers` kept as `codec`."""
    kind = CODECS[codec]
    if kind.max is None:
        return numbers.to(device, kind.dtype, copy=True)
    layout = Layout(numbers.numel(), granularity, scale, segments if granularity == "tensor" else ())
    result = Moment(kind, layout, torch.device(device), never_zero=never_zero)
    result.quantize(numbers)
    return result


def dequantized(state: torch.Tensor | Moment) -> torch.Tensor:
    """FP32 numbers that a state stands for, on the CPU."""
    return state.dequantize("cpu") if isinstance(state, Moment) else state.float().cpu()


def adamw(master, gradient, exp_avg, exp_avg_sq, count: int, group: dict) -> tuple[torch.Tensor, ...]:
    """Master and moments behind step `count` of AdamW by its definition."""
    beta1, beta2 = group["betas"]
    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient.square()
    denominator = (exp_avg_sq / (1 - beta2**count)).sqrt() + group["eps"]
    decayed = master * (1 - group["lr"] * group["weight_decay"])
    return decayed - group["lr"] / (1 - beta1**count) * exp_avg / denominator, exp_avg, exp_avg_sq
