"""`python -m ds_fp8` for the CPU ranks of tests: Accelerate itself knows DeepSpeed on accelerators only."""

from __future__ import annotations

import deepspeed

from ds_fp8.__main__ import main
from ds_fp8.zero.deepspeed.patches import disable_shm_build
from tests.integrations import accelerate_on_cpus

if __name__ == "__main__":
    accelerate_on_cpus.enable()
    disable_shm_build()  # which may wait for another process's build
    deepspeed.init_distributed(dist_backend="gloo")
    main()
