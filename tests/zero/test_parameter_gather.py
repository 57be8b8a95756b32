import deepspeed
import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED
from tests.zero import models

SPECS = {"infir2": ("e4m3", "128x128"), "tensorwise": ("e4m3", "tensor"), "rowwise": ("e4m3", "row")}
SECTIONS = {
    "infir2": {"preset": "infir2"},
    "tensorwise": {"preset": "tensorwise"},
    "rowwise": {"linear": {"weight": {"granularity": "row"}}},
}


def fp8_linears(engine):
    return {name: m for name, m in engine.module.named_modules() if isinstance(m, FP8Linear)}


def gather(engine, parameters):
    parameters = list(parameters)
    parameters[0].all_gather_coalesced(parameters).wait()


def gathered_against_whole(preset, steps):
    """Per weight, at the start and after `steps`: the gathered tensor equals a cast of the whole master tensor, bit for
    bit."""
    engine = models.build(models.config({**SECTIONS[preset], "monitor": {"every": 0}}))
    first = look_at_gathered(engine, preset)
    models.train(engine, steps)
    return {"start": first, "end": look_at_gathered(engine, preset)}


def look_at_gathered(engine, preset):
    weights = {name: m.weight for name, m in fp8_linears(engine).items()}
    expected = {name: quantize(models.full_master(w), *SPECS[preset]) for name, w in weights.items()}
    gather(engine, weights.values())
    result = {}
    for name, weight in weights.items():
        ours, whole = getattr(weight, UNSHARDED), expected[name]
        result[name] = models.same_cast(ours, whole)
        assert weight.isnan().all(), "the placeholder must be loud"
        assert weight.untyped_storage().nbytes() == 2
        weight.partition()
        assert getattr(weight, UNSHARDED) is None
    return result


@pytest.mark.parametrize(
    ("world", "preset"), [(1, "infir2"), (4, "infir2"), *((world, preset) for world in (2, 3) for preset in SPECS)]
)
def test_gathered_weight_is_the_cast_of_the_whole_master(ranks, world, preset):
    for results in ranks(world, gathered_against_whole, preset, 2):
        for result in results.values():
            assert len(result) == 6
            assert all(result.values()), results


EMULATED = {
    "layers.0.up": ("int8", "row", "fp32"),
    "layers.0.down": ("e2m1", "16x16", "e4m3"),
    "layers.1.up": ("e3m4", "32x32", "pow2"),
    "layers.1.down": ("log8", "tensor", "fp32"),
    "layers.2.up": ("int4", "128x128", "pow2"),
    "layers.2.down": ("e2m3", "32x32", "e4m3"),
}


def emulated_against_whole():
    """Per weight, after a step: whether what is gathered, shown and used is the cast of the whole master tensor."""
    words = ("format", "granularity", "scale")
    overrides = {name: {"weight": dict(zip(words, spec, strict=True))} for name, spec in EMULATED.items()}
    engine = models.build(models.config({"linear": {"overrides": overrides}, "monitor": {"every": 0}}))
    models.train(engine, 1)
    shown = {}
    engine.fp8.weights.observe(lambda weight, rows, cast, elements: shown.update({id(weight): cast}))
    result = {}
    for name, module in fp8_linears(engine).items():
        whole = quantize(models.full_master(module.weight), *EMULATED[name])
        gather(engine, [module.weight])
        ours = getattr(module.weight, UNSHARDED)
        assert (ours.spec, ours.data.dtype) == (whole.spec, torch.uint8)
        numbers = torch.equal(ours.dequantize(), whole.dequantize())
        result[name] = numbers and models.same_cast(ours, whole)
        assert shown[id(module.weight)].spec == whole.spec
        module.weight.partition()
    return result, engine.fp8.report["emulated"]


@pytest.mark.parametrize("world", [2, 3])
def test_emulated_weights_are_gathered_as_the_cast_of_the_whole_master(ranks, world):
    for result, emulated in ranks(world, emulated_against_whole):
        assert result == dict.fromkeys(EMULATED, True)
        assert "e2m1 16x16 e4m3" in emulated


def read_by_another_module():
    """A weight that a user wrote, and another module reads, as GatheredParameters shows it and as it is gathered."""
    engine = models.build(models.config({"monitor": {"every": 0}}))
    models.train(engine, 1)
    weight = engine.module.layers[0].up.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            weight.data.fill_(0.25)
    deepspeed.zero.register_external_parameter(engine.module.layers[1], weight)
    with deepspeed.zero.GatheredParameters([weight]):
        shown = weight.detach().clone()
    gather(engine, [weight])
    found = weight.detach().clone()
    weight.partition()
    return shown, found


def test_what_was_written_is_what_another_module_reads(ranks):
    for shown, found in ranks(2, read_by_another_module):
        assert (shown == 0.25).all()
        assert (found == 0.25).all()


def gathers_per_step(fp8):
    engine = models.build(models.config(fp8))
    models.train(engine, 2)
    engine.fp8.wire.take()
    models.train(engine, 1)
    sent = engine.fp8.wire.take()
    layers = sum(p.ds_numel for name, p in engine.module.named_parameters() if "layers" in name and p.ds_numel > 300)
    others = sum(p.ds_numel for name, p in engine.module.named_parameters() if "layers" not in name)
    return sent, layers, others


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_on_the_wire(ranks, world):
    """Layers are gathered twice a step (forward and backward), at one byte a parameter."""
    fp8, layers, others = ranks(world, gathers_per_step, {"monitor": {"every": 0}})[0]
    bf16, _, _ = ranks(world, gathers_per_step, {"enabled": False})[0]
    share = (world - 1) / world
    # Embedding and lm_head stay BF16; subtract them, and what the persistent vectors cost, from both.
    rest = bf16["all_gather_bytes"] - 2 * layers * 2 * share
    assert 0 < rest < 2 * 2 * others * share * 1.2
    assert fp8["all_gather_bytes"] - rest <= 0.53 * 2 * layers * 2 * share
    assert fp8["all_gather_bytes"] - rest >= 0.5 * 2 * layers * 2 * share
    assert fp8["grad_bytes"] <= 0.53 * bf16["grad_bytes"]
    assert bf16["grad_bytes"] == pytest.approx(2 * (layers + others) * share, rel=0.02)


def persistent_weights(threshold):
    engine = models.build(models.config({"monitor": {"every": 0}}, stage3_param_persistence_threshold=threshold))
    losses = models.train(engine, 3)
    return engine.fp8.report["fp8_linears"], engine.fp8.report["fp8_gathered_parameters"], engine.fp8.report, losses


def test_persistent_weights_are_cast_when_used_and_reported(ranks):
    for (linears, gathered, report, losses), (_, all_gathered, _, gathered_losses) in zip(
        ranks(2, persistent_weights, 100000), ranks(2, persistent_weights, 300), strict=True
    ):
        assert all_gathered > 200000
        assert (linears, gathered) == (6, 0)
        assert report["param_gather"] == "bf16"
        assert any("persistence_threshold" in note for note in report["notes"])
        assert losses == pytest.approx(gathered_losses, rel=0.02)


def without_copy_engines():
    return models.build(models.config({"monitor": {"every": 0}})).fp8.report["param_transport"]


def test_why_there_are_no_copy_engines_is_reported(ranks):
    assert ranks(2, without_copy_engines) == ["by collectives: there is no CUDA device"] * 2
