"""The "fp8" section, and the one view of a DeepSpeed configuration."""

import copy
import json

import pytest
import torch

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.config.linear import LinearConfig
from ds_fp8.config.presets import AXES, PRESETS, merge
from ds_fp8.engine.initialize import _for_deepspeed
from ds_fp8.engine.optimizer import uses_own_optimizer
from ds_fp8.engine.preflight import check
from ds_fp8.engine.state import FP8State

GOOD = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def parse(section) -> FP8Config:
    return parse_fp8({"fp8": section})


def mistake(section) -> UserError:
    with pytest.raises(UserError) as error:
        parse_fp8({"fp8": section}, "ds.json")
    assert str(error.value.file) == "ds.json"
    assert len(str(error.value).splitlines()) <= 5
    assert len(str(error.value)) < 600
    return error.value


def casts(config: FP8Config) -> dict[str, tuple[str, str, str]]:
    linear = config.linear
    return {
        name: (cast.format, cast.granularity, cast.scale)
        for name, cast in (("input", linear.input), ("weight", linear.weight), ("grad_output", linear.grad_output))
    }


INFIR2 = {
    "input": ("e4m3", "1x128", "pow2"),
    "weight": ("e4m3", "128x128", "pow2"),
    "grad_output": ("e4m3", "1x128", "pow2"),
}
TENSORWISE = {
    "input": ("e4m3", "tensor", "pow2"),
    "weight": ("e4m3", "tensor", "pow2"),
    "grad_output": ("e5m2", "tensor", "pow2"),
}


def test_outlier_channels_take_fitted_scales_for_inputs_alone():
    section = {"preset": "precise", "linear": {"weight": {"scale": "fitted"}}}
    assert mistake(section).key == "fp8.linear.outlier_channels"


def test_presets():
    sources = {"fp8lm_o1", "fp8lm_o2", "fp8lm_o3", "coat"}
    assert set(PRESETS) == {"infir2", "compact", "hybrid_fast", "precise", "rowwise", "tensorwise"} | sources
    assert casts(parse({"preset": "hybrid_fast"})) == INFIR2
    assert parse({"preset": "hybrid_fast"}).linear.wgrad.input == "128x128"
    assert parse({"preset": "precise"}).linear.outlier_channels == 128
    assert {granularity for _, granularity, _ in casts(parse({"preset": "rowwise"})).values()} == {"row"}
    assert casts(parse({"preset": "infir2"})) == casts(parse({"preset": "compact"})) == INFIR2
    for preset in ("tensorwise", *sources):
        assert casts(parse({"preset": preset})) == TENSORWISE


def test_munit_has_static_scales_alone():
    static = ("e4m3", "tensor", "static")
    found = casts(parse({"preset": "munit"}))
    assert found == {"input": static, "weight": static, "grad_output": ("e5m2", "tensor", "static")}
    assert str(parse({"preset": "munit"}).linear.grad_output) == "e5m2 tensor static 2^-24"


def test_infir2_is_the_default_everywhere():
    assert parse({}) == parse({"preset": "infir2"}) == FP8Config()
    assert parse({}).enabled
    assert casts(FP8Config()) == INFIR2


@pytest.mark.parametrize("raw", [{}, {"bf16": {"enabled": True}}])
def test_no_section_is_disabled(raw):
    assert not parse_fp8(raw).enabled
    assert not parse({"enabled": False, "preset": "tensorwise"}).enabled


