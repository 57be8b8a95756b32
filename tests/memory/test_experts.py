"""Estimates of mixtures of experts against real engines."""

import pytest

from ds_fp8.config.presets import merge
from ds_fp8.memory import estimate
from tests.memory import workloads
from tests.memory.test_activations import measured_and_estimated
from tests.memory.test_estimate import EVERY_GATHER, LENGTH, ROWS, measured

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
SHARED = {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 384}
DECODED = {"linear": {"expert_products": "bf16"}}
MULTIPLIED = {"linear": {"expert_products": "fp8"}}
CASES = {
    "fused": DECODED,
    "linear by linear": {**DECODED, "fuse": "off"},
    "bf16": {"enabled": False},
    "multiplied in fp8": MULTIPLIED,
    "kept in bf16": {**MULTIPLIED, "activations": {"save": "bf16"}},
    "gate and up again": {**MULTIPLIED, "activations": {"recompute": "mlp"}},
}


@pytest.mark.parametrize("model", [MOE, SHARED], ids=["experts", "a shared one beside"])
@pytest.mark.parametrize("section", CASES.values(), ids=CASES)
def test_layers_keep_nearly_what_the_formulas_say(section, model):
    raw = workloads.stage(fp8=section, zero_optimization={"stage": 3}, model={"config": model})
    kept, expected = measured_and_estimated(raw, 2, 128)
    assert kept == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("section", "error"), [({}, 0.08), ({"enabled": False}, 0.12)], ids=["fp8", "bf16"])
def test_a_step_takes_what_is_estimated(ranks, section, error):
    sizes = {**MOE, "num_hidden_layers": 3}
    raw = workloads.stage(model={"config": sizes}, data={"sequence_length": LENGTH}, zero_optimization=EVERY_GATHER)
    raw = merge(raw, {"train_micro_batch_size_per_gpu": ROWS, "fp8": section})
    expected = estimate(raw, gpus=2, device="cpu")
    # The step's part is a bound on a CPU, where it emulates what a GPU does in registers.
    computing = max(phase.total for phase in expected.phases if phase.name != "the optimizer step")
    for lasting, peak in ranks(2, measured, raw):
        assert lasting == pytest.approx(expected.lasting_bytes, rel=2e-3)
        assert peak == pytest.approx(computing, rel=error)


def test_experts_in_fp8_take_less():
    raw = workloads.stage(model={"config": {**MOE, "num_hidden_layers": 8}}, data={"sequence_length": 256})
    fp8, bf16 = (estimate(merge(raw, {"fp8": section}), gpus=8) for section in ({}, {"enabled": False}))
    assert fp8.peak_bytes < 0.85 * bf16.peak_bytes
