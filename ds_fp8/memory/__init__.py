"""Memory of a stage: estimated beforehand from its JSON alone, and measured over a grid of settings.

ds_fp8.memory.estimate("ds_configs/infir2_1.5b/cpt.json", gpus=4).peak_bytes
"""

from __future__ import annotations

from ds_fp8.memory.estimate import Estimate, estimate, estimate_workload, largest_that_fits
from ds_fp8.memory.shapes import Workload, read_workload

__all__ = ["Estimate", "Workload", "estimate", "estimate_workload", "largest_that_fits", "read_workload"]
