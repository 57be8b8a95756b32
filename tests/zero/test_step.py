"""The own optimizer step: clipping, overflow, offloading, and what users write and read around it."""

from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_set_local_fp32_param,
)

from ds_fp8.config.errors import UserError
from tests.zero import models

COAT = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
SECTION = {"monitor": {"every": 0}, "optimizer": {"implementation": "ds_fp8"}}


def engine_of(fp8=None, own=True, clip=0.0, sizes=(131, 301)):
    """An engine with the own step, or with DeepSpeed's around the same optimizer."""
    config = models.config({**SECTION, **(fp8 or {})}) | {"gradient_clipping": clip}
    engine = models.build(config, sizes=sizes, own=own)
    assert (engine.fp8.step is not None) == own
    return engine


def backward(engine, step, factor=1.0):
    engine.backward(engine(models.batch(step, dist.get_rank()).to(engine.device)) * factor)


def kept_bf16_shards():
    """Elements of BF16 shards that exist before and after states are offloaded: gradients, BF16 shards, moments."""
    engine = engine_of()
    models.train(engine, 1)

    def kept() -> int:
        return sum(p.ds_tensor.numel() for p in engine.module.parameters() if p.ds_tensor.is_contiguous())

    found = [kept()]
    for include in ([OffloadStateTypeEnum.lp_grads], [OffloadStateTypeEnum.lp_params]):
        engine.offload_states(include=include, pin_memory=False)
        found.append(kept())
        engine.reload_states()
        found.append(kept())
    with pytest.raises(UserError):
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
    return *found, kept()


def test_offloading_keeps_no_more_bf16_shards_than_it_moves(ranks):
    for before, grads, grads_back, params, params_back, refused in ranks(2, kept_bf16_shards):
        assert before == grads == grads_back == params_back == refused
        assert params > 3 * before


def accumulator_of(section):
    settings = {key: value for key, value in models.config(section).items() if key != "data_types"}
    return str(models.build(settings | {"gradient_accumulation_steps": 2}).optimizer.grad_partitions_flat_buffer.dtype)


@pytest.mark.parametrize("section", [SECTION, {**SECTION, "grad_reduce": {"format": "bf16"}}])
def test_micro_batches_are_summed_in_fp32_unless_told_otherwise(ranks, section):
    assert ranks(2, accumulator_of, section) == ["torch.float32"] * 2


def accumulated_in(dtype, coat):
    """Losses, norms and the gradient accumulator's dtype of a run whose accumulator has this dtype."""
    section = SECTION | ({"optimizer": COAT} if coat else {})
    engine = models.build(models.config(section) | {"data_types": {"grad_accum_dtype": dtype}})
    losses, norms = [], []
    for step in range(6):
        losses += models.train(engine, 1, start=step)
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine.fp8.step is not None, str(engine.optimizer.grad_partitions_flat_buffer.dtype)


@pytest.mark.parametrize("coat", [False, True])
def test_one_micro_batch_may_be_accumulated_in_bf16(ranks, coat):
    (losses, norms, own, dtype), _ = ranks(2, accumulated_in, "bf16", coat)
    (expected, expected_norms, _, _), _ = ranks(2, accumulated_in, "fp32", coat)
    assert own
    assert dtype == "torch.bfloat16"
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-3)
    assert norms == pytest.approx(expected_norms, rel=2e-2)


def offloaded():
    config = models.config(SECTION, offload_optimizer={"device": "cpu"})
    engine = models.build({**config, "zero_force_ds_cpu_optimizer": False})
    return engine.fp8.step is None, engine.fp8.report["optimizer_step"]


def test_the_report_says_why_deepspeeds_step_stays(ranks):
    assert ranks(2, offloaded) == [(True, "DeepSpeed's: offload_optimizer steps on the CPU")] * 2


def shown_with_nan():
    """What the next cast reads after masters with a NaN were shown to a rank that wrote nothing."""
    engine = engine_of(sizes=(132, 300))
    models.train(engine, 1)
    weight = engine.module.layers[1].up.weight
    master = safe_get_local_fp32_param(weight).clone()
    master.view(-1)[0] = torch.nan
    safe_set_local_fp32_param(weight, master)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        shown = bool(weight.isnan().any())
    return shown, engine.fp8.weights.of(weight).from_bf16


def test_a_nan_that_was_only_shown_is_not_written(ranks):
    assert ranks(2, shown_with_nan) == [(True, False)] * 2


def undisturbed():
    return models.train(engine_of(), 3)


def refused_load(folder):
    """Losses before and after a load that fails, and whether BF16 shards that nobody reads are there after it."""
    engine = engine_of()
    losses = models.train(engine, 1)
    engine.save_checkpoint(folder, tag="whole")
    losses += models.train(engine, 1, start=1)
    file = Path(folder, "whole", f"bf16_zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt")
    saved = torch.load(file, weights_only=False)
    for group in saved["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
        del group["betas"]
    torch.save(saved, file)
    dist.barrier()
    with pytest.raises(UserError, match="not of an Adam optimizer"):
        engine.load_checkpoint(folder, tag="whole")
    kept = [p.ds_tensor.is_contiguous() for p in engine.module.parameters() if engine.fp8.weights.in_fp8(p)]
    return losses + models.train(engine, 1, start=2), any(kept)


def test_a_load_that_is_refused_changes_nothing(ranks, tmp_path):
    expected = ranks(2, undisturbed)
    for (losses, kept), its_losses in zip(ranks(2, refused_load, str(tmp_path)), expected, strict=True):
        assert losses == its_losses
        assert not kept
