"""The benchmark of NVFP4's gradients: its references, what it averages, and that it tells ingredients apart."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fp8.config.errors import UserError

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import nvfp4_gradients as bench
from byte_training import batch, build_model, read_sources
from exact_products import gradients, linears, operands, with_exact_products


@pytest.fixture(scope="module")
def options():
    return bench.parse_arguments(["--quick"])


@pytest.fixture(scope="module")
def model(options):
    return build_model(options.scale, 0).float()


@pytest.fixture(scope="module")
def tokens(options):
    return batch(read_sources(options.scale.text), options.scale, 0)


class _Quantized(nn.Module):
    """The product of quantized operands, whose gradients autograd finds, straight through both casts."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.recipe = layer.weight, layer.recipe

    def forward(self, x):
        rows, w = x.flatten(0, -2), self.weight
        x_cast, w_cast = self.recipe.cast_input(rows).dequantize(), self.recipe.cast_weight(w).dequantize()
        through_x, through_w = x_cast + rows - rows.detach(), w_cast + w - w.detach()
        return (through_x @ through_w.t()).view(*x.shape[:-1], -1)


def test_the_forward_reference_is_the_derivative_of_the_quantized_forward(model, tokens, options):
    recipe = bench.converted(model, "no-2d-scales", options)
    exact = gradients(with_exact_products(recipe, False, False), tokens)
    weights = [layer.weight for layer in linears(recipe).values()]
    for name, layer in linears(recipe).items():
        if hasattr(layer, "recipe"):
            recipe.set_submodule(name, _Quantized(layer))
    found = torch.autograd.grad(recipe(input_ids=tokens, labels=tokens).loss, weights)
    assert bench.relative(torch.cat([gradient.flatten() for gradient in found]), exact) < 1e-5


@pytest.mark.parametrize("variant", [bench.RECIPE, "no-2d-scales", "no-hadamard"])
def test_draws_scatter_around_the_unrounded_reference(variant, model, tokens, options):
    own = bench.converted(model, variant, options)
    unrounded = gradients(with_exact_products(own, True, True), tokens)
    forward = gradients(with_exact_products(own, False, False), tokens)
    torch.manual_seed(0)
    errors = bench.errors_of_means(
        (gradients(own, tokens) for _ in range(16)), lambda index: {"unrounded": unrounded, "forward": forward}
    )
    # Of independent draws without a bias a quarter; another reference is not what they scatter around.
    assert errors["unrounded"][-1] < 0.4 * errors["unrounded"][0]
    assert errors["forward"][-1] > 0.6 * errors["forward"][0]


def test_operands_multiply_to_the_gradients(model, tokens):
    products = [(dy.t() @ x).flatten() for x, dy in operands(model, tokens).values()]
    assert bench.relative(torch.cat(products), gradients(model, tokens)) < 1e-5


def test_outlier_tokens_drown_their_neighbours_without_rotation(model, tokens, options):
    found = operands(model, tokens)
    kept = {
        variant: bench.wgrad_of_outliers(bench.converted(model, variant, options), found, [7], 0)["kept"]
        for variant in (bench.RECIPE, "no-hadamard")
    }
    # Of 64 tokens the first is 128 times as large: the other 15 of its group, of 63 that are left, are rounded to 0.
    assert kept["no-hadamard"]["x 2^7"] == pytest.approx(48 / 63, abs=0.2)
    assert kept[bench.RECIPE]["x 2^7"] == pytest.approx(1, abs=0.15)
    assert all(row["none"] == pytest.approx(1, abs=0.1) for row in kept.values())


def test_means_and_crossings():
    found = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([4.0, 3.0])]
    errors = bench.errors_of_means(found, lambda index: {"a": torch.tensor([1.0, 0.0]) * (index + 1)})
    assert errors == {"a": pytest.approx([1.0, 0.5, 2**0.5 / 3])}
    assert bench.crossing([0.5, 0.3, 0.1], [0.4]) == 2
    assert bench.crossing([0.5, 0.3, 0.1], [0.4, 0.2, 0.15]) == 3
    assert bench.crossing([0.5, 0.3], [0.1]) is None
    assert bench.root_mean_square([3.0, 4.0]) == pytest.approx(12.5**0.5)


def test_figures_tell_what_is_left_out(tmp_path, capsys):
    file = tmp_path / "gradients.json"
    assert bench.main(["--quick", "--draws", "2", "--batches", "2", "--outliers", "4", "--json", str(file)]) == 0
    (seed,) = json.loads(file.read_text())["seeds"]
    variants = seed["variants"]
    assert list(variants) == bench.VARIANTS
    for variant, row in variants.items():
        assert (row["inconsistency"]["weight"] > 0.05) == (variant == "no-2d-scales")
        assert (row["inconsistency"]["gradients"] > 0.01) == (variant == "no-2d-scales")
        assert list(row["outliers"]) == list(row["kept"]) == ["none", "x 2^4", "dy 2^4"]
        assert len(row["means"]["exact"]) == (1 if variant == bench.NEAREST else 2)
    recipe, nearest = variants[bench.RECIPE], variants[bench.NEAREST]
    assert nearest["means"]["exact"] == pytest.approx([nearest["one_draw"]["exact"]])
    assert recipe["one_draw"]["unrounded"] > nearest["one_draw"]["unrounded"]  # one draw: noise for bias
    assert variants["no-bf16-layers"]["one_draw"]["exact"] > recipe["one_draw"]["exact"]
    assert len(recipe["batches"]["forward"]) == len(nearest["batches"]["forward"]) == 2
    printed = capsys.readouterr().out
    assert "errors of the mean over batches" in printed
    assert "below nearest rounding's from" in printed


def test_some_layers_must_be_quantized():
    with pytest.raises(UserError) as caught:
        bench.parse_arguments(["--quick", "--kept", "2"])
    assert caught.value.key == "--kept"
