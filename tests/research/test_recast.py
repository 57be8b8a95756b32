"""Casts of fprop's operands for backward, as in Quartet: beside the products written out, and on average."""

import math

import numpy as np
import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention.hadamard import signs
from tests.layers.hugging_face import causal_lm
from tests.layers.linears import fp8_linear, results_of

E2M1 = torch.tensor([0, 1, 2, 4, 0.5, 1.5, 3, 6], dtype=torch.float64)
TOKENS, INPUTS, OUTPUTS = 40, 96, 64
DRAWS = 100


def section(**recast):
    return {"preset": "quartet", "linear": {"recast": recast}, "monitor": {"every": 0}}


def nearest(groups, scale):
    distance = ((groups / scale).abs()[..., None] - E2M1).abs()
    return groups.sign() * E2M1[distance.argmin(-1)] * scale


def mxfp4(x, least_error):
    """(x [M, K] in MXFP4 along K to nearest, where that clips)."""
    padding = -x.shape[1] % 32
    groups = torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1, (amax / 6).log2().ceil().exp2())
    if least_error:
        errors = [(nearest(groups, one) - groups).square().sum(-1, keepdim=True) for one in (scale, scale / 2)]
        scale = torch.where(errors[1] < errors[0], scale / 2, scale)
    parts = nearest(groups, scale), groups.abs() > 6 * scale
    return tuple(part.flatten(1)[:, : x.shape[1]] for part in parts)


def hadamard(size, random):
    """Block diagonal [size, size] of matrices of 32 by 32, element (i, j) of -1 to the bits that i and j share."""
    shared = np.bitwise_and.outer(np.arange(32), np.arange(32))
    block = torch.tensor([[(-1.0) ** int(n).bit_count() for n in row] for row in shared], dtype=torch.float64)
    if random:
        block = signs(32, 0, torch.device("cpu")).double()[:, None] * block
    return torch.block_diag(*[block / math.sqrt(32)] * (size // 32))


def operands():
    torch.manual_seed(3)
    x, dy = torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, OUTPUTS)
    return x * torch.randn(TOKENS, 1).exp(), dy * torch.randn(TOKENS, 1).exp()


def forward_operands(linear, x, random=True):
    """Fprop's operands in FP64, what of them is clipped, and its rotation."""
    f = hadamard(INPUTS, random)
    return *mxfp4(x.double() @ f, True), *mxfp4(linear.weight.detach().double() @ f, True), f


@pytest.mark.parametrize("save", ["fp8", "bf16"])
@pytest.mark.parametrize("clipped", ["zero", "pass"])
def test_products_are_those_of_the_algorithm(clipped, save):
    """All of it rounded to nearest, so that every number can be foretold."""
    linear = fp8_linear(
        INPUTS, OUTPUTS, torch.float32, preset="quartet", monitor={"every": 0}, activations={"save": save},
        linear={"recast": {"rounding": "nearest", "clipped": clipped}, "grad_output": {"rounding": "nearest"}},
    )  # fmt: skip
    x, dy = operands()
    x_cast, x_clipped, w_cast, w_clipped, f = forward_operands(linear, x)
    if clipped == "pass":
        x_clipped, w_clipped = torch.zeros_like(x_clipped), torch.zeros_like(w_clipped)
    else:
        assert 0 < x_clipped.double().mean() < 0.1
        assert 0 < w_clipped.double().mean() < 0.1
    along_n, along_t = hadamard(OUTPUTS, True), hadamard(64, True)  # 40 tokens are padded to 64
    padded_dy, padded_x = (torch.cat([part, part.new_zeros(24, part.shape[1])]) for part in (dy.double(), x_cast))
    dx = mxfp4(dy.double() @ along_n, False)[0] @ mxfp4(w_cast.t() @ along_n, False)[0].t()
    dw = mxfp4(padded_dy.t() @ along_t, False)[0] @ mxfp4(padded_x.t() @ along_t, False)[0].t()
    expected = [x_cast @ w_cast.t(), (dx * ~x_clipped) @ f.t(), (dw * ~w_clipped) @ f.t()]
    for found, wanted in zip(results_of(linear, x, dy), expected, strict=True):
        # A sum that lands on the middle between two numbers may go either way: of the other rounding it is 3%.
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_are_right_on_average():
    """Of the function that forward computed: draws of backward differ, and their mean is what they leave out."""
    linear = fp8_linear(INPUTS, OUTPUTS, torch.float32, **section(of="fprop"))
    x, dy = operands()
    x_cast, x_clipped, w_cast, w_clipped, f = forward_operands(linear, x)
    exact = [((dy.double() @ w_cast) * ~x_clipped) @ f.t(), ((dy.double().t() @ x_cast) * ~w_clipped) @ f.t()]
    draws = [results_of(linear, x, dy)[1:] for _ in range(DRAWS)]
    for expected, found in zip(exact, zip(*draws, strict=True), strict=True):
        found = torch.stack(found).double()
        spread = found.std(0) / math.sqrt(len(draws))
        off = ((found.mean(0) - expected) / spread).square().mean().sqrt()
        assert 0.9 < off < 1.1  # standard errors
    high = fp8_linear(INPUTS, OUTPUTS, torch.float32, **section(of="high_precision"))
    of_another = torch.stack([results_of(high, x, dy)[2] for _ in range(DRAWS)]).double()
    off = ((of_another.mean(0) - exact[1]) / (of_another.std(0) / math.sqrt(DRAWS))).square().mean().sqrt()
    assert off > 2


def test_an_input_that_needs_no_gradient_keeps_no_mask():
    linear = fp8_linear(INPUTS, OUTPUTS, torch.float32, **section(of="fprop"))
    x, dy = operands()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.dtype, t.shape)) or t, lambda t: t):
        y = linear(x)
        assert torch.bool not in [dtype for dtype, _ in kept]
        linear(x.requires_grad_())
    assert (torch.bool, x.shape) in kept
    y.backward(dy)
    assert linear.weight.grad.isfinite().all()


def test_nothing_is_fused_or_smoothed_where_operands_are_cast_again():
    quartet = section(of="fprop")
    quartet["linear"]["rotation"] = {"fprop": None, "dgrad": None, "wgrad": None}
    conversion = convert(causal_lm("llama"), parse_fp8({"fp8": quartet}))
    assert not conversion.fusion.layers
    assert "recast or smooth_swiglu are computed one by one" in next(iter(conversion.fusion.left.values()))
    assert "recast: fprop's for the others, pow2 stochastic" in str(FP8Config.from_preset("quartet").linear)
    quartet["linear"]["smooth_swiglu"] = True
    with pytest.raises(UserError, match="recast both change"):
        convert(causal_lm("llama"), parse_fp8({"fp8": quartet}))
