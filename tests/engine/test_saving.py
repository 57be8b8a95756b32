"""Whoever looks at the weights between steps, to save them or to see them, changes nothing."""

import deepspeed

from tests.zero import models
from tests.zero.test_training import QUIET, assert_same


def look_with_a_modifier_rank(engine, folder):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass


LOOKS = [
    lambda engine, folder: engine.save_16bit_model(folder, "model.bin"),
    lambda engine, folder: engine._zero3_consolidated_16bit_state_dict(),  # as Accelerate does
    look_with_a_modifier_rank,
    lambda engine, folder: engine.save_checkpoint(folder),
]


def train_around(looks, folder):
    """Losses of steps between which somebody looks at the weights, or nobody, and the weights that they leave."""
    engine = models.build(models.config(QUIET, stage3_gather_16bit_weights_on_model_save=True))
    losses = models.train(engine, 2)
    for step, look in enumerate(LOOKS, 2):
        if looks:
            look(engine, folder)
        losses += models.train(engine, 1, start=step)
    return losses, models.bf16_weights(engine)


def test_saving_changes_no_later_step(ranks, tmp_path):
    undisturbed, looked_at = (ranks(2, train_around, looks, str(tmp_path)) for looks in (False, True))
    for left, right in zip(undisturbed, looked_at, strict=True):
        assert_same(left, right)
