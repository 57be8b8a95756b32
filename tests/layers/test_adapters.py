"""Plain LoRA in fused layers: PEFT's forward is the oracle."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ds_fp8.casts import QuantizedTensor, apply_factors, quantize
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.linear.adapters import Adapters
from ds_fp8.layers.linear.recipe import LinearRecipe
from tests.layers.hugging_face import causal_lm, fp8, tokens
from tests.numerics import error

SAME = 5e-5  # Relative, in FP32 and with products of what is not cast at all: sums in another order
MORE = 0.03  # What a gradient's error against BF16's may have above 1.5 times that of unfused layers in FP8


class Uncast(QuantizedTensor):
    def __post_init__(self):
        pass

    def dequantize(self, dtype=torch.float32):
        return self.data.to(dtype)


def uncast(x):
    return None if x is None else Uncast(x.detach(), torch.ones(()), "tensor", "fp32")


class Exact(LinearRecipe):
    """Products in FP32 of operands as they are: what is left is which products there are."""

    def multiply(self, a, b, out_dtype):
        return (a.data.float() @ b.data.float().t()).to(out_dtype)

    def transposed(self, q):
        return uncast(q.data.t())

    def quantize_weight(self, weight, column_factor=None):
        return uncast(weight)

    def quantize_input(self, x, row_factor=None, column_factor=None):
        return uncast(apply_factors(x, row_factor, column_factor))

    def quantize_gradient(self, dy, rowwise, columnwise, column_factor=None):
        return uncast(dy if rowwise else None), uncast(dy.t() if columnwise else None)

    def quantize_input_columnwise(self, x, row_factor=None, column_factor=None):
        return uncast(apply_factors(x, row_factor, column_factor).t())

    def quantize_input_both(self, x, column_factor=None):
        return uncast(x), uncast(x.t())

    def saved_input(self, data, scale):
        return uncast(data)

    def quantize_gate_up(self, gate_up):
        return uncast(gate_up)

    def saved_gate_up(self, data, scale):
        return uncast(data)


def without_casts(config, monitor=None, casts=None):
    return Exact(**vars(recipe_from_config(config, monitor, casts)))


ALL = {"target_modules": "all-linear"}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
MLP = {"target_modules": ["up_proj", "down_proj"]}
CASES = {
    "all linears": ("llama", ALL, {}),
    "all linears of a preset with outlier channels": ("llama", ALL, {"preset": "precise"}),
    "scales by row": ("qwen2", ALL, {"preset": "rowwise"}),
    "norms of heads": ("qwen3", ALL, {}),
    "biases": ("qwen2", ALL | {"r": 3, "use_rslora": True}, {"activations": {"save": "bf16"}}),
    "attention": ("llama", ATTENTION, {}),
    "MLP, recomputed": ("llama", MLP | {"r": 64}, {"activations": {"recompute": "mlp"}}),
    "one layer": ("llama", {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1]}, {}),
}


def adapted(name="llama", dtype=torch.bfloat16, num_hidden_layers=2, **options):
    model = causal_lm(name, num_hidden_layers=num_hidden_layers)
    torch.manual_seed(1)
    config = LoraConfig(**({"r": 8, "lora_alpha": 12, "init_lora_weights": False} | ALL | options))
    return get_peft_model(model, config).to(dtype)


def results(model, seed=0):
    """Loss and gradients of the trained parameters by name."""
    model.zero_grad()
    torch.manual_seed(seed)
    ids = tokens()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach().float(), **found}


def assert_close(fused, unfused, exact):
    assert fused.keys() == unfused.keys() == exact.keys()
    for name, expected in exact.items():
        assert error(fused[name], expected) < 1.5 * error(unfused[name], expected) + MORE, name


@pytest.mark.parametrize(("name", "options", "section"), CASES.values(), ids=CASES)
def test_fused_layers_compute_what_peft_does(name, options, section):
    exact = adapted(name, **options)
    unfused, fused = copy.deepcopy(exact), copy.deepcopy(exact)
    fp8(unfused, fuse="off", **section)
    fusion = fp8(fused, **section).fusion
    assert len(fusion.layers) == 2
    assert not fusion.left
    assert list(fused.state_dict()) == list(exact.state_dict())
    assert_close(results(fused), results(unfused), results(exact))


@pytest.mark.parametrize(("name", "options", "section"), CASES.values(), ids=CASES)
def test_without_casts_fused_layers_compute_exactly_what_peft_does(name, options, section, monkeypatch):
    exact = adapted(name, torch.float32, **options)
    fused = copy.deepcopy(exact)
    monkeypatch.setattr("ds_fp8.engine.plans.recipe_from_config", without_casts)
    assert len(fp8(fused, **section | {"preset": "hybrid_fast"}).fusion.layers) == 2
    found = results(fused)
    for key, expected in results(exact).items():
        assert error(found[key], expected) < SAME, key


def test_an_mlp_alone_is_fused_below_an_attention_with_dora_which_is_named():
    exact = adapted(**ATTENTION, use_dora=True)
    exact.add_adapter("default_2", LoraConfig(r=4, **MLP, init_lora_weights=False))
    exact.base_model.set_adapter(["default", "default_2"])
    exact = exact.bfloat16()
    unfused, fused = copy.deepcopy(exact), copy.deepcopy(exact)
    fp8(unfused, fuse="off")
    fusion = fp8(fused).fusion
    assert not fusion.layers
    assert len(fusion.mlps) == 2
    assert all("beyond plain LoRA (DoraLinearVariant)" in reason for reason in fusion.left.values())
    assert_close(results(fused), results(unfused), results(exact))


def test_switched_adapters_are_those_that_peft_runs():
    exact = adapted()
    exact.add_adapter("other", LoraConfig(r=4, lora_alpha=32, **MLP, init_lora_weights=False))
    exact = exact.bfloat16()
    unfused, fused = copy.deepcopy(exact), copy.deepcopy(exact)
    fp8(unfused, fuse="off")
    assert len(fp8(fused).fusion.layers) == 2
    losses = set()
    for names in ("other", "default", ["default", "other"]):
        for model in (exact, unfused, fused):
            model.base_model.set_adapter(names)
        with warnings.catch_warnings(action="error"):  # of layers that call their modules
            found = results(fused)
        assert_close(found, results(unfused), results(exact))
        losses.add(found["loss"].item())
    assert len(losses) == 3
    with warnings.catch_warnings(action="error"), fused.disable_adapter(), exact.disable_adapter(), torch.no_grad():
        ids = tokens()
        base, expected = (model(input_ids=ids, labels=ids).loss for model in (fused, exact))
        assert base.item() not in losses
        assert error(base, expected) < MORE


def test_what_is_no_plain_lora_any_more_is_called():
    fused, exact = adapted(), adapted()
    fp8(fused)
    for model in (fused, exact):
        model.merge_adapter()
    with pytest.warns(UserWarning, match="has merged adapters"), torch.no_grad():
        fused(input_ids=tokens())
    for model in (fused, exact):
        model.unmerge_adapter()
        model.add_adapter("dora", LoraConfig(r=4, use_dora=True, init_lora_weights=False, **ATTENTION))
        model.set_adapter("dora")
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    fused.load_state_dict(exact.state_dict())
    found = results(fused)
    assert any("magnitude" in name for name in found)
    unfused = copy.deepcopy(exact)
    fp8(unfused, fuse="off")
    assert_close(found, results(unfused), results(exact))


def test_dropout_masks_are_drawn_again_in_recomputation_and_are_each_adapters_own():
    model = adapted(lora_dropout=0.3)
    assert len(fp8(model).fusion.layers) == 2
    kept = results(model)
    assert results(model, seed=1)["loss"] != kept["loss"]
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        again = results(model)
        assert all(torch.equal(again[name], value) for name, value in kept.items())
    model.gradient_checkpointing_disable()
    model.eval()
    without = adapted().eval()
    fp8(without)
    assert torch.equal(results(model)["loss"], results(without)["loss"])


def like_a_trained_one(model):
    """Give weights heavy tails and rows of unlike size, and every norm a few channels far above the others."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            channels = torch.randint(len(parameter), (len(parameter) // 64,), generator=generator)
            parameter.data[channels] *= 8
        elif "lora" not in name and "embed" not in name:
            tails = torch.randn(5, *parameter.shape, generator=generator).square().mean(0).rsqrt()
            rows = torch.randn(len(parameter), 1, generator=generator).mul(0.25).exp()
            parameter.data *= tails * rows


