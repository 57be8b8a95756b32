"""Checks before a model is converted: all mistakes at once, with file, keys and remedies."""

import copy
import functools
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine import preflight
from ds_fp8.engine.preflight import check, check_compiles, check_launch, check_parallelism, check_trains
from tests.ranks import on_ranks

GOOD = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
UNTESTED = {"zero_allow_untested_optimizer": True}
LINEAR = nn.Linear(4, 4)
BF16_WIRE = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}


def zero(**changes):
    return {"zero_optimization": {"stage": 3, **changes}}


def configuration(kind, params, **more):
    return {"zero_optimization": {"stage": 3}, "optimizer": {"type": kind, "params": params}, **more}


def adamw(**params):
    return configuration("AdamW", {"lr": 1e-3, "torch_adam": True, **params})


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def mistakes(raw, **more):
    """The mistakes of a configuration, by key."""
    before = copy.deepcopy(raw)
    with pytest.raises(UserError) as caught:
        check(Configuration(raw, "ds.json"), **more)
    assert raw == before
    for error in caught.value.all:
        assert error.file == "ds.json"
        assert error.remedy
        assert len(str(error)) < 1000 or error.others
    return {error.key: error for error in caught.value.all}


# Key of the error, and values of it
WRONG_VALUES = {
    "gradient_clipping": [None, "1.0", True, -1],
    "prescale_gradients": ["yes"],
    "gradient_predivide_factor": [0, None],
    "gradient_allreduce_op": ["sum"],
    "communication_data_type": ["int8", 5],
    "steps_per_print": [0, "never"],
    "wall_clock_breakdown": ["yes"],
    "log_level": ["loud"],
    "data_types.grad_accum_dtype": ["int8", 3],
    "data_types": ["fp32"],
    "checkpoint.tag_validation": [3, "maybe"],
    "zero_optimization": [3],
    "zero_optimization.stage": [7],
    "zero_optimization.stgae": [3],
    "zero_optimization.reduce_bucket_size": [0, "large"],
    "zero_optimization.zero_hpz_partition_size": [None],
    "zero_optimization.mics_shard_size": [-1],
    "zero_optimization.stage3_prefetch_bucket_size": [-1],
    "optimizer": [None, {"type": 3}],
    "optimizer.type": ["AdamX"],
    "optimizer.params": [None, [1]],
    "optimizer.params.betas": [[0.9], [0.9, 0.95, 0.99], 0.9, ["a", "b"]],
    "optimizer.params.lr": [True, None],
    "optimizer.params.weight_decay": ["no"],
    "optimizer.params.beta": [0.9],
    "optimizer.params.max_grad_norm": [1.0],
}


def with_value(key, value):
    raw = copy.deepcopy(GOOD | (adamw() if "optimizer" in key else {}))
    *sections, last = key.split(".")
    functools.reduce(lambda section, name: section.setdefault(name, {}), sections, raw)[last] = value
    return raw


