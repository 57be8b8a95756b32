"""AdamW with moments in 8 or 16 bits, for DeepSpeed ZeRO and for torch alone."""

from __future__ import annotations

from ds_fp8.config.plans import StatePrecision
from ds_fp8.optim.adamw import AdamW
from ds_fp8.optim.moments import Moment

__all__ = ["AdamW", "Moment", "StatePrecision"]