def errors_by_layer(found, exact):
    """Relative errors of the gradients of each layer's adapters, taken together."""
    layers = {}
    for name, gradient in exact.items():
        if name != "loss":
            mine, theirs = layers.setdefault(name.partition(".layers.")[2].partition(".")[0], ([], []))
            mine.append(found[name].flatten())
            theirs.append(gradient.flatten())
    return [error(torch.cat(mine), torch.cat(theirs)) for mine, theirs in layers.values()]


@pytest.mark.parametrize(("preset", "bound"), [("precise", 0.13), ("hybrid_fast", 0.22)])
def test_gradients_of_adapters_beside_fp32(preset, bound):
    """BF16's are 1.6 to 2.1% off, those of products in FP8 6 to 10% and 10 to 18%: of the layers, not of A and B."""
    model = adapted("llama", num_hidden_layers=4)
    like_a_trained_one(model)
    exact = results(copy.deepcopy(model).float())
    in_bf16 = errors_by_layer(results(model), exact)
    assert len(fp8(model, preset=preset).fusion.layers) == 4
    found = errors_by_layer(results(model), exact)
    assert all(0.01 < plain < 0.03 for plain in in_bf16)
    assert all(2 * plain < ours < bound for ours, plain in zip(found, in_bf16, strict=True))


