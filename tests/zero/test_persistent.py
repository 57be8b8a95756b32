"""Parameters that stay whole are gathered as one after a step, and hold what DeepSpeed gathers."""

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fp8.zero.deepspeed.parameters import PersistentGather
from tests.zero import models

SECTION = {"monitor": {"every": 0}}


def persistent(threshold, together):
    """Values of persistent parameters after three steps, launches of gathers and waits of the host in the last."""
    engine = models.build(models.config(SECTION, stage3_param_persistence_threshold=threshold))
    whole = {name: p for name, p in engine.module.named_parameters() if p.ds_persist}
    together_or_not = PersistentGather.__call__
    if not together:
        PersistentGather.__call__ = lambda *_: False
    losses = models.train(engine, 2)
    launched, waits = [], []
    accelerator, synchronize = get_accelerator(), get_accelerator().synchronize
    accelerator.synchronize = lambda *words: waits.append(1) or synchronize(*words)
    close = engine.optimizer._post_step

    def close_as_on_a_gpu(*words):
        # DeepSpeed then waits for its gathers; of one rank, for a stream, which a CPU has not.
        if dist.get_world_size() > 1:
            accelerator.resolves_data_dependency = lambda: False
        gather = dist.all_gather_into_tensor
        dist.all_gather_into_tensor = lambda *words, **more: launched.append(1) or gather(*words, **more)
        try:
            close(*words)
        finally:
            dist.all_gather_into_tensor = gather
            vars(accelerator).pop("resolves_data_dependency", None)

    engine.optimizer._post_step = close_as_on_a_gpu
    try:
        losses += models.train(engine, 1, start=2)
    finally:
        PersistentGather.__call__ = together_or_not
        del accelerator.synchronize, engine.optimizer._post_step
    values = {name: parameter.detach().clone() for name, parameter in whole.items()}
    rounded = {name: models.full_master(parameter).bfloat16() for name, parameter in whole.items()}
    return losses, values, rounded, launched, len(waits)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("threshold", [400, 100_000])
def test_they_hold_the_new_masters_and_travel_in_one_launch(ranks, world, threshold):
    ours, theirs = (ranks(world, persistent, threshold, together) for together in (True, False))
    for (losses, values, rounded, launched, waits), (expected, stock, _, _, stock_waits) in zip(
        ours, theirs, strict=True
    ):
        assert losses == expected
        assert values.keys() == rounded.keys()
        assert len(values) > 2
        for name, value in values.items():
            assert torch.equal(value, rounded[name]), name
            assert torch.equal(value, stock[name]), name
        assert len(launched) == (world > 1)
        assert waits == 0
        assert stock_waits == (world > 1)


def gathered_again(of_each):
    """Gather some, others and all of the persistent parameters in turn; return which hold their masters each time."""
    engine = models.build(models.config(SECTION, stage3_param_persistence_threshold=100_000))
    models.train(engine, 1)
    gather, persistent = PersistentGather(engine), [p for p in engine.module.parameters() if p.ds_persist]
    right = []
    for places in of_each:
        some = persistent[places]
        some[0].partition(some)
        assert gather(some)
        right += [torch.equal(p, models.full_master(p).bfloat16()) for p in persistent]
    assert not gather(some)  # all are there
    return right


@pytest.mark.parametrize("world", [1, 2])
def test_other_parameters_may_be_gathered_the_next_time(ranks, world):
    for right in ranks(world, gathered_again, [slice(None), slice(2), slice(1, None), slice(None)]):
        assert len(right) > 8
        assert all(right)
