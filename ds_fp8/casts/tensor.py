"""QuantizedTensor: FP8 elements and the scales that turn them back into numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_fp8.casts import primitives
from ds_fp8.config.formats import BLOCK, FORMATS, CastSpec, format_of, is_of_blocks, scale_shape


def block_scales(rows: int, columns: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return uninitialised FP32 scales [rows, columns] of 128x128 blocks, in the layout that cuBLAS reads.

    Rows lie a multiple of 4 floats apart; the view is what it seems, its storage a little larger.
    """
    return torch.empty(rows, -(-columns // 4) * 4, device=device)[:, :columns]


def whole_blocks(columns: int) -> int:
    """Return `columns` rounded up to whole blocks."""
    return -(-columns // BLOCK) * BLOCK


def width_with_outliers(columns: int, channels: int) -> int:
    """Return the length of the contraction with its outlier blocks."""
    return whole_blocks(columns) + whole_blocks(2 * channels)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor x stored as x ≈ data * scale.

    Raises:
        ValueError: The shapes of data and scale do not belong together.
    """

    data: torch.Tensor
    """FP8, or uint8 codes of a format with a codec, the shape of x."""
    scale: torch.Tensor
    """FP32 dequantisation factors of shape `scale_shape(x.shape, granularity)`."""
    granularity: str
    scale_type: str = "fp32"
    """A name of SCALE_TYPES; "pow2" promises that every scale is a power of two."""
    format_name: str | None = None
    """Name of the format of uint8 codes; FP8 dtypes say theirs."""

    def __post_init__(self) -> None:
        if self.format_name is None:
            format_of(self.data.dtype)
        # Checked once here, so that products and decoding need not: wrong shapes would broadcast silently.
        expected = scale_shape(self.data.shape, self.granularity)
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}; {self.granularity} of data "
                f"{tuple(self.data.shape)} needs {expected}"
            )

    @classmethod
    def of_bytes(cls, codes: torch.Tensor, scale: torch.Tensor, spec: CastSpec) -> QuantizedTensor:
        """Return the tensor whose codes are these bytes.

        Args:
            codes: uint8, of the tensor's shape.
            scale: FP32, as `scale_shape` has it.
            spec: How the tensor was cast.
        """
        format = FORMATS[spec.format]
        name = None if format.codec is None else format.name
        return cls(codes.view(format.dtype), scale, spec.granularity, spec.scale, name)

    def __reduce__(self) -> tuple:
        # torch writes FP8 tensors into a plain pickle and cannot read them back: the bytes go in instead.
        data = self.data.view(torch.uint8), self.data.dtype
        return _from_bytes, (*data, self.scale, self.granularity, self.scale_type, self.format_name)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the tensor."""
        return self.data.shape

    @property
    def format(self) -> str:
        """Return the name of the number format, such as "e4m3"."""
        return self.format_name or format_of(self.data.dtype).name

    @property
    def spec(self) -> CastSpec:
        """Return the cast that made this tensor."""
        return CastSpec(self.format, self.granularity, self.scale_type)

    @property
    def nbytes(self) -> int:
        """Return the bytes of elements and scales together."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers that this tensor stands for.

        Args:
            dtype: Dtype of the result; data * scale is rounded to it once.

        Returns:
            A tensor of `shape` and `dtype`.
        """
        return primitives.dequantize(self.data, self.scale, self.granularity, self.scale_type, dtype, self.format)

    def t(self) -> QuantizedTensor:
        """Return the transposed matrix without casting again: bytes and scales are views of this tensor's.

        Raises:
            ValueError: For granularities whose groups lie along one dimension; transposed, they need new scales.
        """
        if self.granularity == "tensor":
            return replace(self, data=self.data.t())
        if is_of_blocks(self.granularity):
            # A transposed block is a block: the same 128 x 128 elements share its scale.
            return replace(self, data=self.data.t(), scale=self.scale.t())
        raise ValueError(
            f"a {self.granularity} cast cannot be transposed: cast the transposed high-precision tensor instead"
        )


def _from_bytes(data: torch.Tensor, dtype: torch.dtype, *others) -> QuantizedTensor:
    return QuantizedTensor(data.view(dtype), *others)
