"""The Hugging Face configuration of an untrained model: the section `model.config`, checked."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import nearest
from ds_fp8.data.tokenizer import embeddings_needed
from ds_fp8.research import munit
from ds_fp8.train.stored_model import first_line

MAX_LAYERS = 10_000
# Keys that Hugging Face configurations take without having them as attributes.
_UNLISTED_KEYS = {"model_type", "architectures", "head_dim", "rope_theta", "rope_scaling", "dtype", "torch_dtype"}


def untrained_config(values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the configuration of an untrained model, from `model.config`.

    Args:
        values: the section, model_type included.
        tokenizer: gives the size of the vocabulary and the ids of special tokens that `values` does not.

    Raises:
        UserError: for an unknown type or key, or sizes of which no model can be made.
    """
    kind = values.get("model_type")
    known_types = [*(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys()), *munit.MODEL_TYPES]
    if kind not in known_types:
        raise UserError(
            "model.config has no model_type" if kind is None else f'unknown model_type "{kind}"',
            key="model.config.model_type",
            remedy=nearest(str(kind), known_types) if kind else '"model_type": "qwen2", say',
        )
    known = AutoConfig.for_model(kind)
    for key in values:
        if not hasattr(known, key) and key not in _UNLISTED_KEYS:
            choices = set(known.to_dict()) | _UNLISTED_KEYS
            raise UserError(
                f'unknown key "{key}" in model.config of type {kind}',
                key=f"model.config.{key}",
                remedy=nearest(key, choices),
            )
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # configurations list their layers one by one
        raise UserError(
            f"{layers:,} layers are too many", key="model.config.num_hidden_layers", remedy=f"at most {MAX_LAYERS:,}"
        )
    from_tokenizer = {
        "vocab_size": embeddings_needed(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = {key: value for key, value in (from_tokenizer | values).items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # each configuration class validates in its own way
        raise UserError(
            f"model.config is refused: {first_line(error)}", key="model.config", remedy="change what the message names"
        ) from None
    _check_sizes(config)
    return config


def _check_sizes(config: PretrainedConfig) -> None:
    """Refuse an untrained model whose sizes do not go together, by making it without its weights."""
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if hidden and heads and hidden % heads and not getattr(config, "head_dim", None):
        raise UserError(
            f"hidden_size {hidden} does not divide into {heads} attention heads",
            key="model.config.num_attention_heads",
            remedy="choose a divisor of hidden_size, or give head_dim",
        )
    if heads and groups and heads % groups:
        raise UserError(
            f"{heads} attention heads do not divide into {groups} key-value heads",
            key="model.config.num_key_value_heads",
            remedy="choose a divisor of num_attention_heads",
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    except Exception as error:  # each model class fails at a wrong size in its own way
        raise UserError(
            f"model.config does not describe a valid model: {type(error).__name__}: {first_line(error)}",
            key="model.config",
            remedy="change the sizes in model.config",
        ) from None
    if empty:
        raise UserError(
            f"{empty[0]} would have no elements", key="model.config", remedy="give model.config sizes above 0"
        )
    needed, there = sum(tensor.nbytes for tensor in model.parameters()), psutil.virtual_memory().total
    if needed > there:
        raise UserError(
            f"the model needs {needed / 2**30:,.0f} GiB, but this machine has {there / 2**30:,.0f}",
            key="model.config",
            remedy="give model.config smaller sizes",
        )
    for key, value in config.to_dict().items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if ("dropout" in key or key.endswith("pdrop")) and is_number and not 0 <= value < 1:
            raise UserError(
                f"{key} {value} is not a probability", key=f"model.config.{key}", remedy="at least 0 and less than 1"
            )
