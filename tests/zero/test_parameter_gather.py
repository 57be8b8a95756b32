"""What is gathered for modules: casts of whole weights, and of what everybody else reads."""

from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fp8.layers.linear.weights import UNSHARDED, fprop_weight
from ds_fp8.zero import collectives
from ds_fp8.zero.deepspeed.parameters import PersistentGather, master_shard
from tests.ranks import case, on_ranks
from tests.zero import models
from tests.zero.models import REUSED, fp8_linears, gather

SPECS = {"infir2": ("e4m3", "128x128"), "tensorwise": ("e4m3", "tensor"), "rowwise": ("e4m3", "row")}
EMULATED = {
    "layers.0.up": ("int8", "row", "fp32"),
    "layers.0.down": ("e2m1", "16x16", "e4m3"),
    "layers.1.up": ("int4", "32x32", "pow2"),
    "layers.1.down": ("log8", "tensor", "fp32"),
}
WORDS = ("format", "granularity", "scale")
OVERRIDES = {name: {"weight": dict(zip(WORDS, spec, strict=True))} for name, spec in EMULATED.items()}
SECTIONS = {
    "infir2": {"preset": "infir2"},
    "tensorwise": {"preset": "tensorwise"},
    "rowwise": {"linear": {"weight": {"granularity": "row"}}},
}


@on_ranks(2)
def test_emulated_weights_are_shown_and_reported():
    """(Gathered as the casts of whole masters: test_state_machine.py.)"""
    engine, shown = models.engine({"linear": {"overrides": OVERRIDES}}), {}
    engine.fp8.weights.observe(lambda weight, rows, cast, elements: shown.update({id(weight): cast}))
    for name, cast in zip(EMULATED, models.unsharded(m.weight for m in fp8_linears(engine).values()), strict=True):
        spec = shown[id(engine.module.get_submodule(name).weight)].spec
        assert (spec.format, spec.granularity, spec.scale) == EMULATED[name]
        assert (cast.spec, cast.data.dtype) == (spec, torch.uint8)
    assert "e2m1 16x16 e4m3" in engine.fp8.report["emulated"]


@on_ranks(2)
def test_what_was_written_is_what_another_module_reads():
    """As GatheredParameters shows it, and as it is gathered."""
    engine = models.engine({})
    models.train(engine, 1)
    weight = engine.module.layers[0].up.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.fill_(0.25)
    deepspeed.zero.register_external_parameter(engine.module.layers[1], weight)
    assert (models.bf16(weight) == 0.25).all()
    gather([weight])
    assert (weight == 0.25).all()
    weight.partition()


def gathers_of_a_step(fp8):
    engine = models.engine(fp8)
    models.train(engine, 2)
    engine.fp8.wire.take()
    models.train(engine, 1, start=2)
    sent, named = engine.fp8.wire.take(), list(engine.module.named_parameters())
    layers = sum(p.ds_numel for name, p in named if "layers" in name and p.ds_numel > 300)
    engine.destroy()
    return sent, layers, sum(p.ds_numel for name, p in named if "layers" not in name)


@on_ranks(2, 3)
def test_bytes_on_the_wire():
    """Layers are gathered twice a step (forward and backward), at one byte a parameter."""
    (fp8, layers, others), (bf16, *_) = gathers_of_a_step({}), gathers_of_a_step(None)
    share = 1 - 1 / dist.get_world_size()
    # Embedding and lm_head stay BF16; subtract them, and what the persistent vectors cost, from both.
    rest = bf16["all_gather_bytes"] - 2 * layers * 2 * share
    assert 0 < rest < 2 * 2 * others * share * 1.2
    assert fp8["all_gather_bytes"] - rest <= 0.53 * 2 * layers * 2 * share
    assert fp8["all_gather_bytes"] - rest >= 0.5 * 2 * layers * 2 * share
    assert fp8["grad_bytes"] <= 0.53 * bf16["grad_bytes"]
    assert bf16["grad_bytes"] == pytest.approx(2 * (layers + others) * share, rel=0.02)


