"""Transformer Engine's MXFP8 storage and general_gemm in torch, as far as its sources say what they read and check.

Scales are one E8M0 byte for 32 elements of a row (rowwise) or of a column (columnwise), in compact order and padded to
multiples of (128, 4) or (4, 128); of the padding nothing is read. Products are exact until they are rounded once.
"""

import sys
import types
from dataclasses import dataclass

import torch

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass
class Storage:
    """MXFP8TensorStorage: the same arguments in the same order."""

    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    fp8_dtype: str
    quantizer: None
    with_gemm_swizzled_scales: bool

    def numbers(self, columnwise: bool) -> torch.Tensor:
        """FP64, in the shape of the memory; asserts what the library and cuBLASLt ask for."""
        data = self.columnwise_data if columnwise else self.rowwise_data
        scales = self.columnwise_scale_inv if columnwise else self.rowwise_scale_inv
        assert data is not None, "the operand lacks this usage"
        assert data.dtype is scales.dtype is torch.uint8
        assert data.is_contiguous()
        assert scales.is_contiguous()
        assert not self.with_gemm_swizzled_scales
        assert all(length % 32 == 0 for length in data.shape)
        if columnwise:
            data, scales = data.t(), scales.t()
        rows, columns = data.shape
        assert scales.shape == (_up(rows, 128), _up(columns // 32, 4))
        factors = scales.contiguous().view(torch.float8_e8m0fnu).double()[:rows, : columns // 32]
        found = data.contiguous().view(DTYPES[self.fp8_dtype]).double() * factors.repeat_interleave(32, 1)
        return found.t() if columnwise else found


def general_gemm(A, B, out_dtype=None, *, layout="TN", use_split_accumulator=False):
    """Multiply B by A, each transposed where the layout (of the columns that BLAS sees) says so."""
    assert layout in ("TN", "NN", "NT")
    general_gemm.layouts.append(layout)
    a, b = A.numbers(columnwise=layout[0] == "N"), B.numbers(columnwise=layout[1] == "T")
    product = (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)
    return product.to(out_dtype), None, None, None


general_gemm.layouts = []


def install(monkeypatch) -> list[str]:
    """Put the stand-in in place of Transformer Engine; return the list of the layouts that are asked for."""
    root = "transformer_engine.pytorch"
    contents = {
        "transformer_engine": {},
        root: {},
        f"{root}.cpp_extensions": {"general_gemm": general_gemm},
        f"{root}.tensor": {},
        f"{root}.tensor.storage": {},
        f"{root}.tensor.storage.mxfp8_tensor_storage": {"MXFP8TensorStorage": Storage},
        "transformer_engine_torch": {"DType": types.SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    general_gemm.layouts.clear()
    return general_gemm.layouts
