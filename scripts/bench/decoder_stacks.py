"""Stacks of decoder layers to compare, for layers.py: this library's and those of its peers, of one size.

All but Transformer Engine's are the Qwen2 layers of transformers with the same weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import ModelSize, device, distinct_presets
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers import extend_weight, weight_residual
from ds_fp8.casts.quantization import widened
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.presets import PRESETS
from ds_fp8.engine.plans import convert
from ds_fp8.gemm import unavailable
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED, group_of, placeholder, stacked_weight
from ds_fp8.research import mxfp8


@dataclass(frozen=True)
class Shape:
    """Model size, depth and input of a stack."""

    size: ModelSize
    layers: int
    sequences: int
    length: int


def recompute_in_backward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, x, use_reentrant=False)


@dataclass(frozen=True)
class Stack:
    """Decoder layers and how they are called."""

    layers: nn.ModuleList
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor]  # (layer, x [B, S, H]) -> [B, S, H]
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext  # Around the forward of all layers
    recompute: Callable[..., torch.Tensor] = recompute_in_backward
    same_weights: bool = True  # True if its results can be compared with those of the other stacks
    backend: str | None = None  # Backend of this library that multiplies

    def step(
        self, x: torch.Tensor, dy: torch.Tensor, recompute: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (y, dx) of a forward and a backward; gradients of the weights are computed and dropped."""
        x = x.detach().requires_grad_()
        with self.context():
            y = x
            for layer in self.layers:
                one = functools.partial(self.call, layer)
                y = self.recompute(one, y) if recompute else one(y)
        y.backward(dy)
        for parameter in self.layers.parameters():
            parameter.grad = None
        return y.detach(), x.grad


@dataclass(frozen=True)
class Contestant:
    """A kind of stack, one or two rows of the table."""

    name: str
    weights: str  # Their precision in memory: "bf16" ones are cast in every step
    build: Callable[[Shape], Stack]
    missing: Callable[[], str | None]  # Reason that it cannot be measured here, or None
    is_peer: bool = True
    compiles: bool = False


def transformers_layers(shape: Shape) -> Stack:
    size = shape.size
    config = Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        num_hidden_layers=shape.layers,
        max_position_embeddings=shape.length,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device():
        layers = nn.ModuleList(Qwen2DecoderLayer(config, index) for index in range(shape.layers)).bfloat16()
        positions = torch.arange(shape.length)[None]
        rotation = Qwen2RotaryEmbedding(config)(torch.empty(0, dtype=torch.bfloat16), positions)

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with _fastest_attention():
            y = layer(x, attention_mask=None, position_embeddings=rotation)
        return y[0] if isinstance(y, tuple) else y

    return Stack(layers, call)


def _fastest_attention() -> AbstractContextManager:
    if device().type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def compiled(stack: Stack) -> Stack:
    for layer in stack.layers:
        layer.compile()
    return stack


def torchao_layers(shape: Shape, recipe: str) -> Stack:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    stack = transformers_layers(shape)
    convert_to_float8_training(stack.layers, config=Float8LinearConfig.from_recipe_name(recipe))
    return compiled(stack)


