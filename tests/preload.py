"""What every rank on a CPU imports, imported once: tests/ranks.py forks its ranks from a process that has done so."""

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for one

# deepspeed.initialize imports these.
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.muon.original_muon
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

import ds_fp8.engine.initialize
import ds_fp8.train  # noqa: F401
from ds_fp8.layers.transformers_versions import warn_of_changes
from ds_fp8.zero.deepspeed import versions

versions.check(deepspeed.__version__)  # once for all: it reads sources
warn_of_changes(transformers.__version__)
gc.collect()
gc.freeze()  # DeepSpeed collects garbage several times an engine