# ---------------------------------------------------------------- one rank: nothing is copied


ALIGNED, RAGGED = (256, 512), (131, 301)
COPIED = mock.patch.object(collectives, "ALIGNMENT", 1 << 62)  # Let no weight lie where it can be used


def trained_on_one_rank(preset, sizes, copied, accumulate):
    section, changes = SECTIONS.get(preset, {"preset": preset}), {"gradient_accumulation_steps": accumulate}
    engine = models.engine(section, changes=changes, sizes=sizes, **REUSED)
    COPIED.start() if copied else None
    losses = models.train(engine, 3)
    COPIED.stop() if copied else None
    engine.eval()
    with torch.no_grad():
        losses.append(models.loss_of(engine, models.batch(99, 0)).item())
    masters = list(models.masters(engine).values())
    engine.destroy()
    return losses, masters


@on_ranks(1)
def test_training_has_the_bits_of_training_with_copies():
    for preset in (*SECTIONS, "precise"):
        for sizes, accumulate in ((ALIGNED, 2), (RAGGED, 1)):
            with case((preset, sizes)):
                (losses, masters), (expected, others) = (
                    trained_on_one_rank(preset, sizes, copied, accumulate) for copied in (False, True)
                )
                assert losses == expected
                assert all(map(torch.equal, masters, others))


def engine_and_weights(preset="infir2"):
    engine = models.engine(SECTIONS.get(preset, {"preset": preset}), sizes=ALIGNED)
    models.train(engine, 1)
    return engine, [m.weight for m in fp8_linears(engine).values()]


def sent_and_allocated():
    engine, weights = engine_and_weights()

    def refuse(*arguments, **options):
        raise AssertionError("one rank has nobody to gather from, or to send gradients to")

    with mock.patch.object(collectives, "all_gather", refuse), mock.patch.object(dist, "all_to_all_single", refuse):
        gather(weights)
        models.train(engine, 2)
    gather(weights)
    inside = engine.fp8.weights.data.untyped_storage().data_ptr()
    return [getattr(weight, UNSHARDED).data.untyped_storage().data_ptr() == inside for weight in weights]


def numbers(engine):
    return [fprop_weight([m.weight], m.recipe).dequantize() for m in fp8_linears(engine).values()]


def change_masters(engine):
    """Write the masters and let them be cast, as an optimizer step does."""
    for weight in engine.fp8.weights:
        master_shard(weight.parameter).mul_(1.37)
    engine.fp8.weights.step_wrote()
    engine.fp8.weights.requantize()


def gathered_over_a_step(left_out, preset):
    """A weight that is gathered while a step writes new shards; DeepSpeed keeps one that nobody used in time."""
    engine, weights = engine_and_weights(preset)
    gather(weights)
    before = numbers(engine)
    if left_out:
        engine.fp8.weights.leave_fp8(weights)
    change_masters(engine)
    stays = all(map(torch.equal, before, numbers(engine)))
    models.release(weights)
    if left_out:
        return stays, None
    gather(weights)
    return stays, any(map(torch.equal, before, numbers(engine)))


def fetched_over_a_step():
    """A gather that is begun before a step and waited for after it."""
    engine, weights = engine_and_weights()
    handle = weights[0].all_gather_coalesced(weights)
    change_masters(engine)
    handle.wait()
    found = numbers(engine)
    models.release(weights)
    gather(weights)
    return all(map(torch.equal, found, numbers(engine)))


