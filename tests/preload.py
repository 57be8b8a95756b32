"""What every rank on a CPU imports, imported once: tests/ranks.py forks its ranks from a process that has done so."""

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for one

# deepspeed.initialize imports these.

import ds_fp8.engine.initialize
import ds_fp8.train  # noqa: F401

gc.collect()
gc.freeze()  # DeepSpeed collects garbage several times an engine
