"""RMSNorm, gated activation and rotary embedding with their casts: kernels against the plain torch references.

On a GPU the kernels run compiled, elsewhere in Triton's interpreter, whose roundings to BF16 and FP8 are coarser.
"""

import pytest
import torch
import torch.nn.functional as F

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.casts.outliers import channel_energy, extend_input_reference, largest_channels
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_quantize
from ds_fp8.layers.decoder.rotary import (
    HeadLayout,
    HeadNorms,
    HeadTransform,
    rotate,
    rotate_backward,
)
from ds_fp8.layers.linear.gated_activation import (
    activate,
    gated_activation_backward,
    gated_backward_reference,
    gated_product_reference,
)
from ds_fp8.layers.linear.recipe import LinearRecipe
from tests.numerics import error

pytest.importorskip("triton", reason="Triton is not installed")
from ds_fp8.layers.decoder import rms_norm_triton as norm_kernels
from ds_fp8.layers.decoder import rotary_triton as rotary_kernels
from ds_fp8.layers.linear import gated_activation_triton as gated_kernels

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FP32_ERROR = 1e-5
BF16_ERROR = 3e-3 if ON_GPU else 6e-3
# Relative errors: of FP32 sums, of one rounding to BF16, and of casts of nearly equal numbers
FP8_ERROR = 1e-2 if ON_GPU else 0.12
# Tokens, features and activation
GATED = [(1, 128, "silu"), (130, 256, "gelu"), (7, 100, "gelu_tanh"), (128, 128, "silu")]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().to(DEVICE)


def on_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Where the layers' functions compute without a kernel."""
    return None if tensor is None else tensor.cpu()


def recipe(**linear) -> LinearRecipe:
    return recipe_from_config(FP8Config(linear={"backend": "reference", **linear}, monitor={"every": 0}))


def assert_cast(result: QuantizedTensor, expected: torch.Tensor, bound: float = FP8_ERROR) -> None:
    """`result` is close to the cast of `expected` by the reference."""
    wanted = quantize(expected.float().cpu(), result.format, result.granularity, result.scale_type)
    assert error(result.dequantize(), wanted.dequantize()) < bound


@pytest.mark.parametrize(
    ("tokens", "hidden", "residual"),
    [(1, 128, False), (3, 200, True), (130, 256, True), (5, 576, False)],
)
def test_rms_norm(tokens, hidden, residual):
    torch.manual_seed(0)
    x, weight, spec = random(tokens, hidden), torch.rand(hidden, device=DEVICE).bfloat16() + 0.5, recipe().input
    added = random(tokens, hidden) if residual else None
    h, rstd, cast = norm_kernels.normalise(x, added, weight, 1e-6, spec)
    assert error(h, x.float() + (added.float() if residual else 0)) < BF16_ERROR
    exact = F.rms_norm(h.float(), (hidden,), weight.float(), 1e-6)
    assert error(rstd, torch.rsqrt(h.float().square().mean(-1) + 1e-6)) < FP32_ERROR
    assert_cast(cast, exact)
    *_, reference = rms_norm_quantize(h.cpu(), weight.cpu(), 1e-6, recipe())
    assert error(reference.dequantize(), quantize(exact.cpu()).dequantize()) < 1e-2

    dn, dresidual = random(tokens, hidden), random(tokens, hidden)
    leaf, w = h.float().requires_grad_(), weight.float().requires_grad_()
    F.rms_norm(leaf, (hidden,), w, 1e-6).backward(dn.float())
    dh = leaf.grad + dresidual.float()
    inputs = dn, h, weight, rstd, dresidual
    for result in (norm_kernels.normalise_backward(*inputs), rms_norm_backward(*map(on_cpu, inputs))):
        assert error(result[0], dh) < BF16_ERROR
        assert error(result[1], w.grad) < BF16_ERROR


@pytest.mark.parametrize(("tokens", "features", "activation"), GATED)
def test_gated_activation_forward(tokens, features, activation):
    torch.manual_seed(0)
    gate_up = random(tokens, 2 * features)
    gate, up = gate_up.float().chunk(2, -1)
    expected = activate(gate, activation) * up
    none, cast, saved = gated_kernels.gated_forward(gate_up, activation, recipe().input, True)
    assert none is None
    assert_cast(cast, expected)
    assert_cast(saved, gate_up)
    product, both, _ = gated_kernels.gated_forward(gate_up, activation, recipe().input, True, product=True)
    assert torch.equal(both.data.view(torch.uint8), cast.data.view(torch.uint8))
    assert error(product, expected) < BF16_ERROR
    product, cast, saved = gated_kernels.gated_forward(
        gate_up, activation, recipe(input={"granularity": "row"}).input, False
    )
    assert cast is saved is None
    assert error(product, expected) < BF16_ERROR


