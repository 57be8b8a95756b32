"""FP8 products of experts as one operation, beside a loop over the experts with the same casts and one without."""

from __future__ import annotations

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.experts.adapters import LowRank
from ds_fp8.layers.experts.products import (
    ExpertAdapters,
    ExpertProducts,
    ExpertWeights,
    expert_products,
)
from ds_fp8.layers.linear.gated_activation import GatedCast, GatedGradients
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED, placeholder
from tests.gemm.tolerance import CHAIN
from tests.layers.expert_loop import Gradients, high_precision, with_casts
from tests.numerics import error

FP8_ERROR = 0.01, 0.15  # Relative error of FP8 products beside FP32: less would mean that nothing was cast
INTERPRETED = 0.3  # Relative error of a chain of casts in Triton's interpreter, each of which is 0.1 off


def recipe(activations: dict | None = None, **linear) -> LinearRecipe:
    config = {"linear": {"backend": "reference", **linear}, "activations": activations or {}, "monitor": {"every": 0}}
    return recipe_from_config(FP8Config(**config))


def settings(activation: str = "silu", activations: dict | None = None, **linear) -> ExpertProducts:
    ours = recipe(activations, **linear)
    return ExpertProducts(activation, ours, ours)


def inputs(counts, choices=1, hidden=256, features=128, dtype=torch.bfloat16):
    """x, indices, router weights, gate_up, down, dy; expert e is the first choice of counts[e] tokens, shuffled."""
    torch.manual_seed(0)
    experts = len(counts)
    first = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)]).long()
    first = first[torch.randperm(len(first))]
    others = torch.rand(len(first), experts).scatter_(1, first[:, None], -1).topk(choices - 1).indices
    index = torch.cat([first[:, None], others], 1)
    x, dy = torch.randn(len(first), hidden).to(dtype), torch.randn(len(first), hidden).to(dtype)
    router_weights = torch.rand(index.shape).softmax(-1).to(dtype)
    gate_up = torch.randn(experts, 2 * features, hidden).mul(hidden**-0.5).to(dtype)
    down = torch.randn(experts, hidden, features).mul(features**-0.5).to(dtype)
    return x, index, router_weights, gate_up, down, dy


def run(x, index, router_weights, gate_up, down, dy, products) -> tuple[torch.Tensor, Gradients]:
    """Return the output and all gradients of the operation."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, router_weights, gate_up, down)]
    y = expert_products(leaves[0], index, leaves[1], ExpertWeights(*leaves[2:]), products)
    y.backward(dy)
    return y.detach(), Gradients(*(leaf.grad for leaf in leaves))


def low_ranks(gate_up, down, rank=8, factor=1.0) -> ExpertAdapters:
    """Adapters whose sum with the weights is about `factor` times as large as these."""

    def of(weight):
        experts, outputs, features = weight.shape
        a = torch.randn(experts, rank, features, dtype=weight.dtype)
        return LowRank(a * factor * (rank * features) ** -0.5, torch.randn(experts, outputs, rank, dtype=weight.dtype))

    return ExpertAdapters(of(gate_up), of(down))


def run_adapted(x, index, router_weights, gate_up, down, dy, products, adapters):
    """Return the output, and the gradients of x, the router's weights and the adapters beside frozen weights."""
    low_rank = [tensor.clone().requires_grad_() for tensor in adapters.tensors]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, router_weights)]
    weights = ExpertWeights(gate_up, down)
    y = expert_products(leaves[0], index, leaves[1], weights, products, ExpertAdapters.of_tensors(low_rank))
    y.backward(dy)
    return y.detach(), [leaf.grad for leaf in (*leaves, *low_rank)]


def sums_in_high_precision(x, index, router_weights, gate_up, down, dy, adapters):
    """As run_adapted in FP32: experts with W + B A, and its gradient taken apart."""
    low_rank = [LowRank(*(part.float() for part in adapter)) for adapter in adapters]
    whole = [weight.float() + part.b @ part.a for weight, part in zip((gate_up, down), low_rank, strict=True)]
    y, gradients = high_precision(x, index, router_weights, *whole, "silu", dy)
    of_adapters = []
    for dw, (a, b) in zip(gradients[2:], low_rank, strict=True):
        of_adapters += [b.transpose(1, 2) @ dw, dw @ a.transpose(1, 2)]
    return y, [*gradients[:2], *of_adapters]


