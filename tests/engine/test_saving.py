"""Whoever looks at the weights between steps, to save them or to see them, changes nothing; whoever writes does."""

import deepspeed
import pytest
from deepspeed import comm as dist

from ds_fp8.layers.linear.weights import GATHERED
from tests.zero import models
from tests.zero.test_training import QUIET, assert_same


def save_16bit_model(engine, folder):
    engine.save_16bit_model(folder, "model.bin")


def state_dict_as_accelerate_gets_it(engine, folder):
    engine._zero3_consolidated_16bit_state_dict()


def look_with_a_modifier_rank(engine, folder):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass


def save_checkpoint(engine, folder):
    engine.save_checkpoint(folder)


def nothing(engine, folder):
    pass


def train_around(between, folder):
    """Losses of the steps after `between`, and the weights they leave."""
    engine = models.build(models.config(QUIET, stage3_gather_16bit_weights_on_model_save=True))
    models.train(engine, 2)
    between(engine, folder)
    return models.train(engine, 2, start=2), models.bf16_weights(engine)


@pytest.mark.parametrize(
    "between", [save_16bit_model, state_dict_as_accelerate_gets_it, look_with_a_modifier_rank, save_checkpoint]
)
def test_saving_changes_no_later_step(ranks, baseline, tmp_path, between):
    undisturbed = baseline(2, train_around, nothing, "")
    for left, right in zip(undisturbed, ranks(2, train_around, between, str(tmp_path)), strict=True):
        assert_same(left, right)


def written_on_one_rank():
    """An element of the first rank's shard as the other layers' products see it, and the same after a step."""
    engine = models.build(models.config(QUIET))
    models.train(engine, 2)
    weight, seen = engine.module.layers[0].up.weight, []
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data[0, 0] = 3.0
    for _ in range(2):
        weight.all_gather_coalesced([weight]).wait()
        seen.append(getattr(weight, GATHERED).dequantize()[0, 0].item())
        weight.partition()
        models.train(engine, 1)
    return seen


def test_a_write_to_one_ranks_shard_counts_on_all_until_the_next_step(ranks):
    for written, after in ranks(2, written_on_one_rank):
        assert written == 3.0
        assert abs(after) < 0.2  # the masters, which do not know of it
