"""A bit test of the transposing casts, for Tritons that may miscompile them."""

from __future__ import annotations

import functools
from importlib import metadata

import torch
from packaging.version import Version

from ds_fp8.casts.quantization import quantize, quantize_both, transpose
from ds_fp8.config.errors import UserError

SUSPECT = Version("3.8")
"""From here on Triton writes wrong bytes in transposed 1-byte stores beside min.NaN and max.NaN (triton#11111)."""
REMEDY = "pip install -c scripts/constraints-gpu.txt torch triton"


def check_triton(device: torch.device) -> None:
    """Cast small matrices and compare every byte, where the installed Triton is one that may miscompile.

    Raises:
        UserError: A byte differs.
    """
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
    """Return which transposing casts differ on a device from casts of the transposed matrix on the CPU."""
    wrong = []
    generator = torch.Generator().manual_seed(0)
    for shape in ((256, 384), (200, 136)):  # whole tiles, ragged ones
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
                wrong.append(f"the cast along tokens in {format}, {granularity}, {scale} of {shape}")
        blocks = quantize(x, "e4m3", "128x128", "pow2")
        on_device = quantize(x.to(device), "e4m3", "128x128", "pow2")
        if not _same(transpose(on_device).data, blocks.data.t().contiguous()):
            wrong.append(f"the transposed copy of a weight of {shape}")
    return wrong


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare codes, or scales, as numbers with their signs: NaN has several codes."""
    found, expected = (x.cpu().float().nan_to_num(nan=1e9) for x in (found, expected))
    return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())
