"""Bytes that a micro-batch needs: what layers keep between forward and backward, workspaces, and the loss.

What a decoder layer keeps is measured: the converted layer itself runs forward on the meta device, where tensors have
shapes and no memory, and every storage is counted that autograd saves and that is no parameter. Casts and products take
the path of their reference, which saves what kernels save; attention, whose kernels differ, is stood in for by what
each of them saves. Backward allocates otherwise in kernels than in references: its workspace is a formula.

T tokens of a micro-batch on a GPU, H hidden and F intermediate features, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import math

import torch
from torch import nn
from transformers import AttentionInterface

from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.cudnn import HEAD_DIM
from ds_fp8.layers.decoder.decoder import FusedAttentionHalf, FusedDecoderLayer, FusedMLP
from ds_fp8.layers.experts.adapters import wraps_parameter
from ds_fp8.layers.experts.experts import PRODUCTS
from ds_fp8.layers.experts.layout import worst_case_rows
from ds_fp8.layers.head.cross_entropy import LOGITS_BYTES, chunk_tokens, group_tokens
from ds_fp8.layers.linear.adapters import is_lora
from ds_fp8.layers.linear.linear import base_of
from ds_fp8.memory.shapes import BF16, FP32, LayerShape, Workload
from ds_fp8.train.packed_attention import varlen_attn

STAND_IN = "ds_fp8_estimate"  # The attention implementation of measured layers
# Tokens from which on another BLOCK of them always adds the same: every expert has rows, every group is full
WHOLE = 8 * BLOCK
# Bytes an element of the product that a fused MLP's backward takes on a CPU, where it is torch's autograd in FP32: gate
# and up 8, act(gate) and the product 8, their gradients and the product's 16, the gradient of gate and up 8
EMULATED = 40
EMULATED_FROZEN = 30  # The same where the weights are frozen, and nothing is cast along the tokens
EMULATED_CASTS = 11  # Bytes an element that casts in both directions take on a CPU, where they compute in FP32


# ---------------------------------------------------------------- kept between forward and backward


def kept(layer: LayerShape, w: Workload) -> int:
    """Return the bytes between forward and backward: all that backward reads, or with activation_checkpointing 2TH.

    With offload the GPU holds the inputs of one layer at a time (`input_on_device`).
    """
    if not w.activation_checkpointing:
        return everything(layer, w)
    inputs = 0 if w.offloads_activations else BF16 * w.tokens * layer.hidden
    if not (w.fp8.enabled and w.fp8.activations.keep_attention):
        return inputs
    # The output and a number a head and token.
    element = 1 if _attention_in_fp8(layer, w) else BF16
    return inputs + w.tokens * layer.heads * (element * layer.head_dim + FP32)


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


def everything(layer: LayerShape, w: Workload) -> int:
    """Return the bytes that backward of the layer reads."""
    # Layers that may have attention in FP8 keep o_proj's input, whatever the length of rows.
    decoder, saved = w.model.decoder, not (w.shared_by > 1 or _may_have_attention_in_fp8(layer, w))
    measure = functools.partial(_measured, decoder, layer, w.shared_by, _groups_heads(w.attention), saved)
    if w.tokens < 2 * WHOLE:
        return measure(w.tokens)
    tokens = WHOLE + w.tokens % BLOCK
    return measure(tokens) + (w.tokens - tokens) // BLOCK * (measure(WHOLE + BLOCK) - measure(WHOLE))


@functools.lru_cache(maxsize=1024)
def _measured(
    decoder: nn.Module, layer: LayerShape, shared_by: int, grouped: bool, output_is_saved: bool, tokens: int
) -> int:
    """Return what the decoder keeps with this layer alone, over what it keeps without any."""
    base_of(layer.module.self_attn.o_proj).input_is_saved = output_is_saved and isinstance(
        layer.module, FusedDecoderLayer
    )
    AttentionInterface.register(STAND_IN, functools.partial(_stand_in, (shared_by, grouped, output_is_saved)))
    decoder.config._attn_implementation = STAND_IN
    layers = decoder.layers
    try:
        decoder.layers = nn.ModuleList([layer.module])
        whole = _saved_bytes(decoder, tokens)
        decoder.layers = nn.ModuleList()
        return whole - _saved_bytes(decoder, tokens)
    finally:
        decoder.layers = layers


def _saved_bytes(decoder: nn.Module, tokens: int) -> int:
    """Return the bytes of all storages that autograd saves, without parameters, cos and sin, which all layers share."""
    others = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # alive, so that no two have one address

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def share(module: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        others.update(x.untyped_storage()._cdata for x in outputs)
        shared.extend(outputs)

    shared: list[torch.Tensor] = []
    ids = torch.empty(1, tokens, dtype=torch.long, device="meta")
    mask = torch.empty(1, 1, 1, 1, device="meta")  # a finished one: there are no positions to look for documents in
    handles = [
        decoder.rotary_emb.register_forward_hook(share),
        # As every layer but the first has it, also where adapters alone are trained.
        decoder.get_input_embeddings().register_forward_hook(lambda module, inputs, x: x.requires_grad_()),
    ]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            decoder(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sum(storage.nbytes() for address, storage in saved.items() if address not in others)


class _StandIn(torch.autograd.Function):
    """Keeps what attention kernels keep: q [B, heads, S, D], k and v [B, kv_heads, S, D], output, a number a head.

    Without grouped attention in the kernel, k and v are repeated for every head of q. GPUs that share sequences have
    all tokens of some heads, as many bytes, but at least one head of k and v each. Attention in FP8 keeps half of it,
    but the bytes of rows of several documents, which it computes in BF16, must be there.
    """

    @staticmethod
    def forward(ctx, q, k, v, shared_by: int, grouped: bool, output_is_saved: bool):
        batch, heads, length, features = q.shape
        kept_heads = max(k.shape[1], shared_by) if grouped else heads
        if kept_heads != k.shape[1] or shared_by > 1:
            k, v = (q.new_empty(batch, kept_heads, length, features) for _ in range(2))
        output = q.new_empty(batch, length, heads, features)
        saved = output if output_is_saved else torch.empty_like(output)
        q = q if shared_by == 1 else torch.empty_like(saved)
        ctx.save_for_backward(q, k, v, saved, q.new_empty(batch, heads, length, dtype=torch.float32))
        return output


def _stand_in(options, module, q, k, v, mask, **more) -> tuple[torch.Tensor, None]:
    return _StandIn.apply(q, k, v, *options), None


def _groups_heads(attention: str) -> bool:
    """Return whether an attention implementation reads one k and v for several heads of q in packed rows."""
    if attention == "packed":
        return varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
    return attention == "flex_attention"


def _attention_in_fp8(layer: LayerShape, w: Workload) -> bool:
    too_short = w.fp8.attention.format == "auto" and w.sequence_length < documents.LONG
    return _may_have_attention_in_fp8(layer, w) and not too_short


def _may_have_attention_in_fp8(layer: LayerShape, w: Workload) -> bool:
    asked = w.fp8.enabled and w.fp8.attention.format != "bf16"
    return asked and (w.device == "cpu" or layer.head_dim == HEAD_DIM)


# ---------------------------------------------------------------- beside the layers


def inputs(w: Workload) -> int:
    """Return the bytes of a batch and its positions: input_ids, labels and position_ids 24T, cos and sin 4T head_dim.

    Attention other than packed has a mask, T length. GPUs that share sequences have the labels twice, and the positions
    of whole rows, 8TP.
    """
    mask = 0 if w.attention == "packed" else w.tokens * w.sequence_length
    shared = 8 * w.tokens * (1 + w.shared_by) if w.shared_by > 1 else 0
    return 3 * 8 * w.tokens + mask + shared + 2 * BF16 * w.tokens * w.model.layers[0].head_dim


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


# ---------------------------------------------------------------- backward


def workspace(layer: LayerShape, w: Workload) -> int:
    """Return the most that backward of a layer allocates beyond what is kept, while everything kept is still there.

    That is in the MLP, at the start of its backward, or in the exchange of heads: dy 2TH, and what the functions below
    say. With activation_checkpointing everything that backward reads is made again first.
    """
    most = [0]
    if layer.mlp is not None:
        fused = isinstance(layer.module, FusedDecoderLayer) and not isinstance(layer.module, FusedAttentionHalf)
        most.append(_fused_mlp(layer, w) if fused or isinstance(layer.mlp, FusedMLP) else _own_mlp(layer, w))
    if layer.experts is not None:
        most.append(_experts(layer, w))
    if w.shared_by > 1:
        # Three forms of the gradients of q, k and v: as attention leaves them, laid out, and received. DeepSpeed
        # exchanges one after the other and lets none go before all have come.
        heads = layer.heads + 2 * max(layer.kv_heads, w.shared_by)
        most.append(3 * BF16 * w.tokens * heads * layer.head_dim)
    again = everything(layer, w) if w.activation_checkpointing else 0
    return again + BF16 * w.tokens * layer.hidden + max(most)


def _own_mlp(layer: LayerShape, w: Workload) -> int:
    """Return gradients of the product, of act(gate) and of up: 6TF, and down_proj's own gradient, 2HF."""
    F = layer.mlp.down_proj.in_features
    return BF16 * (3 * w.tokens * F + layer.hidden * F)


