"""Parameters are gathered, and gradients reduced, over the group that DeepSpeed shards each parameter over."""

import os
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

import ds_fp8
from tests.ranks import RankPool
from tests.zero import models
from tests.zero.test_training import QUIET, assert_same

PAIRS = [[0, 1], [2, 3]]


def train(engine, rank, steps=3):
    losses = []
    for step in range(steps):
        losses.append(models.take_step(engine, engine(models.batch(step, rank))))
    return losses, models.bf16_weights(engine), engine.fp8.health.last


def in_pairs(section, ranks_per_node):
    """Two trainings beside each other on 4 ranks, each sharded over its own two."""
    os.environ["LOCAL_SIZE"] = str(ranks_per_node)
    pairs = [dist.new_group(pair) for pair in PAIRS]
    pair, rank = divmod(dist.get_rank(), 2)
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: pairs[pair],
        get_data_parallel_world_size=lambda: 2,
        get_data_parallel_rank=lambda: rank,
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )
    torch.manual_seed(0)
    model = models.Net().bfloat16()
    engine = ds_fp8.initialize(
        model=model, model_parameters=list(model.parameters()), config=models.config(section), mpu=mpu
    )[0]
    return train(engine, rank + 10 * pair)


def alone(section, pair):
    return train(models.build(models.config(section)), dist.get_rank() + 10 * pair)


def test_two_pairs_of_ranks_train_as_each_alone(ranks):
    """The 4 ranks are 2 nodes to FP8's reduction in two levels, which is not for groups inside a node."""
    section = {"grad_reduce": {"scale": "tensor"}, "monitor": {"every": 1}}
    pool = RankPool(4)  # what DeepSpeed keeps of the groups stays with a process
    try:
        together = pool.run(in_pairs, section, 2)
    finally:
        pool.close()
    for pair in range(2):
        for left, right in zip(ranks(2, alone, section, pair), together[2 * pair :], strict=False):
            assert_same(left, right)
            assert left[2].measurement == right[2].measurement


def two_groups(several, section):
    """A layer's weights sharded over different groups, though of the same ranks, and gathered in one call."""
    other = dist.new_group(list(range(dist.get_world_size())))
    config = models.config({**QUIET, **section})
    torch.manual_seed(0)

    def init(group):
        return deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16, data_parallel_group=group)

    with init(None):
        model = models.Net()
    for block in model.layers if several else ():
        with deepspeed.zero.GatheredParameters([block.down.weight]):
            whole = block.down.weight.detach().clone()
        with init(other):
            block.down = torch.nn.Linear(*reversed(whole.shape), bias=False)
        with deepspeed.zero.GatheredParameters([block.down.weight], modifier_rank=0):
            block.down.weight.data.copy_(whole)
    deepspeed.utils.set_z3_leaf_modules(model, [models.Block])
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return train(engine, dist.get_rank())


@pytest.mark.parametrize("section", [{}, {"preset": "precise"}], ids=str)
def test_weights_of_several_groups_are_gathered_together(ranks, section):
    """Also the residuals of their outlier channels."""
    for left, right in zip(*(ranks(2, two_groups, several, section) for several in (False, True)), strict=True):
        assert_same(left, right)
