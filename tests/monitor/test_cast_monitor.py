"""Statistics of casts: what is counted, and on which steps."""

import functools
import math

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize, quantize_with_scale
from ds_fp8.config.fp8 import MonitorConfig, parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.convert import layer_of, restore
from ds_fp8.layers.experts.routing import mixtures
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.monitor import statistics
from ds_fp8.monitor.cast_monitor import CastFigures, CastMonitor, Thresholds
from ds_fp8.monitor.routing import RoutingFigures, RoutingMonitor
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.linears import fp8_linear
from tests.layers.moe import EXPERTS, mixture

DECIBELS = 1e-3  # Of ratios whose squares are summed in FP64 here and there


def observed(monitor: CastMonitor, x: torch.Tensor, **words: str) -> None:
    monitor.observe("input", x, quantize(x, **words))


def test_numbers_beyond_the_scale_count_as_saturated():
    x, scale = torch.tensor([[447.0, 448.0, 500.0, -1e9, 0.0]]), torch.tensor(1.0)
    monitor = CastMonitor(every=1)
    monitor.observe("weight", x, QuantizedTensor(quantize_with_scale(x, scale, "e4m3", "tensor"), scale, "tensor"))
    monitor.end_step()
    assert monitor.last == pytest.approx({"saturated": 2 / 5, "underflow": 0})


@pytest.mark.parametrize(
    ("every", "measured"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (4, [0, 4]), (100, [0]), (0, [])]
)
def test_one_step_of_every_is_measured(every, measured):
    """Step n flushes n + 1 of 10 elements, so that `last` tells which step it is of."""
    monitor, seen = CastMonitor(every), []
    for step in range(6):
        assert monitor.active == (step in measured)
        x = torch.ones(1, 10)
        x[0, 1 : step + 2] = 1e-30
        observed(monitor, x)
        monitor.end_step()
        if monitor.last is not None and (share := round(monitor.last["underflow"] * 10) - 1) not in seen:
            seen.append(share)
    assert seen == measured