def _fused_mlp(layer: LayerShape, w: Workload) -> int:
    """Return what backward of a fused MLP takes, in tiles or not.

    In tiles: the gradient of the MLP's input 2TH, sums of the gradients of its weights 12FH, and for a tile what a
    whole MLP takes that keeps no gate_up, or, once that is gone, the tile's own gradients, 12FH. Or what attention then
    takes, with A features of q and K of k and v: the gradients of its output 2TA and of q, k and v 2T(A + K), the
    kernel's sums of q's in FP32, 4TA, and the casts of those of q, k and v, 2T(A + K).
    """
    saves, T, H, F = w.fp8.activations, w.tokens, layer.hidden, layer.mlp.down_proj.in_features
    if saves.mlp_tile_tokens is None:
        return _mlp_backward(layer, w, T, saves.recompute == "mlp")
    gradients = 3 * FP32 * F * H
    tile = max(_mlp_backward(layer, w, min(T, saves.mlp_tile_tokens), recomputes=True), gradients)
    query = layer.heads * layer.head_dim
    qkv = query + 2 * layer.kv_heads * layer.head_dim
    attention = T * (BF16 * query + 2 * BF16 * qkv + FP32 * query)
    if w.device == "cpu":
        attention = T * (2 * BF16 + EMULATED_CASTS) * qkv
    return max(BF16 * T * H + gradients + tile, attention)


