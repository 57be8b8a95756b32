"""A micro-step as a CUDA graph captures it: DeepSpeed's state before, after, and when something goes wrong within."""

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fp8.zero.deepspeed.micro_step import MicroStep
from tests.zero import models

REUSE = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 10**6}
SECTION = {"monitor": {"every": 0}}


def built(**zero):
    return models.build(models.config(SECTION, **{**REUSE, **zero}))


def micro_step_of(engine):
    fp8 = engine.fp8
    return MicroStep(engine, fp8.step.gradients, fp8.weights, fp8.wire)


def masters(engine):
    return [models.full_master(parameter) for parameter in engine.module.parameters()]


def statuses(engine):
    return {parameter.ds_status for parameter in engine.module.parameters() if not parameter.ds_persist}


def forward_and_backward(engine, tokens):
    loss = engine.module(tokens)
    torch.autograd.backward([loss], [torch.ones_like(loss)])


def broken_off(where):
    """Losses and masters of five steps; after three a micro-step breaks off in `where`, if any, and is abandoned."""
    engine = built()
    losses = models.train(engine, 3)
    if where is not None:
        micro_step = micro_step_of(engine)
        assert micro_step.ready
        micro_step.reset()
        state = micro_step.remember()

        def fail(*_):
            raise ValueError("planted")

        layer = engine.module.layers[1]
        if where == "forward":
            hook = layer.register_forward_pre_hook(fail)
        else:
            hook = layer.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
        with pytest.raises(ValueError, match="planted"):
            forward_and_backward(engine, models.batch(77, dist.get_rank()))
        hook.remove()
        micro_step.abandon()
        micro_step.restore(state)
        assert statuses(engine) == {ZeroParamStatus.NOT_AVAILABLE}
    return losses + models.train(engine, 2, start=3), masters(engine)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_micro_step_that_is_abandoned_leaves_nothing(ranks, baseline, where):
    for (losses, parts), (expected, wanted) in zip(
        ranks(2, broken_off, where), baseline(2, broken_off, None), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(*pair) for pair in zip(parts, wanted, strict=True))


def by_itself(_):
    """A micro-step outside of engine.forward and engine.backward leaves the gradients that one inside leaves."""
    engine = built()
    models.train(engine, 3)
    micro_step, gradients = micro_step_of(engine), engine.fp8.step.gradients
    tokens = models.batch(50, dist.get_rank())
    found = []
    for inside in (True, False):
        engine.fp8.wire.take()
        if inside:
            engine.backward(engine(tokens))
        else:
            micro_step.reset()
            assert statuses(engine) == {ZeroParamStatus.NOT_AVAILABLE}
            assert all(p.ds_status == ZeroParamStatus.AVAILABLE for p in micro_step.persistent)
            state = micro_step.remember()
            with micro_step.unthrottled():
                loss = engine.module(tokens)
                micro_step.finish_gathers()
                torch.autograd.backward([loss], [torch.ones_like(loss)])
                micro_step.finish_backward()
            counted = micro_step.restore(state)
            assert gradients.arrived == frozenset()
            micro_step.count(counted)
            assert statuses(engine) == {ZeroParamStatus.NOT_AVAILABLE}
        accumulates, arrived = micro_step.progress
        sent = engine.fp8.wire.take()
        found.append((engine.optimizer.grad_partitions_flat_buffer.clone(), arrived, accumulates, sent))
        gradients.arrived = set()
    return found


def test_a_micro_step_by_itself_leaves_the_same_gradients(ranks):
    for (inside, names, _, sent), (alone, others, accumulates, counted) in ranks(2, by_itself, None):
        assert torch.equal(inside, alone)
        assert names == others
        assert counted["grad_bytes"] == sent["grad_bytes"] > 0
        assert not accumulates


def pinned(pin, section, sizes):
    """Losses and masters of steps between which the scales are pinned, or are not."""
    engine = models.build(models.config({**SECTION, **section}, **REUSE), sizes=sizes)
    losses = models.train(engine, 2)
    gather = engine.fp8.weights
    if pin:
        gather.pin_scales()
        before = [weight.scale.data_ptr() for weight in gather]
    losses += models.train(engine, 3, start=2)
    if pin:
        assert [weight.scale.data_ptr() for weight in gather] == before
    return losses, masters(engine)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"preset": "precise", "monitor": {"every": 2}},
        {"preset": "precise", "optimizer": {"master": "fp8_plus16"}},
    ],
)
def test_pinned_scales_follow_the_masters(ranks, section):
    (losses, parts), (expected, wanted) = (ranks(2, pinned, pin, section, (132, 300))[0] for pin in (True, False))
    assert losses == expected
    assert all(torch.equal(*pair) for pair in zip(parts, wanted, strict=True))


def addresses(_):
    engine = built()
    models.train(engine, 1)
    micro_step, gather = micro_step_of(engine), engine.fp8.weights
    seen = [micro_step.addresses()]
    models.train(engine, 1, start=1)
    seen.append(micro_step.addresses())
    gather.leave_fp8([next(iter(gather)).parameter])
    seen.append(micro_step.addresses())
    return seen[0] == seen[1], seen[1] == seen[2]


def test_addresses_change_with_what_is_gathered_and_with_no_step(ranks):
    assert ranks(2, addresses, None) == [(True, False)] * 2
