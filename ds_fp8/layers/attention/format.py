"""FP8 attention in Hugging Face models, as attention implementations of transformers.

"fp8_sdpa" and "fp8_packed" replace "sdpa" and "packed" in the model's configuration, for fused and unconverted layers
alike. Masks are unchanged. Causal attention over unpadded rows, or within long documents of packed rows, runs in FP8;
every other call runs in BF16, by the replaced implementation. Under DeepSpeed's sequence parallelism both run between
its two exchanges, which are in BF16 (sequence_parallel.py).

`use_fp8_attention` chooses the modules. Calls of these modules in BF16:

    short documents of packed rows (documents.py)       FP8 is not faster: a warning in training
    short rows, with only_long                          FP8 is not faster
    padded batches                                      not causal: a warning in training
    generation with a cache                             fewer queries than keys

Calls without gradients are in FP8, too: recomputation must repeat the first forward's bits.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.errors import UserError
from ds_fp8.layers.attention import cudnn, documents, sequence_parallel
from ds_fp8.layers.attention.documents import QKV
from ds_fp8.layers.attention.fp8_attention import fp8_attention

SLIDING = "sliding_attention"  # in transformers' layer_types


def window_of(module: nn.Module) -> int | None:
    """Return the tokens of an attention module's sliding window, or None."""
    # An attribute of some classes, absent in Qwen2-MoE's layers without a window; other classes read the configuration
    # in each call. No window is None or 0.
    config = module.config
    types, index = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", None)
    if hasattr(module, "sliding_window"):
        return module.sliding_window or None
    if index is not None and SLIDING in types and types[index] != SLIDING:
        return None
    return getattr(config, "sliding_window", None) or None


PREFIX = "fp8_"
KNOWN = ("sdpa", "packed")  # implementations whose mask is None, or the ends of documents, for causal attention

KEY, BF16 = "fp8.attention.format", '"attention": {"format": "bf16"}'
_ONLY_LONG = "fp8_attention_only_of_long_rows"  # attribute of an attention module: AttentionFormat.only_long
# Arguments of attention functions that the kernels do not support.
CHANGES_SCORES = ("softcap", "s_aux", "position_bias", "head_mask", "indices", "block_indices")

INDEXER = "its indexer selects keys by a mask for sdpa alone"


@dataclass(frozen=True)
class AttentionFormat:
    """Result of `use_fp8_attention`: names of the attention modules in FP8; the others, `left`, with the reason."""

    layers: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    emulated: bool = False  # by the reference in plain torch
    packed: bool = False  # rows may hold several documents
    only_long: bool = False  # rows of fewer than documents.LONG tokens stay in BF16


def use_fp8_attention(model: nn.Module, only_long: bool = False) -> AttentionFormat:
    """Run the attention modules of a model in FP8, in place, where the kernels support them.

    only_long: rows of fewer than documents.LONG tokens stay in BF16.

    Raises:
        UserError: No kernels on this machine, another attention implementation, or no module is supported.
    """
    # The reference, on a CPU, supports heads of any size.
    emulated = not torch.cuda.is_available()
    if not emulated and (why := cudnn.unavailable()) is not None:
        raise UserError(f"attention in FP8 cannot run here: {why}", key=KEY, remedy=BF16)
    modules = {name: module for name, module in model.named_modules() if is_attention(module)}
    left = {name: why for name, module in modules.items() if (why := _unsupported(module, emulated)) is not None}
    layers = [name for name in modules if name not in left]
    if not layers or INDEXER in left.values():  # such a layer asks the shared configuration for the implementation
        reasons = "; ".join(dict.fromkeys(left.values())) or "none calls transformers' attention functions"
        raise UserError(f"no attention module of this model can run in FP8: {reasons}", key=KEY, remedy=BF16)
    implementations = {modules[name].config._attn_implementation for name in layers}
    for unknown in implementations - set(KNOWN):
        raise UserError(
            f'attention in FP8 reads masks as "sdpa" or "packed" has them, and the model\'s attention is "{unknown}"',
            key=KEY,
            remedy=f'attn_implementation="sdpa" when the model is loaded ("packed" in a stage), or {BF16}',
        )
    for name in layers:
        config = modules[name].config
        if not config._attn_implementation.startswith(PREFIX):
            # Modules share the model's configuration, unsupported ones, too: each call asks `_unsupported` again.
            config._attn_implementation = f"{PREFIX}{config._attn_implementation}"
    for module in modules.values():
        setattr(module, _ONLY_LONG, only_long)
    return AttentionFormat(layers, left, emulated, "packed" in implementations, only_long)


def rows_stay_in_bf16(model: nn.Module, tokens: int) -> bool:
    """Return whether rows of so many tokens are in BF16 in every attention module."""
    modules = [module for module in model.modules() if is_attention(module)]
    return bool(modules) and all(_is_too_short(module, tokens) for module in modules)


