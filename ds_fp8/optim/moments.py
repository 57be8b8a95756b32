"""Optimizer moments in few bytes: encoding and decoding in plain torch, the oracle of moments_triton.py.

    fp32            4 bytes, exact
    bf16            2 bytes, no scale
    fp16            2 bytes in units of a scale                        x ≈ code * scale
    e4m3, e5m2      1 byte in units of a scale
    e4m3_expanded   1 byte, the range of the group bent to fill E4M3   |x| ≈ scale * (|code| / 448) ** (1 / exponent)
    int8, log8 ...  1 byte in units of a scale: the emulated formats of config.formats

The scale of fp16, e4m3, e5m2 and emulated formats brings the group's largest magnitude to the format's largest number.
Rounded up to a power of two (`pow2`) or to 13 significant bits (`fp32`) it makes every product code * scale exact in
FP32 (but for log8, whose numbers are rounded themselves), and a group that is dequantized and quantized again gives
the same values: checkpoints hold dequantized moments and lose nothing.

`e4m3_expanded` is the dynamic range expansion of COAT (arXiv 2410.19313). There code = cast((|x| / c) ** k / s) with
c = sqrt(max * min), s = (max / c) ** k / 448 and k = log(448² / 2) / log(max / min) rounded down to sixteenths; c and s
cancel to code = cast(448 * (|x| / max) ** k), so a group keeps max as its FP32 scale and 16 k as one byte: 5 bytes in
128. Exact zeros do not count as min; a group of equal values, whose ratio is 1, takes the largest k.

Two rules hold for all of them. Magnitudes below 2^-126 are zeros: GPUs flush them anyway. And where `never_zero` is
set, as for exp_avg_sq, a positive value never becomes code 0 but the smallest code: Adam divides by its root.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch

from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.config.formats import BLOCK, FORMATS, SMALLEST_SCALE, Format
from ds_fp8.config.plans import MOMENTS, StatePrecision


@dataclass(frozen=True)
class Codec:
    """A way to store FP32 numbers."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int = 0
    min_exponent: int = 0  # exponent of the smallest normal number. Emulated formats need neither of the two.
    max: float | None = None  # value that the largest magnitude of a group is scaled to; None: no scales
    expanded: bool = False

    @property
    def emulated(self) -> Format | None:
        """Return the format whose codes are bytes that torch has no dtype for, or None."""
        return FORMATS[self.name] if self.dtype is torch.uint8 else None

    @property
    def smallest(self) -> float:
        """Return the smallest positive number of the format."""
        if self.emulated is not None:
            return self.emulated.smallest_subnormal
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


class _Codecs(dict[str, Codec]):
    def __missing__(self, name: str) -> Codec:
        # A byte of a format that torch has no dtype for.
        format = FORMATS[name]
        self[name] = Codec(name, format.dtype, max=format.max)
        return self[name]


# By name; those of other formats (config/formats.py) are made when they are asked for.
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

# log2 of the ratio max / min that an expanded group fills: 448 down to 2.3 of E4M3's smallest steps.
LOG2_RANGE = math.log2(448.0**2 / 2)
EXPONENT_STEPS = 16  # exponents are stored in sixteenths, from 1 to LARGEST_EXPONENT of them
LARGEST_EXPONENT = 255

CHUNK = 1 << 22  # elements that are decoded at once where only a part is wanted: bounds the FP32 copies


class Quantized(NamedTuple):
    """A flat quantized tensor: data [n], scale FP32 [g] and exponent uint8 [g] a group where the codec has them."""

    data: torch.Tensor
    scale: torch.Tensor | None
    exponent: torch.Tensor | None


def group_count(numel: int, granularity: str) -> int:
    """Return the number of scales of a flat tensor: for "1x128" one for every 128 elements and the ragged rest."""
    return math.ceil(numel / BLOCK) if granularity == "1x128" else 1


