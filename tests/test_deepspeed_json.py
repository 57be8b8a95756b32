"""The one view of a DeepSpeed configuration: parsed by DeepSpeed's models, changed in one function."""

import copy
import json

import pytest

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.initialize import _for_deepspeed
from ds_fp8.engine.optimizer import uses_own_optimizer

GOOD = {
    "fp8": {},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def with_zero(**changes):
    return Configuration({**GOOD, "zero_optimization": {"stage": 3, **changes}})


@pytest.mark.parametrize(
    ("section", "device"),
    [
        ({}, "none"),
        ({"offload_optimizer": None}, "none"),
        ({"offload_optimizer": {"device": "none"}}, "none"),
        ({"offload_optimizer": {"device": "cpu"}}, "cpu"),
        ({"offload_optimizer": {}}, "none"),
        ({"cpu_offload": True}, "cpu"),  # DeepSpeed's old name of it
    ],
)
def test_where_the_optimizer_is_kept_is_as_deepspeed_reads_it(section, device):
    configuration = with_zero(**section)
    assert configuration.optimizer_device == device
    assert uses_own_optimizer(configuration) == (device == "none")


def test_keys_that_are_absent_have_deepspeeds_defaults():
    configuration = Configuration({})
    assert (configuration.stage, configuration.zero.reduce_scatter, configuration.bf16.enabled) == (0, True, False)
    assert (configuration.optimizer_type, configuration.optimizer_params) == ("", {})
    assert configuration.parameter_device == "none"
    assert configuration.given("data", "sequence_length") is None
    assert not configuration.fp8.enabled


def test_zero_optimization_may_be_a_word_of_old():
    assert Configuration({"zero_optimization": True}).stage == 1


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("own", [True, False])
def test_what_deepspeed_is_given_is_what_was_given_and_what_fp8_needs(stage, own):
    given = {**copy.deepcopy(GOOD), "zero_optimization": {"stage": stage}, "somebody": {"else": 1}}
    before = copy.deepcopy(given)
    handed = _for_deepspeed(Configuration(given), own, {})
    assert given == before
    added = {key: handed[key] for key in handed.keys() - given.keys()}
    assert {key: handed[key] for key in given} == given
    assert added == (
        {"timers": {"throughput": {"synchronized": False}}}
        | ({"data_types": {"grad_accum_dtype": "fp32"}} if stage == 3 else {})
        | ({"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False} if own else {})
    )


def test_what_the_user_has_set_stays():
    chosen = {"timers": {"throughput": {"synchronized": True}}, "data_types": {"grad_accum_dtype": "bf16"}}
    handed = _for_deepspeed(Configuration({**GOOD, **chosen}), False, {})
    assert {key: handed[key] for key in chosen} == chosen


def test_without_fp8_nothing_is_changed():
    plain = {key: value for key, value in GOOD.items() if key != "fp8"}
    assert _for_deepspeed(Configuration(plain), False, {}) == plain


def test_deepspeeds_refusal_names_the_file_and_its_key(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**GOOD, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}))
    configuration = Configuration.read(file)
    with pytest.raises(UserError, match="MiCS") as caught:
        configuration.zero  # noqa: B018
    assert (caught.value.file, caught.value.key) == (str(file), "zero_optimization.mics_shard_size")