def restore_attention(model: nn.Module) -> None:
    for module in filter(is_attention, model.modules()):
        name = module.config._attn_implementation or ""
        if name.startswith(PREFIX):
            module.config._attn_implementation = name.removeprefix(PREFIX)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module has the attributes of one that calls transformers' attention functions."""
    return all(hasattr(module, part) for part in ("config", "scaling", "is_causal"))


def runs_in_fp8(module: nn.Module) -> bool:
    name = module.config._attn_implementation or ""
    return name.startswith(PREFIX) and _unsupported(module, not torch.cuda.is_available()) is None


def is_exchanged(module: nn.Module) -> bool:
    name = (module.config._attn_implementation or "").removeprefix(PREFIX)
    return sequence_parallel.exchange_of(ALL_ATTENTION_FUNCTIONS.get(name)) is not None


def _unsupported(module: nn.Module, emulated: bool) -> str | None:
    head_dim = getattr(module, "head_dim", None)
    sizes = f"{head_dim or 'several numbers of'} features, and cuDNN on Hopper supports {cudnn.HEAD_DIM}"
    reasons = {
        INDEXER: getattr(module, "indexer", None) is not None,  # first: it counts for the model
        "it is not causal": not module.is_causal,
        f"its heads have {sizes}": not emulated and head_dim != cudnn.HEAD_DIM,
        "it has dropout": getattr(module, "attention_dropout", 0.0),
        "it has a sliding window": window_of(module),
        "it has sinks": getattr(module, "sinks", None) is not None,
        "it caps its scores": getattr(module, "attn_logit_softcapping", None),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_too_short(module: nn.Module, tokens: int) -> bool:
    return getattr(module, _ONLY_LONG, False) and tokens < documents.LONG


def _mask(implementation: str, **arguments: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)


def _attention(implementation, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **more):
    qkv, options = QKV(query, key, value), {"dropout": dropout, "scaling": scaling, **more}
    before = ALL_ATTENTION_FUNCTIONS[implementation]
    before = getattr(before, "separates_documents", before)
    core = functools.partial(_by_format, implementation == "packed")
    exchange = sequence_parallel.exchange_of(before)
    if exchange is None:
        return core(before, module, qkv, attention_mask, **options)
    return sequence_parallel.ulysses_attention(exchange, before, core, module, qkv, **options)


def _by_format(takes_ends, before, module, qkv, mask, scaling=None, **more):
    """Return attention in FP8 if module and call support it, else that of the function `before`.

    mask: of the implementation `before`, or the ends of documents, for an implementation without them, too.
    """
    in_bf16 = functools.partial(documents.attention, takes_ends, before, module, scaling=scaling, **more)
    if _unsupported(module, not qkv.q.is_cuda) is None and not _is_too_short(module, qkv.q.shape[2]):
        why = _unsupported_call(qkv, mask, more)
        if why is None:
            in_fp8 = functools.partial(fp8_attention, scaling=scaling)
            return documents.by_length(in_fp8, in_bf16, qkv, mask), None
        if module.training:  # generation and evaluation of padded batches are in BF16 by design
            _warn(why)
    return in_bf16(qkv, mask)


def _unsupported_call(qkv: QKV, mask: torch.Tensor | None, more: dict[str, Any]) -> str | None:
    changed = [name for name in CHANGES_SCORES if more.get(name) is not None]
    ends = mask is not None and mask.ndim == 1
    reasons = {
        f"it is called with {', '.join(changed)}": changed,
        "it is called with is_causal=False": more.get("is_causal") is False,
        "there are not as many queries as keys": qkv.q.shape[2] != qkv.k.shape[2],
        "heads of keys and of values are not of one size": qkv.q.shape[3] != qkv.v.shape[3],
        "it is in FP16, whose range does not hold the scales of gradients": qkv.q.dtype == torch.float16,
        "the mask is not causal over unpadded rows: they are padded, or hold several documents": mask is not None
        and not ends,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    # As many documents as rows are rows of one document. The last condition is a host sync.
    if reason is not None or not ends or len(mask) == len(qkv.q) + 1:
        return reason
    if documents.longest(documents.ends_on_host(mask)) >= documents.LONG:
        return None
    return f"rows hold several documents, all shorter than {documents.LONG} tokens"


@functools.lru_cache
def _warn(why: str) -> None:
    warnings.warn(f"attention runs in BF16 where {why}", stacklevel=3)


for _name in KNOWN:
    AttentionInterface.register(f"{PREFIX}{_name}", functools.partial(_attention, _name))
    AttentionMaskInterface.register(f"{PREFIX}{_name}", functools.partial(_mask, _name))