def moment_bytes(precision: StatePrecision) -> float:
    """Return the bytes an element of both moments with their scales, where tensors are large."""
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
    """Encode flat numbers, rounding to nearest even.

    Args:
        x: FP32 [n].
        codec: How a number is coded.
        granularity: "1x128" or "tensor": what shares a scale.
        scale_type: "fp32" or "pow2", of the scales.
        never_zero: Whether positive numbers stay above zero.
        noise: Uniform numbers in [0, 1), FP32 [n]: round stochastically, up where the noise exceeds what is missing.
        exponent: uint8 [groups]: use these instead of finding the group's own (decoded numbers came from them).
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
            if at_max is not None:  # or noise could round it down, and the scale would not be found again
                magnitude = torch.where(at_max & positive, codec.max, magnitude)
    if codec.max is not None:
        magnitude = torch.where(magnitude > codec.max, codec.max, magnitude)  # NaN stays
    if never_zero and not codec.expanded:  # expansion brings the smallest to 2.3 steps of the format
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
    """Return the flat FP32 numbers [n] that `quantized` stands for."""
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
    """Reshape [n] -> [groups, elements of a group], the last group filled up with zeros."""
    if granularity == "tensor":
        return x.view(1, -1)
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scale_of(amax: torch.Tensor, largest: float, scale_type: str) -> torch.Tensor:
    """Return amax / largest, rounded up as the scale type has it; 1 for a group of zeros."""
    # A tensor as divisor: dividing by a number, CUDA multiplies by its rounded reciprocal.
    exact = amax / torch.full_like(amax, largest)
    mask = SCALE_MASKS[scale_type]
    # Rounded up on the bits: adding the mask carries into the kept bits unless the low ones are zero already. The next
    # power of two, or 13 significant bits; a carry into the exponent is right as well.
    rounded = ((exact.view(torch.int32) + mask) & ~mask).view(torch.float32)
    rounded = torch.where(exact.isfinite(), rounded, torch.nan)
    return torch.where(amax == 0, 1.0, rounded.clamp_min(SMALLEST_SCALE))


def _find_exponent(magnitude: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the group's exponent in sixteenths, from its magnitudes [g, e] and the largest of each [g]."""
    # Exact zeros do not count: one of them would stretch the range without end.
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(1)
    ratio = largest.log2() - smallest.log2()
    # Equal values have ratio 0; a group of zeros, or of NaN, has no ratio at all.
    # Rounded down, so that the group's range never exceeds that of the format.
    steps = torch.where(ratio > 0, (EXPONENT_STEPS * LOG2_RANGE / ratio).floor(), LARGEST_EXPONENT)
    return steps.clamp(1, LARGEST_EXPONENT).to(torch.uint8)


def _round_with_noise(
    magnitude: torch.Tensor, noise: torch.Tensor, codec: Codec, bend: torch.Tensor | None
) -> torch.Tensor:
    """Return one of the two numbers of the format around `magnitude`, whose expectation over the noise is right.

    bend [g, 1]: codes stand for their power of this, and it is of those powers that the expectation is taken. Taken of
    the codes it would be too small by a share of up to 1e-3 at every step, as much as exp_avg_sq changes in one.
    """
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent, m in [0.5, 1)
    step = torch.ldexp(torch.ones_like(magnitude), (exponent - 1).clamp_min(codec.min_exponent) - codec.mantissa_bits)
    below = (magnitude / step).floor() * step
    above = below + step
    if bend is None:
        share = (magnitude - below) / step
    else:
        share = (magnitude**bend - below**bend) / (above**bend - below**bend)
    # P(noise >= 1 - share) = share, so that the expectation is below + share * step: the number itself.
    rounded = torch.where(share + noise >= 1, above, below)
    return rounded if codec.max is None else torch.where(rounded > codec.max, codec.max, rounded)


