"""Small Hugging Face models of many architectures, made of configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.convert import Conversion

SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal_lm(architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """A random model in training mode; the same arguments give the same numbers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def fp8(model: nn.Module, **section: Any) -> Conversion:
    """Convert a model under the "fp8" section `section`, by the reference and without a monitor."""
    section["linear"] = {"backend": "reference", **section.get("linear", {})}
    return convert(model, parse_fp8({"fp8": {"monitor": {"every": 0}, **section}}))


def tokens(rows: int = 2, length: int = 16) -> torch.Tensor:
    """int64 [rows, length] of the vocabulary of SIZES."""
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))
