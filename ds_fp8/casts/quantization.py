"""QuantizedTensor, and quantize for tensors and matrices: Triton on a GPU, plain torch elsewhere, bitwise equal.

The reference is scales_for and quantize_with_scale of primitives.py, the kernel is in quantization_triton.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from importlib import metadata

import torch
from packaging.version import Version

from ds_fp8.casts import primitives
from ds_fp8.casts.primitives import apply_factors, infinite_to_nan, quantize_with_scale, scales_for
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import (
    BLOCK,
    FORMATS,
    CastSpec,
    check_scale_type,
    format_of,
    is_native,
    is_of_blocks,
    scale_shape,
)


def block_scales(rows: int, columns: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return uninitialised FP32 scales [rows, columns] of 128x128 blocks, in the layout that cuBLAS reads.

    Row strides are multiples of 4 floats: a view of a slightly larger storage.
    """
    return torch.empty(rows, -(-columns // 4) * 4, device=device)[:, :columns]


def round_up_to_blocks(columns: int) -> int:
    return -(-columns // BLOCK) * BLOCK


def width_with_outliers(columns: int, channels: int) -> int:
    """Return the length of the contraction `columns` padded to blocks, with its outlier blocks."""
    return round_up_to_blocks(columns) + round_up_to_blocks(2 * channels)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor x stored as x ≈ data * scale.

    Raises:
        ValueError: The shape of scale does not fit data and granularity.
    """

    data: torch.Tensor  # FP8, or uint8 for a format with a codec; shape of x
    scale: torch.Tensor  # FP32, of shape `scale_shape(x.shape, granularity)`
    granularity: str
    scale_type: str = "fp32"  # a name of SCALE_TYPES; "pow2" promises that every scale is a power of two
    format_name: str | None = None  # format of uint8 data; implied by FP8 dtypes

    def __post_init__(self) -> None:
        if self.format_name is None:
            format_of(self.data.dtype)
        # Checked once here: in GEMMs and dequantize wrong shapes would broadcast silently.
        expected = scale_shape(self.data.shape, self.granularity)
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}; {self.granularity} of data "
                f"{tuple(self.data.shape)} needs {expected}"
            )

    @classmethod
    def of_bytes(cls, data: torch.Tensor, scale: torch.Tensor, spec: CastSpec) -> QuantizedTensor:
        """Return the QuantizedTensor of uint8 data, with format, granularity and scale type of `spec`."""
        format = FORMATS[spec.format]
        name = None if format.codec is None else format.name
        return cls(data.view(format.dtype), scale, spec.granularity, spec.scale, name)

    def __reduce__(self) -> tuple:
        # torch cannot unpickle FP8 tensors from a plain pickle: pickled as bytes.
        data = self.data.view(torch.uint8), self.data.dtype
        return _from_bytes, (*data, self.scale, self.granularity, self.scale_type, self.format_name)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def format(self) -> str:
        """Return the name of the number format, such as "e4m3"."""
        return self.format_name or format_of(self.data.dtype).name

    @property
    def spec(self) -> CastSpec:
        return CastSpec(self.format, self.granularity, self.scale_type)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return data * scale, rounded once to `dtype`."""
        return primitives.dequantize(self.data, self.scale, self.granularity, self.scale_type, dtype, self.format)

    def t(self) -> QuantizedTensor:
        """Return the transpose as a view of data and scale.

        Raises:
            ValueError: The granularity has groups along one dimension: the transpose needs other scales.
        """
        if self.granularity == "tensor":
            return replace(self, data=self.data.t())
        if is_of_blocks(self.granularity):
            # A transposed block is a block: the same 128 x 128 elements share its scale.
            return replace(self, data=self.data.t(), scale=self.scale.t())
        raise ValueError(
            f"{self.granularity} cannot be transposed: quantize the transposed high-precision tensor instead"
        )


def widened(q: QuantizedTensor, channels: int) -> QuantizedTensor | None:
    """Return `q` [R, K] with its outlier blocks, as a view over the padding of its rows; None without such padding."""
    rows, K = q.shape
    width = width_with_outliers(K, channels)
    if q.data.stride(0) != width:  # the stride of rows with padding for exactly these blocks
        return None
    # The padding of each row is part of the allocation (empty_result, `room`; FP8Param.pitch).
    scale = q.scale.as_strided((len(q.scale), width // BLOCK), q.scale.stride())
    return replace(q, data=q.data.as_strided((rows, width), (width, 1)), scale=scale)


def _from_bytes(data: torch.Tensor, dtype: torch.dtype, *others) -> QuantizedTensor:
    return QuantizedTensor(data.view(dtype), *others)


def quantize(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    room: int = 0,
) -> QuantizedTensor:
    """Quantize a floating point tensor of any shape, with scales from its own amax.

    Args:
        x: Floating point; a matrix for blocks such as "128x128" and for factors.
        format: A name of config.formats.FORMATS.
        granularity: Elements that share a scale: "tensor", "row" (the last dimension), "1x128" (128 elements along the
            last dimension), "128x128", or groups and blocks of other sizes. Ragged edges are separate groups.
        scale: A name of config.formats.SCALE_TYPES.
        row_factor: [M], multiplied in FP32 into the rows of a matrix [M, K] first.
        column_factor: [K], multiplied into its columns after that.
        room: Padding after every row of a matrix with granularity "1x128", in bytes, a multiple of 128, for outlier
            blocks (outliers.py): the result is a view of a wider matrix. Ignored on a CPU.

    A group with Inf or NaN becomes NaN. Raises ValueError for unknown names and unsupported shapes.
    """
    # Kernels take matrices: leading dimensions are flattened, which would change blocks of 128x128.
    if x.device.type == "cuda" and is_native(format, granularity, scale) and x.dim():
        if x.dim() == 2:
            return quantize_both(x, format, granularity, None, scale, row_factor, column_factor, room)[0]
        if granularity != "128x128":
            result, _ = quantize_both(x.reshape(-1, x.shape[-1]), format, granularity, None, scale)
            scales = result.scale.reshape(*x.shape[:-1], -1) if result.scale.dim() else result.scale
            return QuantizedTensor(result.data.view(x.shape), scales, granularity, scale)
    _check_words(format, scale)
    return _reference(apply_factors(x, row_factor, column_factor), format, granularity, scale)


def quantize_columnwise(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a matrix x [M, K] columnwise: quantize(x.t()), of shape [K, M], in one pass."""
    return quantize_both(x, format, None, granularity, scale, row_factor, column_factor)[1]


def quantize_both(
    x: torch.Tensor,
    format: str = "e4m3",
    rowwise: str | None = "1x128",
    columnwise: str | None = "1x128",
    scale: str = "pow2",
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    room: int = 0,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Quantize a matrix x [M, K] rowwise, [M, K], and columnwise, [K, M], in one pass.

    Arguments as of `quantize`, `room` for the rowwise result; None for a result whose granularity is None.
    """
    _check_words(format, scale)
    if x.dim() != 2:
        raise ValueError(f"rowwise and columnwise quantization needs a matrix, got shape {tuple(x.shape)}")
    native = all(granularity is None or is_native(format, granularity, scale) for granularity in (rowwise, columnwise))
    if x.device.type == "cuda" and native:
        from ds_fp8.casts.quantization_triton import quantize_tiles

        return quantize_tiles(x.detach(), format, scale, rowwise, columnwise, row_factor, column_factor, room)
    x = apply_factors(x.detach(), row_factor, column_factor)
    row = None if rowwise is None else _reference(x, format, rowwise, scale)
    if columnwise is None:
        return row, None
    # Transposed first: the reference has groups along the last dimension.
    return row, _reference(x.t().contiguous(), format, columnwise, scale)


def transpose(q: QuantizedTensor, matrices: int = 1) -> QuantizedTensor:
    """Return a contiguous copy of the transpose.

    matrices: q is a stack of so many matrices along its rows, each transposed: [matrices * K, M / matrices].
    """
    if matrices == 1:
        return replace(q.t(), data=_transposed(q.data))
    if q.granularity != "tensor" and not is_of_blocks(q.granularity):
        q.t()  # raises
    scale = q.scale
    if scale.dim():
        # Scales of each matrix are transposed like its data; the order of the matrices stays.
        scale = scale.unflatten(0, (matrices, -1)).transpose(1, 2).flatten(0, 1)
    return replace(q, data=_transposed(q.data.unflatten(0, (matrices, -1))).flatten(0, 1), scale=scale)


def _transposed(data: torch.Tensor) -> torch.Tensor:
    if data.device.type == "cuda":
        from ds_fp8.casts.quantization_triton import transpose_bytes

        # Rows may have padding, as of weights for an outlier block; stacks of matrices must be contiguous.
        return transpose_bytes(data if data.dim() == 2 and data.stride(1) == 1 else data.contiguous())
    return data.transpose(-2, -1).contiguous()


def _reference(x: torch.Tensor, format: str, granularity: str, scale: str) -> QuantizedTensor:
    factors = scales_for(x, format, granularity, scale)
    name = None if FORMATS[format].codec is None else format
    data = quantize_with_scale(infinite_to_nan(x, scale), factors, format, granularity)
    return QuantizedTensor(data, factors, granularity, scale, name)


def _check_words(format: str, scale: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    check_scale_type(scale)


# From this version on Triton miscompiles transposed 1-byte stores next to min.NaN and max.NaN (triton#11111)
SUSPECT = Version("3.8")
REMEDY = "pip install -c scripts/constraints-gpu.txt torch triton"


def check_triton(device: torch.device) -> None:
    """Raise UserError if the installed Triton miscompiles transposing kernels, found by running small ones."""
    version = _version()
    if device.type == "cuda" and version is not None and version >= SUSPECT and (wrong := wrong_casts(device)):
        raise UserError(f"Triton {version} miscompiles {', '.join(wrong)} on this GPU (triton#11111)", remedy=REMEDY)


@functools.cache
def _version() -> Version | None:
    try:
        return Version(metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return None


def wrong_casts(device: torch.device) -> list[str]:
    """Return which columnwise quantizations and transposes on a device differ from the CPU."""
    wrong = []
    generator = torch.Generator().manual_seed(0)
    for shape in ((256, 384), (200, 136)):  # full tiles, ragged ones
        x = torch.randn(shape, generator=generator).to(torch.bfloat16)
        x[131, 7] = 0.0
        poisoned = x.clone()
        poisoned[3, 5], poisoned[130, 70] = float("inf"), float("nan")
        for values, format, granularity, scale in (
            (poisoned, "e4m3", "1x128", "pow2"),
            (poisoned, "e5m2", "1x128", "fp32"),
            (x, "e4m3", "tensor", "fp32"),
        ):
            _, columnwise = quantize_both(values.to(device), format, granularity, granularity, scale)
            expected = quantize(values.t().contiguous(), format, granularity, scale)
            if not _same(columnwise.data, expected.data) or not _same(columnwise.scale, expected.scale):
                wrong.append(f"columnwise quantization to {format}, {granularity}, {scale} of {shape}")
        blocks = quantize(x, "e4m3", "128x128", "pow2")
        on_device = quantize(x.to(device), "e4m3", "128x128", "pow2")
        if not _same(transpose(on_device).data, blocks.data.t().contiguous()):
            wrong.append(f"the transpose of a weight of {shape}")
    return wrong


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare data or scales as numbers with signs: NaN has several bit patterns."""
    found, expected = (x.cpu().float().nan_to_num(nan=1e9) for x in (found, expected))
    return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())
