"""The optimizer inside DeepSpeed, on real ranks."""

from __future__ import annotations

import os
import tempfile
import warnings
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import ds_fp8
from tests.optim.numbers import COAT, FISHMAN, ROUNDING
from tests.zero import models

QUIET = {"monitor": {"every": 0}}
LOSS = 0.01  # Relative difference of losses after a few steps


def config(optimizer: dict, *, stage: int = 3, universal: bool = False, fp8: dict | None = None, **zero) -> dict:
    flat = {} if stage == 3 else {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
    result = models.config({**QUIET, **flat, **(fp8 or {}), "optimizer": optimizer}, stage=stage, **zero)
    if stage < 2:  # DeepSpeed sums there in BF16, or leaves checkpoints that nothing reads
        del result["data_types"]
    return {**result, "checkpoint": {"load_universal": True}} if universal else result


def weights_and_moments(engine) -> dict[str, torch.Tensor]:
    """Whole FP32 masters and moments by name, as DeepSpeed gives them to users."""
    result = {}
    for name, parameter in engine.module.named_parameters():
        result[f"{name} master"] = safe_get_full_fp32_param(parameter).cpu()
        for key in ("exp_avg", "exp_avg_sq"):
            result[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).cpu()
    return result


def losses(optimizer, stage=3, steps=4, **zero):
    engine = models.build(config(optimizer, stage=stage, **zero))
    own = engine.fp8.optimizer
    return models.train(engine, steps), None if own is None else own.state_bytes()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_with_compressed_moments(baseline, stage):
    expected, fp32_bytes = baseline(2, losses, {}, stage)[0]
    assert (fp32_bytes is None) == (stage != 3)  # under ZeRO-3 this package's Adam steps FP32 moments, too
    for kept, most in ((COAT, 2.10), (FISHMAN, 2.02)):
        found, state_bytes = baseline(2, losses, kept, stage)[0]
        assert found != expected
        assert found == pytest.approx(expected, rel=LOSS)
        numel = 253_471 / (1 if stage == 0 else 2)
        # Stage 0 keeps small tensors apart, each with groups of its own, and ZeRO pads.
        assert state_bytes / numel < most * 1.002


def replicas(stage, kept):
    """Whether all ranks hold the same weights, and the losses of an engine that resumed beside one that went on."""
    engine = models.build(config(kept, stage=stage))
    models.train(engine, 3)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    engine.save_checkpoint(folder[0], tag="three")
    went_on = models.train(engine, 2, start=3)
    flat = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    engine = models.build(config(kept, stage=stage))
    engine.load_checkpoint(folder[0], tag="three")
    return all(torch.equal(flat, other) for other in others), went_on, models.train(engine, 2, start=3)


@pytest.mark.parametrize(("stage", "kept"), [(0, COAT), (0, FISHMAN), (1, COAT), (2, COAT)], ids=str)
def test_replicas_stay_the_same_and_resume_exactly(ranks, stage, kept):
    for same, went_on, resumed in ranks(2, replicas, stage, kept):
        assert same
        assert went_on == resumed


def hooks_called(initialize_name):
    """Calls of hooks of a given AdamW, registered before and after initialize, in 3 steps, and whether it has state."""
    ds_config = config({})
    del ds_config["optimizer"]
    if initialize_name == "deepspeed":
        ds_config = {key: value for key, value in ds_config.items() if key != "fp8"}
    net = models.Net().bfloat16()
    given = torch.optim.AdamW(net.parameters(), lr=1e-3)
    called = []
    given.register_step_pre_hook(lambda *_: called.append("pre"))
    initialize = ds_fp8.initialize if initialize_name == "ds_fp8" else deepspeed.initialize
    engine = initialize(model=net, optimizer=given, config=ds_config)[0]
    given.register_step_post_hook(lambda *_: called.append("post"))
    called.clear()  # DeepSpeed steps once to make the state
    models.train(engine, 3)
    return called, sorted(next(iter(given.state.values())))


def test_hooks_of_a_given_optimizer_are_called_as_deepspeed_calls_them(ranks):
    ours, stock = (ranks(1, hooks_called, name)[0] for name in ("ds_fp8", "deepspeed"))
    assert ours == stock
    assert ours[0] == ["pre", "post"] * 3


def test_sub_groups_and_cpu_offload(ranks, baseline):
    expected = baseline(2, losses, COAT, 3)[0][0]
    for zero in ({"sub_group_size": 20000}, {"offload_optimizer": {"device": "cpu"}}):
        found = ranks(2, _losses_with, COAT, zero)[0]
        assert found == pytest.approx(expected, rel=LOSS)


def _losses_with(optimizer, zero):
    return losses(optimizer, **zero)[0]


def start_and_save(optimizer, folder, tag):
    engine = models.build(config(optimizer))
    models.train(engine, 3)
    engine.save_checkpoint(folder, tag=tag)
    return weights_and_moments(engine)


def load_universal(optimizer, folder, tag, save_as):
    """(as loaded, after two more steps), saved again under `save_as`."""
    engine = models.build(config(optimizer, universal=True))
    engine.load_checkpoint(folder, tag=f"{tag}_universal", load_module_strict=False)
    loaded = weights_and_moments(engine)
    found = models.train(engine, 2, start=3)
    engine.save_checkpoint(folder, tag=save_as)
    steps = {float(state["step"]) for state in engine.basic_optimizer.state.values()}
    return loaded, weights_and_moments(engine), found, steps


def to_universal(folder, tag):
    main(
        SimpleNamespace(
            input_folder=os.path.join(folder, tag), output_folder=os.path.join(folder, f"{tag}_universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    with open(os.path.join(folder, "latest_universal"), "w") as latest:
        latest.write(f"{tag}_universal")


def assert_carried_over(before: dict, after: dict, kept: dict) -> None:
    """Masters exactly; moments up to one more rounding, in groups that lie otherwise."""
    for name, value in before.items():
        kind = kept.get(name.split()[-1], "fp32")
        if kind == "fp32":
            assert torch.equal(value, after[name]), name
        else:
            error = (value - after[name]).abs()
            assert (error <= 1.01 * ROUNDING[kind] * value.abs().max()).all(), name
            assert error.norm() <= ROUNDING[kind] * value.norm(), name


def test_a_universal_checkpoint_moves_between_numbers_of_ranks_and_precisions(ranks, tmp_path):
    folder = str(tmp_path)
    two = ranks(2, start_and_save, COAT, folder, "a")[0]
    to_universal(folder, "a")
    loaded, four, _, steps = ranks(4, load_universal, COAT, folder, "a", "b")[0]
    assert_carried_over(two, loaded, COAT)
    assert steps == {5.0}
    to_universal(folder, "b")
    loaded, _, found, _ = ranks(3, load_universal, FISHMAN, folder, "b", "c")[0]
    assert_carried_over(four, loaded, FISHMAN)
    assert all(loss == loss for loss in found)
    # And on to DeepSpeed's own Adam, exactly.
    loaded, _, _, steps = ranks(3, load_universal, {}, folder, "b", "d")[0]
    assert_carried_over(four, loaded, {})
    assert steps == {7.0}


def load_weights_of_universal(folder, from_fp32):
    """Weights of an engine that took those of the universal checkpoint alone, and the loss of its next step."""
    ds_config = config({}, universal=True, load_from_fp32_weights=from_fp32)
    engine = models.build(ds_config, prepare=lambda net: [parameter.data.zero_() for parameter in net.parameters()])
    engine.load_checkpoint(folder, tag="a_universal", load_optimizer_states=False)
    return models.bf16_weights(engine), models.train(engine, 1, start=3)


def start_and_save_all(folder):
    engine = models.build(config({}))
    models.train(engine, 3)
    engine.save_checkpoint(folder, tag="a")
    return models.bf16_weights(engine), models.train(engine, 1, start=3)


def test_the_weights_of_a_universal_checkpoint_load_alone(ranks, tmp_path):
    saved = ranks(2, start_and_save_all, str(tmp_path))
    to_universal(str(tmp_path), "a")
    for from_fp32 in (True, False):
        for (weights, loss), (expected, its_loss) in zip(
            ranks(2, load_weights_of_universal, str(tmp_path), from_fp32), saved, strict=True
        ):
            assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
            # Masters of BF16 are cast to a few other codes than those of FP32.
            assert loss == pytest.approx(its_loss, rel=LOSS)


def warnings_of_a_scheduler(stepped):
    """Return what a scheduler of AdamW warns of, after a step or without one, and the learning rate after it."""
    ds_config = config({})
    del ds_config["optimizer"]
    net = models.Net().bfloat16()
    given = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (step + 1))
    engine = ds_fp8.initialize(model=net, optimizer=given, config=ds_config)[0]
    assert engine.fp8.step is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models.train(engine, int(stepped))
        scheduler.step()
    said = [str(one.message) for one in caught if "lr_scheduler" in str(one.message)]
    return said, engine.optimizer.param_groups[0]["lr"]


def test_a_scheduler_of_the_given_optimizer_notices_the_steps(ranks):
    assert ranks(1, warnings_of_a_scheduler, True) == [([], 5e-4)]
    [(said, _)] = ranks(1, warnings_of_a_scheduler, False)
    assert len(said) == 1
