"""DeepSpeed's key "sequence_parallel_size": ranks that share every sequence (Ulysses)."""

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
from ds_fp8.config.schema import shown
from ds_fp8.layers.attention.format import PREFIX, is_attention, restore_attention, window_of
from ds_fp8.layers.attention.sequence_parallel import exchange_of, separate_documents
from ds_fp8.zero.deepspeed import ulysses
from ds_fp8.zero.deepspeed.methods import disable_shm_build

KEY = "sequence_parallel_size"  # DeepSpeed's key: the number of ranks that share a sequence
PACKED = "packed"  # The attention implementation that takes where documents end
WITHOUT_POSITIONS = ("sdpa", PACKED)  # Those that know of documents and windows by the mask alone
# Types of layers in configurations of transformers in which nothing but exchanged attention reads other tokens
MIXES_BY_ATTENTION = {"full_attention", "sliding_attention", "attention", "moe", "mlp", "dense", "sparse"}

# Types of rotary embeddings whose frequencies follow from the largest position of a call
BY_LENGTH = ("dynamic", "longrope")


def sequence_parallel_size(raw: Mapping[str, Any]) -> int:
    """Return how many ranks share a sequence: 1 where the configuration does not say, or leaves it to a device mesh."""
    size = raw.get(KEY, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(
            f"{KEY} must be a whole number of at least 1, got {shown(size)}", key=KEY, remedy=f'"{KEY}": 2, say'
        )
    return 1 if "data_parallel_size" in raw else size  # DeepSpeed makes a device mesh of the two


def check_ranks(size: int, world: int) -> None:
    if world % size:
        raise UserError(
            f"{size} ranks share a sequence, but there are {world} ranks",
            key=KEY,
            remedy=f"a number that divides {world}, or another number of ranks",
        )


def check_heads(config: PretrainedConfig, size: int) -> None:
    if size == 1:
        return
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        raise UserError(
            f"ranks exchange the heads of attention, and {type(config).__name__} has none",
            key=KEY,
            remedy="1, or a model whose layers have causal attention",
        )
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    good = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in good:
        raise UserError(
            f"{heads} heads, and {kv_heads} of keys and values, cannot be spread over {size} ranks",
            key=KEY,
            remedy=f"one of 1, {', '.join(map(str, good))}",
        )


def check_layers(config: PretrainedConfig, size: int) -> None:
    """Raise UserError where layers of a model would compute something else of slices than of whole sequences."""
    if size == 1:
        return
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    other = next((name for name in types if name not in MIXES_BY_ATTENTION), None)
    if other is not None:
        raise UserError(
            f'layers of type "{other}" cannot be computed in slices: causal attention alone is exchanged between ranks',
            key=KEY,
            remedy="1, or a model whose layers have causal attention",
        )
    if getattr(config.get_text_config(), "v_head_dim", None) is not None:
        # DeepSpeed's exchange has one size for all, and fails in the first forward.
        raise UserError(
            "heads of values have another size than those of keys (multi-head latent attention), and DeepSpeed "
            "exchanges heads of one size",
            key=KEY,
            remedy="1, or a model without latent attention",
        )


def check_rotation(config: PretrainedConfig, size: int) -> None:
    """Raise UserError where each rank would rotate by frequencies of its own: those of the largest position it has."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # One for all layers, or one for each type of layers.
    for one in [rope, *(value for value in rope.values() if isinstance(value, Mapping))] if size > 1 else ():
        kind = one.get("rope_type", one.get("type"))
        if kind not in BY_LENGTH or (kind == "longrope" and one.get("short_factor") == one.get("long_factor")):
            continue
        remedy = '"rope_type": "yarn", "linear" or "llama3" in the configuration of the model'
        if kind == "longrope":
            remedy = (
                'the factors that fit the rows as both "short_factor" and "long_factor" in the model\'s configuration'
            )
        raise UserError(
            f'rotary embeddings of type "{kind}" have frequencies that depend on the length of rows, and a rank has a '
            "slice of them",
            key=KEY,
            remedy=remedy,
        )


def share_sequences(raw: Mapping[str, Any], model: nn.Module | None, mpu: Any, mesh_param: Any) -> Any:
    """Put DeepSpeed's exchange around the attention of a model, as "sequence_parallel_size" says. Collective.

    Does nothing where the caller has done so, as an `mpu` or a device mesh tells.

    Returns:
        The `mpu` for deepspeed.initialize.
    """
    size = sequence_parallel_size(raw)
    if mpu is None and mesh_param is None and size > 1:
        mpu = _register(raw, model, size)
    # An engine before may have left attention in FP8, which is between the exchanges of the attention it stands for.
    name = (getattr(getattr(model, "config", None), "_attn_implementation", None) or "").removeprefix(PREFIX)
    exchange = exchange_of(ALL_ATTENTION_FUNCTIONS.get(name))
    # Without either the exchange is that of another model of this process.
    if exchange is not None and (mpu is not None or mesh_param is not None):
        check_layers(model.config, ulysses.ranks_of(exchange))
        check_rotation(model.config, ulysses.ranks_of(exchange))
    if name in WITHOUT_POSITIONS and exchange is not None:
        _check_windows(model, name)
        separate_documents(name, takes_ends=name == PACKED)
    return mpu


def check_training_data(training_data: Any, mpu: Any) -> None:
    """Raise UserError where DeepSpeed would be asked for a loader of data, of rows that ranks share."""
    # What DeepSpeed asks of an mpu for a loader, and its own groups of ranks do not have.
    if training_data is not None and mpu is ulysses.MPU and not hasattr(mpu, "get_data_parallel_world_size"):
        raise UserError(
            "DeepSpeed makes no loader of training_data whose rows ranks share",
            key=KEY,
            remedy="no training_data, and a loader of your own in UlyssesSPDataLoaderAdapter (docs/long_context.md)",
        )


def _check_windows(model: nn.Module, name: str) -> None:
    """Raise UserError for sliding windows, which are in the mask, and DeepSpeed's exchange drops masks."""
    windows = (window_of(module) for module in model.modules() if is_attention(module))
    window = next((tokens for tokens in windows if tokens is not None), None)
    if window is not None:
        raise UserError(
            f'the model has a sliding window of {window} tokens, which is lost where "{name}" attention is exchanged',
            key=KEY,
            remedy='attn_implementation="flash_attention_2", which is told of windows; or sliding_window=None in the '
            "model's configuration where rows are no longer than the window",
        )


def _register(raw: Mapping[str, Any], model: nn.Module | None, size: int) -> Any:
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise UserError(
            f"ranks share sequences by the attention functions of transformers, and {type(model).__name__} has none",
            key=KEY,
            remedy="a model of transformers, or mpu=... for one of your own",
        )
    restore_attention(model)  # of an engine before; the exchange is put around what attention in FP8 stands for
    check_layers(config, size)
    check_rotation(config, size)
    check_heads(config, size)
    if getattr(config.get_text_config(), "num_key_value_heads", None) is None:
        raise UserError(
            f"DeepSpeed reads num_key_value_heads of the model's configuration, and {type(config).__name__} has none",
            key=KEY,
            remedy="a model whose configuration names it, such as Llama, Qwen or Mistral; or 1",
        )
    if config._attn_implementation in WITHOUT_POSITIONS:
        _check_windows(model, config._attn_implementation)
    if config._attn_implementation == "eager":
        raise UserError(
            'the model\'s attention is "eager", which needs a mask of whole rows',
            key=KEY,
            remedy='attn_implementation="sdpa" when the model is loaded',
        )
    if not dist.is_initialized():
        disable_shm_build()
        deepspeed.init_distributed()
    # Before DeepSpeed makes groups of ranks: here a wrong number is an error with a remedy.
    check_ranks(size, dist.get_world_size())
    # Computed from "train_batch_size" it is a float: DeepSpeed divides the number of ranks by those that share a row.
    rows = int(DeepSpeedConfig(dict(raw)).train_micro_batch_size_per_gpu)
    name = config._attn_implementation
    before = exchange_of(ALL_ATTENTION_FUNCTIONS.get(name))
    # DeepSpeed keeps its groups of ranks in module globals: one set a process, for all models.
    if before is None and not ulysses.has_groups():
        return _registered(model, name, size, rows)
    heads = config.get_text_config().num_attention_heads
    if before is None or ulysses.shape_of(before) != (size, rows, heads):
        raise UserError(
            "this process already shares sequences of another model",
            key=KEY,
            remedy="one process for each model",
        )
    return ulysses.MPU


def _registered(model: nn.Module, name: str, size: int, rows: int) -> Any:
    text = model.config.get_text_config()
    computed = getattr(text, "head_dim", 0) is None  # as in Mixtral's; DeepSpeed takes what it finds for a number
    if computed:
        text.head_dim = text.hidden_size // text.num_attention_heads
    try:
        return ulysses.register(model, name, size, rows)
    except ValueError as error:
        raise UserError(
            f"DeepSpeed cannot share sequences: {first_line(error)}",
            key=KEY,
            remedy='attn_implementation="sdpa" when the model is loaded',
        ) from None
    finally:
        if computed:
            text.head_dim = None