def test_a_linear_reports_its_casts():
    linear = fp8_linear(4, 4, monitor={"every": 1})
    x = torch.tensor([[1.0, 1e-30, 1e-30, 1e-30]], dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.fill_(1)
    y = linear(x)
    y.sum().backward()
    linear.recipe.monitor.end_step()
    assert linear.recipe.monitor.last["saturated"] == 0
    # 3 of the 4 numbers of the input; none of the 16 of the weight.
    assert linear.recipe.monitor.last["underflow"] == pytest.approx(3 / (4 + 16))


# ---------------------------------------------------------------- figures of a product


def figures_of(x: torch.Tensor, quantized: QuantizedTensor | None = None, elements: int | None = None, **words: str):
    monitor = CastMonitor(every=1)
    monitor.observe("input", x, quantized or quantize(x, **words), "a", elements)
    return monitor.end_step()["input"]["a"]


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (257, 129), (128, 128)])
def test_figures_are_those_of_the_definition(granularity, scale, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.01
    cast = quantize(x, granularity=granularity, scale=scale)
    figures = figures_of(x, cast)
    error = (x - cast.dequantize()).double()
    noise = error.square().sum().item()
    snr = 10 * math.log10(x.double().square().sum().item() / noise) if noise else None
    assert figures.amax == x.abs().max().item()
    assert figures.snr_db == (None if snr is None else pytest.approx(snr, abs=DECIBELS))
    assert (figures.scale_min, figures.scale_max) == (cast.scale.min().item(), cast.scale.max().item())
    assert figures.flushed == pytest.approx(((x != 0) & (cast.dequantize() == 0)).double().mean().item())
    assert figures.saturated == 0


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_a_sample_stands_for_a_tensor_that_is_larger(granularity, monkeypatch):
    x = torch.randn(999, 200, generator=torch.Generator().manual_seed(0))
    x[::3, ::2] = 1e-12
    x[700, 7] = 300.0
    cast = quantize(x, granularity=granularity)
    whole = figures_of(x, cast)
    monkeypatch.setattr(statistics, "SAMPLE", 50_000)
    monkeypatch.setattr(statistics, "CHUNK", 30_000)
    sample = figures_of(x, cast)
    assert sample.amax == whole.amax == 300.0, "the amax is of the whole tensor"
    assert (sample.scale_min, sample.scale_max) == (whole.scale_min, whole.scale_max)
    assert sample.flushed == pytest.approx(whole.flushed, abs=0.02)


def test_rows_are_asked_for_where_the_matrix_is_nowhere():
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    assert figures_of(lambda rows: x[rows], quantize(x)) == figures_of(x)


def test_groups_of_zeros_say_nothing_about_scales():
    """Their scale is 1 by definition."""
    x = torch.zeros(3, 256)
    x[1, 130] = 2.0**-20
    figures = figures_of(x)
    assert figures.scale_min == figures.scale_max == 2.0**-28


def test_a_tensor_of_zeros_has_no_ratio_and_no_scale():
    figures = figures_of(torch.zeros(4, 8))
    assert (figures.amax, figures.snr_db, figures.scale_min, figures.scale_max) == (0, None, None, None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_known(bad):
    x = torch.ones(2, 300)
    x[1, 5] = bad
    figures = figures_of(x)
    assert (figures.amax, figures.snr_db) == (None, None)
    assert figures.scale_min == figures.scale_max == 2.0**-8, "of the groups that are finite"


def test_zeros_that_are_no_part_of_the_tensor_do_not_count():
    x = torch.zeros(2, 4)
    x[0] = torch.tensor([1.0, 1e-30, 0.0, 0.0])
    assert figures_of(x).flushed == 1 / 8
    assert figures_of(x, elements=2).flushed == 1 / 2


def test_casts_of_a_step_add_up_by_site_and_class():
    monitor = CastMonitor(every=1)
    for site, tensor_class, value in (
        ("a", "input", 1.0),
        ("a", "input", 4.0),
        ("b", "input", 2.0),
        ("a", "weight", 8),
    ):
        monitor.observe(tensor_class, x := torch.tensor([[value, 1e-30]]), quantize(x), site)
    measurement = monitor.end_step()
    assert {site: figures.amax for site, figures in measurement["input"].items()} == {"a": 4.0, "b": 2.0}
    assert {site: figures.amax for site, figures in measurement["weight"].items()} == {"a": 8.0}
    assert measurement["input"]["a"].flushed == 0.5
    assert measurement["grad_output"] == {}


def test_a_model_that_is_evaluated_is_not_measured():
    model, monitor = torch.nn.Linear(2, 2), CastMonitor(every=1)
    monitor.attach(model, ["a"], torch.device("cpu"), lambda sums, peaks: None)
    x = torch.tensor([[1.0, 1e-30]])
    model.eval()
    monitor.observe("input", x, quantize(x), "a")
    model.train()
    assert monitor.end_step()["input"] == {}
    monitor.observe("input", x, quantize(x), "a")
    assert list(monitor.end_step()["input"]) == ["a"]


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_every_product_of_a_decoder_has_a_site_of_its_own(fuse):
    model = causal_lm("qwen2")
    monitor = convert(model, parse_fp8({"fp8": {"fuse": fuse, "monitor": {"every": 1}}})).recipe.monitor
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    measurement = monitor.end_step()
    fused = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    sites = {f"model.layers.{layer}.{part}" for layer in range(2) for part in (fused if fuse == "auto" else parts)}
    for tensor_class in ("input", "weight", "grad_output"):
        assert set(measurement[tensor_class]) == sites


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_restored_layer_is_what_it_was(fuse):
    model, stock = causal_lm("qwen2"), causal_lm("qwen2")
    convert(model, parse_fp8({"fp8": {"fuse": fuse, "monitor": {"every": 0}}}))
    sites = [module.recipe.name for module in model.modules() if isinstance(module, FP8Linear)]
    for name in dict.fromkeys(layer_of(model, site) for site in sites):
        assert restore(model.get_submodule(name))
    for (name, module), (_, original) in zip(model.named_modules(), stock.named_modules(), strict=True):
        assert type(module) is type(original), name
        assert module.__dict__.keys() <= original.__dict__.keys() | {"input_is_saved"}, name
    ids = tokens()
    assert torch.equal(model(input_ids=ids, labels=ids).loss, stock(input_ids=ids, labels=ids).loss)


# ---------------------------------------------------------------- thresholds


def watched(*measurements: dict, **config: float) -> list[list[tuple[str, str]]]:
    watch = Thresholds(MonitorConfig(**config).min_snr_db)
    return [[(found.name, found.tensor_class) for found in watch.check(m)] for m in measurements]


def figures(snr_db: float | None = 31.0, flushed: float = 0.0) -> CastFigures:
    return CastFigures(1.0, 0.0, flushed, snr_db, 1.0, 1.0)


GOOD, NOISY, FLUSHED = figures(), figures(snr_db=19.9), figures(flushed=0.6)


def test_a_layer_degrades_after_measurements_in_a_row_and_is_named_once():
    steps = [NOISY, NOISY, GOOD, NOISY, FLUSHED, NOISY, NOISY]
    found = watched(*({"input": {"a": figures, "b": GOOD}} for figures in steps))
    assert found == [[], [], [], [], [], [("a", "input")], []]


@pytest.mark.parametrize(
    ("figures", "config", "degraded"),
    [
        (GOOD, {}, False),
        (NOISY, {}, True),
        (NOISY, {"min_snr_db": 19}, False),
        (FLUSHED, {}, True),
        (figures(snr_db=None), {}, False),
    ],
)
def test_either_threshold_counts(figures, config, degraded):
    found = watched(*3 * [{"grad_weight": {"a": figures}}], **config)
    assert found == [[], [], [("a", "grad_weight")] * degraded]


def test_a_degradation_names_layer_class_and_figure():
    watch, noisy = Thresholds(20.0), {"grad_output": {"model.layers.3.mlp.down_proj": NOISY}}
    (found,) = [watch.check(noisy) for _ in range(3)][-1]
    assert str(found).startswith("model.layers.3.mlp.down_proj, output gradient: ")
    assert "19.9 dB" in str(found)
    assert "20" in str(found)


# ---------------------------------------------------------------- router statistics


def monitor_of(experts, every=1):
    """A RoutingMonitor, its CastMonitor, and a list that gets what is added up over the ranks."""
    casts, added = CastMonitor(every), []
    cpu = torch.device("cpu")
    return RoutingMonitor(casts, experts, cpu, lambda sums: added.append(sums.clone())), casts, added


def chosen(*experts):
    return None, (torch.zeros(1), torch.tensor(experts)[:, None], None), {}


def test_figures_are_those_of_the_shares():
    routing, *_ = monitor_of({"a": 4, "b": 2})
    routing.observe(0, *chosen(0, 0, 0, 1))
    routing.observe(0, *chosen(2, 2, 1, 2))
    routing.observe(1, *chosen(0, 1))
    measured = routing.take()
    shares = [3 / 8, 2 / 8, 3 / 8]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert measured.layers == {
        "a": RoutingFigures(pytest.approx(entropy), 3 / 8, 1),
        "b": RoutingFigures(pytest.approx(1), 0.5, 0),
    }
    assert measured.mean == RoutingFigures(pytest.approx((entropy + 1) / 2), 7 / 16, 0.5)
    assert measured.auxiliary_loss is None
    assert routing.last is measured
    assert routing.take() is None, "counts begin at zero again"
    assert routing.last is measured


def test_choices_that_no_expert_computes_do_not_count():
    """transformers gives tokens of other ranks, and masked ones, the number of experts."""
    routing, *_ = monitor_of({"a": 2, "b": 4})
    routing.observe(0, *chosen(0, 1, 2, 2, 2))
    routing.observe(1, *chosen(4, 4))
    assert routing.take().layers == {"a": RoutingFigures(pytest.approx(1), 0.5, 0)}


def test_only_measured_steps_in_training_count():
    routing, casts, _ = monitor_of({"a": 2}, every=2)
    model = torch.nn.Linear(1, 1)
    casts.attach(model, [], torch.device("cpu"), lambda sums, peaks: None)
    model.eval()
    routing.observe(0, *chosen(0))
    model.train()
    assert routing.take() is None
    casts.end_step()
    routing.observe(0, *chosen(0))
    assert routing.take() is None
    casts.end_step()
    routing.observe(0, *chosen(0))
    assert routing.take() is not None


@pytest.mark.parametrize("recompute", [None, False, True])
def test_every_choice_of_a_model_counts_once(recompute):
    model = mixture("qwen3_moe", torch.float32, output_router_logits=True)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    layers = mixtures(model)
    routing, _, added = monitor_of(dict.fromkeys(layers, EXPERTS))
    for number, module in enumerate(layers.values()):
        module.register_forward_pre_hook(functools.partial(routing.observe, number), with_kwargs=True)
    model.register_forward_hook(routing.observe_output)
    ids = tokens()
    losses = []
    for _ in range(2):
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        losses.append(output.aux_loss.item())
    measured = routing.take()
    assert added[0][:-2].sum() == 2 * len(layers) * 2 * ids.numel()
    assert measured.auxiliary_loss == pytest.approx(sum(losses) / 2)
