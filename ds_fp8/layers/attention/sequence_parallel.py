"""Attention under DeepSpeed's sequence parallelism (Ulysses), where each rank has a slice of every sequence.

    q, k, v    [B, heads, S / P, D]      of this rank's tokens
    exchange   [B, heads / P, S, D]      one all-to-all each; with fewer than P heads of k and v, repeated before
    attention  [B, S, heads / P, D]      of whole sequences: the core
    exchange   [B, S / P, heads · D]

DeepSpeed's `UlyssesSPAttentionHF.register_with_transformers` puts the exchange around one of transformers' attention
functions. It drops the mask, which was made of this rank's tokens, and hands the positions of whole sequences to the
core. Cores that ignore positions ("sdpa", "packed") would attend from one document of a packed row to another; here
(`find_documents`) the documents are found from the positions again.

An attention that exchanges by itself (shared.py) takes the place of exchange and core where every row is
one document.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.documents import QKV
from ds_fp8.layers.attention.shared import count_sent

# An attention function of transformers: (module, query, key, value, mask, **options) -> (output, weights)
Attention = Callable[..., tuple[torch.Tensor, Any]]


def exchange_of(attention: Attention) -> UlyssesSPAttentionHF | None:
    """Return DeepSpeed's exchange of heads that a registered attention function makes, or None."""
    # DeepSpeed registers a function whose closure holds the exchange, and has no other way to it.
    cells = getattr(attention, "__closure__", None) or ()
    held = (cell.cell_contents for cell in cells)
    return next((value for value in held if isinstance(value, UlyssesSPAttentionHF)), None)


def place_of_slices(implementation: str | None) -> int | None:
    """Return the number of this rank's slice of the sequences that ranks share; None where they share none."""
    exchange = exchange_of(ALL_ATTENTION_FUNCTIONS.get((implementation or "").removeprefix("fp8_")))
    return None if exchange is None else exchange.sp_rank