def assert_is_the_loop(given, products) -> None:
    x, *others, dy = given
    y, gradients = run(*given, products)
    expected, of_loop = with_casts(x, *others, products, dy)
    assert y.dtype is x.dtype
    assert error(y, expected) < CHAIN[x.dtype]
    for name, found, wanted in zip(Gradients._fields, gradients, of_loop, strict=True):
        assert found.shape == wanted.shape, name
        assert found.dtype is x.dtype, name
        assert error(found, wanted) < CHAIN[x.dtype], name


SCALED = {"scale": "fp32"}
CASES = {
    "awkward counts": (((0, 1, 127, 128, 129),), {"wgrad": {"input": "128x128"}}),
    "one expert of some": (((200, 0, 0),), {}),
    "the last expert": (((0, 0, 300),), {}),
    "a token and an expert": (((1,),), {}),
    "many experts": (((3,) * 64,), {}),
    "all choices": (((12,) * 8, 8), {}),
    "eight choices of many": (((1,) * 64, 8), {}),
    "square": (((130, 5, 40), 2, 128, 128), {}),
    "wide": (((130, 5, 40), 2, 512, 384), {}),
    "narrow": (((130, 5, 40), 2, 128, 512), {}),
    "gelu": (((60, 7, 130), 2), {"activation": "gelu", "activations": {"save": "bf16"}}),
    "gelu_tanh": (((60, 7, 130), 2), {"activation": "gelu_tanh"}),
    "silu, kept in BF16": (((60, 7, 130), 2), {"activations": {"save": "bf16"}}),
    "FP32 scales": (((60, 7, 130), 2), {"input": SCALED, "weight": SCALED, "grad_output": SCALED}),
    "FP32 scales of blocks": (
        ((60, 7, 130), 2),
        {"input": SCALED, "weight": SCALED, "grad_output": SCALED, "wgrad": {"input": "128x128"}},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_a_loop_over_experts(case, dtype):
    arguments, section = CASES[case]
    assert_is_the_loop(inputs(*arguments, dtype=dtype), settings(**section))


@pytest.mark.parametrize("counts", [(40, 30, 20, 10), (0, 1, 127, 128)])
def test_fp8_beside_high_precision(counts):
    x, index, *weights, dy = inputs(counts, 2)
    y, gradients = run(x, index, *weights, dy, settings())
    expected, of_loop = high_precision(x, index, *weights, "silu", dy)
    low, high = FP8_ERROR
    for found, wanted in zip((y, *gradients), (expected, *of_loop), strict=True):
        assert low < error(found, wanted) < high


ADAPTED = {
    "awkward counts": ((0, 1, 127, 128, 129), 1),
    "one expert of some": ((200, 0, 0), 1),
    "two choices": ((60, 7, 0, 130), 2),
    "a token and an expert": ((1,), 1),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_alone_are_exact(case):
    """Beside weights of zeros nothing is cast that counts."""
    given = list(inputs(*ADAPTED[case], dtype=torch.float32))
    adapters = low_ranks(*given[3:5])
    given[3:5] = torch.zeros_like(given[3]), torch.zeros_like(given[4])
    y, gradients = run_adapted(*given, settings(activations={"save": "bf16"}), adapters)
    expected, of_reference = sums_in_high_precision(*given, adapters)
    for found, wanted in zip((y, *gradients), (expected, *of_reference), strict=True):
        assert found.shape == wanted.shape
        assert error(found, wanted) < 1e-5
    for gradient in gradients[2:]:
        assert [bool(part.any()) for part in gradient] == [
            count > 0 for count in ADAPTED[case][0]
        ] or case == "two choices"


@pytest.mark.parametrize("activations", [{}, {"recompute": "mlp"}, {"save": "bf16"}])
def test_adapters_beside_weights_in_fp8(activations):
    given = inputs((60, 7, 0, 130), 2)
    adapters = low_ranks(*given[3:5], factor=0.3)
    y, gradients = run_adapted(*given, settings(activations=activations), adapters)
    expected, of_reference = sums_in_high_precision(*given, adapters)
    low, high = FP8_ERROR
    for found, wanted in zip((y, *gradients), (expected, *of_reference), strict=True):
        assert low < error(found, wanted) < high


def test_one_of_two_weights_may_have_an_adapter():
    given = inputs((60, 7, 130), 2)
    both, plain = low_ranks(*given[3:5]), run(*given, settings())[0]
    for adapters in (both._replace(down=None), both._replace(gate_up=None)):
        zeros = both._replace(
            **{
                name: LowRank(part.a, 0 * part.b)
                for name, part in zip(both._fields, both, strict=True)
                if getattr(adapters, name) is None
            }
        )
        x, index, router_weights, *weights, _ = given
        y, expected = (
            expert_products(x, index, router_weights, ExpertWeights(*weights), settings(), chosen)
            for chosen in (adapters, zeros)
        )
        assert torch.equal(y, expected)
        assert not torch.equal(y, plain)


def test_computed_again_it_is_the_same():
    given = inputs((60, 7, 130), 2)
    kept = run(*given, settings())
    again = run(*given, settings(activations={"recompute": "mlp"}))
    assert all(map(torch.equal, (kept[0], *kept[1]), (again[0], *again[1])))
    x, index, router_weights, *weights, _ = given
    with torch.no_grad():
        assert torch.equal(expert_products(x, index, router_weights, ExpertWeights(*weights), settings()), kept[0])


def test_what_is_kept_is_x_and_gate_up():
    def kept(activations):
        held = {}

        def pack(tensor):
            held[tensor.data_ptr()] = tensor.nbytes
            return tensor

        x, index, router_weights, gate_up, down, _ = inputs((300, 200), 2)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = x.requires_grad_()
            expert_products(x, index, router_weights, ExpertWeights(gate_up, down), settings(activations=activations))
        return sum(held.values()) - held[x.data_ptr()]

    rows, features = 1000 + 2 * 127 - 102, 128
    maps = 16 * (1000 + 2 * 128)  # places, sources and factors of rows
    in_fp8 = rows * 2 * features
    assert in_fp8 <= kept({"save": "fp8"}) <= in_fp8 * (1 + 4 / 128) + maps
    assert 2 * in_fp8 <= kept({"save": "bf16"}) <= 2 * in_fp8 + maps
    assert kept({"recompute": "mlp"}) <= maps


def test_a_rank_without_tokens_has_gradients_of_zeros():
    x, index, router_weights, gate_up, down, _ = inputs((3, 4), 2)
    empty = x[:0], index[:0], router_weights[:0], gate_up, down, x[:0]
    y, gradients = run(*empty, settings())
    assert y.shape == (0, x.shape[1])
    for gradient, leaf in zip(gradients, (x[:0], router_weights[:0], gate_up, down), strict=True):
        assert gradient.shape == leaf.shape
        assert gradient.dtype is leaf.dtype
        assert not gradient.any()


def test_choices_of_other_ranks_add_nothing():
    x, index, router_weights, gate_up, down, dy = inputs((40, 30, 20), 2)
    elsewhere = torch.rand(index.shape) < 0.3
    marked = torch.where(elsewhere, len(gate_up), index)
    y, gradients = run(x, marked, router_weights, gate_up, down, dy, settings())
    expected, of_loop = with_casts(x, marked, router_weights, gate_up, down, settings(), dy)
    assert error(y, expected) < CHAIN[x.dtype]
    assert not gradients.router_weights[elsewhere].any()
    for found, wanted in zip(gradients, of_loop, strict=True):
        assert error(found, wanted) < CHAIN[x.dtype]


def test_gathered_weights_are_read_in_fp8():
    x, index, router_weights, gate_up, down, dy = inputs((60, 7, 130), 2)
    products = settings()
    expected = run(x, index, router_weights, gate_up, down, dy, products)
    weights = []
    for weight in (gate_up, down):
        spread = torch.nn.Parameter(placeholder(weight.shape, weight.dtype, weight.device))
        setattr(spread, UNSHARDED, quantize(weight.flatten(0, 1), granularity="128x128"))
        weights.append(spread)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, router_weights)]
    y = expert_products(leaves[0], index, leaves[1], ExpertWeights(*weights), products)
    found = torch.autograd.grad(y, [*leaves, *weights], dy)
    for one, other in zip((y, *found), (expected[0], *expected[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("frozen", [("gate_up",), ("down",), ("gate_up", "down")])
def test_frozen_weights_have_no_gradient(frozen):
    x, index, router_weights, gate_up, down, dy = inputs((60, 7, 130), 2)
    _, expected = run(x, index, router_weights, gate_up, down, dy, settings())
    leaves = {"x": x, "router_weights": router_weights, "gate_up": gate_up, "down": down}
    leaves = {name: tensor.clone().requires_grad_(name not in frozen) for name, tensor in leaves.items()}
    weights = ExpertWeights(leaves["gate_up"], leaves["down"])
    expert_products(leaves["x"], index, leaves["router_weights"], weights, settings()).backward(dy)
    for name, leaf in leaves.items():
        if name in frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, getattr(expected, name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels in tests/gpu")
def test_the_kernels_fit_together(monkeypatch):
    """The whole operation by the kernels a GPU runs, in Triton's interpreter, whose casts round in their own way."""
    gated = pytest.importorskip("ds_fp8.layers.linear.gated_activation_triton", reason="Triton is not installed")
    from ds_fp8.gemm import grouped_triton
    from ds_fp8.layers.experts import layout_triton
    from ds_fp8.layers.experts import products as module

    def permute_quantize(x, layout, format="e4m3", rowwise="1x128", columnwise=None, scale="pow2"):
        return layout_triton.permute_tiles(x, layout.source, layout.choices, format, rowwise, columnwise, scale)

    def activation_cast(gate_up, activation, recipe, keep, factors, product):
        uncast, cast, saved = gated.gated_forward(
            gate_up, activation, recipe.input, keep, row_factor=factors, product=product
        )
        return GatedCast(cast, saved, uncast)

    def activation_backward(dproduct, saved, activation, recipe, down, row_factor, wgrad, uncast):
        return GatedGradients(
            *gated.gated_backward_quantized(dproduct, saved, activation, recipe, down, row_factor, wgrad, uncast)
        )

    given, products = inputs((5, 0, 3), 2, hidden=128), settings(wgrad={"input": "128x128"})
    adapters = low_ranks(*given[3:5])
    expected = run(*given, products), run_adapted(*given, products, adapters)
    kernels = {
        "permute_quantize": permute_quantize,
        "grouped_matmul": lambda a, b, groups, backend, out_dtype: grouped_triton.multiply_tiles(
            a, b, groups, out_dtype
        ),
        "grouped_wgrad": lambda a, b, groups, backend, out_dtype: grouped_triton.multiply_along_rows(
            a, b, groups, out_dtype
        ),
        "unpermute": lambda rows, layout: layout_triton.sum_rows(rows, layout.place),
        "gated_activation_forward": activation_cast,
        "gated_activation_backward": activation_backward,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    found = run(*given, products), run_adapted(*given, products, adapters)
    for (y, gradients), (wanted, of_reference) in zip(found, expected, strict=True):
        for one, other in zip((y, *gradients), (wanted, *of_reference), strict=True):
            assert error(one, other) < INTERPRETED


def test_infinity_is_seen():
    x, index, router_weights, gate_up, down, dy = inputs((60, 7, 130))
    x[3, 5] = torch.inf
    y, gradients = run(x, index, router_weights, gate_up, down, dy, settings())
    assert y[3].isnan().any()
    assert y.isfinite().all(1).sum() == len(y) - 1
    assert gradients.gate_up[index[3, 0]].isnan().any()


def test_casts_are_observed():
    monitored = recipe_from_config(FP8Config(linear={"backend": "reference"}, monitor={"every": 1}))
    run(*inputs((60, 7, 130)), ExpertProducts("silu", monitored.at("gate_up"), monitored.at("down")))
    measured = monitored.monitor.end_step()
    for tensor_class in ("input", "weight", "grad_output"):
        assert set(measured[tensor_class]) == {"gate_up", "down"}
