"""QuantizedTensor: FP8 elements and the scales that turn them back into numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fp8.formats import format_of, scale_shape
from ds_fp8.quantize import reference


def block_scales(rows: int, columns: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Uninitialised FP32 scales [rows, columns] of 128x128 blocks, laid out as cuBLAS reads them.

    Rows lie a multiple of 4 floats apart; the view is what it seems, its storage a little larger.
    """
    return torch.empty(rows, -(-columns // 4) * 4, device=device)[:, :columns]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor x stored as x ≈ data * scale.

    data: FP8, the shape of x. scale: FP32 dequantisation factors of shape `scale_shape(x.shape, granularity)`.
    Raises ValueError when the two shapes do not belong together.
    """

    data: torch.Tensor
    scale: torch.Tensor
    granularity: str
    scale_type: str = "fp32"
    """"pow2" promises that every scale is a power of two."""

    def __post_init__(self) -> None:
        format_of(self.data.dtype)
        expected = scale_shape(self.data.shape, self.granularity)
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}; {self.granularity} of data "
                f"{tuple(self.data.shape)} needs {expected}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def format(self) -> str:
        """Name of the number format, such as "e4m3"."""
        return format_of(self.data.dtype).name

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales together."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers this tensor stands for, of shape `shape`."""
        return reference.dequantize(self.data, self.scale, self.granularity, self.scale_type, dtype)

    def t(self) -> QuantizedTensor:
        """The transposed matrix, without casting again: bytes and scales are views of this tensor's.

        Raises ValueError for granularities whose groups lie along one dimension: transposed, they need new scales.
        """
        if self.granularity == "tensor":
            return QuantizedTensor(self.data.t(), self.scale, "tensor", self.scale_type)
        if self.granularity == "128x128":
            return QuantizedTensor(self.data.t(), self.scale.t(), "128x128", self.scale_type)
        raise ValueError(
            f"a {self.granularity} cast cannot be transposed: cast the transposed high-precision tensor instead"
        )
