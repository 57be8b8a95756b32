"""Bytes that a micro-batch needs: what layers keep and allocate (measured by measure.py), the batch, and the loss.

T tokens of a micro-batch on a GPU, H hidden features, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.cudnn import HEAD_DIM
from ds_fp8.layers.decoder.decoder import FusedDecoderLayer
from ds_fp8.layers.head.cross_entropy import LOGITS_BYTES, chunk_tokens, group_tokens
from ds_fp8.layers.linear.linear import base_of
from ds_fp8.memory.measure import Attention, Measured, Recording, measure
from ds_fp8.memory.shapes import BF16, FP32, LayerShape, ModelShape, Workload
from ds_fp8.train.packed_attention import varlen_attn

# ---------------------------------------------------------------- layers


def kept(layer: LayerShape, w: Workload) -> int:
    """Return the bytes between forward and backward: all that backward reads, or with activation_checkpointing 2TH.

    With offload the GPU holds the inputs of one layer at a time (`input_on_device`).
    """
    if not w.activation_checkpointing:
        return measured(layer, w).kept
    inputs = 0 if w.offloads_activations else BF16 * w.tokens * w.model.hidden
    return inputs + _kept_attention(layer, w)


def _kept_attention(layer: LayerShape, w: Workload) -> int:
    """Return the bytes of attention's output and a number a head, where recomputation leaves them."""
    attention = layer.attention
    if attention is None or not (w.fp8.enabled and w.fp8.activations.keep_attention):
        return 0
    features = base_of(attention.o_proj).in_features
    element = 1 if _attention_in_fp8(layer, w) else BF16
    return w.tokens * (element * features + FP32 * features // attention.head_dim)


def input_on_device(w: Workload) -> int:
    """Return what of offloaded inputs is on the GPU beside those of the layer that computes: one, 2TH.

    After forward it is the last layer's; in backward that of the layer before, which is fetched ahead.
    """
    return BF16 * w.tokens * w.model.hidden if w.offloads_activations else 0


def inputs_on_host(w: Workload) -> int:
    """Return the pinned host memory of offloaded inputs: 2TH a layer, each rounded up to a power of two by torch."""
    if not w.offloads_activations:
        return 0
    return len(w.model.layers) * (1 << (BF16 * w.tokens * w.model.hidden - 1).bit_length())


def workspace(layer: LayerShape, w: Workload, reduces: bool = False) -> int:
    """Return the most that backward of a layer allocates beyond what is kept, while everything kept is still there.

    With activation_checkpointing everything that backward reads is made again first, but its input. reduces: gradients
    of weights are counted with their reduction.
    """
    found = measured(layer, w)
    again = found.kept - _kept_attention(layer, w) if w.activation_checkpointing else 0
    again -= found.input if again and not w.offloads_activations else 0
    return again + (found.without_gradients if reduces else found.backward)


def measured(layer: LayerShape, w: Workload) -> Measured:
    """Return what a layer keeps and allocates."""
    # Layers that may have attention in FP8 keep o_proj's input, whatever the length of rows.
    saves_output = not (w.shared_by > 1 or _may_have_attention_in_fp8(layer, w))
    how = Attention(w.shared_by, _groups_heads(w.attention), saves_output)
    tile = w.fp8.activations.mlp_tile_tokens if w.fp8.enabled else None
    return _measured(w.model, layer, w.tokens, tile, how, w.device == "cuda")


@functools.lru_cache(maxsize=4096)
def _measured(
    model: ModelShape, layer: LayerShape, tokens: int, tile: int | None, how: Attention, on_gpu: bool
) -> Measured:
    # Enough tokens that as many more always add the same: every expert has rows, every group is full. Of a loop over
    # tokens, in tiles for one, the peak alone continues: what is largest of many tokens must be so already.
    unit = tile or BLOCK
    for blocks in (8 if layer.has_experts else 2, 16):
        least = blocks * unit + tokens % unit
        if tokens <= least + unit:
            return _recorded(model, layer, tokens, how, on_gpu).measured
        shorter, longer = (_recorded(model, layer, length, how, on_gpu) for length in (least, least + unit))
        if shorter.is_like(longer):
            break
    return shorter.continued(longer, (tokens - least) // unit)


@functools.lru_cache(maxsize=256)
def _recorded(model: ModelShape, layer: LayerShape, tokens: int, how: Attention, on_gpu: bool) -> Recording:
    if layer.attention is not None:
        fused = isinstance(layer.module, FusedDecoderLayer)
        base_of(layer.attention.o_proj).input_is_saved = how.saves_output and fused
    try:
        return measure(model.decoder, model.container, layer.module, tokens, how, on_gpu)
    except Exception as error:  # whatever the code of a model raises where tensors have no values
        problem = f"there is no estimate for a {type(layer.module).__name__}, which needs values: {first_line(error)}"
        raise UserError(problem, key="model", remedy="measure it: ds-fp8 sweep") from error


@functools.cache
def _groups_heads(attention: str) -> bool:
    """Return whether an attention implementation reads one k and v for several heads of q in packed rows."""
    if attention == "packed":
        return varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
    return attention == "flex_attention"


def _attention_in_fp8(layer: LayerShape, w: Workload) -> bool:
    too_short = w.fp8.attention.format == "auto" and w.sequence_length < documents.LONG
    return _may_have_attention_in_fp8(layer, w) and not too_short


def _may_have_attention_in_fp8(layer: LayerShape, w: Workload) -> bool:
    asked = w.fp8.enabled and w.fp8.attention.format != "bf16" and layer.attention is not None
    return asked and (w.device == "cpu" or layer.attention.head_dim == HEAD_DIM)


# ---------------------------------------------------------------- beside the layers


def inputs(w: Workload) -> int:
    """Return the bytes of a batch and its positions: input_ids, labels and position_ids 24T, cos and sin.

    Attention other than packed has a mask, T length. GPUs that share sequences have the labels twice, and the positions
    of whole rows, 8TP.
    """
    mask = 0 if w.attention == "packed" else w.tokens * w.sequence_length
    shared = 8 * w.tokens * (1 + w.shared_by) if w.shared_by > 1 else 0
    return 3 * 8 * w.tokens + mask + shared + measured(w.model.layers[0], w).arguments


def final_norm(w: Workload) -> int:
    """Return the last hidden state: 4TH in FP32 + 4T, 2TH for the head; normalised 2TH too, if the norm is trained."""
    normalised = BF16 if any(parameter.trainable for parameter in w.model.outside) else 0
    return w.tokens * (w.model.hidden * (FP32 + normalised + BF16) + FP32)


def loss(w: Workload) -> int:
    """Return the most that the head and the loss allocate at once, at the end of forward.

    transformers' loss over all logits takes 12TV at the start of backward: log-softmax, its gradient and the one that
    came in, in FP32. The loss without logits takes the gradient of the hidden states, 2TH, and

        on a CPU       dweight 4VH, a chunk of logits in FP32 and half as much in BF16, twice
        head in BF16   dweight 4VH (2VH of one chunk); then a chunk of logits in BF16 or dweight once more, 2VH
        head in FP8    two casts of the weight 2VH, dlogits of a group cast along its tokens, and of a chunk the logits
                       and another cast 3CV, or dweight in BF16 2VH; of several groups dweight in FP32 4VH, too

    A frozen head has no dweight.
    """
    model, T, V, VH = w.model, w.tokens, w.model.vocabulary, w.model.head_numel
    if not model.loss_without_logits:
        return 3 * FP32 * T * V
    dhidden = BF16 * T * model.hidden
    trained = VH if w.model.head is None or w.model.head.trainable else 0
    if w.device == "cpu":
        return dhidden + FP32 * trained + 2 * min(LOGITS_BYTES, FP32 * T * V)
    in_fp8 = w.fp8.multiplies_head_in_fp8
    chunk = chunk_tokens(T, V, model.hidden, on_gpu=True, in_fp8=in_fp8)
    if in_fp8:
        group = group_tokens(model.hidden, chunk)
        summed = 4 * trained if group < T else 0
        return dhidden + summed + 2 * VH + min(T, group) * V + max(3 * min(T, chunk) * V, BF16 * trained)
    dweight = (FP32 if chunk < T else BF16) * trained
    return dhidden + dweight + max(BF16 * min(T, chunk) * V, BF16 * trained)


def head_gradient(w: Workload) -> int:
    """Return 2VH: a gradient of tied embeddings waits through all of backward for its other half."""
    return BF16 * w.model.head_numel if w.model.head is None else 0
