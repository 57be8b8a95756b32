"""Whole engines: FP8 against BF16, and DeepSpeed's own behaviours with FP8 in place."""

import deepspeed
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.initialize import initialize
from ds_fp8.engine.plans import convert
from ds_fp8.monitor.cast_monitor import CastMonitor
from tests.engine.graphs_in_python import Graphs, engine_of
from tests.layers.hugging_face import causal_lm, tokens
from tests.ranks import case, on_ranks
from tests.zero import models
from tests.zero.models import QUIET, REUSED


def make_leaves(model):
    deepspeed.utils.set_z3_leaf_modules(model, [models.Block])


def losses_and_weights(ds_config, recompute=False, leaf=False, stock=False, steps=4):
    prepare = make_leaves if leaf else None
    engine = models.build(ds_config, recompute=recompute, prepare=prepare, stock=stock)
    found = models.train(engine, steps), models.bf16_weights(engine)
    engine.destroy()
    return found


def assert_same(left, right):
    assert left[0] == right[0]
    models.assert_same(left[1], right[1])


@on_ranks(2)
def test_when_and_where_change_nothing():
    """Prefetch, overlap, buckets and sub-groups; what is recomputed; leaf modules. Collectives may stay in BF16."""
    base = losses_and_weights(models.config(QUIET), steps=3)
    for changes, recompute, leaf in [
        (REUSED, False, False),
        ({"stage3_prefetch_bucket_size": 50000}, False, False),
        ({"overlap_comm": True}, False, False),
        ({"contiguous_gradients": False, "reduce_bucket_size": 50000}, False, False),
        ({"sub_group_size": 50000}, False, False),
        ({}, True, False),
        ({}, False, True),
        ({}, True, True),
    ]:
        with case((changes, recompute, leaf)):
            found = losses_and_weights(models.config(QUIET, **changes), recompute, leaf, steps=3)
            assert_same(found, base)
    for part in ("param_gather", "grad_reduce"):
        with case(part):
            losses, _ = losses_and_weights(models.config({**QUIET, part: {"format": "bf16"}}), steps=3)
            assert losses != base[0]
            assert losses == pytest.approx(base[0], rel=0.02)


@on_ranks(2)
def test_without_fp8_nothing_changes_bit_for_bit():
    """Also beside an engine in FP8."""
    several = {"gradient_accumulation_steps": 3}
    for fp8, changes, recompute, leaf in [
        ([None, {"enabled": False}], {}, False, False),
        ([{"enabled": False}], several, True, True),
        ([{"enabled": False}], {"zero_optimization": {"stage": 3, "overlap_comm": True}}, False, False),
    ]:
        stock = losses_and_weights({**models.config(None), **changes}, recompute, leaf, True, steps=3)
        for section in fp8:
            with case((section, changes)):
                ours = losses_and_weights({**models.config(section), **changes}, recompute, leaf, steps=3)
                assert_same(ours, stock)
        if not changes:
            beside = models.engine({})
            models.train(beside, 1)
            assert_same(losses_and_weights(models.config(None), stock=True, steps=3), stock)
            beside.destroy()


@on_ranks(2)
def test_fp8_linears_alone_under_stages_1_and_2():
    fp8 = {**QUIET, "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
    for stage in (1, 2):
        with case(stage):
            in_bf16 = {"data_types": {"grad_accum_dtype": "bf16"}}
            losses, bf16 = (
                losses_and_weights(models.config(section, stage=stage) | in_bf16, steps=3)[0]
                for section in (fp8, {"enabled": False})
            )
            assert losses != bf16
            assert losses == pytest.approx(bf16, rel=0.02)


# ---------------------------------------------------------------- weights that a module reads which does not own them


class ReadsAnothers(nn.Module):
    """A residual linear layer that adds a product with the weight of its neighbour, which it does not call."""

    def __init__(self, hidden: int):
        super().__init__()
        self.own = nn.Linear(hidden, hidden)
        self.neighbour = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.product(x))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.neighbour.weight)