@dataclass(frozen=True)
class Layout:
    """Division of a flat state of `numel` elements into groups, and the rounding of their scales.

    granularity `1x128`: runs of 128 elements. `tensor`: one group for each of `segments`, the sizes of the tensors that
    were flattened into this one (() for a single one).
    """

    numel: int
    granularity: str
    scale_type: str
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.segments and sum(self.segments) != self.numel:
            raise ValueError(f"segments of {sum(self.segments)} elements in a tensor of {self.numel}")

    @property
    def groups(self) -> int:
        return max(1, len(self.segments)) if self.granularity == "tensor" else group_count(self.numel, "1x128")

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yield (elements, groups) slices that together make up the state, each of whole groups and bounded in size.

        A group of a whole tensor is not divided.
        """
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
    """A flat state of FP32 numbers in fewer bytes. Not a Tensor subclass, so generic code cannot cast it.

    codes [numel] in the codec's dtype; scale FP32 [groups]; exponent uint8 [groups] for e4m3_expanded, else None.
    """

    def __init__(self, codec: Codec, layout: Layout, device: torch.device, *, never_zero: bool):
        self.codec, self.layout, self.never_zero = codec, layout, never_zero
        self.data = torch.zeros(layout.numel, dtype=torch.uint8 if codec.dtype.itemsize == 1 else codec.dtype,
                                 device=device).view(codec.dtype)  # fmt: skip
        self.scale = torch.ones(layout.groups, device=device)
        # 1 and scale 1 with codes of zero: a new state decodes to zeros.
        self.exponent = torch.ones(layout.groups, dtype=torch.uint8, device=device) if codec.expanded else None

    def __getstate__(self) -> dict[str, Any]:
        # torch writes FP8 tensors into a plain pickle and cannot read them back: the bytes go in instead.
        state = dict(vars(self))
        state["codes"] = _bytes(state.pop("data"))  # the name in checkpoints
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state.pop("codes").view(state["codec"].dtype)
        vars(self).update(state, data=data)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.data, self.scale, self.exponent) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(self, elements: slice, groups: slice) -> torch.Tensor:
        """Return the numbers of one piece of the layout, FP32."""
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
        """Encode FP32 `numbers` into one piece of the layout, with separate scales."""
        quantized = quantize_moment(
            numbers, self.codec, self.layout.granularity, self.layout.scale_type,
            never_zero=self.never_zero, noise=noise, exponent=exponent,
        )  # fmt: skip
        _bytes(self.data[elements]).copy_(_bytes(quantized.data))
        self.scale[groups] = quantized.scale
        if self.exponent is not None:
            self.exponent[groups] = quantized.exponent

    def dequantize(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return all numbers, FP32 [numel], on `device` (where the codes are when None)."""
        result = torch.empty(self.layout.numel, device=self.data.device if device is None else device)
        for elements, groups in self.layout.pieces():
            # Piece by piece: with `device` "cpu" the GPU never holds all of the state in FP32.
            result[elements] = self.read(elements, groups).to(result.device)
        return result

    def quantize(
        self, numbers: torch.Tensor, exponent: torch.Tensor | None = None, noise: torch.Generator | None = None
    ) -> None:
        """Replace all numbers.

        Args:
            numbers: The new ones, in their order.
            exponent: uint8 [groups], those that `numbers` were decoded with, where they are known.
            noise: Round stochastically with numbers drawn from this generator; None: to the nearest.
        """
        flat = numbers.reshape(-1)
        device = self.data.device
        if exponent is not None and (self.exponent is None or exponent.numel() != self.exponent.numel()):
            exponent = None
        for elements, groups in self.layout.pieces():
            known = None if exponent is None else exponent[groups].to(device)
            piece = flat[elements].to(device, torch.float32)
            self.write(elements, groups, piece, draw(noise, piece), exponent=known)

    def packed(self) -> dict[str, Any]:
        """Return all of this state, codes and scales on the CPU: what a compact checkpoint holds."""
        about = {**asdict(self.layout), "codec": self.codec.name, "never_zero": self.never_zero}
        data, scale, exponent = (None if x is None else x.cpu() for x in (self.data, self.scale, self.exponent))
        return {**about, "codes": data, "scale": scale, "exponent": exponent}

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Moment:
        """Return the Moment, on the CPU, that `packed` came from."""
        layout = Layout(*(packed[field.name] for field in fields(Layout)))
        moment = cls(CODECS[packed["codec"]], layout, torch.device("cpu"), never_zero=packed["never_zero"])
        moment.data, moment.scale, moment.exponent = packed["codes"], packed["scale"], packed["exponent"]
        return moment

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return a copy of decoded elements, which is how DeepSpeed reads a parameter's part of a state."""
        if dim != 0:
            raise ValueError(f"a flat state has no dimension {dim}")
        parts: Sequence[torch.Tensor] = [
            self.read(elements, groups)[max(0, start - elements.start) : max(0, start + length - elements.start)]
            for elements, groups in self.layout.pieces()
            if elements.start < start + length and start < elements.stop
        ]
        return torch.cat(list(parts)) if parts else torch.empty(0, device=self.data.device)


def shared_layout(*states: torch.Tensor | Moment) -> Layout | None:
    """Return the layout of states that are Moments, the same for all of them; None if none is."""
    layouts = {state.layout for state in states if isinstance(state, Moment)}
    if len(layouts) > 1:
        raise ValueError(f"moments of one parameter in several layouts: {layouts}")
    return next(iter(layouts), None)


def is_stored_as(value: torch.Tensor | Moment | None, codec: str, device: torch.device) -> bool:
    """Return whether a state is in the form that a step works on: others put FP32 tensors in its place, or move it."""
    if isinstance(value, Moment):
        return value.codec.name == codec and value.data.device == device
    kept = CODECS[codec]
    return value is not None and kept.max is None and (value.dtype, value.device) == (kept.dtype, device)


def draw(noise: torch.Generator | None, like: torch.Tensor) -> torch.Tensor | None:
    """Draw uniform FP32 numbers in [0, 1) of the shape of `like` from a generator of its device; None without one."""
    return None if noise is None else torch.rand(like.shape, generator=noise, device=like.device)


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8) if data.dtype.itemsize == 1 else data