@pytest.mark.parametrize(
    ("activation", "saved_as", "wgrad_input"),
    [("silu", "fp8", "1x128"), ("gelu", "bf16", "128x128"), ("gelu_tanh", "fp8", "128x128")],
)
def test_gated_activation_of_rows_with_factors(activation, saved_as, wgrad_input):
    torch.manual_seed(0)
    gate_up, dproduct, factor = random(256, 256), random(256, 128), torch.rand(256, device=DEVICE) + 0.1
    factor[130:] = 0  # rows that belong to no expert
    gate_up[130:] = 0
    saved = quantize(gate_up) if saved_as == "fp8" else gate_up
    numbers = saved.dequantize() if saved_as == "fp8" else gate_up
    leaf, of_rows = numbers.float().requires_grad_(), factor.clone().requires_grad_()
    product = gated_product_reference(leaf, activation, of_rows)
    product.backward(dproduct.float())

    _, cast, _ = gated_kernels.gated_forward(gate_up, activation, recipe().input, False, row_factor=factor)
    assert_cast(cast, gated_product_reference(gate_up, activation, factor))
    assert not cast.dequantize()[130:].any()
    mixed = recipe(wgrad={"input": wgrad_input})
    kernel = gated_kernels.gated_backward_quantized(dproduct, saved, activation, mixed, mixed, factor)
    host = saved if DEVICE == "cpu" else numbers.cpu()
    reference = gated_activation_backward(dproduct.cpu(), host, activation, mixed, mixed, row_factor=factor.cpu())
    for row, column, product_column, dfactor, *none in (kernel, reference):
        assert none == [None, None]
        assert_cast(row, leaf.grad)
        assert_cast(column, leaf.grad.t())
        assert_cast(product_column, product.detach().t())
        assert error(dfactor, of_rows.grad) < FP32_ERROR
        assert not row.dequantize()[130:].any()
    frozen = gated_kernels.gated_backward_quantized(dproduct, saved, activation, mixed, mixed, factor, wgrad=False)
    assert frozen[1] is frozen[2] is None
    assert torch.equal(frozen[0].data.view(torch.uint8), kernel[0].data.view(torch.uint8))
    assert torch.equal(frozen[3], kernel[3])


@pytest.mark.parametrize(
    ("tokens", "features", "activation", "saved_as"),
    [
        *((*case, "fp8") for case in GATED),
        (7, 100, "gelu_tanh", "bf16"),
        (128, 128, "gelu", "bf16"),
        (128, 128, "gelu_tanh", "fp8"),
    ],
)
def test_gated_activation_backward(tokens, features, activation, saved_as):
    torch.manual_seed(0)
    gate_up, dproduct = random(tokens, 2 * features), random(tokens, features)
    saved = quantize(gate_up) if saved_as == "fp8" else gate_up
    numbers = saved.dequantize() if saved_as == "fp8" else gate_up
    leaf = numbers.float().requires_grad_()
    product = gated_product_reference(leaf, activation)
    product.backward(dproduct.float())

    reference = gated_backward_reference(dproduct, numbers, activation)
    plain = gated_kernels.gated_backward(dproduct, saved, activation)
    for results, bound in ((reference, FP32_ERROR), (plain, BF16_ERROR)):
        assert error(results[0], leaf.grad) < bound
        assert error(results[1], product) < bound
    for wgrad_input in ("1x128", "128x128"):
        if features % 128 or tokens % 128:
            continue
        mixed = recipe(wgrad={"input": wgrad_input})
        row, column, product_column, _, *uncast = gated_kernels.gated_backward_quantized(
            dproduct, saved, activation, mixed, mixed, uncast=(True, True)
        )
        assert all(torch.equal(x, y) for x, y in zip(uncast, plain, strict=True))
        assert (row.granularity, column.granularity, product_column.granularity) == ("1x128", "1x128", wgrad_input)
        assert_cast(row, leaf.grad)
        assert_cast(column, leaf.grad.t())
        assert_cast(product_column, product.detach().t())
        if not ON_GPU:
            reference = gated_activation_backward(dproduct, saved, activation, mixed, mixed)
            assert_cast(reference.dgate_up, leaf.grad, 1e-2)
            assert_cast(reference.product_columnwise, product.detach().t(), 1e-2)


