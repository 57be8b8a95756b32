"""DeepSpeed's key "sequence_parallel_size": Ulysses attention, checked and registered for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.sequence_parallel import (
    KEY,
    check_heads,
    check_layers,
    check_ranks,
    check_rotation,
    refuse,
    sequence_parallel_size,
)
from ds_fp8.layers.attention.format import PREFIX, is_attention, restore_attention, window_of
from ds_fp8.layers.attention.sequence_parallel import exchange_of, separate_documents
from ds_fp8.zero.deepspeed import ulysses
from ds_fp8.zero.deepspeed.patches import disable_shm_build

PACKED = "packed"  # the attention implementation whose mask is the ends of documents
WITHOUT_POSITIONS = ("sdpa", PACKED)  # implementations that know documents and windows from the mask alone


def share_sequences(raw: Mapping[str, Any], model: nn.Module | None, mpu: Any, mesh_param: Any) -> Any:
    """Register DeepSpeed's exchange for the attention of a model, by "sequence_parallel_size". Collective.

    A caller that has registered it passes an `mpu` or a device mesh: it is checked alone.

    Returns:
        The `mpu` for deepspeed.initialize.
    """
    size = sequence_parallel_size(raw)
    if mpu is None and mesh_param is None and size > 1:
        mpu = _register(raw, model, size)
    # Without the prefix of FP8 attention, left by an earlier engine: the exchange is registered under the plain name.
    name = (getattr(getattr(model, "config", None), "_attn_implementation", None) or "").removeprefix(PREFIX)
    exchange = exchange_of(ALL_ATTENTION_FUNCTIONS.get(name))
    # Without mpu and mesh the exchange is that of another model of this process.
    if exchange is not None and (mpu is not None or mesh_param is not None):
        check_layers(model.config, ulysses.ranks_of(exchange))
        check_rotation(model.config, ulysses.ranks_of(exchange))
    if name in WITHOUT_POSITIONS and exchange is not None:
        _check_windows(model, name)
        separate_documents(name, takes_ends=name == PACKED)
    return mpu


def check_training_data(training_data: Any, mpu: Any) -> None:
    """Raise UserError for training_data under sequence parallelism: DeepSpeed makes no loader for it."""
    # DeepSpeed's loader asks an mpu for this method, which its own groups of ranks lack.
    if training_data is not None and mpu is ulysses.MPU and not hasattr(mpu, "get_data_parallel_world_size"):
        refuse(
            "DeepSpeed makes no loader of training_data whose rows ranks share",
            "no training_data, and a loader of your own in UlyssesSPDataLoaderAdapter (docs/long_context.md)",
        )


def _check_windows(model: nn.Module, name: str) -> None:
    """Raise UserError for sliding windows: they are in the mask, which DeepSpeed's exchange drops."""
    windows = (window_of(module) for module in model.modules() if is_attention(module))
    window = next((tokens for tokens in windows if tokens is not None), None)
    if window is not None:
        refuse(
            f'the model has a sliding window of {window} tokens, which is lost where "{name}" attention is exchanged',
            'attn_implementation="flash_attention_2", which takes windows as an argument; or sliding_window=None in '
            "the model's configuration where rows are no longer than the window",
        )


def _register(raw: Mapping[str, Any], model: nn.Module | None, size: int) -> Any:
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        refuse(
            f"ranks share sequences by the attention functions of transformers, and {type(model).__name__} has none",
            "a model of transformers, or mpu=... for one of your own",
        )
    restore_attention(model)  # of an earlier engine: the exchange is registered under the plain name
    check_layers(config, size)
    check_rotation(config, size)
    check_heads(config, size)
    text, name = config.get_text_config(), config._attn_implementation
    if getattr(text, "num_key_value_heads", None) is None:
        refuse(
            f"DeepSpeed reads num_key_value_heads of the model's configuration, and {type(config).__name__} has none",
            "a model whose configuration names it, such as Llama, Qwen or Mistral; or 1",
        )
    if name in WITHOUT_POSITIONS:
        _check_windows(model, name)
    sdpa = 'attn_implementation="sdpa" when the model is loaded'
    if name == "eager":
        refuse('the model\'s attention is "eager", which needs a mask of unsharded rows', sdpa)
    if not dist.is_initialized():
        disable_shm_build()
        deepspeed.init_distributed()
    # Before DeepSpeed makes groups of ranks, without a remedy for a wrong number.
    check_ranks(size, dist.get_world_size())
    # int: a float if computed from "train_batch_size", since DeepSpeed divides by the ranks of a sequence.
    rows = int(DeepSpeedConfig(dict(raw)).train_micro_batch_size_per_gpu)
    before = exchange_of(ALL_ATTENTION_FUNCTIONS.get(name))
    # DeepSpeed keeps its groups of ranks in module globals: one set a process, for all models.
    if before is not None or ulysses.has_groups():
        if before is None or ulysses.shape_of(before) != (size, rows, text.num_attention_heads):
            refuse("this process already shares sequences of another model", "one process for each model")
        return ulysses.MPU
    computed = getattr(text, "head_dim", 0) is None  # as in Mixtral's; DeepSpeed would read None for a number
    if computed:
        text.head_dim = text.hidden_size // text.num_attention_heads
    try:
        return ulysses.register(model, name, size, rows)
    except ValueError as error:
        raise UserError(f"DeepSpeed cannot share sequences: {first_line(error)}", key=KEY, remedy=sdpa) from None
    finally:
        if computed:
            text.head_dim = None
