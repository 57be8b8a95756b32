"""Quantized optimizer moments in plain torch, the reference of moments_triton.py.

    fp32            4 bytes, exact
    bf16            2 bytes, no scale
    fp16            2 bytes in units of a scale                        x ≈ data * scale
    e4m3, e5m2      1 byte in units of a scale
    e4m3_expanded   1 byte, dynamic range expanded to that of E4M3     |x| ≈ scale * (|data| / 448) ** (1 / exponent)
    int8, log8 ...  1 byte in units of a scale: the emulated formats of config.formats

The scale of fp16, e4m3, e5m2 and emulated formats maps the group's amax to the format's largest number. It is rounded
up to a power of two (`pow2`) or to 13 significant bits (`fp32`), which makes data * scale exact in FP32 (except for
log8, whose numbers are rounded themselves): dequantized and quantized again, a group has the same values. Checkpoints
hold dequantized moments and lose nothing.

`e4m3_expanded` is the dynamic range expansion of COAT (arXiv 2410.19313): data = round((|x| / c) ** k / s) with c =
sqrt(max * min), s = (max / c) ** k / 448 and k = log(448² / 2) / log(max / min) rounded down to sixteenths. c and s
cancel to data = round(448 * (|x| / max) ** k): a group of 128 stores max as FP32 scale and 16 k as one byte. Exact
zeros do not count as min; a group of equal values takes the largest k.

In all formats magnitudes below 2^-126 are zero, as GPUs flush them, and with `never_zero`, as for exp_avg_sq, a
positive value is rounded up to the smallest positive number: Adam divides by the square root.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch

from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.config import registry
from ds_fp8.config.formats import BLOCK, FORMATS, SMALLEST_SCALE, Format
from ds_fp8.config.plans import MOMENTS, StatePrecision


@dataclass(frozen=True)
class Codec:
    """A storage format of moments."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int = 0
    min_exponent: int = 0  # of the smallest normal number; emulated formats need neither of the two
    max: float | None = None  # largest number, to which the amax of a group is scaled; None: no scales
    expanded: bool = False

    @property
    def emulated(self) -> Format | None:
        """The emulated format, stored in uint8 for lack of a torch dtype, or None."""
        return FORMATS[self.name] if self.dtype is torch.uint8 else None

    @property
    def smallest(self) -> float:
        """Smallest positive number of the format."""
        if self.emulated is not None:
            return self.emulated.smallest_subnormal
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


class _Codecs(dict[str, Codec]):
    def __missing__(self, name: str) -> Codec:
        # A byte of a format that torch has no dtype for.
        if name not in FORMATS:
            registry.load()  # of a checkpoint: the configuration of this run need not name it
        format = FORMATS[name]
        self[name] = Codec(name, format.dtype, max=format.max)
        return self[name]


# By name; emulated formats (config/formats.py) are added on first use.
CODECS = _Codecs(
    (codec.name, codec)
    for codec in (
        Codec("fp32", torch.float32, 23, -126),
        Codec("bf16", torch.bfloat16, 7, -126),
        Codec("fp16", torch.float16, 10, -14, 65504.0),
        Codec("e4m3", torch.float8_e4m3fn, 3, -6, FORMATS["e4m3"].max),
        Codec("e5m2", torch.float8_e5m2, 2, -14, FORMATS["e5m2"].max),
        Codec("e4m3_expanded", torch.float8_e4m3fn, 3, -6, FORMATS["e4m3"].max, expanded=True),
    )
)

SCALE_MASKS = {"fp32": 0x7FF, "pow2": 0x7FFFFF}  # low bits of an FP32 scale that are zero, by scale type

# log2 of the range that an expanded group fills: from 448 down to 2.3 of E4M3's smallest steps
LOG2_RANGE = math.log2(448.0**2 / 2)
EXPONENT_STEPS = 16  # exponents are stored in sixteenths, from 1 to LARGEST_EXPONENT of them
LARGEST_EXPONENT = 255

CHUNK = 1 << 22  # elements dequantized at a time: bounds the FP32 copies


class Quantized(NamedTuple):
    """A flat quantized tensor: data [n], scale FP32 [g] and exponent uint8 [g] a group where the codec has them."""

    data: torch.Tensor
    scale: torch.Tensor | None
    exponent: torch.Tensor | None