# Change, key of the error, and what the remedy says
WRONG = [
    *((with_value(key, value), key) for key, values in WRONG_VALUES.items() for value in values),
    ({"flops_profiler": {"enabled": True, "profile_step": "x"}}, "flops_profiler.profile_step"),
    ({"elasticity": {"enabled": True}}, "elasticity"),
    ({"csv_monitor": {"enabled": True, "output_path": None}}, "csv_monitor.output_path"),
    ({"comms_logger": {"enabled": True, "prof_ops": 3}}, "comms_logger.prof_ops"),
    (zero(offload_optimizer={"device": "disk"}), "zero_optimization.offload_optimizer.device"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16"),
    (configuration("SGD", {"lr": 1e-3}), "optimizer.type"),
    (configuration("SGD", {"lr": 1e-3, "torch_adam": True}, **UNTESTED), "optimizer.params.torch_adam"),
    (configuration("SGD", {"betas": [0.9, 0.95]}, **UNTESTED), "optimizer.params.betas"),
    (configuration("LBFGS", {"lr": 1e-2}, **UNTESTED), "optimizer.type"),
    (configuration("SparseAdam", {"lr": 1e-2}, **UNTESTED), "optimizer.type"),
    (configuration("Muon", {"lr": 1e-2}), "zero_optimization.reduce_scatter"),
    (configuration("Muon", {"lr": 1e-2, "nesterov": True}), "optimizer.params.nesterov"),
    (configuration("Lion", {"eps": 1e-8}), "optimizer.params.eps"),
    (configuration("Lamb", {"lr": 1e-3}), "optimizer.type"),
    (configuration("MuAdamW", {"lr": 1e-3}), "optimizer.type"),
    ({**zero(stage=2), "optimizer": {"type": "AdamW", "params": {"maximize": True}}}, "optimizer.params.maximize"),
    # What programs of one's own get wrong outside of "fp8"
    ({"gradient_cliping": 1.0}, "gradient_cliping", '"gradient_clipping"'),
    ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", '"zero_optimization"'),
    ({"train_batchsize": 8}, "train_batchsize", '"train_batch_size"'),
    ({"optimiser": {"type": "AdamW"}}, "optimiser", '"optimizer"'),
    ({"steps_per_prints": 10}, "steps_per_prints", '"steps_per_print"'),
    ({"bf16": {"enable": True}}, "bf16.enable", '"enabled"'),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled", "true, without"),
    ({"bfloat16": {"enabled": True}}, "bfloat16", 'remove "bfloat16"'),
    ({"data_types": {"grad_accum_type": "fp32"}}, "data_types.grad_accum_type", '"grad_accum_dtype"'),
    ({"activation_checkpointing": {"cpu_checkpoint": True}}, "activation_checkpointing.cpu_checkpoint", "cpu_checkp"),
    ({"flops_profiler": {"enabeld": True}}, "flops_profiler.enabeld", '"enabled"'),
    ({"checkpoint": {"load_universall": True}}, "checkpoint.load_universall", '"load_universal"'),
    ({"timers": {"throughput": {"synchronised": False}}}, "timers.synchronised", ""),
    ({"timers": None}, "timers", "change"),
    ({"timers": []}, "timers", "change"),
    ({"train_batch_size": "8"}, "train_batch_size", "change"),
    ({"scheduler": {"type": []}}, "scheduler.type", "WarmupLR"),
    (zero(overlap_com=True), "zero_optimization.overlap_com", '"overlap_comm"'),
    (zero(overlap_comm="no"), "zero_optimization.overlap_comm", "false, without"),
    (zero(offload_optimizer={"devise": "cpu"}), "zero_optimization.offload_optimizer.devise", ""),
    (configuration("AdmW", {"lr": 1e-3}), "optimizer.type", '"AdamW"'),
    (adamw(wd=0.1), "optimizer.params.wd", "weight_decay"),
    (adamw(maximize="false"), "optimizer.params.maximize", "false, without"),
    (adamw(lr="1e-4"), "optimizer.params.lr", '"lr": 1e-4'),
    ({"optimizer": {"type": "AdamW", "parms": {"lr": 1e-3}}}, "optimizer.parms", '"params"'),
    (scheduler("WarmupLr"), "scheduler.type", '"WarmupLR"'),
    (scheduler("WarmupLR", warmup_steps=3), "scheduler.params.warmup_steps", '"warmup_num_steps"'),
    (scheduler("WarmupLR", warmup_num_steps="10"), "scheduler.params", "change"),
    (scheduler("WarmupDecayLR", warmup_num_steps=3), "scheduler.params.total_num_steps", '"total_num_steps"'),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: str(row[0])[:60])
def test_a_wrong_value_and_a_typo_name_file_key_and_remedy(row):
    change, key, *remedy = row
    found = mistakes({**GOOD, **({"fp8": {}} if remedy else {}), **change})
    assert key in found
    assert all(words in found[key].remedy for words in remedy)


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
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": None}},
        {"fp8": {"preset": "coat"}, "model": {}, "data": {}, "train": {"run_dir": "true"}},
        {"_comment": "of a person"},
        *(
            {**zero(stage=stage), "fp8": BF16_WIRE, "data_types": {"grad_accum_dtype": dtype}}
            for stage, dtype in ((2, "fp32"), (1, "bf16"))
        ),
        {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
        scheduler("WarmupDecayLR", total_num_steps=100, warmup_num_steps=10, warmup_max_lr=[1e-3, 1e-4]),
        scheduler("WarmupCosineLR", total_num_steps="auto", warmup_num_steps="auto"),
        scheduler("StepLR", step_size=10),
        scheduler("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-3),
        {"scheduler": {}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_deepspeed_works_with_is_accepted(change):
    for section in ({}, {"fp8": {}} if "scheduler" in change else {}):
        check(Configuration({**GOOD, **section, **change}))


@pytest.mark.parametrize("key", ["autotuning", "comms_logger", "pipeline", "torch_autocast"])
def test_a_section_without_a_value_is_named_beside_deepspeeds_words(key):
    assert f'"{key}" cannot be None' in mistakes({**GOOD, "fp8": {}, key: None})[key].problem


def test_a_key_that_is_only_in_the_shown_value_is_not_named():
    section = {"enabled": True, "data_sampling": {"enabled": False}, "data_routing": 5}
    found = mistakes({**GOOD, "data_efficiency": section})
    assert found.keys() == {"data_efficiency"}
    assert "no attribute" in found["data_efficiency"].problem


def test_all_mistakes_are_told_at_once():
    raw = {**GOOD, "fp8": {}, "gradient_cliping": 1, **adamw(wd=1), **scheduler("NoSuch"), **zero(stage=2)}
    found = mistakes(raw)
    assert found.keys() == {"gradient_cliping", "zero_optimization.stage", "optimizer.params.wd", "scheduler.type"}
    remedy = found["zero_optimization.stage"].remedy
    assert '"stage": 3' in remedy
    assert '"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}' in remedy
    with pytest.raises(UserError) as caught:
        check(Configuration(raw, "ds.json"))
    assert all(key in str(caught.value) for key in found)
    # What the caller passes takes the place of the sections.
    given = torch.optim.AdamW(LINEAR.parameters())
    assert mistakes(raw, optimizer=given, scheduler_given=True).keys() == {
        "gradient_cliping",
        "zero_optimization.stage",
    }


def test_parameters_to_train_need_an_optimizer():
    with pytest.raises(UserError) as caught:
        check_trains(Configuration(GOOD, "ds.json"), None, [])
    assert (caught.value.key, caught.value.file) == ("optimizer", "ds.json")
    check_trains(Configuration(GOOD), None, None)  # an engine that evaluates
    check_trains(Configuration(GOOD), object(), [])
    check_trains(Configuration(adamw()), None, [])


@pytest.mark.parametrize(
    "raw",
    [
        adamw(),
        adamw(betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, adam_w_mode=True, amsgrad=False, foreach=True),
        adamw(lr=0),
        configuration("Adam", {"torch_adam": True, "adam_w_mode": False}),
        configuration("Adagrad", {"lr": 1e-2}),
        configuration("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, **UNTESTED),
        configuration("Adafactor", {"lr": 1e-3}, **UNTESTED),
        configuration("Lion", {"lr": 1e-4, "betas": [0.9, 0.99]}),
        {**configuration("Muon", {"lr": 1e-2, "torch_adam": True}), **zero(reduce_scatter=False)},
        {**configuration("Muon", {"muon_lr": 1e-2, "adam_lr": 1e-3, "ns_method": "gram"}), **zero(stage=1)},
        configuration("RMSprop", {"lr": 1e-3}, **UNTESTED),
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}},  # without ZeRO DeepSpeed asks for no test
    ],
    ids=lambda raw: str(raw["optimizer"])[:70],
)
def test_what_the_optimizer_takes_is_accepted(raw):
    check(Configuration(raw))


@pytest.mark.parametrize(
    ("kind", "raw", "key"),
    [
        (torch.optim.SGD, zero(), "optimizer.type"),
        (torch.optim.LBFGS, {**zero(), **UNTESTED}, "optimizer.type"),
        (torch.optim.Muon, {**zero(stage=1), **UNTESTED}, "optimizer.type"),
        (torch.optim.SGD, {**zero(offload_optimizer={"device": "cpu"}), **UNTESTED}, "zero_force_ds_cpu_optimizer"),
    ],
)
def test_an_optimizer_that_is_given_is_judged_too(kind, raw, key):
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    assert mistakes({**GOOD, **raw}, optimizer=optimizer).keys() == {key}
    right = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    check(Configuration({**GOOD, **raw, **right}), optimizer=torch.optim.SGD(LINEAR.parameters()))


def test_params_are_refused_under_the_name_that_the_section_gives():
    raw = {**GOOD, **configuration("Muon", {"nesterov": True}), **zero(stage=2)}
    assert mistakes(raw)["optimizer.params.nesterov"].problem == "Muon takes no 'nesterov'"


def test_muon_in_stage_3_is_told_the_keys_of_both():
    raw = {**GOOD, "fp8": {}, **configuration("Muon", {"torch_adam": True})}
    remedy = mistakes(raw)["zero_optimization.reduce_scatter"].remedy
    assert '"reduce_scatter": false' in remedy
    whole = {**raw, "fp8": {"grad_reduce": {"format": "bf16"}}, **zero(reduce_scatter=False)}
    check(Configuration(whole))


@pytest.mark.parametrize(
    ("raw", "missing"),
    [
        (configuration("Lion", {}), "implementation for the device 'cpu'"),
        (configuration("Lamb", {}), "implementation for the device 'cpu'"),
        ({**configuration("Lion", {}), **zero(offload_optimizer={"device": "cpu"})}, "a C\\+\\+ compiler"),
        ({**zero(stage=2), "optimizer": {"type": "AdamW"}}, "a C\\+\\+ compiler"),
    ],
)
def test_what_deepspeed_cannot_compile_here_is_refused(monkeypatch, raw, missing):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(UserError, match=missing) as caught:
        check_compiles(Configuration({**GOOD, **raw}, "ds.json"))
    assert (caught.value.key, caught.value.file) == ("optimizer.type", "ds.json")
    check_compiles(
        Configuration({**GOOD, **zero(stage=2), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    )
    check_compiles(Configuration({**GOOD, "fp8": {}, **configuration("AdamW", {})}))  # a step of this package's


@pytest.mark.parametrize(
    "name", ["get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size"]
)
def test_tensors_split_over_ranks_are_refused(name):
    with pytest.raises(UserError, match="tensor parallelism"):
        check_parallelism(LINEAR, SimpleNamespace(**{name: lambda: 2}))
    check_parallelism(LINEAR, SimpleNamespace(**{name: lambda: 1}))
    # As DeepSpeed-Ulysses' own mpu, which calls the ranks of a sequence model-parallel.
    groups = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_model_parallel_world_size=lambda: 2)
    check_parallelism(LINEAR, groups)


@on_ranks(2)
def test_pipelines_and_deepspeeds_experts_are_refused():
    pipeline = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1)
    for model, words in ((pipeline, "pipeline parallelism"), (MoE(4, nn.Linear(4, 4), num_experts=2), "MoE")):
        with pytest.raises(UserError, match=words):
            check_parallelism(nn.Sequential(model) if words == "MoE" else model, None)


@pytest.fixture
def started(monkeypatch):
    """A process that was started with these variables, and sees so many GPUs."""

    def start(gpus=0, joined=False, **variables):
        for name in (*ALL, "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        accelerator = SimpleNamespace(device_name=lambda: "cuda" if gpus else "cpu")
        monkeypatch.setattr(preflight, "get_accelerator", lambda: accelerator)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)

    return start


ALL = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="DeepSpeed asks MPI")
def test_variables_that_nobody_set_are_named(started):
    started()
    with pytest.raises(UserError) as error:
        check_launch()
    assert all(name in error.value.problem for name in ALL)
    assert all(f"{name}={value}" in error.value.remedy for name, value in ALL.items())
    started(**{name: value for name, value in ALL.items() if name != "MASTER_PORT"})
    with pytest.raises(UserError, match="has no MASTER_PORT, which"):
        check_launch()


def test_what_is_missing_where_ranks_have_met(started):
    started(**ALL)
    check_launch()
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        started(joined=True, **{name: "0"})
        check_launch()
    started(joined=True)
    with pytest.raises(UserError, match="has no LOCAL_RANK, which"):  # they still need their GPU
        check_launch()


def test_a_rank_that_sees_one_gpu_calls_it_0(started):
    started(gpus=1, **{**ALL, "LOCAL_RANK": "1"})
    with pytest.raises(UserError, match=r"LOCAL_RANK is 1, but this process sees 1 GPU\n") as error:
        check_launch()
    assert "LOCAL_RANK=0" in error.value.remedy
    started(gpus=2, **{**ALL, "LOCAL_RANK": "1"})
    check_launch()
    assert os.environ["LOCAL_RANK"] == "1"
