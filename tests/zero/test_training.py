"""Whole engines: FP8 against BF16, and DeepSpeed's own behaviours with FP8 in place."""

import deepspeed
import pytest
import torch

from tests.zero import models

QUIET = {"monitor": {"every": 0}}


def losses_and_weights(ds_config, recompute=False, leaf=False, stock=False, steps=4):
    prepare = None
    if leaf:

        def prepare(model):
            deepspeed.utils.set_z3_leaf_modules(model, [models.Block])

    engine = models.build(ds_config, recompute=recompute, prepare=prepare, stock=stock)
    losses = models.train(engine, steps)
    return losses, models.bf16_weights(engine)


def assert_same(left, right):
    assert left[0] == right[0]
    for name in left[1]:
        assert torch.equal(left[1][name], right[1][name]), name


BASE = (losses_and_weights, models.config(QUIET))  # What options that only say when and where are compared to


@pytest.mark.parametrize(
    ("changes", "recompute", "leaf"),
    [
        ({"stage3_prefetch_bucket_size": 10**8, "stage3_max_reuse_distance": 10**8}, False, False),
        ({"stage3_prefetch_bucket_size": 50000}, False, False),
        ({"overlap_comm": True}, False, False),
        ({"contiguous_gradients": False, "reduce_bucket_size": 50000}, False, False),
        ({"sub_group_size": 50000}, False, False),
        ({}, True, False),
        ({}, False, True),
        ({}, True, True),
    ],
    ids=str,
)
def test_when_and_where_change_nothing(ranks, baseline, changes, recompute, leaf):
    """Prefetch, overlap, buckets and sub-groups; what is recomputed; leaf modules."""
    varied = ranks(2, losses_and_weights, models.config(QUIET, **changes), recompute, leaf)
    for left, right in zip(baseline(2, *BASE), varied, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize(
    ("fp8", "changes", "recompute", "leaf"),
    [
        (None, {}, False, False),
        ({"enabled": False}, {}, False, False),
        ({"enabled": False}, {"gradient_accumulation_steps": 3}, True, True),
        ({"enabled": False}, {"zero_optimization": {"stage": 3, "overlap_comm": True}}, False, False),
    ],
    ids=["no section", "disabled", "accumulation, recompute and leaves", "prefetch and overlap"],
)
def test_without_fp8_nothing_changes_bit_for_bit(ranks, baseline, fp8, changes, recompute, leaf):
    stock = baseline(2, losses_and_weights, {**models.config(None), **changes}, recompute, leaf, True)
    ours = ranks(2, losses_and_weights, {**models.config(fp8), **changes}, recompute, leaf)
    for left, right in zip(stock, ours, strict=True):
        assert_same(left, right)


def stock_engine_beside_an_fp8_engine():
    models.train(models.build(models.config(QUIET)), 1)
    return losses_and_weights(models.config(None), stock=True)


def test_a_plain_engine_beside_an_fp8_engine_is_untouched(ranks, baseline):
    stock = baseline(2, losses_and_weights, models.config(None), False, False, True)
    for left, right in zip(stock, ranks(2, stock_engine_beside_an_fp8_engine), strict=True):
        assert_same(left, right)


def step_with_overflow(value, grad_reduce=None):
    engine = models.build(models.config({**QUIET, "grad_reduce": grad_reduce or {}}))
    models.train(engine, 1)
    before = models.bf16_weights(engine)
    skipped = engine.skipped_steps
    loss = engine(models.batch(5, deepspeed.comm.get_rank()).to(engine.device))
    # One rank's loss is scaled so that its gradients are not finite.
    engine.backward(loss * (value if deepspeed.comm.get_rank() == 1 else 1.0))
    engine.step()
    after = models.bf16_weights(engine)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    losses = models.train(engine, 2)
    return unchanged, engine.skipped_steps - skipped, losses


@pytest.mark.parametrize(
    ("world", "value", "grad_reduce"),
    [(2, float("inf"), {}), (2, float("nan"), {}), (3, float("nan"), {}), (2, float("inf"), {"scale": "tensor"})],
    ids=str,
)
def test_overflow_on_one_rank_skips_the_step_on_all(ranks, world, value, grad_reduce):
    for unchanged, skipped, losses in ranks(world, step_with_overflow, value, grad_reduce):
        assert unchanged
        assert skipped == 1
        assert all(loss == loss and loss < 10 for loss in losses)


@pytest.mark.parametrize("stage", [1, 2])
def test_fp8_linears_alone_under_stages_1_and_2(ranks, stage):
    fp8 = {**QUIET, "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
    losses, twin = (
        ranks(
            2, losses_and_weights, models.config(section, stage=stage) | {"data_types": {"grad_accum_dtype": "bf16"}}
        )[0][0]
        for section in (fp8, {"enabled": False})
    )
    assert losses != twin
    assert losses == pytest.approx(twin, rel=0.02)


@pytest.mark.parametrize("part", ["param_gather", "grad_reduce"])
def test_each_collective_can_stay_bf16(ranks, baseline, part):
    losses = ranks(2, losses_and_weights, models.config({**QUIET, part: {"format": "bf16"}}))[0][0]
    assert losses == pytest.approx(baseline(2, *BASE)[0][0], rel=0.02)
