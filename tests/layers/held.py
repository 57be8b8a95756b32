"""Weights as ZeRO-3's FP8 gather leaves them: how the benchmarks of layers hold them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from decoder_stacks import hold_in_fp8

__all__ = ["hold_in_fp8"]
