"""Bytes that one decoder layer keeps between its forward and its backward, and those that backward needs besides.

T tokens of a micro-batch, H hidden and F intermediate features, A features of q, K of k and of v together with it
(A + K for q, k and v), heads. Bytes: BF16 2, FP32 4, FP8 1 and its scales.

Every function takes a layer and the workload and returns bytes by part, so that a table can be checked term by term.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping

from ds_fp8.config.formats import scale_shape
from ds_fp8.layers.attention.cudnn import HEAD_DIM
from ds_fp8.memory.experts import experts_kept, experts_workspace
from ds_fp8.memory.model_shape import LayerShape
from ds_fp8.memory.workload import BF16, FP32, Workload
from ds_fp8.train.packed_attention import varlen_attn

ATTENTION, MLP, NORMS = "activations: attention", "activations: MLP", "activations: norms and residual"

EMULATED = 40
"""Bytes an element of the product that a fused MLP's backward takes on a CPU, where it is torch's autograd in FP32:
gate and up 8, act(gate) and the product 8, their gradients and the product's 16, the gradient of gate and up 8."""
EMULATED_CASTS = 11
"""Bytes an element that casts in both directions take on a CPU, where they compute in FP32."""

Bytes = Counter[str]


def kept(layer: LayerShape, w: Workload) -> Bytes:
    """Return the bytes between forward and backward: all that backward reads, or with activation_checkpointing 2TH.

    None with offload, where the GPU holds those of one layer at a time (`input_on_device`).
    """
    if w.offloads_activations:
        return Counter()
    if w.activation_checkpointing:
        return Counter({NORMS: BF16 * w.tokens * layer.hidden})
    return everything(layer, w)


def input_on_device(w: Workload) -> Bytes:
    """Return what of offloaded inputs is on the GPU beside those of the layer that computes: one, 2TH.

    After forward it is the last layer's; in backward that of the layer before, which is fetched ahead.
    """
    if not w.offloads_activations:
        return Counter()
    return Counter({NORMS: BF16 * w.tokens * max(layer.hidden for layer in w.model.layers)})


def inputs_on_host(w: Workload) -> int:
    """Return the pinned host memory of offloaded inputs: 2TH a layer, each rounded up to a power of two by torch."""
    if not w.offloads_activations:
        return 0
    return sum(1 << (BF16 * w.tokens * layer.hidden - 1).bit_length() for layer in w.model.layers)


def everything(layer: LayerShape, w: Workload) -> Bytes:
    """Return the bytes that backward of the layer reads; with Smooth-SwiGLU also the factors of channels, 4F."""
    if layer.experts is not None:
        result = _with_experts(layer, w)
    else:
        result = _fused(layer, w) if layer.fused else _own_forward(layer, w)
    if "down_proj" in layer.fp8 and layer.fp8["down_proj"].smooth:
        result[MLP] += FP32 * layer.intermediate
    return result


def cast(rows: int, columns: int, granularity: str) -> int:
    """Return an FP8 matrix with its scales.

    Rows · columns, and 4 bytes a scale (4/128 an element for groups of 1x128).
    """
    return rows * columns + FP32 * math.prod(scale_shape((rows, columns), granularity))


def gate_up(layer: LayerShape, w: Workload) -> int:
    """Return the bytes of gate and up of a fused MLP.

    2TF(1 + 1/32) in FP8, 4TF in BF16, nothing with recompute "mlp" or in tiles.
    """
    if w.fp8.activations.recompute == "mlp" or w.fp8.activations.mlp_tile_tokens is not None:
        return 0
    if w.fp8.activations.save == "fp8":
        return cast(w.tokens, 2 * layer.intermediate, "1x128")
    return BF16 * w.tokens * 2 * layer.intermediate


