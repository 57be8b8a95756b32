"""The package deep_gemm of fake_deep_gemm/ in place of the library, in this process and in those that it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.gemm import deep_gemm

FOLDER = Path(__file__).parent / "fake_deep_gemm"


def forget() -> None:
    """Let this process know of no kernel, as a new one."""
    deep_gemm._ready.clear()
    sys.modules.pop("deep_gemm", None)


class Library:
    """The installed package, its cache and what it has compiled."""

    def __init__(self, folder: Path, setenv, prepend):
        self._log = folder / "compiled"
        self.cache = folder / "cache of kernels"
        setenv("DG_JIT_CACHE_DIR", str(self.cache))
        setenv("FAKE_DEEP_GEMM_LOG", str(self._log))
        setenv("PYTHONPATH", f"{FOLDER}:{Path(__file__).parents[2]}")
        prepend(str(FOLDER))
        forget()

    @property
    def compiled(self) -> list[list[str]]:
        """Return process, name, N, K, groups and tile of every compilation."""
        return [line.split() for line in self._log.read_text().splitlines()] if self._log.exists() else []


def operands(rows: int, columns: int, contraction: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return random operands of a product."""
    a, b = torch.randn(rows, contraction), torch.randn(columns, contraction)
    return quantize(a.bfloat16()), quantize(b.bfloat16(), granularity="128x128")
