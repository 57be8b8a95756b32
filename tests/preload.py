"""What every rank on a CPU imports, imported once: tests/ranks.py forks its ranks from a process that has done so."""

import gc
import importlib
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for one
gc.disable()  # collections while modules are imported take a second

# Those of DeepSpeed its initialize imports, which takes a second; the models are those of most tests.
for name in (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "ds_fp8.engine.initialize",
    "ds_fp8.train.run",
    *(f"transformers.models.{model}.modeling_{model}" for model in ("llama", "qwen2", "qwen3", "qwen3_moe")),
):
    importlib.import_module(name)

gc.collect()
gc.freeze()  # DeepSpeed collects garbage several times an engine
gc.enable()