def attention_core(layer: LayerShape, w: Workload) -> int:
    """Return the bytes of q, k, v, the output and the normaliser of each head: 2T(A + K) + 2TA + 4T heads.

    Without grouped attention in the kernel, k and v are repeated for every query head. Attention in FP8 keeps half of
    it, but the bytes of rows of several documents, which it computes in BF16, must be there. GPUs that share sequences
    have all tokens of some heads, as many bytes, but at least one head of k and v each.
    """
    kv_heads = max(layer.kv_heads, w.shared_by) if groups_heads(w.attention) else layer.heads
    qkv = (layer.heads + 2 * kv_heads) * layer.head_dim
    return w.tokens * (BF16 * (qkv + layer.query) + FP32 * layer.heads)


def groups_heads(attention: str) -> bool:
    """Return whether an attention implementation reads one k and v for several query heads.

    Asked for rows of packed documents.
    """
    if attention == "packed":
        return varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
    return attention == "flex_attention"


def attention_in_fp8(layer: LayerShape, w: Workload) -> bool:
    """Return whether attention of rows of one document is in FP8."""
    asked = w.fp8.enabled and w.fp8.attention.format != "bf16"
    return asked and (w.device == "cpu" or layer.head_dim == HEAD_DIM)


def _fused(layer: LayerShape, w: Workload) -> Bytes:
    """Return the bytes of x 2TH, x + attention 2TH, two norms 4T each; attention_core; gate_up.

    Normed heads (Qwen3) keep the product of q, k and v before the norm as well, 2T(A + K). With attention in FP8 o_proj
    keeps its own cast along the tokens, TA(1 + 1/32): attention keeps another form of its output, as it does where GPUs
    share sequences.
    """
    half = _fused_attention(layer, w)
    return half + Counter({NORMS: BF16 * w.tokens * layer.hidden + FP32 * w.tokens, MLP: gate_up(layer, w)})


def _with_experts(layer: LayerShape, w: Workload) -> Bytes:
    """Return a layer with experts: its attention, fused or not, its norm, and what `experts_kept` says.

    The router's input 2TH, where nothing else keeps it, and the output of a shared expert with a gate 2TH.
    """
    T, H = w.tokens, layer.hidden
    result = _fused_attention(layer, w) if layer.fused_attention else _own_attention(layer, w)
    result += _own_mlp(layer, w)
    saves = w.fp8.activations
    if layer.intermediate and w.fp8.enabled and saves.save == "fp8" and "gate_proj" in layer.fp8:
        # The shared expert keeps a cast of its input, or with recompute the input itself, which is the router's too.
        result[NORMS] += BF16 * T * H * (saves.recompute == "none")
    result[MLP] += experts_kept(layer, w) + BF16 * T * H * layer.experts.shared_gate
    return result


def _fused_attention(layer: LayerShape, w: Workload) -> Bytes:
    """Return the attention half of _fused: x 2TH, its norm 4T, attention_core, and what `_fused` says of it."""
    T, H = w.tokens, layer.hidden
    own = BF16 * T * layer.qkv if layer.head_norms else 0
    if w.fp8.activations.save == "fp8" and (attention_in_fp8(layer, w) or w.shared_by > 1):
        own += cast(layer.query, T, layer.fp8["o_proj"].wgrad_input)
    elif w.shared_by > 1:
        own += BF16 * T * layer.query
    return Counter({NORMS: BF16 * T * H + FP32 * T, ATTENTION: attention_core(layer, w) + own})


def _own_forward(layer: LayerShape, w: Workload) -> Bytes:
    """Return a layer as transformers computes it.

    norms      4TH (the input in FP32) + 4T + 2TH (normalised, before the weight), twice
    linears    their inputs, each once, in BF16 (2T · features), or an FP8 cast along the tokens for every FP8 linear
    attention  attention_core; normed heads 4TA + 2TA + 4T heads for q, the same for k
    MLP        gate, act(gate) and up, 6TF, unless it is fused: gate_up
    """
    return _own_attention(layer, w) + _own_mlp(layer, w)


