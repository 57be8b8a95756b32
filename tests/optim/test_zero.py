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
from tests.ranks import case, on_ranks
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
    found = models.train(engine, steps), None if own is None else own.state_bytes()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_every_stage_trains_with_compressed_moments(stage):
    """Replicas stay the same, and resume exactly. Stage 3 also with sub-groups and offloaded."""
    (expected, fp32_bytes), runs = losses({}, stage), []
    assert (fp32_bytes is None) == (stage != 3)  # under ZeRO-3 this package's Adam steps FP32 moments, too
    for kept, most in ((COAT, 2.10), (FISHMAN, 2.02)):
        with case(kept):
            found, state_bytes = losses(kept, stage)
            runs.append(found)
            assert found != expected
            assert found == pytest.approx(expected, rel=LOSS)
            numel = 174_308 / (1 if stage == 0 else 2)
            # Stage 0 keeps small tensors apart, each with groups of its own, and ZeRO pads.
            assert state_bytes / numel < most * 1.002
            if stage == 0 or (stage < 3 and kept is COAT):
                assert_replicas_are_the_same_and_resume_exactly(stage, kept)
    for zero in ({"sub_group_size": 20000}, {"offload_optimizer": {"device": "cpu"}}) if stage == 3 else ():
        assert losses(COAT, **zero)[0] == pytest.approx(runs[0], rel=LOSS), zero


def assert_replicas_are_the_same_and_resume_exactly(stage, kept):
    engine = models.build(config(kept, stage=stage))
    models.train(engine, 3)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    engine.save_checkpoint(folder[0], tag="three")
    went_on = models.train(engine, 2, start=3)
    flat = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)
    engine = models.build(config(kept, stage=stage))
    engine.load_checkpoint(folder[0], tag="three")
    assert models.train(engine, 2, start=3) == went_on


@on_ranks(1)
def test_hooks_of_a_given_optimizer_are_called_as_deepspeed_calls_them():
    """Registered before and after initialize; in 3 steps."""
    found = []
    for initialize in (ds_fp8.initialize, deepspeed.initialize):
        left_out = ("optimizer",) if initialize is ds_fp8.initialize else ("optimizer", "fp8")
        net, called = models.Net().bfloat16(), []
        given = torch.optim.AdamW(net.parameters(), lr=1e-3)
        given.register_step_pre_hook(lambda *_, called=called: called.append("pre"))
        ds_config = {key: value for key, value in config({}).items() if key not in left_out}
        engine = initialize(model=net, optimizer=given, config=ds_config)[0]
        given.register_step_post_hook(lambda *_, called=called: called.append("post"))
        called.clear()  # DeepSpeed steps once to make the state
        models.train(engine, 3)
        found.append((called, sorted(next(iter(given.state.values())))))
        engine.destroy()
    assert found[0] == found[1]
    assert found[0][0] == ["pre", "post"] * 3


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


@on_ranks(1)
def test_a_scheduler_of_the_given_optimizer_notices_the_steps():
    for stepped in (True, False):
        ds_config, net = config({}), models.Net().bfloat16()
        del ds_config["optimizer"]
        given = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (step + 1))
        engine = ds_fp8.initialize(model=net, optimizer=given, config=ds_config)[0]
        assert engine.fp8.step is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            models.train(engine, int(stepped))
            scheduler.step()
        assert sum("lr_scheduler" in str(one.message) for one in caught) == (not stepped)
        assert not stepped or engine.optimizer.param_groups[0]["lr"] == 5e-4