def moment_bytes(precision: StatePrecision) -> float:
    """Return the bytes per element of both moments with their scales, for large tensors."""
    total = 0.0
    for codec in (CODECS[getattr(precision, name)] for name in MOMENTS):
        per_group = 0 if codec.max is None or precision.granularity == "tensor" else 4 + codec.expanded
        total += codec.dtype.itemsize + per_group / BLOCK
    return total


def quantize_moment(
    x: torch.Tensor,
    codec: Codec,
    granularity: str = "1x128",
    scale_type: str = "fp32",
    *,
    never_zero: bool = False,
    noise: torch.Tensor | None = None,
    exponent: torch.Tensor | None = None,
) -> Quantized:
    """Quantize a flat moment, rounding to nearest even.

    Args:
        x: FP32 [n].
        codec: Storage format.
        granularity: Of scales: "1x128" or "tensor".
        scale_type: "fp32" or "pow2".
        never_zero: Whether positive numbers stay positive.
        noise: Uniform random numbers in [0, 1), FP32 [n], for stochastic rounding.
        exponent: uint8 [groups], to be used instead of computing them from x (dequantized with them before).
    """
    if codec.name == "fp32":
        return Quantized(x.clone(), None, None)
    groups = _as_groups(x, granularity)
    magnitude = groups.abs()
    magnitude = torch.where(magnitude < SMALLEST_SCALE, 0.0, magnitude)
    positive = magnitude > 0
    scale = None
    if codec.expanded:
        scale = magnitude.amax(1)
        if exponent is None:
            exponent = _find_exponent(magnitude, scale)
        in_range = torch.exp2(
            (magnitude.log2() - torch.where(scale == 0, 1.0, scale).log2()[:, None])
            * (exponent.float() / EXPONENT_STEPS)[:, None]
        )
        magnitude = in_range * codec.max
    else:
        exponent = None
        if codec.max is not None:
            amax = magnitude.amax(1)
            scale = _scale_of(amax, codec.max, scale_type)
            at_max = magnitude == amax[:, None] if scale_type == "fp32" else None
            magnitude = magnitude * scale.reciprocal()[:, None]
            if at_max is not None:  # stochastic rounding down would change the scale when quantized again
                magnitude = torch.where(at_max & positive, codec.max, magnitude)
    if codec.max is not None:
        magnitude = torch.where(magnitude > codec.max, codec.max, magnitude)  # NaN stays
    if never_zero and not codec.expanded:  # expansion maps the smallest to 2.3 steps of the format
        magnitude = torch.where(positive & (magnitude < codec.smallest), codec.smallest, magnitude)
    if codec.emulated is not None:
        signed = torch.copysign(magnitude, groups)
        draw = None if noise is None else _as_groups(noise, granularity)
        data = codec.emulated.codec.encode(signed, draw)
        return Quantized(data.view(-1)[: x.numel()], scale, exponent)
    if noise is not None:
        bend = (EXPONENT_STEPS / exponent.float())[:, None] if codec.expanded else None
        magnitude = _round_with_noise(magnitude, _as_groups(noise, granularity), codec, bend)
    data = torch.copysign(magnitude, groups).to(codec.dtype)
    return Quantized(data.view(-1)[: x.numel()], scale, exponent)


def dequantize_moment(quantized: Quantized, codec: Codec, granularity: str = "1x128") -> torch.Tensor:
    """Return the flat FP32 moment [n]."""
    one_byte = codec.dtype.itemsize == 1
    numbers = dequantize_unscaled(quantized.data, format=codec.name) if one_byte else quantized.data.float()
    if codec.max is None:
        return numbers
    groups = _as_groups(numbers, granularity)
    if codec.expanded:
        magnitude = torch.exp2(
            (groups.abs() / codec.max).log2() / (quantized.exponent.float() / EXPONENT_STEPS)[:, None]
        )
        groups = torch.copysign(magnitude * quantized.scale[:, None], groups)
    else:
        groups = groups * quantized.scale[:, None]
    return groups.reshape(-1)[: numbers.numel()]