def _own_attention(layer: LayerShape, w: Workload) -> Bytes:
    T, H = w.tokens, layer.hidden
    result = Counter({NORMS: T * H * (FP32 + BF16) + FP32 * T, ATTENTION: attention_core(layer, w)})
    if layer.head_norms:
        heads = layer.heads + layer.kv_heads
        result[ATTENTION] += T * heads * (layer.head_dim * (FP32 + BF16) + FP32)
    linears = {"q_proj": ("n1", H), "k_proj": ("n1", H), "v_proj": ("n1", H), "o_proj": ("attention", layer.query)}
    return result + _inputs_of_linears(linears, ATTENTION, layer, w)


def _own_mlp(layer: LayerShape, w: Workload) -> Bytes:
    T, H, F = w.tokens, layer.hidden, layer.intermediate
    result = Counter({NORMS: T * H * (FP32 + BF16) + FP32 * T})
    if not layer.fused_mlp:
        result[MLP] += 3 * BF16 * T * F
        linears = {"gate_proj": ("n2", H), "up_proj": ("n2", H), "down_proj": ("product", F)}
        return result + _inputs_of_linears(linears, MLP, layer, w)
    result[MLP] += gate_up(layer, w)
    activations = w.fp8.activations
    if activations.save == "fp8" and activations.recompute == "none" and activations.mlp_tile_tokens is None:
        result[MLP] += cast(H, T, layer.fp8["gate_proj"].wgrad_input)
    else:
        result[NORMS] += BF16 * T * H
    return result


def _inputs_of_linears(linears: Mapping[str, tuple[str, int]], part: str, layer: LayerShape, w: Workload) -> Bytes:
    """Return the inputs that linears keep, by their names: (where the input comes from, its features)."""
    T, in_fp8 = w.tokens, w.fp8.activations.save == "fp8"
    result, inputs = Counter(), {}
    for name, (source, features) in linears.items():
        if name in layer.fp8 and in_fp8:
            result[part] += cast(features, T, layer.fp8[name].wgrad_input)
        elif source != "attention" or w.shared_by > 1:  # otherwise attention keeps it anyway
            inputs[source] = (NORMS if source in ("n1", "n2") else part, BF16 * T * features)
    for kind, size in inputs.values():
        result[kind] += size
    return result


# ---------------------------------------------------------------- beyond what is kept


def workspace(layer: LayerShape, w: Workload) -> int:
    """Return the most that backward of a layer allocates beyond what is kept, while everything kept is still there.

    That is in the MLP, at the start of its backward, or in the exchange of heads: dy 2TH, and what the functions below
    say. With activation_checkpointing everything that backward reads is made again first.
    """
    again = sum(everything(layer, w).values()) if w.activation_checkpointing else 0
    mlp: Callable[[LayerShape, Workload], int] = _own_mlp_workspace
    if layer.fused or layer.fused_mlp:
        mlp = _fused_mlp_workspace
        if w.fp8.activations.mlp_tile_tokens is not None:
            mlp = _tiled_mlp_workspace
    most = mlp(layer, w) if layer.intermediate else 0
    if layer.experts is not None:
        most = max(most, experts_workspace(layer, w))
    if w.shared_by > 1:
        most = max(most, _exchange(layer, w))
    return again + BF16 * w.tokens * layer.hidden + most


def _exchange(layer: LayerShape, w: Workload) -> int:
    """Return three forms of the gradients of q, k and v: as attention leaves them, laid out, and received, 6T(A + K).

    DeepSpeed exchanges one after the other and lets none go before all have come. GPUs have a head of k and v at least.
    With attention in FP8, rows of one document travel as codes and take less; rows of several take all of it.
    """
    return 3 * BF16 * w.tokens * (layer.heads + 2 * max(layer.kv_heads, w.shared_by)) * layer.head_dim


def _own_mlp_workspace(layer: LayerShape, w: Workload) -> int:
    """Return gradients of the product, of act(gate) and of up: 6TF, and down_proj's own gradient, 2HF."""
    return BF16 * (3 * w.tokens * layer.intermediate + layer.hidden * layer.intermediate)