class ReadsAndCalls(ReadsAnothers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + nn.functional.linear(x, self.neighbour.weight)) + self.neighbour(x)


class CallsOnly(ReadsAnothers):
    """Has a method that reads a weight, which its forward does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.neighbour(x))


def register(model):
    for layer in model.layers:
        deepspeed.zero.register_external_parameter(layer, layer.neighbour.weight)


def make_leaves_of(model):
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.layers[0])])


@pytest.mark.parametrize("layer", [ReadsAnothers, ReadsAndCalls])
@on_ranks(2)
def test_external_parameters_arrive_in_bf16_and_follow_it(layer):
    """As in plain ZeRO-3: registered before the engine is made or after, or found."""
    expected = None
    for when in ("in BF16", "before", "after", "found", "inside leaf modules"):
        prepare = {"in BF16": register, "before": register, "inside leaf modules": make_leaves_of}.get(when)
        engine = models.engine(None if when == "in BF16" else {}, layers=[layer] * 2, prepare=prepare)
        if when == "after":
            register(engine.module)
        losses, weights = models.train(engine, 3), models.bf16_weights(engine)
        expected = expected or (losses, weights)
        with case(when):
            assert engine.skipped_steps == 0
            assert losses == pytest.approx(expected[0], rel=0.02)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[1][name], atol=0.01, rtol=0.1)
        engine.destroy()


@on_ranks(2)
def test_the_report_names_what_leaf_modules_read():
    for layer, reads in ((ReadsAnothers, True), (CallsOnly, False)):
        seen = models.engine({}, layers=[layer], prepare=make_leaves_of).fp8.report
        assert any("2 FP8 linears are all-gathered in BF16" in note for note in seen["notes"]) == reads
        assert seen["fp8_gathered_parameters"] == (0 if reads else 2 * 131 * 131)


# ---------------------------------------------------------------- the fused loss with the head's products in FP8


@pytest.mark.parametrize(("world", "tied"), [(1, False), (2, True)], ids=["untied", "tied"])
@on_ranks()
def test_the_fused_loss(tied):
    """With the head in FP8, in BF16, and in a BF16 run, to compare memory and time with."""
    found = {}
    for name, section in {
        "bf16 head": {"loss": {"head": "bf16"}},
        "fp8 head": {"loss": {"head": "fp8"}},
        "bf16": {"enabled": False},
        "bf16, fused": {"enabled": False, "loss": "fused"},
    }.items():
        engine = models.engine(
            section, causal_lm("qwen2", tie_word_embeddings=tied), {"gradient_accumulation_steps": 2}
        )
        losses, ids = [], tokens()
        for _ in range(4):
            loss = engine(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(30.0)).loss
            losses.append(models.take_step(engine, loss))
        engine.eval()
        with torch.no_grad():
            losses.append(engine(input_ids=ids, labels=ids).loss.item())
            assert engine(input_ids=ids).logits.shape == (2, 16, 97)
        released, loss = engine.module.lm_head.weight.numel() == 0, engine.fp8.loss
        found[name] = losses, released, engine.fp8.report.get("loss"), loss is not None and loss.fused
        engine.destroy()
    in_fp8, in_bf16, own, fused = (found[name] for name in ("fp8 head", "bf16 head", "bf16", "bf16, fused"))
    assert in_fp8[1] and fused[1], "the head's weight must have been partitioned for this test to mean something"  # noqa: PT018
    assert "head's products in FP8" in in_fp8[2]
    assert "FP8" not in in_bf16[2]
    assert in_fp8[0] != in_bf16[0]
    assert in_fp8[0] == pytest.approx(in_bf16[0], rel=5e-3)
    assert in_fp8[0][-1] < in_fp8[0][0]
    assert (own[3], fused[3]) == (False, True)
    assert fused[0] == pytest.approx(own[0], rel=2e-3)


def test_a_head_in_fp8_needs_a_loss_that_can_be_fused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    model = causal_lm("gemma2", final_logit_softcapping=5.0)
    with pytest.raises(UserError, match="changes its logits") as error:
        initialize(model=model, config=models.config({"preset": "infir2", "loss": {"head": "fp8"}}))
    assert error.value.key == "fp8.loss.head"
    assert FP8Config(loss="off") == FP8Config(loss={"mode": "off"})
    assert not FP8Config(enabled=False, loss={"mode": "fused", "head": "fp8"}).multiplies_head_in_fp8
    with pytest.raises(UserError, match="off"):
        FP8Config(loss={"mode": "off", "head": "fp8"})


# ---------------------------------------------------------------- torch.inference_mode, torch.profiler


@pytest.mark.parametrize(("world", "section"), [(2, {}), (1, {"attention": {"format": "e4m3"}})], ids=str)
@on_ranks()
def test_training_goes_on_behind_inference_mode_as_behind_no_grad(section):
    """No tensor stays behind that training may not write."""
    found, ids = [], tokens()
    for mode in (torch.no_grad, torch.inference_mode):
        engine = models.engine({"preset": "precise", "monitor": {"every": 1}, **section}, causal_lm("qwen2"))
        found.append([])
        for _ in range(2):
            engine.eval()
            with mode():
                found[-1].append(engine(input_ids=ids).logits.float().sum().item())
            engine.train()
            found[-1].append(models.take_step(engine, engine(input_ids=ids, labels=ids).loss))
        engine.destroy()
    assert found[0] == found[1]


def test_a_monitor_without_an_engine():
    model = nn.Sequential(nn.Linear(128, 128))
    convert(model, FP8Config(), CastMonitor(1))
    with torch.inference_mode():
        model(torch.randn(2, 128))
    model(torch.randn(2, 128)).sum().backward()


def ranges_of(profiled):
    """Names and counts of this package's ranges, and by name those of the ranges around a collective."""
    events = [event for event in profiled.events() if event.name.startswith("ds_fp8: ")]
    around = {}
    for event in events:
        names, waiting = around.setdefault(event.name, set()), list(event.cpu_children)
        while waiting:
            child = waiting.pop()
            names.add(child.name)
            waiting += child.cpu_children
    return {name: sum(event.name == name for event in events) for name in around}, around