@on_ranks(1)
def test_a_cast_changes_no_weight_that_is_gathered_and_nothing_is_sent_or_copied():
    assert sent_and_allocated() == [True] * 4
    for left_out, preset in ((False, "infir2"), (False, "precise"), (True, "infir2")):
        assert gathered_over_a_step(left_out, preset) == (True, None if left_out else False)
    assert fetched_over_a_step()
    engine, (weight, *_) = engine_and_weights()
    found = engine.fp8.weights.unsharded(weight)  # readers keep what they read
    before = found.dequantize()
    change_masters(engine)
    assert torch.equal(found.dequantize(), before)


# ---------------------------------------------------------------- parameters that stay whole


@on_ranks(2)
def test_persistent_weights_are_cast_when_used_and_reported():
    whole, sharded = (models.engine({}, stage3_param_persistence_threshold=numel) for numel in (100000, 300))
    report = whole.fp8.report
    assert sharded.fp8.report["fp8_gathered_parameters"] > 150000
    assert (report["fp8_linears"], report["fp8_gathered_parameters"], report["param_gather"]) == (4, 0, "bf16")
    assert any("persistence_threshold" in note for note in report["notes"])
    assert models.train(whole, 3) == pytest.approx(models.train(sharded, 3), rel=0.02)
    assert sharded.fp8.report["param_transport"] == "by collectives: there is no CUDA device"


def persistent(threshold, together):
    """Values of persistent parameters after three steps, launches of gathers and waits of the host in the last."""
    engine = models.engine({}, stage3_param_persistence_threshold=threshold)
    whole = {name: p for name, p in engine.module.named_parameters() if p.ds_persist}
    launched, waits = [], []
    accelerator, synchronize = get_accelerator(), get_accelerator().synchronize
    close, gather = engine.optimizer._post_step, dist.all_gather_into_tensor

    def close_as_on_a_gpu(*words):
        # DeepSpeed then waits for its gathers; of one rank, for a stream, which a CPU has not.
        if dist.get_world_size() > 1:
            accelerator.resolves_data_dependency = lambda: False
        counted = lambda *words, **more: launched.append(1) or gather(*words, **more)  # noqa: E731
        try:
            with mock.patch.object(dist, "all_gather_into_tensor", counted):
                close(*words)
        finally:
            vars(accelerator).pop("resolves_data_dependency", None)

    own = PersistentGather.__call__
    with mock.patch.object(PersistentGather, "__call__", own if together else lambda *_: False):
        losses = models.train(engine, 2)
        accelerator.synchronize = lambda *words: waits.append(1) or synchronize(*words)
        engine.optimizer._post_step = close_as_on_a_gpu
        try:
            losses += models.train(engine, 1, start=2)
        finally:
            del accelerator.synchronize, engine.optimizer._post_step
    values = {name: parameter.detach().clone() for name, parameter in whole.items()}
    rounded = {name: models.full_master(parameter).bfloat16() for name, parameter in whole.items()}
    engine.destroy()
    return losses, values, rounded, len(launched), len(waits)


@on_ranks(1, 2, 3)
def test_they_hold_the_new_masters_and_travel_in_one_launch():
    several = dist.get_world_size() > 1
    for threshold in (400, 100_000):
        losses, values, rounded, launched, waits = persistent(threshold, True)
        expected, stock, _, _, stock_waits = persistent(threshold, False)
        with case(threshold):
            assert losses == expected
            assert len(values) >= 2
            models.assert_same(values, rounded)
            models.assert_same(values, stock)
            assert (launched, waits, stock_waits) == (several, 0, several)


@on_ranks(1, 2)
def test_other_parameters_may_be_gathered_the_next_time():
    engine = models.engine({}, stage3_param_persistence_threshold=100_000)
    models.train(engine, 1)
    again, whole = PersistentGather(engine), [p for p in engine.module.parameters() if p.ds_persist]
    assert len(whole) > 2
    for places in (slice(None), slice(2), slice(1, None), slice(None)):
        some = whole[places]
        some[0].partition(some)
        assert again(some)
        assert all(torch.equal(p, models.full_master(p).bfloat16()) for p in whole), places
    assert not again(whole)  # all are there
