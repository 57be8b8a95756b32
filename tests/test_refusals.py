"""Every row of the table of refusals is hit by an example, with its key, its words and a remedy without a gap."""

import copy
import re
from pathlib import Path

import pytest

import ds_fp8.research  # noqa: F401  adds the rows of its sections
from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override
from ds_fp8.config.refusals import NAMED_DATA, SHARED, TABLE, Row
from ds_fp8.engine.preflight import check
from ds_fp8.optim import AdamW
from ds_fp8.train.stage import checked_stage
from tests.train.tiny_stage import TINY

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
    *({"linear": {"weight": weight}} for weight in (MX, {"format": "int8"}, {"rounding": "stochastic"})),
    {"param_gather": {"format": "e5m2"}},
    {"linear": {"input": {"scale": "static"}}},
    {"linear": {"input": {"scale": "static", "granularity": "tensor", "format": "int8"}}},
    *({"linear": {cast: {"scale": "mse", "rounding": "stochastic"}}} for cast in ("input", "grad_output")),
    {"linear": {"input": {"scale": "fitted", "format": "e2m1"}}},
    {"linear": {"input": {"static_exponent": 3}}},
    {"linear": {"input": {"rounding": "stochastic"}, "outlier_channels": 64}},
    *({"linear": {"recast": recast}} for recast in ({"scale": "fp32"}, {"rounding": "nearest"})),
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


