"""What every rank on a CPU imports, imported once: tests/ranks.py forks its ranks from a process that has done so."""

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for one

# deepspeed.initialize imports these.

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 torch.compile: a second and more of every rank

import ds_fp8.engine.initialize
import ds_fp8.train
import ds_fp8.train.run  # noqa: F401

gc.collect()
gc.freeze()  # DeepSpeed collects garbage several times an engine
