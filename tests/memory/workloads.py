"""Small stages to estimate, and what their models really keep."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import merge
from ds_fp8.engine.plans import convert
from ds_fp8.train import Lora
from ds_fp8.train.adapters import add_adapters
from tests.corpus import DOCUMENTS

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 997,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
STAGE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 300_000, "stage3_param_persistence_threshold": 1000},
    "fp8": {},
    "model": {"config": MODEL, "attn_implementation": "sdpa"},
    "data": {**DOCUMENTS, "sequence_length": 128},
    "train": {"run_dir": "run", "steps": 3},
}


def stage(**changes: Any) -> dict[str, Any]:
    """STAGE with `changes` merged in, section by section."""
    return merge(copy.deepcopy(STAGE), changes)


def model_of(raw: dict[str, Any], device: str = "cpu") -> nn.Module:
    """The BF16 model of a stage, in training mode."""
    values = dict(raw["model"]["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "attn_implementation": raw["model"]["attn_implementation"]}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, **options).train()
        if "lora" in raw["train"]:
            add_adapters(model, Lora(**raw["train"]["lora"]))
            model.enable_input_require_grads()
        return model


def kept_bytes(model: nn.Module, rows: int, length: int) -> int:
    """Bytes of all storages but parameters that autograd keeps after a forward of the decoder of `model`."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 97, (rows, length))
    positions = torch.arange(length).expand(rows, length).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        takes = inspect.signature(model.base_model.forward).parameters
        options = {"position_ids": positions} if "position_ids" in takes else {}
        output = model.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def kept_of(config: PretrainedConfig, fp8: FP8Config, rows: int, length: int) -> int:
    """Bytes that a model of this configuration keeps after a forward."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if fp8.enabled:
        convert(model, fp8)
    return kept_bytes(model, rows, length)


def most_allocated(step: Callable[[], object], steps: int = 1) -> int:
    """Return the peak of CPU tensors during `step` in bytes, beyond those before it: the least of `steps` steps.

    By chance a step takes more: a thread of gloo lets go of a collective's tensors a little after the wait for it has
    ended, when the caller may have allocated its next ones.
    """
    found = []
    for _ in range(steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        found.append(max(itertools.accumulate(changes, initial=0)))
    return min(found)