@on_ranks(2)
def test_a_profile_of_a_step_has_its_parts():
    """By name; the ranges are not made where nobody profiles."""
    engine, made, record = models.engine({}), [], torch.profiler.record_function
    models.train(engine, 1)
    torch.profiler.record_function = lambda name: made.append(name) or record(name)
    try:
        models.train(engine, 1, start=1)
    finally:
        torch.profiler.record_function = record
    assert made == []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        models.train(engine, 1, start=2)
    counts, around = ranges_of(profiled)
    assert sorted(counts) == ["ds_fp8: cast", "ds_fp8: gather", "ds_fp8: reduce", "ds_fp8: step"]
    assert counts["ds_fp8: step"] == counts["ds_fp8: cast"] == 1
    assert counts["ds_fp8: reduce"] >= 1
    assert counts["ds_fp8: gather"] > 6  # each module, forward and backward
    assert "ds_fp8: cast" in around["ds_fp8: step"]
    # The collectives are within.
    for name, word in (("gather", "allgather"), ("cast", "allreduce"), ("reduce", "alltoall")):
        found = [child for child in around[f"ds_fp8: {name}"] if child.startswith("c10d::")]
        assert any(word in child for child in found), (name, found)


@on_ranks(2)
def test_so_has_a_replay():
    engine, _ = engine_of(fp8={"graph": "off"})
    graphs = engine.fp8.graphs = Graphs(engine, auto=True)

    def train(steps):
        for _ in range(steps):
            models.take_step(engine, models.loss_of(engine, torch.arange(32).view(2, 16)))

    train(5)
    assert graphs.captured == 1
    graphs.log.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(1)
    assert graphs.log == ["replayed for 0"]
    assert ranges_of(profiled)[0].get("ds_fp8: graph") == 2  # forward and backward
