"""DeepSpeed's key "sequence_parallel_size": what of a configuration and a model allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import clipped_repr

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEY = "sequence_parallel_size"
# Types of layers, in configurations of transformers, in which attention alone mixes tokens.
MIXES_BY_ATTENTION = {"full_attention", "sliding_attention", "attention", "moe", "mlp", "dense", "sparse"}
# Types of rotary embeddings with frequencies by the largest position of a call.
BY_LENGTH = ("dynamic", "longrope")


def refuse(problem: str, remedy: str) -> NoReturn:
    raise UserError(problem, key=KEY, remedy=remedy)


def sequence_parallel_size(raw: Mapping[str, Any]) -> int:
    """Return the number of ranks of a sequence: 1 if the configuration has no key, or a device mesh instead."""
    size = raw.get(KEY, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        refuse(f"{KEY} must be a whole number of at least 1, got {clipped_repr(size)}", f'"{KEY}": 2, say')
    return 1 if "data_parallel_size" in raw else size  # DeepSpeed makes a device mesh of the two


def check_ranks(size: int, world: int) -> None:
    if world % size:
        remedy = f"a number that divides {world}, or another number of ranks"
        refuse(f"{size} ranks share a sequence, but there are {world} ranks", remedy)


def check_heads(config: PretrainedConfig, size: int) -> None:
    if size == 1:
        return
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        refuse(
            f"ranks exchange the heads of attention, and {type(config).__name__} has none",
            "1, or a model whose layers have causal attention",
        )
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    good = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in good:
        refuse(
            f"{heads} heads, and {kv_heads} of keys and values, cannot be spread over {size} ranks",
            f"one of 1, {', '.join(map(str, good))}",
        )


def check_layers(config: PretrainedConfig, size: int) -> None:
    """Raise UserError for layers that mix tokens by anything but causal attention with heads of one size."""
    if size == 1:
        return
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    other = next((name for name in types if name not in MIXES_BY_ATTENTION), None)
    if other is not None:
        refuse(
            f'layers of type "{other}" cannot be computed in slices: causal attention alone is exchanged between ranks',
            "1, or a model whose layers have causal attention",
        )
    if getattr(config.get_text_config(), "v_head_dim", None) is not None:
        refuse(
            "heads of values have another size than those of keys (multi-head latent attention), and DeepSpeed "
            "exchanges heads of one size",
            "1, or a model without latent attention",
        )


def check_rotation(config: PretrainedConfig, size: int) -> None:
    """Raise UserError for rotary frequencies that depend on the largest position: a rank has those of its slice."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # One for all layers, or one a type of layers.
    for one in [rope, *(value for value in rope.values() if isinstance(value, Mapping))] if size > 1 else ():
        kind = one.get("rope_type", one.get("type"))
        if kind not in BY_LENGTH or (kind == "longrope" and one.get("short_factor") == one.get("long_factor")):
            continue
        remedy = '"rope_type": "yarn", "linear" or "llama3" in the configuration of the model'
        if kind == "longrope":
            remedy = 'equal "short_factor" and "long_factor", those of the rows\' length, in the model\'s configuration'
        problem = f'rotary embeddings of type "{kind}" have frequencies that depend on the length of rows'
        refuse(f"{problem}, and a rank has a slice of them", remedy)
