"""FP8Linear: its three products, its shapes, and what it keeps between forward and backward."""

import gc
import math
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.casts.outliers import (
    channel_energy,
    extend_input_reference,
    extend_weight,
    largest_channels,
    weight_residual,
)
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.presets import PRESETS
from ds_fp8.layers.linear.linear import FP8Linear
from tests.gemm.tolerance import assert_is_product
from tests.layers.linears import fp8_linear
from tests.numerics import error

presets = pytest.mark.parametrize("preset", PRESETS)
saves = pytest.mark.parametrize("save", ["fp8", "bf16"])
BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Numbers whose magnitude differs along the last dimension, so that groups along other dimensions differ too."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-5, 6, shape[-1:], generator=generator))
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def cast(x: torch.Tensor, spec: CastSpec) -> torch.Tensor:
    """`x` as numbers that FP8 holds."""
    return quantize(x.detach(), spec.format, spec.granularity, spec.scale).dequantize()


def run(linear: FP8Linear, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of input and weight."""
    x = x.detach().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(dy)
    return [y.detach(), x.grad, linear.weight.grad]


def outlier_channels(linear: FP8Linear, x: torch.Tensor) -> tuple[torch.Tensor, QuantizedTensor]:
    """The outlier channels of an input, and its cast."""
    recipe = linear.recipe
    x_cast = quantize(x.detach(), recipe.input.format, recipe.input.granularity, recipe.input.scale)
    return largest_channels(channel_energy(x_cast), recipe.outlier_channels), x_cast


def fprop_operands(linear: FP8Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the operands of fprop, with an outlier block where the preset has one."""
    recipe = linear.recipe
    x_cast = quantize(x.detach(), recipe.input.format, recipe.input.granularity, recipe.input.scale)
    w = quantize(linear.weight.detach(), recipe.weight.format, recipe.weight.granularity, recipe.weight.scale)
    if recipe.outlier_channels:
        channels, _ = outlier_channels(linear, x)
        x_cast = extend_input_reference(x_cast, x[:, channels.long()], channels)
        w = extend_weight(w, weight_residual(linear.weight, w, channels), channels)
    return x_cast.dequantize(), w.dequantize()


def saved_tensors(linear: FP8Linear, x: torch.Tensor) -> list[torch.Tensor]:
    """What autograd keeps after one forward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear(x)
    return saved


@presets
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "dtype"), [(1, 1, 1, BF16), (129, 200, 7, torch.float32), (130, 127, 300, BF16)]
)
def test_the_three_products(preset, dtype, tokens, inputs, outputs):
    linear = fp8_linear(inputs, outputs, dtype, preset=preset)
    recipe, w = linear.recipe, cast(linear.weight, linear.recipe.weight)
    x_spec, dy_spec = recipe.input, recipe.grad_output
    x, dy = random(tokens, inputs, dtype=dtype), random(tokens, outputs, dtype=dtype, seed=1)
    y, dx, dw = run(linear, x, dy)

    assert {y.dtype, dx.dtype, dw.dtype} == {dtype}
    assert_is_product(y, *fprop_operands(linear, x))
    if recipe.weight.granularity == "row":  # dgrad contracts over the weight's rows: their scales go into dy's cast
        codes = quantize(linear.weight.detach(), recipe.weight.format, "row", recipe.weight.scale)
        scaled = dy.float() * codes.scale.flatten()
        assert_is_product(dx, cast(scaled, dy_spec), codes.data.float().t())
    else:
        assert_is_product(dx, cast(dy, dy_spec), w.t())
    dy_NT = quantize(dy.t(), dy_spec.format, dy_spec.granularity, dy_spec.scale)
    x_KT = quantize(x.t(), x_spec.format, recipe.wgrad_input, x_spec.scale)
    assert_is_product(dw, dy_NT.dequantize(), x_KT.dequantize())


def test_every_cast_follows_its_own_key():
    """A section that no preset has, so that no two casts can be mistaken for each other."""
    casts = {
        "input": {"format": "e4m3", "granularity": "row", "scale": "fp32"},
        "weight": {"format": "e5m2", "granularity": "tensor"},
        "grad_output": {"format": "e5m2", "granularity": "1x128"},
        "wgrad": {"input": "tensor"},
    }
    linear = fp8_linear(200, 130, linear=casts, param_gather={"format": "e5m2"})
    x, dy = random(9, 200), random(9, 130, seed=1)
    y, dx, dw = run(linear, x, dy)
    w = quantize(linear.weight, "e5m2", "tensor", "pow2").dequantize()
    assert_is_product(y, quantize(x, "e4m3", "row", "fp32").dequantize(), w)
    assert_is_product(dx, quantize(dy, "e5m2", "1x128", "pow2").dequantize(), w.t())
    x_KT, dy_NT = quantize(x.t(), "e4m3", "tensor", "fp32"), quantize(dy.t(), "e5m2", "1x128", "pow2")
    assert_is_product(dw, dy_NT.dequantize(), x_KT.dequantize())


def test_inputs_with_outlier_channels_may_have_fitted_scales():
    x, errors = random(130, 576), {}
    for scale in ("fp32", "fitted"):
        linear = fp8_linear(576, 96, preset="precise", linear={"input": {"scale": scale}, "outlier_channels": 16})
        y, _, _ = run(linear, x, random(130, 96, seed=1))
        assert_is_product(y, *fprop_operands(linear, x))
        errors[scale] = error(y.float(), x.float() @ linear.weight.detach().float().t())
    assert errors["fitted"] < errors["fp32"]


def test_bias_is_added_and_gets_its_gradient():
    plain, biased = fp8_linear(40, 7), fp8_linear(40, 7, bias=True)
    biased.load_state_dict({"weight": plain.weight, "bias": random(7, seed=2)})
    x, dy = random(2, 65, 40), random(2, 65, 7, seed=1)
    y, dx, dw = run(plain, x, dy)
    y_biased, dx_biased, dw_biased = run(biased, x, dy)
    assert torch.equal(y_biased, y + biased.bias)
    assert torch.equal(dx_biased, dx)
    assert torch.equal(dw_biased, dw)
    assert_is_product(biased.bias.grad[None], torch.ones(1, 130), dy.flatten(0, 1).t())


@presets
@saves
@pytest.mark.parametrize("shape", [(), (5, 2, 13), (2, 0)], ids=str)
def test_leading_dimensions_are_tokens(preset, save, shape):
    linear, tokens = fp8_linear(40, 7, bias=True, preset=preset, activations={"save": save}), math.prod(shape)
    x, dy = random(tokens, 40), random(tokens, 7, seed=1)
    flat = run(linear, x, dy)
    shaped = run(linear, x.view(*shape, 40), dy.view(*shape, 7))
    for got, expected, dimensions in zip(shaped, flat, [(*shape, 7), (*shape, 40), (7, 40)], strict=True):
        assert torch.equal(got, expected.view(dimensions))
    if not tokens:
        assert not shaped[2].any()
        assert not linear.bias.grad.any()


@saves
@pytest.mark.parametrize("order", ["strided", "expanded"])
def test_memory_order_does_not_matter(save, order):
    """`y.sum().backward()` hands over one number with strides of 0: expanded."""
    linear = fp8_linear(40, 7, activations={"save": save})
    x, dy = random(5, 26, 40), random(5, 26, 7, seed=1)
    if order == "strided":
        others = [tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in (x, dy)]
    else:
        dy = torch.ones_like(dy)
        others = [x, dy[:1, :1, :1].expand(dy.shape)]
    assert not others[1].is_contiguous()
    for got, expected in zip(run(linear, *others), run(linear, x, dy), strict=True):
        assert torch.equal(got, expected)


@saves
def test_what_needs_no_gradient_gets_none_and_changes_nothing(save):
    linear, x, dy = fp8_linear(40, 7, activations={"save": save}), random(9, 40), random(9, 7, seed=1)
    y, dx, dw = run(linear, x, dy)
    linear.zero_grad()
    linear(x).backward(dy)
    assert torch.equal(linear.weight.grad, dw)
    linear.requires_grad_(False)
    _, dx_frozen, dw = run(linear, x, dy)
    assert torch.equal(dx_frozen, dx)
    assert dw is None
    assert saved_tensors(linear, x.detach().requires_grad_()) == []
    linear.requires_grad_(True)
    with torch.no_grad():
        assert torch.equal(linear(x), y)
        assert saved_tensors(linear, x) == []


@presets
def test_what_is_saved_does_not_change_the_gradients(preset):
    x, dy = random(130, 200), random(130, 40, seed=1)
    fp8, bf16 = (run(fp8_linear(200, 40, preset=preset, activations={"save": s}), x, dy) for s in ("fp8", "bf16"))
    for got, expected in zip(fp8, bf16, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@saves
def test_activation_checkpointing_does_not_change_the_gradients(use_reentrant, save):
    first, second = (fp8_linear(*sizes, activations={"save": save}) for sizes in ((40, 130), (130, 7)))

    def block(x):
        return second(torch.nn.functional.silu(first(x)))

    def gradients(forward):
        x = random(9, 40).requires_grad_()
        first.zero_grad()
        second.zero_grad()
        forward(x).backward(random(9, 7, seed=1))
        return [x.grad, first.weight.grad, second.weight.grad]

    plain = gradients(block)
    recomputed = gradients(lambda x: checkpoint(block, x, use_reentrant=use_reentrant))
    for got, expected in zip(recomputed, plain, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("save", "bytes_per_element"), [("fp8", 1), ("bf16", 2)])
def test_what_is_kept_between_forward_and_backward(save, bytes_per_element):
    linear, x = fp8_linear(200, 300, activations={"save": save}), random(4, 256, 200).requires_grad_() * 2
    saved = sum(tensor.nbytes for tensor in saved_tensors(linear, x))
    scales = 4 / 128 if save == "fp8" else 0
    assert saved == x.numel() * (bytes_per_element + scales)
    alive = weakref.ref(x)
    y = linear(x)
    del x
    gc.collect()
    assert (alive() is not None) == (save == "bf16")
    y.sum().backward()


@presets
def test_a_gathered_weight_stands_in_for_the_parameter(preset):
    """Under FP8 gather `weight.data` may not be read, and backward multiplies by what is gathered at that time."""
    linear = fp8_linear(200, 130, preset=preset)
    spec, x, dy = linear.recipe.weight, random(9, 200).requires_grad_(), random(9, 130, seed=1)
    forward_w, backward_w = (
        quantize(random(130, 200, seed=seed), spec.format, spec.granularity, spec.scale) for seed in (2, 3)
    )
    operands = cast(x, linear.recipe.input), forward_w.dequantize()
    if linear.recipe.outlier_channels:
        linear.weight.data = random(130, 200, seed=2)
        channels, _ = outlier_channels(linear, x)
        linear.weight.fp8_residual = weight_residual(linear.weight, forward_w, channels)
        operands = fprop_operands(linear, x)
    linear.weight.data = torch.full((), torch.nan, dtype=BF16).expand(130, 200)

    linear.weight.fp8_gathered = forward_w
    y = linear(x)
    del linear.weight.fp8_gathered  # released after forward, gathered again for backward
    linear.weight.fp8_gathered = backward_w
    y.backward(dy)
    assert_is_product(y.detach(), *operands)
    assert_is_product(x.grad, cast(dy, linear.recipe.grad_output), backward_w.dequantize().t())
    assert linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_overflow_is_seen_in_every_product(poison):
    x, dy = random(9, 40), random(9, 7, seed=1)
    x[3, 5] = poison
    y, _, dw = run(fp8_linear(40, 7), x, dy)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [3]
    assert dw.isnan().any()
    x, dy[3, 5] = random(9, 40), poison
    _, dx, dw = run(fp8_linear(40, 7), x, dy)
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [3]
    assert dw.isnan().any()


@pytest.mark.parametrize("shape", [(9,), (2, 5)], ids=str)
def test_the_output_may_be_changed_in_place(shape):
    """As that of nn.Linear: Llama 4 adds the output of its experts to that of the shared one."""
    linear, x = fp8_linear(40, 7), random(*shape, 40)
    gradients = []
    for add in (torch.add, torch.Tensor.add_):
        leaf = x.clone().requires_grad_()
        add(linear(leaf), 2 * leaf[..., :7]).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_gradient_of_gradients_is_an_error():
    linear, x = fp8_linear(40, 7), random(9, 40).requires_grad_()
    (dx,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (dx.sum() + x.sum()).backward()