@pytest.mark.parametrize(
    ("section", "name", "expected"),
    [
        ({"linear": {"weight": {"scale": "fp32"}}}, "weight", ("e4m3", "128x128", "fp32")),
        ({"linear": {"weight": {"format": "e4m3"}}}, "weight", ("e4m3", "128x128", "pow2")),
        ({"linear": {"weight": {}}}, "weight", ("e4m3", "128x128", "pow2")),
        ({"linear": {"input": {"granularity": "row"}}}, "input", ("e4m3", "row", "pow2")),
        ({"preset": "tensorwise", "linear": {"input": {"scale": "fp32"}}}, "input", ("e4m3", "tensor", "fp32")),
        ({"preset": "tensorwise", "linear": {"weight": {"scale": "fp32"}}}, "weight", ("e4m3", "tensor", "fp32")),
        (
            {"preset": "tensorwise", "linear": {"grad_output": {"granularity": "row"}}},
            "grad_output",
            ("e5m2", "row", "pow2"),
        ),
        ({"preset": "tensorwise", "linear": {"skip": []}}, "input", ("e4m3", "tensor", "pow2")),
    ],
)
def test_a_preset_supplies_what_the_user_leaves_out(section, name, expected):
    preset = TENSORWISE if section.get("preset") == "tensorwise" else INFIR2
    assert casts(parse(section)) == {**preset, name: expected}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_constructor_from_preset_and_json_are_one(preset):
    assert FP8Config(preset=preset) == FP8Config.from_preset(preset) == parse({"preset": preset})
    assert FP8Config(preset=preset) == FP8Config.model_validate_json(json.dumps({"preset": preset}))
    assert set(PRESETS[preset]) <= set(AXES)
    for axis, values in PRESETS[preset].items():
        section = getattr(FP8Config(preset=preset), axis).model_dump()
        assert merge(section, values) == section


@pytest.mark.parametrize("preset", ["nonsense", None, 3, {"linear": "nonsense"}, {"monitor": "coat"}])
def test_no_constructor_takes_a_preset_that_is_none(preset):
    for make in (FP8Config, FP8Config.from_preset, lambda preset: parse({"preset": preset})):
        with pytest.raises(UserError) as error:
            make(preset=preset)
        assert error.value.key.startswith("fp8.preset")
        assert error.value.remedy


def test_sections_may_come_from_different_presets():
    mixed = FP8Config.from_preset("infir2", optimizer="coat", monitor={"every": 0})
    assert mixed.optimizer == FP8Config(preset="coat").optimizer
    assert mixed.grad_reduce == FP8Config().grad_reduce != FP8Config(preset="coat").grad_reduce
    assert mixed.monitor.every == 0
    # An object is taken whole, a mapping changes keys.
    assert FP8Config.from_preset("tensorwise", linear=LinearConfig()).linear == LinearConfig()
    assert FP8Config.from_preset("tensorwise", linear={"skip": []}).linear.input.granularity == "tensor"
    assert parse({"preset": {"linear": "infir2", "optimizer": "coat"}}).optimizer == mixed.optimizer
    other = FP8Config.from_preset("fp8lm_o3", optimizer="coat", linear={"skip": []})
    assert other.linear == FP8Config(preset="tensorwise", linear={"skip": []}).linear
    assert other.grad_reduce == FP8Config(preset="fp8lm_o3").grad_reduce
    assert "optimizer of coat" in other.preset_name
    changed = parse({"preset": {"optimizer": "coat"}, "optimizer": {"exp_avg": "fp32"}})
    assert (changed.optimizer.exp_avg, changed.optimizer.exp_avg_sq) == ("fp32", "e4m3_expanded")


@pytest.mark.parametrize(
    ("changes", "key"), [({"liner": {}}, "fp8.liner"), ({"optimizer": "cot"}, "fp8.preset.optimizer")]
)
def test_a_wrong_change_of_a_preset_names_its_key(changes, key):
    with pytest.raises(UserError) as error:
        FP8Config.from_preset("coat", **changes)
    assert error.value.key == key
    assert "Did you mean" in error.value.remedy


