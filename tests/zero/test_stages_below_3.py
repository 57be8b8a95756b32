"""Users reach compressed moments through DeepSpeed's functions at every stage, and offload the optimizer below 3."""

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from tests.zero import models

PLAIN = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}, "monitor": {"every": 0}}
SIZES = (132, 300)  # ZeRO-3 sets whole moments only where they divide by the ranks


def build(stage: int, moments: str, accumulation: str | None = None, **zero):
    section = {**PLAIN, "optimizer": {"exp_avg": moments, "exp_avg_sq": moments}}
    ds_config = models.config(section) | {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, **zero}}
    ds_config.pop("data_types")
    data_types = {} if accumulation is None else {"data_types": {"grad_accum_dtype": accumulation}}
    return models.build(ds_config | data_types, sizes=SIZES)


def moments_of(engine) -> dict[str, torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq")
    named = engine.module.named_parameters()
    return {f"{name} {key}": safe_get_full_optimizer_state(p, key) for name, p in named for key in names}


def read_and_written(stage: int, moments: str, accumulation: str | None):
    plain, engine = build(stage, "fp32", accumulation), build(stage, moments, accumulation)
    for each in (plain, engine):
        models.train(each, 2)
    right, found = moments_of(plain), moments_of(engine)
    apart = max(float((found[name] - right[name]).norm() / right[name].norm()) for name in right)
    weight, other = engine.module.layers[1].up.weight, engine.module.layers[2].up.weight
    state_bytes = engine.fp8.optimizer.state_bytes()
    shape = found["layers.1.up.weight exp_avg"].shape
    value = torch.linspace(-1, 1, shape.numel()).view(shape).bfloat16().float()
    safe_set_full_optimizer_state(weight, value, "exp_avg")
    written = torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), value)
    kept = safe_get_full_optimizer_state(other, "exp_avg")
    written &= torch.equal(kept, found["layers.2.up.weight exp_avg"])
    models.train(engine, 1, start=2)  # which compresses it again
    written &= engine.fp8.optimizer.state_bytes() == state_bytes
    after = safe_get_full_optimizer_state(weight, "exp_avg")
    return apart, written, float((after - 0.9 * value).norm() / value.norm())


@pytest.mark.parametrize(("stage", "accumulation"), [(1, None), (2, "fp32"), (2, None), (3, "fp32")])
@pytest.mark.parametrize("moments", ["e4m3", "bf16"])
def test_moments_are_read_and_written(ranks, stage, accumulation, moments):
    for apart, written, after in ranks(2, read_and_written, stage, moments, accumulation):
        assert apart < (0.06 if moments == "e4m3" else 0.005)
        assert written
        assert after < 0.06


def losses(stage: int, zero: dict):
    return models.train(build(stage, "fp32", **zero), 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_offloaded_optimizer_trains(ranks, stage):
    offloaded = ranks(2, losses, stage, {"offload_optimizer": {"device": "cpu"}})
    assert offloaded[0] == pytest.approx(ranks(2, losses, stage, {})[0], rel=1e-3)


def summed_by_hand(dtype: str):
    """Boundaries of accumulation that a program sets, as Accelerate does, with one micro-batch in the JSON."""
    engine = models.build(models.config({"monitor": {"every": 0}}) | {"data_types": {"grad_accum_dtype": dtype}})
    try:
        for micro in range(2):
            loss = engine(models.batch(micro, deepspeed.comm.get_rank()))
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.backward(loss)
            if micro == 0:
                engine.step()
        return "summed"
    except Exception as error:
        return str(getattr(error, "key", error))


@pytest.mark.parametrize(("dtype", "said"), [("fp32", "summed"), ("bf16", "data_types.grad_accum_dtype")])
def test_micro_batches_are_never_summed_in_bf16(ranks, dtype, said):
    assert ranks(2, summed_by_hand, dtype) == [said, said]
