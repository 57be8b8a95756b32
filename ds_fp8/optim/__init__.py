"""AdamW with moments and master weights in 8 or 16 bits, for DeepSpeed ZeRO and for torch alone."""

from __future__ import annotations

from ds_fp8.optim.adamw import AdamW
from ds_fp8.optim.moment import Moment
from ds_fp8.state_precision import StatePrecision

__all__ = ["AdamW", "Moment", "StatePrecision"]