def _mlp_backward(layer: LayerShape, w: Workload, tokens: int, recomputes: bool) -> int:
    """Return the bytes that backward of a fused MLP allocates for T tokens.

    dy cast twice 2TH, weights transposed 3HF, the product's gradient 2TF and three casts TF(2 + 2 + 1), scales 1/32. Of
    frozen weights dy is cast once, TH, and there is one cast, 2TF; adapters read dgate_up 4TF and the product 2TF.

    Casts other than 1x128 and 128x128 go through dgate_up 4TF and product 2TF in BF16 first. If it recomputes, gate
    and up are there again: 2TF(1 + 1/32) in FP8, made from 4TF in BF16, or those 4TF. On a CPU the casts are emulated:
    40TF in their place.
    """
    T, H, F = tokens, layer.hidden, layer.mlp.down_proj.in_features
    linears = [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    gate, _, down_proj = bases = [base_of(linear) for linear in linears]
    gate_up, down = gate.recipe, down_proj.recipe
    dy = _cast(T, H, down.grad_output.granularity)
    casts = _cast(T, 2 * F, gate_up.grad_output.granularity)
    frozen = not any(linear.weight.requires_grad for linear in bases)
    if not frozen:
        dy += _cast(H, T, down.grad_output.granularity)
        casts += _cast(2 * F, T, gate_up.grad_output.granularity) + _cast(F, T, down.wgrad_input)
    of_gate, of_up, of_down = map(is_lora, linears)
    casts += BF16 * T * F * (2 * (of_gate or of_up) + of_down)
    by_tile = gate_up.quantizes_by_tile and down.wgrad_input in ("1x128", "128x128")
    through_bf16 = 0 if by_tile and gate_up.weight.granularity != "row" else BF16 * T * 3 * F
    again = 0
    if recomputes:
        again = _cast(T, 2 * F, "1x128") if w.fp8.activations.save == "fp8" else BF16 * T * 2 * F
    if w.device == "cpu":
        casts, through_bf16 = (EMULATED_FROZEN if frozen else EMULATED) * T * F, 0
    return dy + 3 * H * F + BF16 * T * F + casts + through_bf16 + again


def _cast(rows: int, columns: int, granularity: str) -> int:
    return rows * columns + FP32 * math.prod(scale_shape((rows, columns), granularity))


def _experts(layer: LayerShape, w: Workload) -> int:
    """Return what backward of E experts allocates, S = Tk rows of a token for an expert, I features.

    BF16: gradients of gate, up and rows 2S(2I + H) and of all weights 6EHI, and gate_up decoded 4EHI, if in FP8. FP8:
    the gradients of all weights 6EHI beside five casts of I features and two of H, R(5I + 2H)(1 + 1/32), of R rows, S
    and what fills the tiles of 128 rows of every expert.

    Frozen weights have no gradients, but in BF16 those of W + s B A beside adapters; in FP8 these read gate, up, their
    gradients and the product in BF16, 2R(5I), and have U and dU of all experts, 4TEr.
    """
    count, H, I = layer.experts.down_proj.shape  # noqa: E741
    rows = w.tokens * w.model.chosen
    adapters = [part for part in layer.module.mlp.experts.modules() if wraps_parameter(part)]
    trained = any(weight.requires_grad for weight in layer.experts.parameters(recurse=False))
    if hasattr(layer.experts, PRODUCTS):
        laid_out = worst_case_rows(rows, count)
        low_rank = sum(sum(part.r.values()) for part in adapters)
        beside = BF16 * (laid_out * 5 * I + 2 * w.tokens * count * low_rank) if adapters else 0
        return int(laid_out * (5 * I + 2 * H) * (1 + FP32 / BLOCK)) + trained * 3 * BF16 * count * H * I + beside
    decoded = 2 * BF16 if w.gathers_in_fp8 and any(p.in_fp8 for p in layer.parameters) else 0
    gradients = 3 * BF16 if trained or adapters else 0
    return BF16 * rows * (2 * I + H) + (gradients + decoded) * count * H * I
