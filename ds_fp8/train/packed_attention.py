"""Attention within each document of a packed row: the attention implementation "packed" of transformers.

A row of S tokens that holds many documents needs a mask of S x S elements for ordinary attention, a gigabyte at 32768
tokens, and time for every element of it. Here the model's mask is where documents end, int32 [documents + 1], and
attention runs over each document: in one variable-length kernel on a GPU, document by document elsewhere.

In the capture of a CUDA graph the mask has a fixed length, and documents of no tokens at its end
(layers/attention/documents.py).

It is installed through transformers' registries alone: models that build their mask there and pass it on to the
attention function that their configuration names get it. Rows that are not packed, as in generation, are computed by
scaled_dot_product_attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
)

from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.format import CHANGES_SCORES

NAME = "packed"
LARGEST_HEAD = 256  # Features of a head up to which the variable-length kernel works


def register(name: str = NAME) -> None:
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, packed_mask)


def packed_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> torch.Tensor | None:
    """Return where the documents of a batch of rows end, counted through all rows: int32 [documents + 1], from 0.

    For a mask that is not one of packed documents, return what sdpa takes: None, or bool [B, 1, S, S].
    """
    if not allow_is_causal_skip and attention_mask is None and not use_vmap and q_length == kv_length > 1:
        ends = _document_ends(mask_function, batch_size, q_length, device)
        if ends is not None:
            return ends
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **more,
    )


def _document_ends(
    mask_function: Callable[..., torch.Tensor], rows: int, length: int, device: torch.device | str
) -> torch.Tensor | None:
    """Return int32 [documents + 1], or None when `mask_function` is not causal attention within documents.

    In the capture of a graph this must hold for any positions, and their number is that of the graph.

    A document begins where a token does not see the one before it. That nothing else is masked shows at three places of
    the mask: each token sees its document's first, sees the one before it there, and does not see the next.
    """
    row = torch.arange(rows, device=device)[:, None]
    place = torch.arange(length, device=device)[None, :]
    # One head stands for all: masks of documents are the same in each.
    head = torch.zeros((), dtype=torch.long, device=device)

    def sees(other: torch.Tensor) -> torch.Tensor:
        return mask_function(row, head, place, other).expand(rows, length)

    # The mask function is evaluated at S places instead of S x S.
    begins = ~sees((place - 1).clamp_min(0))
    begins[:, 0] = True
    most = documents.fixed_at()
    if most:
        if not _is_of_documents(mask_function):
            raise ValueError("attention to packed rows is not causal attention within each document, or has a window")
        return documents.ends(begins, most)
    # The place where the document of each token begins: the last beginning up to it.
    first = torch.where(begins, place, 0).cummax(dim=1).values
    beyond = sees((place + 1).clamp_max(length - 1))[:, :-1]
    # The host waits here, once a batch. In the capture of a graph it cannot, and the function's parts are checked
    # instead.
    if not bool(sees(first).all() & ~beyond.any()):
        return None
    starts = torch.nonzero(begins.reshape(-1)).flatten()
    return F.pad(starts, (0, 1), value=rows * length).to(torch.int32)


def _is_of_documents(mask_function: Callable[..., torch.Tensor]) -> bool:
    """Return whether a mask function is causal attention within documents by the parts that transformers made it of."""
    parts = _variables(mask_function).get("mask_functions", ())
    within = packed_sequence_mask_function(torch.empty(0)).__code__
    others = [part for part in parts if getattr(part, "__code__", None) is not within]
    # From transformers 5.23 on the causal part counts in positions of the document, which is the same within one.
    return len(parts) == 2 and [_variables(part).get("mask_function", part) for part in others] == [
        causal_mask_function
    ]


def _variables(function: Callable[..., Any]) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output [B, S, heads, D] of queries [B, heads, S, D] and keys and values [B, kv_heads, S, D].

    attention_mask: what `packed_mask` returned.

    Raises:
        ValueError: The model passes what changes scores, such as sinks, which neither kernel computes.
    """
    if changed := [name for name in CHANGES_SCORES if more.get(name) is not None]:
        raise ValueError(f'attention "{NAME}" does not compute {changed[0]}')
    if attention_mask is None or attention_mask.ndim != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    # [B, heads, S, D] -> [B * S, heads, D]
    q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (query, key, value))
    if q.is_cuda and q.dtype != torch.float32 and q.shape[2] <= LARGEST_HEAD and not dropout:
        output = _in_one_kernel(q, k, v, attention_mask, query.shape[2], scaling)
    else:
        output = _document_by_document(q, k, v, attention_mask, dropout, scaling)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _in_one_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, scaling: float | None
) -> torch.Tensor:
    # `longest` bounds the documents: their own maximum would have to be waited for.
    options: dict[str, Any] = {} if scaling is None else {"scale": scaling}
    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known and scaling is not None:  # torch 2.10 always divides by the root of the head size
        q, options = q * (scaling * q.shape[2] ** 0.5), {}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return varlen_attn(q, k, v, ends, ends, longest, longest, **options)


def _document_by_document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, dropout: float, scaling: float | None
) -> torch.Tensor:
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"packed rows are computed document by document with torch {torch.__version__}, {q.dtype}, heads of "
            f"{q.shape[2]} features and dropout {dropout}: the host reads where they end"
        )
    groups = q.shape[1] // k.shape[1]
    # [T, heads, D] -> [1, heads, T, D]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    places = ends.tolist()
    outputs = [
        F.scaled_dot_product_attention(
            *(x[:, :, start:stop] for x in (q, k, v)), dropout_p=dropout, is_causal=True, scale=scaling
        )
        for start, stop in pairwise(places)
        if start < stop
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1).contiguous()