IN_FP32, STATE = {"grad_accum_dtype": "fp32"}, {"optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"}}
HALVED = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
ZERO = "zero_optimization"
# Configurations, and by key what the remedy says
CONFIGURATIONS = [
    ({"bfloat16": {"enabled": True}}, {}),
    ({**zero(0), "fp8": IN_BF16, "data_types": IN_FP32}, {"data_types.grad_accum_dtype": ""}),
    ({**zero(1), "fp8": IN_BF16, "data_types": IN_FP32}, {"data_types.grad_accum_dtype": '"stage": 2'}),
    ({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, {}),
    ({"bf16": {"enabled": False}}, {"bf16.enabled": '"enabled": true'}),
    ({"bf16": None}, {"bf16.enabled": '"enabled": true'}),
    (zero(zenflow={"topk_ratio": 0.1}), {f"{ZERO}.zenflow": "remove"}),
    ({"bf16": HALVED}, {}),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}, "fp8": STATE}, {"bf16.bf16_optimizer_states": ""}),
    ({**zero(2, offload_optimizer=NVME), "fp8": "coat"}, {}),
    ({**zero(offload_optimizer=NVME), "fp8": STATE}, {f"{ZERO}.offload_optimizer.device": ""}),
    (
        {**zero(offload_optimizer={"device": "cpu", "ratio": 0.5, "super_offload": True}), "fp8": "coat"},
        {f"{ZERO}.offload_optimizer.{key}": "" for key in ("ratio", "super_offload")},
    ),
    ({**zero(2), "fp8": {**CODED, **IN_BF16, "enabled": True}}, {}),
    ({**zero(2, offload_optimizer={"device": "cpu"}), "fp8": CODED}, {}),
    *((zero(stage), {f"{ZERO}.stage": '"stage": 3'}) for stage in (0, 2)),
    ({"optimizer": {"params": {"lr": 1e-4}}}, {}),
    ({"optimizer": {"type": "MuAdam", "params": {}}, "zero_allow_untested_optimizer": True}, {}),
    ({"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, {}),
    ({"torch_autocast": {"enabled": True}}, {"torch_autocast.enabled": "remove"}),
    ({"compile": {"deepcompile": True}}, {"compile.deepcompile": '"deepcompile": false'}),
    ({"tensor_parallel": {"autotp_size": 2}}, {"tensor_parallel.autotp_size": "remove"}),
    ({"expert_parallel": {"enabled": True}}, {"expert_parallel.enabled": "remove"}),
    *((zero(zero_hpz_partition_size=size), {f"{ZERO}.zero_hpz_partition_size": "remove"}) for size in (2, "2")),
    (zero(**dict.fromkeys(QUANTIZED, True)), {f"{ZERO}.{key}": "false" for key in QUANTIZED}),
    *((zero(**{key: True}), {f"{ZERO}.{key}": "false"}) for key in QUANTIZED),
    (zero(mics_shard_size=4), {f"{ZERO}.mics_shard_size": "remove"}),
    *((zero(offload_param={"device": d}), {f"{ZERO}.offload_param.device": "param_gather"}) for d in ("cpu", "nvme")),
    (zero(offload_optimizer=NVME), {f"{ZERO}.offload_optimizer.device": "cpu"}),
    (zero(reduce_scatter=False), {f"{ZERO}.reduce_scatter": "true"}),
    *(({"data_types": {"grad_accum_dtype": d}}, {"data_types.grad_accum_dtype": "fp32"}) for d in ("bf16", "fp16")),
    (
        {"data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 2},
        {"data_types.grad_accum_dtype": '"gradient_accumulation_steps": 1'},
    ),
]


OF_STAGES = ("TrainConfig", "DataConfig", NAMED_DATA, SHARED, "Stage")
NOT_IN_A_STAGE = ("fp16", "torch_autocast", "weight_quantization", "data_efficiency", "hybrid_engine", "autotuning")
NOT_IN_A_STAGE += ("datastates_ckpt", "tensor_parallel", "expert_parallel", "pipeline")
TWO = ["sequence_parallel_size=2"]
STAGES = [  # changes of a stage on two ranks
    ["train.steps=null"],
    ["train.epochs=3"],
    ["train.spike=rollback"],
    ["train.keep_best=true"],
    ["train.keep_best=true", "train.save_every=3", "train.eval_every=2"],
    ['data.sources=[{"path": "x"}]'],
    ['data={"sources": [], "tokenizer": "t"}'],
    ["data.validation_fraction=0.5", "data.test_fraction=0.5"],
    ["data.path=null"],
    ["data.tokenizer=null"],
    [*TWO, "model.attn_implementation=sdpa"],
    [*TWO, "data.sequence_length=63"],
    [*TWO, "zero_optimization.stage=2", "fp8.enabled=false"],
    [*TWO, "train.eval_bf16=true"],
    ['scheduler={"type": "WarmupLR"}', *(f"{key}={{}}" for key in NOT_IN_A_STAGE)],
    ['activation_checkpointing={"cpu_checkpointing": true}'],
    ["bf16.enabled=false", "fp8.enabled=false"],
    [f'{key}={{"enabled": true}}' for key in ("tensorboard", "wandb", "comet")],
    ["train.compact_checkpoints=true"],
    ["model.config=null"],
    ["model.path=some/where"],
    ["train.init_from=runs/before"],
    ["train.run_dir=  "],
    ["train.run_dir=/tmp/.."],
    ["data.tokens_per_gpu=64"],
]


def found_in_stage(changes: list[str]) -> tuple[UserError, ...]:
    raw = copy.deepcopy(TINY)
    for change in changes:
        apply_override(raw, change)
    with pytest.raises(UserError) as caught:
        checked_stage(raw, Path("stage.json"), 2)
    return caught.value.all


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


def of_table(errors: list[UserError], rows: list[Row]) -> None:
    """Check that each row is hit, and that each of the errors is one of the table's."""
    assert not any("{c" in str(error) for error in errors)
    assert [row.problem for row in rows if not any(is_of(error, row) for error in errors)] == []
    assert {sum(is_of(error, row) for row in TABLE) for error in errors} == {1}


def test_every_row_is_hit_by_an_example():
    examples = [*({"fp8": section} for section in SECTIONS), *(example for example, _ in CONFIGURATIONS)]
    errors = [error for example in examples for error in found_in(example)]
    assert all(error.file == "ds.json" and error.remedy for error in errors)
    ours = [error for error in errors if not error.problem.startswith("DeepSpeed refuses")]
    of_table(ours, [row for row in TABLE if row.of not in OF_STAGES])


def test_every_row_of_a_stage_is_hit_by_an_example(monkeypatch):
    monkeypatch.setattr("ds_fp8.config.refusals.find_spec", lambda package: None)
    errors = [error for changes in STAGES for error in found_in_stage(changes)]
    of_table(errors, [row for row in TABLE if row.of in OF_STAGES])


@pytest.mark.parametrize(("example", "remedies"), CONFIGURATIONS, ids=lambda value: str(value)[:70])
def test_an_example_is_refused_with_its_key_and_remedy(example, remedies):
    found = {error.key: error for error in found_in(example)}
    for key, words in remedies.items():
        assert words in found[key].remedy


def test_pairs_of_the_optimizers_own_arguments_are_rows_too():
    with pytest.raises(UserError, match="groups of 128") as caught:
        AdamW([], exp_avg="e4m3_expanded", granularity="tensor")
    assert caught.value.key == "fp8.optimizer.granularity"