def _tiled_mlp_workspace(layer: LayerShape, w: Workload) -> int:
    """Return the bytes that backward of a fused MLP in tiles allocates, or that of attention, whichever is more.

    The gradient of the MLP's input 2TH, sums of the gradients of its weights 12FH, and for a tile what a whole MLP
    allocates that keeps no gate_up, or, once that is gone, the tile's own gradients, 12FH.

    Attention then comes into view: the gradients of its output 2TA and of q, k and v 2T(A + K), the kernel's sums of
    q's in FP32, 4TA, and the casts of those of q, k and v, 2T(A + K). On a CPU, where casts are emulated, those take
    11T(A + K), and the stacked gradients 2T(A + K).
    """
    T, H, F = w.tokens, layer.hidden, layer.intermediate
    tokens = min(T, w.fp8.activations.mlp_tile_tokens)
    gradients = 3 * FP32 * F * H
    tile = max(_mlp_backward(layer, w, tokens, recomputes=True), gradients)
    attention = T * (BF16 * layer.query + 2 * BF16 * layer.qkv + FP32 * layer.query)
    if w.device == "cpu":
        attention = T * (2 * BF16 + EMULATED_CASTS) * layer.qkv
    return max(BF16 * T * H + gradients + tile, attention)


def _fused_mlp_workspace(layer: LayerShape, w: Workload) -> int:
    """Return the bytes that backward of a fused MLP allocates."""
    return _mlp_backward(layer, w, w.tokens, w.fp8.activations.recompute == "mlp")


def _mlp_backward(layer: LayerShape, w: Workload, tokens: int, recomputes: bool) -> int:
    """Return the bytes that backward of a fused MLP allocates for T tokens.

    dy cast twice 2TH, weights transposed 3HF, the product's gradient 2TF and three casts TF(2 + 2 + 1), scales 1/32.

    Casts other than 1x128 and 128x128 go through dgate_up 4TF and product 2TF in BF16 first. If it recomputes, gate
    and up are there again: 2TF(1 + 1/32) in FP8, made from 4TF in BF16, or those 4TF. On a CPU the casts are emulated:
    40TF in their place.
    """
    T, H, F = tokens, layer.hidden, layer.intermediate
    gate_up, down = layer.fp8["gate_proj"], layer.fp8["down_proj"]
    dy = cast(T, H, down.grad_output.granularity) + cast(H, T, down.grad_output.granularity)
    casts = cast(T, 2 * F, gate_up.grad_output.granularity) + cast(2 * F, T, gate_up.grad_output.granularity)
    casts += cast(F, T, down.wgrad_input)
    by_tile = gate_up.casts_by_tile and down.wgrad_input in ("1x128", "128x128")
    through_bf16 = 0 if by_tile and gate_up.weight.granularity != "row" else BF16 * T * 3 * F
    again = 0
    if recomputes:
        again = cast(T, 2 * F, "1x128") if w.fp8.activations.save == "fp8" else BF16 * T * 2 * F
    if w.device == "cpu":
        casts, through_bf16 = EMULATED * T * F, 0
    return dy + 3 * H * F + BF16 * T * F + casts + through_bf16 + again


def final_norm(w: Workload) -> int:
    """Return the last hidden state: 4TH in FP32 + 2TH normalised + 4T, and 2TH for the head."""
    return w.tokens * (w.model.hidden * (FP32 + BF16 + BF16) + FP32)


def rotary(w: Workload, layer: LayerShape) -> int:
    """Return the bytes of cos and sin of every position, shared by all layers: 4 T head_dim."""
    return 2 * BF16 * w.tokens * layer.head_dim


def batch(w: Workload) -> int:
    """Return the bytes of input_ids, labels and position_ids, int64: 24T.

    Attention other than packed has a mask, T length. GPUs that share sequences have the labels twice, and the positions
    of whole rows, 8TP.
    """
    mask = 0 if w.attention == "packed" else w.tokens * w.sequence_length
    shared = 8 * w.tokens * (1 + w.shared_by) if w.shared_by > 1 else 0
    return 3 * 8 * w.tokens + mask + shared
