"""Values of DeepSpeed's own sections: refused with file, key and remedy where DeepSpeed refuses them or fails later."""

import copy

import pytest

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.deepspeed_values import check_values

GOOD = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def zero(**changes):
    return {"zero_optimization": {"stage": 3, **changes}}


# (change, key of the error)
WRONG = [
    ({"gradient_clipping": "auto"}, "gradient_clipping"),
    ({"gradient_clipping": None}, "gradient_clipping"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping"),
    ({"gradient_clipping": True}, "gradient_clipping"),
    ({"gradient_clipping": -1}, "gradient_clipping"),
    ({"gradient_clipping": {"value": 1}}, "gradient_clipping"),
    ({"prescale_gradients": True}, "prescale_gradients"),
    ({"prescale_gradients": "yes"}, "prescale_gradients"),
    ({"gradient_predivide_factor": 2}, "gradient_predivide_factor"),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
    ({"gradient_predivide_factor": None}, "gradient_predivide_factor"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op"),
    ({"communication_data_type": "int8"}, "communication_data_type"),
    ({"communication_data_type": 5}, "communication_data_type"),
    ({"steps_per_print": 0}, "steps_per_print"),
    ({"steps_per_print": "never"}, "steps_per_print"),
    ({"wall_clock_breakdown": "yes"}, "wall_clock_breakdown"),
    ({"log_level": "loud"}, "log_level"),
    ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype"),
    ({"data_types": {"grad_accum_dtype": 3}}, "data_types.grad_accum_dtype"),
    ({"data_types": "fp32"}, "data_types"),
    ({"checkpoint": {"tag_validation": 3}}, "checkpoint.tag_validation"),
    ({"checkpoint": {"tag_validation": "maybe"}}, "checkpoint.tag_validation"),
    ({"flops_profiler": {"enabled": True, "profile_step": "x"}}, "flops_profiler.profile_step"),
    ({"elasticity": {"enabled": True}}, "elasticity"),
    ({"csv_monitor": {"enabled": True, "output_path": None}}, "csv_monitor.output_path"),
    ({"csv_monitor": {"enabeld": True}}, "csv_monitor.enabeld"),
    ({"comms_logger": {"enabled": True, "prof_ops": 3}}, "comms_logger.prof_ops"),
    ({"zero_optimization": 3}, "zero_optimization"),
    (zero(stage=7), "zero_optimization.stage"),
    (zero(stgae=3), "zero_optimization.stgae"),
    (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size"),
    (zero(reduce_bucket_size="large"), "zero_optimization.reduce_bucket_size"),
    (zero(reduce_bucket_size=10**15), "zero_optimization.reduce_bucket_size"),
    (zero(allgather_bucket_size=10**15), "zero_optimization.allgather_bucket_size"),
    (zero(zero_hpz_partition_size=None), "zero_optimization.zero_hpz_partition_size"),
    (zero(mics_shard_size=-1), "zero_optimization.mics_shard_size"),
    (zero(sub_group_size=0), "zero_optimization.sub_group_size"),
    (zero(stage3_prefetch_bucket_size=-1), "zero_optimization.stage3_prefetch_bucket_size"),
    (zero(offload_optimizer={"device": "disk"}), "zero_optimization.offload_optimizer.device"),
    (zero(offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.nvme_path"),
    (zero(offload_param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16"),
]


@pytest.mark.parametrize(("change", "key"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_value_names_file_key_and_remedy(change, key):
    raw = copy.deepcopy({**GOOD, **change})
    before = copy.deepcopy(raw)
    with pytest.raises(UserError) as caught:
        check_values(Configuration(raw, "ds.json"))
    assert caught.value.key == key
    assert caught.value.file == "ds.json"
    assert caught.value.remedy
    assert len(str(caught.value)) < 1000
    assert raw == before


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_clipping": 0},
        {"gradient_clipping": 1},
        {"steps_per_print": float("inf")},  # Accelerate's
        {"steps_per_print": None},
        {"train_batch_size": 64, "gradient_accumulation_steps": 7},  # judged when the ranks are known
        {"train_micro_batch_size_per_gpu": "auto"},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},  # DeepSpeed takes its default
        {"prescale_gradients": True, "zero_optimization": {"stage": 2, "reduce_scatter": False}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": None}},
        {"fp8": {"preset": "coat"}, "model": {}, "data": {}, "train": {}},
        {"something": "of somebody else's"},
        {"optimizer": {"type": "Unheard", "params": None}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_deepspeed_works_with_is_accepted(change):
    check_values(Configuration({**GOOD, **change}))


def test_auto_is_explained():
    with pytest.raises(UserError) as caught:
        check_values(Configuration({**GOOD, "gradient_clipping": "auto"}))
    assert '"auto"' in caught.value.remedy