def test_what_is_parsed_is_left_alone():
    section = {"preset": "tensorwise", "linear": {"input": {"scale": "fp32"}}}
    before, presets = copy.deepcopy(section), copy.deepcopy(PRESETS)
    parse(section)
    assert section == before
    assert presets == PRESETS


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ({"liner": {}}, "fp8.liner", "linear"),
        ({"param_gahter": {}}, "fp8.param_gahter", "param_gather"),
        ({"linear": {"grad_outputs": {}}}, "fp8.linear.grad_outputs", "grad_output"),
        ({"linear": {"input": {"formt": "e4m3"}}}, "fp8.linear.input.formt", "format"),
        ({"linear": {"weight": {"granularty": "tensor"}}}, "fp8.linear.weight.granularty", "granularity"),
        ({"grad_reduce": {"scales": 128}}, "fp8.grad_reduce.scales", "scale"),
        ({"monitor": {"evry": 1}}, "fp8.monitor.evry", "every"),
    ],
)
def test_an_unknown_key_names_the_nearest(section, key, meant):
    error = mistake({"preset": "coat", **section})
    assert error.key == key
    assert f'"{meant}"' in error.remedy


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"enabled": "maybe"}, "fp8.enabled"),
        ({"preset": False, "optimizer": "coat"}, "fp8.preset"),
        ({"preset": None, "optimizer": "coat"}, "fp8.preset"),
        ({"preset": [[]], "linear": "infir2"}, "fp8.preset"),
        ({"linear": None}, "fp8.linear"),
        ({"linear": {"backend": "cutlass"}}, "fp8.linear.backend"),
        ({"linear": {"input": {"format": "e4m4"}}}, "fp8.linear.input.format"),
        ({"linear": {"input": {"granularity": "1x64"}}}, "fp8.linear.input.granularity"),
        ({"linear": {"input": {"scale": "pow3"}}}, "fp8.linear.input.scale"),
        ({"linear": {"weight": {"granularity": "1x128"}}}, "fp8.linear.weight.granularity"),
        ({"linear": {"wgrad": {"input": "1x64"}}}, "fp8.linear.wgrad.input"),
        ({"linear": {"accumulation": "fp16"}}, "fp8.linear.accumulation"),
        ({"linear": {"skip": "lm_head"}}, "fp8.linear.skip"),
        ({"activations": {"save": "fp16"}}, "fp8.activations.save"),
        ({"param_gather": {"format": "int8"}}, "fp8.param_gather.format"),
        ({"param_gather": {"format": "bf16", "frozen": "whole"}}, "fp8.param_gather.frozen"),
        ({"param_gather": {"format": "e4m4"}}, "fp8.param_gather.format"),
        ({"grad_reduce": {"format": None}}, "fp8.grad_reduce.format"),
        ({"grad_reduce": {"scale": "deep"}}, "fp8.grad_reduce.scale"),
        ({"optimizer": {"exp_avg": "int5"}}, "fp8.optimizer.exp_avg"),
        ({"monitor": {"every": -1}}, "fp8.monitor.every"),
        ({"monitor": {"every": "often"}}, "fp8.monitor.every"),
        ({"monitor": {"min_snr_db": float("nan")}}, "fp8.monitor.min_snr_db"),
    ],
)
def test_a_wrong_value_names_its_key(section, key):
    error = mistake(section)
    assert error.key == key
    assert error.remedy


def test_a_section_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        FP8Config().linear.backend = "cublas"


@pytest.mark.parametrize(("word", "section"), [("coat", {"preset": "coat"}), (True, {})])
def test_a_word_is_a_section(word, section):
    assert parse(word) == parse(section)
    raw = {"fp8": word}
    apply_override(raw, "fp8.monitor.every=7")
    assert parse_fp8(raw).monitor.every == 7


@pytest.mark.parametrize(
    "override",
    ["fp8.optimizer=coat", "fp8.preset.optimizer=coat", 'fp8.preset={"linear":"precise","optimizer":"coat"}'],
)
@pytest.mark.parametrize("section", ["precise", {"preset": "precise"}])
def test_a_part_of_a_preset_is_set_from_the_command_line(section, override):
    raw = {"fp8": section}
    apply_override(raw, override)
    config = parse_fp8(raw)
    assert config.optimizer.exp_avg == "e4m3_expanded"
    assert config.linear.outlier_channels == 128
    assert config.grad_reduce.format == "e4m3"


@pytest.mark.parametrize("section", [None, False, 3, []])
def test_a_section_that_is_no_object(section):
    assert mistake(section).key == "fp8"


@pytest.mark.parametrize(
    ("preset", "remedy"),
    [
        ("infir", "infir2"),
        ("tensor_wise", "tensorwise"),
        ("zzz", "infir2, munit, mxfp8, nvfp4, precise, quartet, rowwise, tensorwise"),
    ],
)
def test_an_unknown_preset_names_the_nearest(preset, remedy):
    error = mistake({"preset": preset})
    assert error.key == "fp8.preset"
    assert remedy in error.remedy


