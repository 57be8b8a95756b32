"""The own optimizer step, and a micro-step as a CUDA graph captures it: DeepSpeed's state before and after."""

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

from ds_fp8.config.errors import UserError
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from tests.ranks import case, on_ranks
from tests.zero import models

COAT = {"optimizer": {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}}
REUSE = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 10**6}


@on_ranks(2)
def test_gradients_are_accumulated_in_fp32_unless_bf16_is_asked_for_one_micro_batch():
    several = {"gradient_accumulation_steps": 2, "data_types": {}}
    for section in ({}, {"grad_reduce": {"format": "bf16"}}):
        engine = models.engine(section, changes=several)
        assert engine.optimizer.grad_partitions_flat_buffer.dtype is torch.float32
    for section in ({}, COAT):
        found = []
        for dtype in ("fp32", "bf16"):
            engine, losses = models.engine(section, changes={"data_types": {"grad_accum_dtype": dtype}}), []
            for step in range(5):
                losses.append([*models.train(engine, 1, start=step), float(engine.get_global_grad_norm())])
            found.append(list(zip(*losses, strict=True)))
        with case(section):
            assert engine.fp8.step is not None
            assert engine.optimizer.grad_partitions_flat_buffer.dtype is torch.bfloat16
            (expected, expected_norms), (losses, norms) = found
            assert losses != expected
            assert losses == pytest.approx(expected, rel=2e-3)
            assert norms == pytest.approx(expected_norms, rel=2e-2)
    own = {"optimizer": {"implementation": "ds_fp8"}}
    offloaded = models.engine(own, changes={"zero_force_ds_cpu_optimizer": False}, offload_optimizer={"device": "cpu"})
    assert offloaded.fp8.step is None
    assert offloaded.fp8.report["optimizer_step"] == "DeepSpeed's: offload_optimizer steps on the CPU"


@on_ranks(2)
def test_a_nan_that_was_only_shown_is_not_written():
    """To a rank that wrote nothing, with masters that the next cast reads."""
    engine = models.engine({}, sizes=(132, 300))
    models.train(engine, 1)
    weight = engine.module.layers[1].up.weight
    master = safe_get_local_fp32_param(weight).clone()
    master.view(-1)[0] = torch.nan
    safe_set_local_fp32_param(weight, master)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        assert weight.isnan().any()
    assert not engine.fp8.weights.of(weight).from_bf16


@on_ranks(2)
def test_offloading_keeps_no_more_bf16_shards_than_it_moves():
    engine = models.engine({})
    models.train(engine, 1)

    def kept() -> int:
        return sum(p.ds_tensor.numel() for p in engine.module.parameters() if p.ds_tensor.is_contiguous())

    before = kept()
    for state in (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.lp_params):
        engine.offload_states(include=[state], pin_memory=False)
        assert kept() == before if state is OffloadStateTypeEnum.lp_grads else kept() > 3 * before
        engine.reload_states()
        assert kept() == before
    with pytest.raises(UserError):
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
    assert kept() == before


@on_ranks(2)
def test_a_load_that_is_refused_changes_nothing(tmp_path):
    engine, undisturbed = models.engine({}), models.engine({})
    losses = models.train(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="whole")
    losses += models.train(engine, 1, start=1)
    file = tmp_path / "whole" / f"bf16_zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
    saved = torch.load(file, weights_only=False)
    for group in saved["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
        del group["betas"]
    torch.save(saved, file)
    dist.barrier()
    with pytest.raises(UserError, match="not of an Adam optimizer"):
        engine.load_checkpoint(str(tmp_path), tag="whole")
    in_fp8 = [p for p in engine.module.parameters() if engine.fp8.weights.in_fp8(p)]
    assert not any(p.ds_tensor.is_contiguous() for p in in_fp8)
    assert losses + models.train(engine, 1, start=2) == models.train(undisturbed, 3)


# ---------------------------------------------------------------- micro-steps


def micro_step_of(engine):
    fp8 = engine.fp8
    return MicroStep(engine, fp8.step.gradients, fp8.weights, fp8.wire)


def statuses(engine):
    return {parameter.ds_status for parameter in engine.module.parameters() if not parameter.ds_persist}


@on_ranks(2)
def test_a_micro_step_that_is_abandoned_leaves_nothing():
    """After three steps one breaks off in its forward or backward, or none does."""
    found = []
    for where in (None, "forward", "backward"):
        engine = models.engine({}, **REUSE)
        losses = models.train(engine, 3)
        if where is not None:
            micro_step = micro_step_of(engine)
            assert micro_step.ready
            micro_step.reset()
            state, layer = micro_step.remember(), engine.module.layers[1]

            def fail(*_):
                raise ValueError("planted")

            if where == "forward":
                hook = layer.register_forward_pre_hook(fail)
            else:
                hook = layer.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
            with pytest.raises(ValueError, match="planted"):
                engine.module(models.batch(77, dist.get_rank())).backward()
            hook.remove()
            micro_step.abandon()
            micro_step.restore(state)
            assert statuses(engine) == {ZeroParamStatus.NOT_AVAILABLE}
        found.append((losses + models.train(engine, 2, start=3), models.masters(engine)))
        with case(where):
            assert found[-1][0] == found[0][0]
            models.assert_same(found[-1][1], found[0][1])


@on_ranks(2)
def test_a_micro_step_by_itself_leaves_the_same_gradients():
    """Outside of engine.forward and engine.backward, as one inside."""
    engine, tokens = models.engine({}, **REUSE), models.batch(50, dist.get_rank())
    models.train(engine, 3)
    micro_step, gradients = micro_step_of(engine), engine.fp8.step.gradients
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
        sent = engine.fp8.wire.take()["grad_bytes"]
        found.append((engine.optimizer.grad_partitions_flat_buffer.clone(), arrived, sent))
        gradients.arrived = set()
    (inside, names, sent), (alone, others, counted) = found
    assert torch.equal(inside, alone)
    assert names == others
    assert counted == sent > 0
    assert not accumulates


@on_ranks(2)
def test_pinned_scales_follow_the_masters():
    for section in (
        {},
        {"preset": "precise", "monitor": {"every": 2}},
        {"preset": "precise", "optimizer": {"master": "fp8_plus16"}},
    ):
        found = []
        for pin in (False, True):
            engine = models.engine(section, sizes=(132, 300), **REUSE)
            losses, gather = models.train(engine, 2), engine.fp8.weights
            if pin:
                gather.pin_scales()
            before = [weight.scale.data_ptr() for weight in gather]
            losses += models.train(engine, 3, start=2)
            assert not pin or [weight.scale.data_ptr() for weight in gather] == before
            found.append((losses, models.masters(engine)))
        with case(section):
            assert found[0][0] == found[1][0]
            models.assert_same(found[0][1], found[1][1])


@on_ranks(2)
def test_addresses_change_with_what_is_gathered_and_with_no_step():
    engine = models.engine({}, **REUSE)
    models.train(engine, 1)
    micro_step, gather = micro_step_of(engine), engine.fp8.weights
    before = micro_step.addresses()
    models.train(engine, 1, start=1)
    assert micro_step.addresses() == before
    gather.leave_fp8([next(iter(gather)).parameter])
    assert micro_step.addresses() != before
