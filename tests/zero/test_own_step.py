"""The own optimizer step beside DeepSpeed's, around the same optimizer, in whatever a training does around a step."""

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)

from tests.zero import models
from tests.zero.test_options import freeze_a_layer

SECTION = {"monitor": {"every": 0}, "optimizer": {"implementation": "ds_fp8"}}
COAT = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
BY_TENSOR = {"exp_avg": "e4m3", "exp_avg_sq": "e5m2", "granularity": "tensor"}
DIVISIBLE = (132, 300)
"""DeepSpeed sets whole masters and gradients only where they divide by the ranks: here by 1, 2 and 3."""


def backward(engine, number, factor=1.0):
    engine.backward(engine(models.batch(number, dist.get_rank())) * factor)


def steps(engine, around=None, between=None, last=None):
    """Three steps of two micro-batches, with something after each forward, between backwards, or before the step."""
    for step in range(3):
        for micro in range(2):
            loss = engine(models.batch(2 * step + micro, dist.get_rank()))
            if around is not None:
                around(engine, step)
            engine.backward(loss)
            if micro == 0 and between is not None:
                between(engine, step)
            if micro == 1 and last is not None:
                last(engine, step)
            engine.step()


def evaluate(engine, step):
    engine.eval()
    with torch.no_grad():
        engine(models.batch(70 + step, dist.get_rank()))
    engine.train()


def halve_a_gradient(engine, step):
    weight = engine.module.layers[step].up.weight
    safe_set_full_grad(weight, safe_get_full_grad(weight) / 2)


def freeze_and_unfreeze(engine):
    models.train(engine, 1)
    layer = engine.module.layers[1]
    for learns in (False, True):
        for parameter in layer.parameters():
            parameter.requires_grad_(learns)
        models.train(engine, 1, start=1 + learns)


def coalesced(engine):
    for step in range(3):
        with engine.coalesce_grad_reduction():
            for micro in range(2):
                backward(engine, 2 * step + micro)
        engine.step()


def two_losses(engine):
    for step in range(3):
        first, second = (engine(models.batch(2 * step + i, dist.get_rank())) for i in range(2))
        engine.backward(first + second)
        engine.step()


def not_a_number(engine):
    for step in range(4):
        backward(engine, step, float("nan") if step == 1 and dist.get_rank() == 0 else 1.0)
        engine.step()
    assert engine.skipped_steps == 1


def written_weights(engine):
    for step in range(3):
        weight = engine.module.layers[step].up.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data.mul_(1.5)
        models.train(engine, 1, start=step)


def written_masters(engine):
    for step in range(3):
        weight = engine.module.layers[step].up.weight
        safe_set_full_fp32_param(weight, 1.5 * models.full_master(weight))
        models.train(engine, 1, start=step)


def zero_gradients(engine, step):
    engine.zero_grad()


def reentrant(model):
    """Recompute every layer as older code of Hugging Face does."""
    for layer in model.layers:
        compute = layer.forward
        layer.forward = lambda x, compute=compute: torch.utils.checkpoint.checkpoint(compute, x, use_reentrant=True)


def tie_and_recompute(model):
    model.lm_head.weight = model.embedding.weight
    reentrant(model)


def three_steps(engine):
    models.train(engine, 3)


TWO = {"config": {"gradient_accumulation_steps": 2}}
WRITTEN = {"sizes": DIVISIBLE}
SCENARIOS = {
    "plain": (three_steps, {}),
    "many buckets": (three_steps, {**TWO, "zero": {"sub_group_size": 50000, "reduce_bucket_size": 50000}}),
    "compressed moments": (three_steps, {"fp8": {"optimizer": COAT}}),
    "scales by tensor, a frozen layer": (three_steps, {"fp8": {"optimizer": BY_TENSOR}, "prepare": freeze_a_layer}),
    "gradients in BF16": (three_steps, {"fp8": {"grad_reduce": {"format": "bf16"}}}),
    "zero_grad between micro-batches": (lambda engine: steps(engine, between=zero_gradients), TWO),
    "evaluation between forward and backward": (lambda engine: steps(engine, around=evaluate), TWO),
    "evaluation between micro-batches": (lambda engine: steps(engine, between=evaluate), TWO),
    "coalesce_grad_reduction": (coalesced, {}),
    "safe_set_full_grad": (lambda engine: steps(engine, last=halve_a_gradient), TWO | WRITTEN),
    "freezing and unfreezing": (freeze_and_unfreeze, {}),
    "reentrant checkpointing": (three_steps, {"prepare": reentrant}),
    "tied, reentrant": (three_steps, {"prepare": tie_and_recompute}),
    "one backward of two losses": (two_losses, {}),
    "NaN on the way": (not_a_number, {}),
    "GatheredParameters that are written": (written_weights, {}),
    "safe_set_full_fp32_param": (written_masters, WRITTEN),
    "overlap_comm false": (three_steps, {"zero": {"overlap_comm": False}}),
    "round_robin_gradients": (three_steps, {"zero": {"round_robin_gradients": True}}),
}


def trained(scenario, own):
    """The last gradient norm, and all that a user sees after a scenario; names of masters that it changed."""
    run, options = SCENARIOS[scenario]
    section = {**SECTION, **options.get("fp8", {})}
    section["optimizer"] = {**SECTION["optimizer"], **section["optimizer"]}
    config = models.config(section, **options.get("zero", {})) | {"gradient_clipping": 0.0} | options.get("config", {})
    engine = models.build(config, prepare=options.get("prepare"), sizes=options.get("sizes", (131, 301)), own=own)
    # An AdamW of torch is taken over: both would be own steps.
    assert (engine.fp8.step is None) == (not own)
    named = dict(engine.module.named_parameters())
    before = {name: models.full_master(p) for name, p in named.items() if p.requires_grad}
    run(engine)
    seen = models.bf16_weights(engine)
    for name in before:
        parameter = named[name]
        seen |= {f"{name} master": models.full_master(parameter), f"{name} gradient": safe_get_full_grad(parameter)}
        seen |= {f"{name} {key}": safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, seen, [name for name in before if not torch.equal(seen[f"{name} master"], before[name])]


CASES = [(2, name) for name in SCENARIOS]
CASES += [(1, name) for name in ("plain", "coalesce_grad_reduction", "tied, reentrant", "safe_set_full_fp32_param")]
CASES += [(3, name) for name in ("plain", "tied, reentrant", "NaN on the way")]


@pytest.mark.parametrize(("world", "scenario"), CASES)
def test_every_bit_is_that_of_deepspeeds_step(ranks, world, scenario):
    ours, theirs = (ranks(world, trained, scenario, own) for own in (True, False))
    for (norm, seen, changed), (their_norm, expected, their_changed) in zip(ours, theirs, strict=True):
        assert norm == pytest.approx(their_norm, rel=1e-12)
        assert changed == their_changed
        assert len(changed) > 5
        assert seen.keys() == expected.keys()
        assert [name for name in seen if not torch.equal(seen[name], expected[name])] == []