@pytest.mark.parametrize("key", ["FP8", "fp_8", "fp-8", "Fp8"])
def test_a_misspelt_section_is_no_silent_bf16(key):
    with pytest.raises(UserError) as error:
        parse_fp8({**GOOD, key: {}}, "ds.json")
    assert error.value.key == key
    assert '"fp8"' in error.value.remedy


def test_gathered_bytes_are_those_multiplied():
    error = mistake({"param_gather": {"format": "e5m2"}})
    assert error.key == "fp8.param_gather.format"
    assert '"e4m3"' in error.remedy
    assert mistake({"linear": {"weight": {"format": "e5m2"}}}).key == "fp8.param_gather.format"
    weight = {"linear": {"weight": {"format": "e5m2"}}}
    assert parse({**weight, "param_gather": {"format": "e5m2"}}).param_gather.format == "e5m2"
    assert parse({**weight, "param_gather": {"format": "bf16"}}).param_gather.format == "bf16"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"bf16": {"enabled": "auto"}},
        {"compile": {"deepcompile": False}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"expert_parallel": {"enabled": False}},
        {"torch_autocast": {"enabled": False}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": None}},
        {"data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 1},
        *(
            {"zero_optimization": {"stage": 3, **harmless}}
            for harmless in [
                {"zero_hpz_partition_size": 1},
                {"zero_quantized_weights": False},
                {"offload_param": {"device": "none"}},
                {"offload_param": None},
                {"offload_optimizer": {"device": "cpu"}},
                {"reduce_scatter": True},
            ]
        ),
    ],
)
def test_what_goes_together_is_accepted(change):
    check(Configuration({**GOOD, **change, "fp8": {}}))


BF16_WIRE = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}


@pytest.mark.parametrize(
    ("section", "zero"),
    [
        (BF16_WIRE, {"stage": 2}),
        (BF16_WIRE, {"stage": 0}),
        ({"param_gather": {"format": "bf16"}}, {"stage": 3, "offload_param": {"device": "cpu"}}),
        ({"grad_reduce": {"format": "bf16"}}, {"stage": 3, "reduce_scatter": False}),
    ],
)
def test_the_remedy_of_a_bf16_wire_helps(section, zero):
    check(Configuration({**GOOD, "zero_optimization": zero, "fp8": section}))


@pytest.mark.parametrize("left", BF16_WIRE)
def test_one_fp8_wire_is_enough_to_need_stage_3(left):
    section = {key: value for key, value in BF16_WIRE.items() if key != left}
    with pytest.raises(UserError) as error:
        check(Configuration({**GOOD, "zero_optimization": {"stage": 2}, "fp8": section}))
    assert left in error.value.remedy


# ---------------------------------------------------------------- the one view of a DeepSpeed configuration


GIVEN = {
    "fp8": {},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def with_zero(**changes):
    return Configuration({**GIVEN, "zero_optimization": {"stage": 3, **changes}})


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


def for_deepspeed(configuration, own=False):
    """Return the JSON of a model without experts."""
    state = FP8State(configuration.fp8, None, None)
    handed = _for_deepspeed(configuration, own, state, torch.nn.Linear(2, 2))
    assert not state.notes
    return handed


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("own", [True, False])
def test_what_deepspeed_is_given_is_what_was_given_and_what_fp8_needs(stage, own):
    given = {**copy.deepcopy(GIVEN), "zero_optimization": {"stage": stage}, "somebody": {"else": 1}}
    before = copy.deepcopy(given)
    handed = for_deepspeed(Configuration(given), own)
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
    handed = for_deepspeed(Configuration({**GIVEN, **chosen}))
    assert {key: handed[key] for key in chosen} == chosen


def test_without_fp8_nothing_is_changed():
    plain = {key: value for key, value in GIVEN.items() if key != "fp8"}
    assert for_deepspeed(Configuration(plain)) == plain


def test_deepspeeds_refusal_names_the_file_and_its_key(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**GIVEN, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}))
    configuration = Configuration.read(file)
    with pytest.raises(UserError, match="MiCS") as caught:
        configuration.zero  # noqa: B018
    assert (caught.value.file, caught.value.key) == (str(file), "zero_optimization.mics_shard_size")
