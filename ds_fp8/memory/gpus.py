"""GPUs by name: how much memory each has, and which FP8 products it multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import nearest

_AMPERE = "no FP8 products: a configuration with FP8 on is refused there"
_ADA = "FP8 products with scales per row and tensor (presets rowwise, tensorwise), not with block scales"
_BLACKWELL = "FP8 products through Transformer Engine's MXFP8 (power-of-two scales)"


@dataclass(frozen=True)
class GPU:
    """A GPU as a training run finds it."""

    gib: float
    """Memory that CUDA reports in total, GiB: less than the name says."""
    limits: str | None = None
    """Limits of its FP8 products, None for a Hopper GPU, which has them all."""

    @property
    def bytes(self) -> int:
        """Return the memory in bytes."""
        return round(self.gib * 2**30)


GPUS = {
    "h100": GPU(79.1),
    "h200": GPU(139.7),
    "h20": GPU(95.0),
    "b200": GPU(178.3, _BLACKWELL),
    "a100-40": GPU(39.4, _AMPERE),
    "a100-80": GPU(79.1, _AMPERE),
    "l40s": GPU(44.4, _ADA),
    "rtx4090": GPU(23.5, _ADA),
    "rtx5090": GPU(31.3, _BLACKWELL),
    "rtx6000-ada": GPU(47.4, _ADA),
}
"""Name -> GPU, on a machine where nothing else uses it."""


def gpu_of(name: str) -> GPU:
    """Return the GPU of this name.

    Raises:
        UserError: It is not known.
    """
    found = GPUS.get(name.lower())
    if found is None:
        remedy = nearest(name.lower(), GPUS, "there are")
        raise UserError(
            f'no GPU is known as "{name}"', key="--gpu", remedy=f"{remedy}; or give its memory: --memory GIB"
        )
    return found
