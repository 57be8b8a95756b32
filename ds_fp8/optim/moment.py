"""One encoded optimizer state: codes, scales and what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ds_fp8.config.formats import BLOCK
from ds_fp8.optim.codecs import CODECS, Codec, Encoded, decode, encode, group_count

CHUNK = 1 << 22
"""Elements that are decoded at once where only a part is wanted: bounds the FP32 copies."""


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
        """Return the number of groups, each with one scale."""
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
        self.codes = torch.zeros(layout.numel, dtype=torch.uint8 if codec.dtype.itemsize == 1 else codec.dtype,
                                 device=device).view(codec.dtype)  # fmt: skip
        self.scale = torch.ones(layout.groups, device=device)
        # 1 and scale 1 with codes of zero: a new state decodes to zeros.
        self.exponent = torch.ones(layout.groups, dtype=torch.uint8, device=device) if codec.expanded else None

    def __getstate__(self) -> dict[str, Any]:
        # torch writes FP8 tensors into a plain pickle and cannot read them back: the bytes go in instead.
        return {**vars(self), "codes": _bytes(self.codes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, codes=state["codes"].view(state["codec"].dtype))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of this state: what takes memory."""
        return tuple(tensor for tensor in (self.codes, self.scale, self.exponent) if tensor is not None)

    @property
    def nbytes(self) -> int:
        """Return the memory of this state in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(self, elements: slice, groups: slice) -> torch.Tensor:
        """Return the numbers of one piece of the layout, FP32."""
        exponent = None if self.exponent is None else self.exponent[groups]
        return decode(Encoded(self.codes[elements], self.scale[groups], exponent), self.codec, self.layout.granularity)

    def write(
        self,
        elements: slice,
        groups: slice,
        numbers: torch.Tensor,
        noise: torch.Tensor | None = None,
        exponent: torch.Tensor | None = None,
    ) -> None:
        """Encode FP32 `numbers` into one piece of the layout, with separate scales."""
        encoded = encode(
            numbers, self.codec, self.layout.granularity, self.layout.scale_type,
            never_zero=self.never_zero, noise=noise, exponent=exponent,
        )  # fmt: skip
        _bytes(self.codes[elements]).copy_(_bytes(encoded.codes))
        self.scale[groups] = encoded.scale
        if self.exponent is not None:
            self.exponent[groups] = encoded.exponent

    def decode(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return all numbers, FP32 [numel], on `device` (where the codes are when None)."""
        result = torch.empty(self.layout.numel, device=self.codes.device if device is None else device)
        for elements, groups in self.layout.pieces():
            # Piece by piece: with `device` "cpu" the GPU never holds all of the state in FP32.
            result[elements] = self.read(elements, groups).to(result.device)
        return result

    def encode(
        self, numbers: torch.Tensor, exponent: torch.Tensor | None = None, noise: torch.Generator | None = None
    ) -> None:
        """Replace all numbers.

        Args:
            numbers: The new ones, in their order.
            exponent: uint8 [groups], those that `numbers` were decoded with, where they are known.
            noise: Round stochastically with numbers drawn from this generator; None: to the nearest.
        """
        flat = numbers.reshape(-1)
        device = self.codes.device
        if exponent is not None and (self.exponent is None or exponent.numel() != self.exponent.numel()):
            exponent = None
        for elements, groups in self.layout.pieces():
            known = None if exponent is None else exponent[groups].to(device)
            piece = flat[elements].to(device, torch.float32)
            self.write(elements, groups, piece, draw(noise, piece), exponent=known)

    def packed(self) -> dict[str, Any]:
        """Return all of this state, codes and scales on the CPU: what a compact checkpoint holds."""
        about = {**asdict(self.layout), "codec": self.codec.name, "never_zero": self.never_zero}
        codes, scale, exponent = (None if x is None else x.cpu() for x in (self.codes, self.scale, self.exponent))
        return {**about, "codes": codes, "scale": scale, "exponent": exponent}

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Moment:
        """Return the Moment, on the CPU, that `packed` came from."""
        layout = Layout(*(packed[field.name] for field in fields(Layout)))
        moment = cls(CODECS[packed["codec"]], layout, torch.device("cpu"), never_zero=packed["never_zero"])
        moment.codes, moment.scale, moment.exponent = packed["codes"], packed["scale"], packed["exponent"]
        return moment

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return a copy of decoded elements, which is how DeepSpeed reads a parameter's part of a state.

        Args:
            dim: 0.
            start: First element.
            length: Number of elements.

        Raises:
            ValueError: For another dimension.
        """
        if dim != 0:
            raise ValueError(f"a flat state has no dimension {dim}")
        parts: Sequence[torch.Tensor] = [
            self.read(elements, groups)[max(0, start - elements.start) : max(0, start + length - elements.start)]
            for elements, groups in self.layout.pieces()
            if elements.start < start + length and start < elements.stop
        ]
        return torch.cat(list(parts)) if parts else torch.empty(0, device=self.codes.device)


def shared_layout(*states: torch.Tensor | Moment) -> Layout | None:
    """Return the layout of states that are Moments, the same for all of them; None if none is."""
    layouts = {state.layout for state in states if isinstance(state, Moment)}
    if len(layouts) > 1:
        raise ValueError(f"moments of one parameter in several layouts: {layouts}")
    return next(iter(layouts), None)


def is_kept_as(value: torch.Tensor | Moment | None, codec: str, device: torch.device) -> bool:
    """Return whether a state is in the form that a step works on: others put FP32 tensors in its place, or move it."""
    if isinstance(value, Moment):
        return value.codec.name == codec and value.codes.device == device
    kept = CODECS[codec]
    return value is not None and kept.max is None and (value.dtype, value.device) == (kept.dtype, device)


def draw(noise: torch.Generator | None, like: torch.Tensor) -> torch.Tensor | None:
    """Draw uniform FP32 numbers in [0, 1) of the shape of `like` from a generator of its device; None without one."""
    return None if noise is None else torch.rand(like.shape, generator=noise, device=like.device)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return FP8 codes as bytes, which copy on every device."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
