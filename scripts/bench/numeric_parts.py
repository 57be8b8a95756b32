"""The parts whose numbers numerics.py compares: each in FP8 by the library, and plainly in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from ds_fp8.layers.decoder.attention import NormedHeads, normed_heads
from ds_fp8.layers.decoder.gated_mlp import GatedMLP, MLPWeights, normed_mlp
from ds_fp8.layers.decoder.heads import HeadLayout
from ds_fp8.layers.decoder.rotary import rotate_reference
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.recipe import LinearRecipe

Tensors = dict[str, torch.Tensor]

ACTIVATIONS = "x", "residual"
"""Names of the inputs of a part that are no weights."""

EPS = 1e-6
"""Epsilon of RMSNorm."""

LAYOUT = HeadLayout(4, 2, 64)
PROJECTIONS = "q_proj", "k_proj", "v_proj"


@dataclass(frozen=True)
class Part:
    """A differentiable function of named tensors, which returns named tensors."""

    shapes: list[tuple[int, ...]]
    """Sizes to try, awkward ones among them; the first is the number of tokens."""
    inputs: Callable[..., dict[str, tuple[int, ...]]]
    """(*shape) -> the shapes of the tensors; those not among ACTIVATIONS are weights."""
    fp8: Callable[[LinearRecipe, Tensors], Tensors]
    plain: Callable[[Tensors], Tensors]


def random_tensors(part: Part, shape: tuple[int, ...]) -> Tensors:
    """Return BF16 tensors on the CPU, the same on every call; weights keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, sizes in part.inputs(*shape).items():
        values = torch.randn(sizes, generator=generator)
        if name not in ACTIVATIONS:
            values = 1 + values / 10 if name == "norm" else values * sizes[-1] ** -0.5
        tensors[name] = values.bfloat16()
    return tensors


def _linear_fp8(recipe: LinearRecipe, t: Tensors) -> Tensors:
    layer = nn.Linear(*reversed(t["weight"].shape), bias=False, device="meta")
    layer.weight = t["weight"]
    layer.__class__, layer.recipe = FP8Linear, recipe
    return {"y": layer(t["x"])}


LINEAR = Part(
    [(256, 256, 384), (100, 72, 200), (129, 136, 264), (17, 8, 1000), (1, 128, 128), (0, 128, 128)],
    lambda tokens, n, k: {"x": (tokens, k), "weight": (n, k)},
    _linear_fp8,
    lambda t: {"y": F.linear(t["x"], t["weight"])},
)


def _mlp_fp8(recipe: LinearRecipe, t: Tensors) -> Tensors:
    weights = MLPWeights(t["gate_proj"], t["up_proj"], t["down_proj"])
    return {"y": normed_mlp(t["x"], t["residual"], t["norm"], EPS, weights, GatedMLP("silu", recipe, recipe))}


def _mlp_plain(t: Tensors) -> Tensors:
    hidden = t["x"] + t["residual"]
    n = F.rms_norm(hidden, hidden.shape[-1:], t["norm"], EPS)
    product = F.silu(F.linear(n, t["gate_proj"])) * F.linear(n, t["up_proj"])
    return {"y": hidden + F.linear(product, t["down_proj"])}


MLP = Part(
    [(256, 256, 512), (100, 200, 384), (129, 264, 128), (1, 128, 256), (0, 128, 256)],
    lambda tokens, hidden, intermediate: {
        "x": (1, tokens, hidden),
        "residual": (1, tokens, hidden),
        "norm": (hidden,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    },
    _mlp_fp8,
    _mlp_plain,
)


def _rotation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos, sin [1, S, D] for x [1, S, H]."""
    frequencies = 1e-4 ** (torch.arange(LAYOUT.head_dim // 2) / (LAYOUT.head_dim // 2))
    angles = torch.outer(torch.arange(x.shape[1]), frequencies).repeat(1, 2)[None]
    return angles.cos().to(x), angles.sin().to(x)


def _heads_fp8(recipe: LinearRecipe, t: Tensors) -> Tensors:
    projections = tuple(SimpleNamespace(weight=t[name], bias=t[f"{name}.bias"]) for name in PROJECTIONS)
    heads = NormedHeads(LAYOUT, EPS, 0.0, recipe)
    q, k, v, _ = normed_heads(t["x"], t["norm"], projections, (None, None), _rotation(t["x"]), heads)
    return {"q": q, "k": k, "v": v}


def _heads_plain(t: Tensors) -> Tensors:
    n = F.rms_norm(t["x"], t["x"].shape[-1:], t["norm"], EPS)
    qkv = torch.cat([F.linear(n, t[name], t[f"{name}.bias"]) for name in PROJECTIONS], -1)
    rotated = rotate_reference(qkv.flatten(0, 1), *_rotation(t["x"]), LAYOUT)
    return dict(zip(("q", "k", "v"), LAYOUT.split(rotated, *t["x"].shape[:2]), strict=True))


HEADS = Part(
    [(256, 256), (100, 200), (129, 264), (1, 128), (0, 128)],
    lambda tokens, hidden: {
        "x": (1, tokens, hidden),
        "norm": (hidden,),
        **{name: (rows, hidden) for name, rows in zip(PROJECTIONS, LAYOUT.sizes, strict=True)},
        **{f"{name}.bias": (rows,) for name, rows in zip(PROJECTIONS, LAYOUT.sizes, strict=True)},
    },
    _heads_fp8,
    _heads_plain,
)

PARTS = {"linear": LINEAR, "RMSNorm, gated MLP": MLP, "RMSNorm, q, k, v": HEADS}