class Linear(nn.Module):
    """As much of PEFT's LoRA as `Adapters` reads."""

    disable_adapters = False
    active_adapters = ("x",)

    def __init__(self, rank, features, outputs, scale, dropout):
        super().__init__()
        self.out_features, self.scaling = outputs, {"x": scale}
        self.lora_A = nn.ModuleDict({"x": nn.Linear(features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"x": nn.Linear(rank, outputs, bias=False)})
        self.lora_dropout = nn.ModuleDict({"x": nn.Dropout(dropout)})


Linear.__module__ = "peft.tuners.lora.layer"


def products(dropouts, normed, dtype=torch.float32):
    """(adapters, x, rstd, norm, dy) of three linears that share x."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linears = [Linear(4 + i, 96, 64 + 32 * i, 0.5 + i, p).to(device, dtype) for i, p in enumerate(dropouts)]
    x, dy, scale = torch.randn(512, 96), torch.randn(512, 288), torch.linspace(0.1, 3, 96)
    x, dy = (value.to(device, dtype) for value in (x * scale, dy))
    norm = (torch.rand(96) + 0.5).to(device, dtype) if normed else None
    return Adapters(linears), x, torch.rand(512, device=device) + 0.5 if normed else None, norm, dy


def of_autograd(adapters, x, rstd, norm, dy, masks):
    """(y, dn, gradients of the parameters) in FP32 by torch."""
    n = (x.float() if norm is None else x.float() * rstd[:, None] * norm.float()).requires_grad_()
    parameters = [parameter.detach().float().requires_grad_() for parameter in adapters.parameters]
    y = []
    for adapter, a, b, mask in zip(adapters, parameters[::2], parameters[1::2], masks, strict=True):
        dropped = n if mask is None else n * mask / (1 - adapter.dropout)
        y.append(adapter.scale * dropped @ a.t() @ b.t())
    y = torch.cat(y, 1)
    return y, *torch.autograd.grad(y, [n, *parameters], dy.float())


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dropouts", [(0.0, 0.0, 0.0), (0.25, 0.0, 0.5)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_products_and_gradients_beside_autograd(dropouts, normed, dtype, bound):
    adapters, x, rstd, norm, dy = products(dropouts, normed, dtype)
    with torch.no_grad():
        kept = adapters.project(x, rstd, norm)
        y = adapters.add(torch.zeros_like(dy), kept)
        dn = torch.zeros_like(x)
        gradients = adapters.backward(dy, dn, kept, x, rstd, norm)
    masks = kept[1:]
    for p, mask in zip(dropouts, masks, strict=True):
        assert (mask is None) == (p == 0)
        if p:
            assert mask.float().mean().item() == pytest.approx(1 - p, abs=0.01)
    if dropouts[0]:
        assert not torch.equal(masks[0], masks[2])
    for found, expected in zip((y, dn, *gradients), of_autograd(adapters, x, rstd, norm, dy, masks), strict=True):
        assert found.dtype is dtype
        assert error(found.float(), expected) < bound


def test_gradients_of_a_from_codes_would_be_much_further_from_fp32():
    adapters, x, _, _, dy = products((0.0,) * 3, False, torch.bfloat16)
    expected = of_autograd(adapters, x, None, None, dy, [None] * 3)[2::2]
    errors = []
    for read in (x, quantize(x).dequantize().bfloat16()):
        with torch.no_grad():
            du, _ = adapters.output_backward(dy, adapters.project(x))
            found = adapters.a_backward(du, read, (None,) * 4)
        errors.append(max(error(da.float(), exact) for da, exact in zip(found, expected, strict=True)))
    assert errors[0] < 0.005
    assert 0.015 < errors[1] < 0.04