def transformer_engine_layers(shape: Shape, recipe: str, weights: str) -> Stack:
    """Return layers of te.TransformerLayer: fused norms, SwiGLU and attention of its own; no biases."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
    from transformer_engine.pytorch.attention import RotaryPositionEmbedding

    recipes = {"bf16": lambda: None, "current": Float8CurrentScaling, "block": Float8BlockScaling}
    fp8, size = recipes[recipe](), shape.size
    holds_fp8 = te.fp8_model_init(enabled=True, recipe=fp8) if weights == "fp8" else contextlib.nullcontext()
    torch.manual_seed(0)
    with holds_fp8:
        layers = nn.ModuleList(
            te.TransformerLayer(
                size.hidden,
                size.intermediate,
                size.heads,
                num_gqa_groups=size.kv_heads,
                hidden_dropout=0,
                attention_dropout=0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
                params_dtype=torch.bfloat16,
                device="cuda",
            )
            for _ in range(shape.layers)
        )
    angles = RotaryPositionEmbedding(size.head_dim)(max_seq_len=shape.length).cuda()
    return Stack(
        layers,
        lambda layer, x: layer(x, rotary_pos_emb=angles),
        functools.partial(te.fp8_autocast, enabled=fp8 is not None, fp8_recipe=fp8),
        functools.partial(te.checkpoint, use_reentrant=False),
        same_weights=False,
    )


def our_layers(
    shape: Shape, preset: str, weights: str, activations: dict[str, Any] | None = None, backend: str = "auto"
) -> Stack:
    """Return Qwen2 layers after `convert`; weights "fp8" as ZeRO-3's FP8 gather leaves them.

    Raise UserError where a layer could not be fused.
    """
    stack = transformers_layers(shape)
    section = {"preset": preset, "monitor": {"every": 0}, "activations": activations or {}}
    section["linear"] = {"backend": backend}
    conversion = convert(stack.layers, parse_fp8({"fp8": section}))
    if len(conversion.fusion.layers) < shape.layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in conversion.fusion.left.items())
        raise UserError(f"{preset}: layers are not fused ({reasons})", remedy="choose a size whose layers can be fused")
    if weights == "fp8":
        linears = [module for module in stack.layers.modules() if isinstance(module, FP8Linear)]
        write_blocks(linears)
        hold_in_fp8([linear.weight for linear in linears], conversion.recipe)
    return replace(stack, backend=conversion.recipe.backend)


def hold_in_fp8(weights: Iterable[nn.Parameter], recipe: LinearRecipe) -> None:
    """Replace high-precision weights by their FP8 casts, as ZeRO-3's FP8 gather leaves them between its hooks.

    A weight keeps shape and dtype, but reading its data gives NaN. Those of one fused product lie adjacent, with room
    for outlier blocks behind their rows.
    """
    held: set[int] = set()
    for weight in weights:
        group = group_of(weight)
        if id(weight) in held:
            continue
        held.update(map(id, group))
        whole = stacked_weight([w.detach() for w in group], recipe)
        if recipe.outlier_channels:
            channels = torch.arange(min(recipe.outlier_channels, whole.shape[1]), device=weight.device).int()
            none = torch.zeros(len(whole.data), len(channels), dtype=torch.uint8, device=weight.device)
            K, wide = whole.shape[1], extend_weight(whole, none.view(whole.data.dtype), channels)
            whole = replace(whole, data=wide.data[:, :K], scale=wide.scale[:, : whole.scale.shape[1]])
        rows = [len(w) for w in group]
        unit = BLOCK if whole.granularity == "128x128" else 1
        scales = [whole.scale] if len(group) == 1 else whole.scale.split([-(-count // unit) for count in rows])
        for w, data, scale in zip(group, whole.data.split(rows), scales, strict=True):
            setattr(w, UNSHARDED, QuantizedTensor(data, scale, whole.granularity, whole.scale_type))
            w.data = placeholder(w.shape, w.dtype, w.device)


def write_blocks(linears: Iterable[FP8Linear]) -> None:
    """Let weights that are to be held in FP8 get their outlier blocks when their channels are found.

    The weights themselves wait on the CPU: a benchmark of memory counts what the GPU holds.
    """
    for outliers, some in itertools.groupby(linears, lambda linear: linear.recipe.outliers):
        if outliers is not None:
            outliers.on_found = functools.partial(
                _write_blocks, [(one.weight, one.weight.detach().cpu()) for one in some]
            )


def _write_blocks(weights: list[tuple[nn.Parameter, torch.Tensor]], outliers: OutlierChannels) -> None:
    for weight, numbers in weights:
        gathered, channels = getattr(weight, UNSHARDED), outliers.channels
        found = extend_weight(gathered, weight_residual(numbers.to(weight.device), gathered, channels), channels)
        room = widened(gathered, len(channels))
        room.data.view(torch.uint8).copy_(found.data.view(torch.uint8))
        room.scale.copy_(found.scale)


def _torchao_missing() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def contestants() -> list[Contestant]:
    """Return all contestants, in the order of the table; of presets that compute alike the first."""

    def never() -> None:
        return None

    def te_missing() -> str | None:
        return mxfp8.missing()

    found = [
        Contestant("hf", "bf16", transformers_layers, never),
        Contestant("hf-compile", "bf16", lambda shape: compiled(transformers_layers(shape)), never, compiles=True),
    ]
    for recipe in ("tensorwise", "rowwise"):
        build = functools.partial(torchao_layers, recipe=recipe)
        found.append(Contestant(f"torchao-{recipe}", "bf16", build, _torchao_missing, compiles=True))
    for recipe, weights in (("bf16", "bf16"), ("current", "fp8"), ("block", "fp8"), ("block", "bf16")):
        build = functools.partial(transformer_engine_layers, recipe=recipe, weights=weights)
        found.append(Contestant(f"te-{recipe}", weights, build, te_missing))
    for preset in distinct_presets(PRESETS):
        for weights in ("fp8", "bf16"):
            build = functools.partial(our_layers, preset=preset, weights=weights)
            found.append(Contestant(preset, weights, build, never, is_peer=False))
        # What "auto" chooses where DeepGEMM is not installed.
        if unavailable("deep_gemm") is None:
            build = functools.partial(our_layers, preset=preset, weights="fp8", backend="cublas")
            found.append(Contestant(f"{preset}/cublas", "fp8", build, never, is_peer=False))
    return found