@pytest.mark.parametrize(
    ("length", "head_dim", "shared_angles", "biased", "norm"),
    [
        (1, 8, False, False, False),
        (1, 8, True, True, True),
        (19, 24, False, False, False),
        (19, 24, True, False, True),
        (19, 24, False, True, False),
        (40, 64, False, True, True),
    ],
)
def test_rotary_embedding(length, head_dim, shared_angles, biased, norm):
    torch.manual_seed(0)
    layout, batch = HeadLayout(4, 2, head_dim), 2
    qkv = random(batch * length, 8 * head_dim)
    angles = torch.randn(1 if shared_angles else batch, length, head_dim, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    bias = random(8 * head_dim) if biased else None
    norms = HeadNorms(*(torch.rand(2, head_dim, device=DEVICE) + 0.5), 1e-6) if norm else None
    transform = HeadTransform(cos, sin, layout, bias, norms)
    norms_on_cpu = None if norms is None else HeadNorms(norms.q.cpu(), norms.k.cpu(), norms.eps)
    reference = HeadTransform(cos.cpu(), sin.cpu(), layout, on_cpu(bias), norms_on_cpu)
    expected = rotate(qkv.cpu(), reference)
    if not (norm or biased):  # by definition, head by head
        q = layout.split(qkv.float(), batch, length)[0]
        turned = torch.cat([-q[..., head_dim // 2 :], q[..., : head_dim // 2]], -1)
        rotated = q * cos[:, None] + turned * sin[:, None]
        assert error(layout.split(expected, batch, length)[0], rotated) < BF16_ERROR
    rotated = rotary_kernels.rotate_heads(qkv.clone(), transform)
    assert error(rotated, expected) < BF16_ERROR

    gradients = layout.split(random(batch * length, 8 * head_dim), batch, length)
    wanted = rotate_backward(tuple(map(on_cpu, gradients)), reference, qkv.cpu())
    results = rotary_kernels.rotate_heads_backward(gradients, transform, qkv)
    for result, expected in zip(results, wanted, strict=True):
        assert (result is None) == (expected is None)
        assert result is None or error(result, expected) < BF16_ERROR


@pytest.mark.parametrize(
    ("tokens", "features", "count", "activation"),
    [(1, 128, 64, "gelu"), (257, 200, 17, "silu"), (3, 640, 128, "silu"), (130, 576, 64, "gelu_tanh")],
)
def test_outlier_blocks_of_gated_products(tokens, features, count, activation):
    torch.manual_seed(0)
    gate_up = random(tokens, 2 * features)
    gate_up[:, : features // 8] *= 20
    _, cast, _ = gated_kernels.gated_forward(gate_up, activation, CastSpec(scale="fp32"), save=False)
    channels = largest_channels(channel_energy(cast), count)
    at = torch.cat([channels, channels + features]).long()
    values = gated_product_reference(gate_up[:, at], activation)
    expected, found = (
        extend_input_reference(cast, values, channels),
        gated_kernels.extend_product_tiles(cast, gate_up, activation, channels),
    )
    start = -(-features // 128) * 128
    assert torch.equal(found.data.view(torch.uint8)[:, :start], expected.data.view(torch.uint8)[:, :start])
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-4, atol=0)
    # The kernel's exponential differs in the last places, where a residual is a small difference of large numbers.
    exact, block = values.double(), found.dequantize().double()[:, start:]
    exact = torch.nn.functional.pad(exact, (0, -count % 64)).view(tokens, -1, 64)
    value, residual = block.view(tokens, -1, 2, 64).unbind(2)
    rounded = cast.dequantize().double()[:, channels.long()]
    rounded = torch.nn.functional.pad(rounded, (0, -count % 64)).view(tokens, -1, 64)
    of_codes, of_pairs = (0.04, 0.004) if ON_GPU else (0.06, 0.02)
    assert (value - exact).norm() < of_codes * exact.norm()
    assert (rounded + residual - exact).norm() < of_pairs * exact.norm()
