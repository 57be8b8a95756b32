"""Every row of the table of refusals is hit by an example, with its key, its words and a remedy without a gap."""

import re

import pytest

import ds_fp8.research  # noqa: F401  adds the rows of its sections
from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.refusals import TABLE, Row
from ds_fp8.engine.preflight import check
from ds_fp8.optim import AdamW

MX = {"granularity": "1x32"}
CODED = {"optimizer": {"master": "fp8_plus16"}}
IN_BF16 = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
SECTIONS = [
    {"activations": {"mlp_tile_tokens": 100}},
    {"param_gather": {"format": "bf16", "frozen": "whole"}},
    {"grad_reduce": {"format": "bf16", "scale": "tensor"}},
    {"optimizer": {"exp_avg": "e4m3_expanded", "granularity": "tensor"}},
    {"loss": {"head": "fp8", "mode": "off"}},
    {"preset": "rowwise", "linear": {"outlier_channels": 64}},
    {**CODED, "param_gather": {"format": "bf16"}},
    {"linear": {"weight": MX}},
    {"param_gather": {"format": "e5m2"}},
    {"linear": {"input": {"scale": "static"}}},
    {"linear": {"input": {"scale": "static", "granularity": "tensor", "format": "int8"}}},
    {"linear": {"input": {"scale": "mse", "rounding": "stochastic"}}},
    {"linear": {"input": {"scale": "fitted", "format": "e2m1"}}},
    {"linear": {"input": {"static_exponent": 3}}},
    {"linear": {"input": {"rounding": "stochastic"}, "outlier_channels": 64}},
    {"linear": {"recast": {"scale": "fp32"}}},
    {"linear": {"recast": {"of": "fprop"}}},
    {"linear": {"recast": {"of": "fprop"}, "weight": MX, "input": {"rounding": "stochastic"}}},
    {"linear": {"recast": {"of": "fprop"}, "weight": MX, "rotation": {"wgrad": "in_features"}}},
    {"linear": {"rotation": {"dgrad": "out_features"}}},
    {"linear": {"input": {"scale": "static", "granularity": "tensor"}, "wgrad": {"input": "1x128"}}},
    {"linear": {"rotation": {"wgrad": "tokens"}}, "loss": {"head": "fp8"}},
]
NVME = {"device": "nvme", "nvme_path": "/nowhere"}


def zero(stage=3, **section):
    return {"zero_optimization": {"stage": stage, **section}}


CONFIGURATIONS = [
    {"bfloat16": {"enabled": True}},
    {**zero(0), "fp8": IN_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    {**zero(1), "fp8": IN_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {"bf16": {"enabled": False}},
    zero(zenflow={"topk_ratio": 0.1}),
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    {**zero(2, offload_optimizer=NVME), "fp8": "coat"},
    {**zero(offload_optimizer={"device": "cpu", "ratio": 0.5, "super_offload": True}), "fp8": "coat"},
    {**zero(2), "fp8": {**CODED, **IN_BF16, "enabled": True}},
    {**zero(2, offload_optimizer={"device": "cpu"}), "fp8": CODED},
    {"torch_autocast": {"enabled": True}},
    {"compile": {"deepcompile": True}},
    {"tensor_parallel": {"autotp_size": 2}},
    {"expert_parallel": {"enabled": True}},
    zero(zero_hpz_partition_size=2),
    zero(zero_quantized_weights=True, zero_quantized_nontrainable_weights=True, zero_quantized_gradients=True),
    zero(offload_param={"device": "cpu"}),
    zero(offload_optimizer=NVME),
    zero(reduce_scatter=False),
    {"data_types": {"grad_accum_dtype": "bf16"}},
    {"data_types": {"grad_accum_dtype": "fp16"}},
]


def found_in(example: dict) -> tuple[UserError, ...]:
    """Return the refusals of a configuration; that of a research key comes from research's section."""
    with pytest.raises(UserError) as caught:
        check(Configuration({"bf16": {"enabled": True}, **zero(), "fp8": {}, **example}, "ds.json"))
    return caught.value.all


def is_of(refusal: UserError, row: Row) -> bool:
    def as_pattern(words: str) -> str:
        text = re.sub(r"\{(?:c|found)\b[^{}]*\}", "\0", words.replace("{{", "\1").replace("}}", "\2"))
        return re.escape(text).replace("\0", ".+").replace("\1", r"\{").replace("\2", r"\}")

    words = zip((refusal.problem, refusal.remedy), (row.problem, row.remedy), strict=True)
    return refusal.key == row.key and all(re.fullmatch(as_pattern(row), given) for given, row in words)


def test_every_row_is_hit_by_an_example():
    examples = [*({"fp8": section} for section in SECTIONS), *CONFIGURATIONS]
    errors = [error for example in examples for error in found_in(example)]
    assert all(error.file == "ds.json" and "{c" not in str(error) for error in errors)
    missing = [row.problem for row in TABLE if not any(is_of(error, row) for error in errors)]
    assert missing == []
    rows = [sum(is_of(error, row) for row in TABLE) for error in errors]
    assert set(rows) == {1}, "every refusal of these examples is one of the table's"


def test_pairs_of_the_optimizers_own_arguments_are_rows_too():
    with pytest.raises(UserError, match="groups of 128") as caught:
        AdamW([], exp_avg="e4m3_expanded", granularity="tensor")
    assert caught.value.key == "fp8.optimizer.granularity"