def _as_groups(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Reshape [n] -> [groups, elements of a group], the last group zero-padded."""
    if granularity == "tensor":
        return x.view(1, -1)
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scale_of(amax: torch.Tensor, largest: float, scale_type: str) -> torch.Tensor:
    """Return amax / largest rounded up according to the scale type; 1 for a group of zeros."""
    # Divided by a tensor: CUDA replaces division by a number with its rounded reciprocal.
    exact = amax / torch.full_like(amax, largest)
    mask = SCALE_MASKS[scale_type]
    # Rounded up on the bits to a power of two or to 13 significant bits: adding the mask carries unless the low bits
    # are zero; a carry into the exponent is correct, too.
    rounded = ((exact.view(torch.int32) + mask) & ~mask).view(torch.float32)
    rounded = torch.where(exact.isfinite(), rounded, torch.nan)
    return torch.where(amax == 0, 1.0, rounded.clamp_min(SMALLEST_SCALE))


def _find_exponent(magnitude: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the exponent of each group in sixteenths, from magnitudes [g, e] and amax [g]."""
    # Without exact zeros, which would make the range infinite.
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(1)
    ratio = largest.log2() - smallest.log2()
    # Rounded down: the range of the group must not exceed that of the format. Ratio 0: equal values; NaN: zeros or NaN.
    steps = torch.where(ratio > 0, (EXPONENT_STEPS * LOG2_RANGE / ratio).floor(), LARGEST_EXPONENT)
    return steps.clamp(1, LARGEST_EXPONENT).to(torch.uint8)


def _round_with_noise(
    magnitude: torch.Tensor, noise: torch.Tensor, codec: Codec, bend: torch.Tensor | None
) -> torch.Tensor:
    """Round `magnitude` stochastically and unbiased to one of the two adjacent numbers of the format.

    bend [g, 1]: the dequantized value is magnitude ** bend, and is rounded unbiased. Unbiased rounding of the data
    would bias it by up to -1e-3 per step, as much as a step changes exp_avg_sq.
    """
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent, m in [0.5, 1)
    step = torch.ldexp(torch.ones_like(magnitude), (exponent - 1).clamp_min(codec.min_exponent) - codec.mantissa_bits)
    below = (magnitude / step).floor() * step
    above = below + step
    if bend is None:
        share = (magnitude - below) / step
    else:
        share = (magnitude**bend - below**bend) / (above**bend - below**bend)
    # P(noise >= 1 - share) = share: the expectation is below + share * step.
    rounded = torch.where(share + noise >= 1, above, below)
    return rounded if codec.max is None else torch.where(rounded > codec.max, codec.max, rounded)


@dataclass(frozen=True)
class Layout:
    """Division of a flat state of `numel` elements into groups, and the type of their scales.

    granularity `1x128`: groups of 128 elements. `tensor`: a group for each of `segments`, sizes of the tensors
    flattened into this one (() for a single one).
    """

    numel: int
    granularity: str
    scale_type: str
    segments: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        return max(1, len(self.segments)) if self.granularity == "tensor" else math.ceil(self.numel / BLOCK)

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yield (elements, groups) slices that cover the state: full groups, at most CHUNK elements or one segment."""
        if self.granularity == "tensor":
            start = 0
            for index, length in enumerate(self.segments or (self.numel,)):
                if length:
                    yield slice(start, start + length), slice(index, index + 1)
                start += length
            return
        for start in range(0, self.numel, CHUNK):
            stop = min(start + CHUNK, self.numel)
            yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


class Moment:
    """A quantized flat moment. Not a Tensor subclass, so that generic code cannot convert it.

    data [numel] in the codec's dtype; scale FP32 [groups]; exponent uint8 [groups] for e4m3_expanded, else None.
    """

    def __init__(self, codec: Codec, layout: Layout, device: torch.device, *, never_zero: bool):
        self.codec, self.layout, self.never_zero = codec, layout, never_zero
        self.data = torch.zeros(layout.numel, dtype=torch.uint8 if codec.dtype.itemsize == 1 else codec.dtype,
                                 device=device).view(codec.dtype)  # fmt: skip
        self.scale = torch.ones(layout.groups, device=device)
        # Exponent 1, scale 1, data 0: a new moment is zero.
        self.exponent = torch.ones(layout.groups, dtype=torch.uint8, device=device) if codec.expanded else None

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot unpickle FP8 tensors from a plain pickle: pickled as bytes.
        state = dict(vars(self))
        state["codes"] = _bytes(state.pop("data"))  # the name in checkpoints
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state.pop("codes").view(state["codec"].dtype)
        vars(self).update(state, data=data)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.exponent) if tensor is not None)

    def read(self, elements: slice, groups: slice) -> torch.Tensor:
        """Dequantize one piece of the layout, FP32."""
        exponent = None if self.exponent is None else self.exponent[groups]
        return dequantize_moment(
            Quantized(self.data[elements], self.scale[groups], exponent), self.codec, self.layout.granularity
        )

    def write(
        self,
        elements: slice,
        groups: slice,
        numbers: torch.Tensor,
        noise: torch.Tensor | None = None,
        exponent: torch.Tensor | None = None,
    ) -> None:
        """Quantize FP32 `numbers` into one piece of the layout."""
        quantized = quantize_moment(
            numbers, self.codec, self.layout.granularity, self.layout.scale_type,
            never_zero=self.never_zero, noise=noise, exponent=exponent,
        )  # fmt: skip
        _bytes(self.data[elements]).copy_(_bytes(quantized.data))
        self.scale[groups] = quantized.scale
        if self.exponent is not None:
            self.exponent[groups] = quantized.exponent

    def dequantize(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the moment, FP32 [numel], on `device` (default: that of data)."""
        result = torch.empty(self.layout.numel, device=self.data.device if device is None else device)
        for elements, groups in self.layout.pieces():
            # Piece by piece: for "cpu" the GPU never holds all of it in FP32.
            result[elements] = self.read(elements, groups).to(result.device)
        return result

    def quantize(self, numbers: torch.Tensor, exponent: torch.Tensor | None = None) -> None:
        """Quantize new values in place, to nearest.

        Args:
            numbers: [numel], any dtype and device.
            exponent: uint8 [groups], with which `numbers` were dequantized, if known.
        """
        flat = numbers.reshape(-1)
        device = self.data.device
        if exponent is not None and (self.exponent is None or exponent.numel() != self.exponent.numel()):
            exponent = None
        for elements, groups in self.layout.pieces():
            known = None if exponent is None else exponent[groups].to(device)
            self.write(elements, groups, flat[elements].to(device, torch.float32), exponent=known)

    def packed(self) -> dict[str, Any]:
        """Return the quantized moment as a dict on the CPU, for a compact checkpoint."""
        about = {**asdict(self.layout), "codec": self.codec.name, "never_zero": self.never_zero}
        data, scale, exponent = (None if x is None else x.cpu() for x in (self.data, self.scale, self.exponent))
        return {**about, "codes": data, "scale": scale, "exponent": exponent}

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Moment:
        """Return the Moment of a `packed` dict, on the CPU."""
        layout = Layout(*(packed[field.name] for field in fields(Layout)))
        moment = cls(CODECS[packed["codec"]], layout, torch.device("cpu"), never_zero=packed["never_zero"])
        moment.data, moment.scale, moment.exponent = packed["codes"], packed["scale"], packed["exponent"]
        return moment

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return a copy of dequantized elements; DeepSpeed calls it to read a parameter's part of a state."""
        parts = [
            self.read(elements, groups)[max(0, start - elements.start) : max(0, start + length - elements.start)]
            for elements, groups in self.layout.pieces()
            if elements.start < start + length and start < elements.stop
        ]
        return torch.cat([torch.empty(0, device=self.data.device), *parts])


def shared_layout(*states: torch.Tensor | Moment) -> Layout | None:
    """Return the layout of the Moments in `states`, which have one; None if there are none."""
    return next((state.layout for state in states if isinstance(state, Moment)), None)


def is_stored_as(value: torch.Tensor | Moment | None, codec: str, device: torch.device) -> bool:
    """Return whether a state is stored as a step needs it: other code may have moved it or replaced it by FP32."""
    if isinstance(value, Moment):
        return value.codec.name == codec and value.data.device == device
    stored = CODECS[codec]
    return value is not None and stored.max is None and (value.dtype, value.device) == (stored.dtype, device)


def draw(noise: torch.Generator | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return uniform random FP32 numbers in [0, 1) like `like`; None without a generator."""
    return None if noise is None else torch.rand(like.shape, generator=noise, device=like.device)


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8) if data.dtype.itemsize == 1 else data
