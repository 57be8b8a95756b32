"""Attention under DeepSpeed's sequence parallelism (Ulysses): each rank holds a slice of every sequence.

    q, k, v    [B, heads, S / P, D]      of this rank's tokens
    exchange   [B, heads / P, S, D]      one all-to-all each; fewer than P heads of k and v are repeated before
    attention  [B, S, heads / P, D]      of unsharded sequences: the core
    exchange   [B, S / P, heads · D]

DeepSpeed's `UlyssesSPAttentionHF.register_with_transformers` puts the exchange around an attention function of
transformers. It drops the mask, made of this rank's tokens, and passes the unsharded positions to the core. A core that
ignores positions ("sdpa", "packed") would attend across the documents of a packed row: `separate_documents` finds the
documents from the positions.

Attention in FP8 is a core, too: it quantizes this rank's heads of unsharded sequences.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.documents import QKV

_sent = 0


def count_sent(nbytes: int) -> None:
    global _sent
    _sent += nbytes


def bytes_sent() -> int:
    return _sent


# An attention function of transformers: (module, query, key, value, mask, **options) -> (output, weights).
Attention = Callable[..., tuple[torch.Tensor, Any]]


def exchange_of(attention: Attention) -> UlyssesSPAttentionHF | None:
    """Return DeepSpeed's exchange of heads in a registered attention function, or None."""
    # Only the closure of the registered function holds it.
    values = (cell.cell_contents for cell in getattr(attention, "__closure__", None) or ())
    return next((value for value in values if isinstance(value, UlyssesSPAttentionHF)), None)


def place_of_slices(implementation: str | None) -> int | None:
    """Return this rank's place among the ranks of a sequence; None without sequence parallelism."""
    exchange = exchange_of(ALL_ATTENTION_FUNCTIONS.get((implementation or "").removeprefix("fp8_")))
    return None if exchange is None else exchange.sp_rank


def ulysses_attention(
    exchange: UlyssesSPAttentionHF,
    attention: Attention,
    core: Callable[..., tuple[torch.Tensor, Any]],
    module: nn.Module,
    qkv: QKV,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return the output [B, S / P, heads · D] of attention over sequences of which a rank holds slices.

    Args:
        exchange: DeepSpeed's, in the closure of `attention`.
        attention: The registered attention function.
        core: Replaces the attention inside of the exchange, its first argument. Its mask is the ends of documents,
            int32 [documents + 1] through all rows, or None for rows of one document each.
        module: The attention module.
        qkv: Of this rank's tokens.
        options: Of the attention function, with `position_ids` int64 [B or 1, S / P].
    """
    of_slice, before = options.get("position_ids"), exchange.attn
    groups = getattr(module, "num_key_value_groups", None)

    def inside(module, query, key, value, _mask, **more):
        ends = _document_ends((len(query), query.shape[2]), more.get("position_ids"), of_slice)
        return core(before, module, QKV(query, key, value), ends, **more)

    exchange.attn = inside  # for this call: all layers share the exchange
    try:
        output, weights = attention(module, *qkv, None, **options)
    finally:
        exchange.attn = before
        if groups is not None:  # DeepSpeed sets the value for this rank's heads; generation needs that of all heads
            module.num_key_value_groups = groups
    only_in_training = getattr(exchange, "disable_in_eval", False)
    if (module.training or not only_in_training) and not exchange.skip_all_but_last_attention_debug_mode:
        _count(exchange.world_size, *qkv, output)
    return output, weights


def separate_documents(name: str, takes_ends: bool) -> None:
    """Keep the registered attention `name` within documents of packed rows under DeepSpeed's exchange.

    takes_ends: its mask is the ends of documents; otherwise it is called once a document.
    """
    attention = ALL_ATTENTION_FUNCTIONS[name]
    exchange = exchange_of(attention)
    if exchange is None or getattr(attention, "separates_documents", False):
        return

    core = functools.partial(documents.attention, takes_ends)

    def within_documents(module, query, key, value, _mask, **options):
        return ulysses_attention(exchange, attention, core, module, QKV(query, key, value), **options)

    within_documents.separates_documents = attention
    ALL_ATTENTION_FUNCTIONS[name] = within_documents


@contextlib.contextmanager
def local_sequences(model: nn.Module) -> Iterator[None]:
    """Compute sequences of each rank's own inside, without an exchange, for generation: by "sdpa".

    "sdpa" must not be registered with an exchange.
    """
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    names = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = "sdpa"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = names[key]


def _count(ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
    """Count the bytes of DeepSpeed's exchange of q, k, v and the output, in backward of their gradients."""
    nbytes = q.nbytes + max(1, ranks // k.shape[1]) * (k.nbytes + v.nbytes) + o.nbytes
    sent = nbytes * (ranks - 1) // ranks  # a rank keeps its own shard
    count_sent(sent)
    if o.requires_grad:
        o.register_hook(lambda _: count_sent(sent))


def _warn_of_slices(ends: torch.Tensor, shape: tuple[int, int], length: int) -> None:
    """Warn if documents are the slices of ranks, of `length` tokens: probably a batch without positions."""
    tokens = math.prod(shape)
    # Numbers first: a host sync only if there are as many documents as slices.
    if len(ends) - 1 == tokens // length and documents.ends_on_host(ends) == list(range(0, tokens + 1, length)):
        warnings.warn(
            f"positions begin anew at each rank's slice of {length} tokens, so that no token sees another rank's: give "
            "the model position_ids of unsharded rows, sliced as input_ids are, unless all documents have this length",
            stacklevel=2,
        )


def _document_ends(
    shape: tuple[int, int], positions: torch.Tensor | None, of_slice: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the ends of documents, int32 [documents + 1] through all rows of `shape`, or None for one document a row.

    One host sync a batch: the result is cached on `of_slice`, this rank's positions, one tensor for all layers.
    positions: of unsharded rows.
    """
    if documents.fixed_at() == 0:
        return None  # in a CUDA graph, without host syncs: eager micro-batches of all ranks had one document a row
    known_shape, ends = documents.cached(of_slice, documents.ENDS) or (None, None)
    if known_shape == shape:
        return ends
    if positions is None or positions.dim() != 2 or positions.shape[1] != shape[1]:
        return None  # positions of other rows, or of the slice alone
    ends = documents.ends_of(positions.expand(shape[0], -1))  # one row of positions is for all rows of a batch
    if of_slice is not None and ends is not None and of_slice.shape[-1] < shape[1]:
        _warn_of_slices(ends, shape, of_slice.shape[-1])
    documents.cache(of_slice, documents.ENDS, (shape, ends))
    return ends
