"""Output, dgrad and wgrad of the fused parts against FP64 on the same cast inputs: only the sums may differ."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_fp8.casts import quantize
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.gemm import BACKENDS, unavailable
from ds_fp8.layers.decoder.attention import NormedHeads, normed_heads
from ds_fp8.layers.decoder.gated_mlp import GatedMLP, MLPWeights, gated_mlp
from ds_fp8.layers.decoder.rotary import HeadLayout
from ds_fp8.layers.linear.recipe import LinearRecipe
from tests.numerics import error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error of a chain of two or three roundings to BF16; a cast in the wrong place gives 3e-2 and more
BF16_ERROR = 6e-3
# The same behind a second cast, which rounds a few numbers the other way because they came out a little different
FLIPPED = 1.5e-2


class _BF16(torch.autograd.Function):
    """FP64 x, itself or its gradient rounded to BF16, as it is where it goes through memory."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.gradient = gradient
        return x.bfloat16().double() if value else x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx.bfloat16().double() if ctx.gradient else dx, None, None


def _rounded(x: torch.Tensor, granularity: str) -> torch.Tensor:
    return quantize(x.float(), "e4m3", granularity, "pow2").dequantize(torch.float64)


class _Product(torch.autograd.Function):
    """x · wᵀ with the casts of the default recipe, in FP64.

    stored: which of "x" and "dy" lie in memory in BF16 before they are cast for backward. On a GPU the kernels that
    cast as they compute want whole blocks of tokens and features; ragged shapes go through memory.
    """

    @staticmethod
    def forward(ctx, x, w, stored=""):
        w = _rounded(w, "128x128")
        ctx.save_for_backward(x.bfloat16().double() if "x" in stored.split() else x, w)
        ctx.stored = stored.split()
        return _rounded(x, "1x128") @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        if "dy" in ctx.stored:
            dy = dy.bfloat16().double()
        columnwise = _rounded(dy.t().contiguous(), "1x128") @ _rounded(x.t().contiguous(), "1x128").t()
        return _rounded(dy, "1x128") @ w, columnwise, None


def random(*shape: int, scale: float = 1.0, grad: bool = True) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16().to(DEVICE).requires_grad_(grad)


def doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def recipe(backend: str, save: str = "fp8") -> LinearRecipe:
    return recipe_from_config(FP8Config(linear={"backend": backend}, activations={"save": save}, monitor={"every": 0}))


def backends():
    # On a GPU the emulation decodes there as well, so every backend is compared with the same FP64 products.
    return [pytest.param(name, marks=pytest.mark.skipif(bool(unavailable(name)), reason=str(unavailable(name))))
            for name in BACKENDS]  # fmt: skip


SHAPES = [(1, 128, 128), (130, 256, 384), (65, 200, 256)]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(("tokens", "hidden", "features"), SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_gated_mlp(backend, tokens, hidden, features, normed):
    torch.manual_seed(0)
    x, residual = random(tokens, hidden), random(tokens, hidden)
    gate, up = random(features, hidden, scale=0.06), random(features, hidden, scale=0.06)
    down, norm = random(hidden, features, scale=0.06), (torch.rand(hidden) + 0.5).bfloat16().to(DEVICE).requires_grad_()
    dy = random(tokens, hidden, scale=1e-3, grad=False)
    mlp, weights = GatedMLP("silu", *(2 * [recipe(backend, "bf16")])), MLPWeights(*map(nn.Parameter, (gate, up, down)))
    leaves = [x, *weights]
    if normed:
        norm = nn.Parameter(norm.detach())
        y = gated_mlp(x, weights, mlp, residual=residual, norm=norm, eps=1e-6)
        leaves += [residual, norm]
    else:
        y = gated_mlp(x, weights, mlp)
    gradients = torch.autograd.grad(y, leaves, dy)

    exact = doubles(*leaves)
    n = h = exact[0]
    if normed:
        h = _BF16.apply(exact[0] + exact[4], True, False)
        n = F.rms_norm(h, (hidden,), exact[5], 1e-6)
    stored = ("dy", "x") if DEVICE == "cuda" else ("", "")  # no shape here is whole blocks
    left, right = _BF16.apply(_Product.apply(n, torch.cat(exact[1:3]), stored[0]), True, False).chunk(2, -1)
    product = F.silu(left) * right
    expected = _Product.apply(_BF16.apply(product, False, True), exact[3], stored[1]) + (h if normed else 0)
    wanted = torch.autograd.grad(expected, exact, dy.double())
    one_flip = (product.abs() / 8 * exact[3].norm(dim=0)).max() / expected.norm()  # of one element, at most
    assert error(y, expected) < (max(FLIPPED, one_flip) if tokens == 1 else FLIPPED)
    for result, reference in zip(gradients, wanted, strict=True):
        assert error(result, reference) < FLIPPED


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_normed_heads(backend, tokens, biased):
    torch.manual_seed(0)
    layout, hidden = HeadLayout(4, 2, 64), 200
    x = random(2, tokens, hidden)
    norm = nn.Parameter((torch.rand(hidden) + 0.5).bfloat16().to(DEVICE))
    projections = [nn.Linear(hidden, size, bias=biased, device=DEVICE, dtype=torch.bfloat16) for size in layout.sizes]
    angle = torch.rand(1, tokens, 32).to(DEVICE) * 6
    rotation = [f(torch.cat([angle, angle], -1)).bfloat16() for f in (torch.cos, torch.sin)]
    heads = NormedHeads(layout, 1e-6, 0.0, recipe(backend))
    *qkv, same = normed_heads(x, norm, projections, (None, None), rotation, heads)
    weights = [p.weight for p in projections] + [p.bias for p in projections if biased]
    grads = [random(*part.shape, scale=1e-3, grad=False) for part in (*qkv, same)]
    gradients = torch.autograd.grad((*qkv, same), (x, norm, *weights), grads)

    exact = doubles(x, norm, *weights)
    n = F.rms_norm(exact[0], (hidden,), exact[1], 1e-6).flatten(0, 1)
    product = _Product.apply(n, torch.cat(exact[2:5])) + (torch.cat(exact[5:]) if biased else 0)
    turned = layout.split(_BF16.apply(product, False, True), 2, tokens)
    cos, sin = (part.double()[:, None] for part in rotation)
    expected = [part * cos + torch.cat([-part[..., 32:], part[..., :32]], -1) * sin for part in turned[:2]] + [
        turned[2]
    ]
    wanted = torch.autograd.grad((*expected, exact[0]), exact, [g.double() for g in grads])
    for result, reference in zip(qkv, expected, strict=True):
        assert error(result, reference) < BF16_ERROR
    for result, reference in zip(gradients, wanted, strict=True):
        assert error(result, reference) < FLIPPED