def exchanged(
    exchange: UlyssesSPAttentionHF,
    attention: Attention,
    core: Callable[..., tuple[torch.Tensor, Any]],
    module: nn.Module,
    qkv: QKV,
    *,
    of_slices: Callable[..., torch.Tensor] | None = None,
    of_documents: Callable[..., torch.Tensor | None] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return the output [B, S / P, heads · D] of an attention over whole sequences, of which a rank has slices.

    core runs inside of the exchange, an attention function whose first argument is the one that ran there before; its
    mask is where documents of packed rows end, int32 [documents + 1] through all rows, or None where every row is one
    document. of_slices runs in place of it all where every row is one document; of_documents where documents are long
    enough for FP8, and returns None where none is. options have `position_ids` int64 [B or 1, S / P].
    """
    of_slice, before = options.get("position_ids"), exchange.attn
    groups = getattr(module, "num_key_value_groups", None)
    known = []
    if of_slices is not None and of_slice is not None and _exchanges(exchange, module):
        # All ranks that share rows find the same here, so that all of them go the same way.
        shape = (len(qkv.q), qkv.q.shape[2] * exchange.world_size)
        known = [_document_ends(shape, functools.partial(_gathered, exchange, of_slice), of_slice)]
        if known[0] is None:
            return of_slices(*qkv, exchange.process_group), None
        if of_documents is not None:
            output = of_documents(before, module, qkv, exchange.process_group, known[0], options)
            if output is not None:
                return output, None

    def of_whole(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, **more: Any
    ) -> tuple[torch.Tensor, Any]:
        shape = (len(query), query.shape[2])
        ends = known[0] if known else _document_ends(shape, lambda: more.get("position_ids"), of_slice)
        return core(before, module, QKV(query, key, value), ends, **more)

    # DeepSpeed's object is one for all layers: its inner attention is replaced for the time of this call.
    exchange.attn = of_whole
    try:
        output, weights = attention(module, *qkv, None, **options)
    finally:
        exchange.attn = before
        if groups is not None:  # DeepSpeed sets those of this rank's heads, and generation needs those of all
            module.num_key_value_groups = groups
    if _exchanges(exchange, module):
        _count(exchange, *qkv, output)
    return output, weights


def find_documents(name: str, takes_ends: bool) -> None:
    """Let the attention of a name keep to the documents of packed rows when DeepSpeed's exchange is around it.

    `takes_ends`: whether its mask is where documents end; otherwise it is called for each document.
    """
    attention = ALL_ATTENTION_FUNCTIONS[name]
    exchange = exchange_of(attention)
    if exchange is None or getattr(attention, "finds_documents", False):
        return

    def keep_to_documents(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        core = functools.partial(_within_documents, takes_ends)
        return exchanged(exchange, attention, core, module, QKV(query, key, value), **options)

    keep_to_documents.finds_documents = attention
    ALL_ATTENTION_FUNCTIONS[name] = keep_to_documents


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Let each rank compute whole sequences of its own inside, as generation must: with "sdpa", and no exchange.

    "sdpa" must have no exchange around it.
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


def _within_documents(
    takes_ends: bool,
    before: Attention,
    module: nn.Module,
    qkv: QKV,
    ends: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    if ends is None:
        return before(module, *qkv, None, **options)
    options.pop("position_ids", None)  # of whole rows, which a call of a document has not
    return documents.attention(before, takes_ends, module, options, qkv, ends), None


def _exchanges(exchange: UlyssesSPAttentionHF, module: nn.Module) -> bool:
    """Return whether DeepSpeed exchanges heads in this call, and computes them."""
    only_in_training = getattr(exchange, "disable_in_eval", False)
    return (module.training or not only_in_training) and not exchange.skip_all_but_last_attention_debug_mode


def _count(exchange: UlyssesSPAttentionHF, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
    """Count the bytes of DeepSpeed's exchange of q, k, v and the output, and when they come, of their gradients."""
    ranks = exchange.world_size
    nbytes = q.nbytes + max(1, ranks // k.shape[1]) * (k.nbytes + v.nbytes) + o.nbytes
    count = functools.partial(count_sent, nbytes * (ranks - 1) // ranks)
    count()
    if o.requires_grad:
        o.register_hook(lambda _: count())


def _warn_of_slices(ends: torch.Tensor, shape: tuple[int, int], length: int) -> None:
    """Warn where documents end where the slices of ranks, of `length` tokens of a row, do.

    So it seems where a batch has no positions.
    """
    tokens = math.prod(shape)
    # The host waits for the numbers only where there are as many documents as slices.
    if len(ends) - 1 == tokens // length and documents.places_of(ends) == list(range(0, tokens + 1, length)):
        warnings.warn(
            f"positions begin anew at each rank's slice of {length} tokens, so that no token sees another rank's: give "
            "the model position_ids of whole rows, sliced as input_ids are, unless all documents have this length",
            stacklevel=2,
        )


def _gathered(exchange: UlyssesSPAttentionHF, positions: torch.Tensor) -> torch.Tensor:
    """Return the positions of whole rows, of this rank's [B or 1, S / P]. Collective."""
    parts = [torch.empty_like(positions, memory_format=torch.contiguous_format) for _ in range(exchange.world_size)]
    dist.all_gather(parts, positions.contiguous(), exchange.process_group)
    return torch.cat(parts, -1)


def _document_ends(
    shape: tuple[int, int], gathered: Callable[[], torch.Tensor | None], noted_on: torch.Tensor | None
) -> torch.Tensor | None:
    """Return where documents end, int32 [documents + 1] through all rows of `shape`, or None for rows of one document.

    The host waits for the device in the first layer alone: what was found is noted on the positions of this rank's
    slice, which are the same tensor in all layers. gathered: returns the positions of whole rows.
    """
    if documents.fixed_at() == 0:
        return None  # in the capture of a graph, which the host cannot wait in: all ranks have found so before
    noted_shape, ends = documents.noted_ends(noted_on) or (None, None)
    if noted_shape == shape:
        return ends
    positions = gathered()
    if positions is None or positions.dim() != 2 or positions.shape[1] != shape[1]:
        return None  # of other rows, or of a slice by itself, nothing is known
    # Positions of one row stand for all rows of a batch.
    ends = documents.ends_of(positions.expand(shape[0], -1))
    if noted_on is not None and ends is not None and noted_on.shape[-1] < shape[1]:
        _warn_of_slices(ends, shape, noted_on.shape[-1])
    documents.note_ends(noted_on, (shape, ends))
    return ends
