"""What core does not know is found in ds_fp8.research, is dumped, and is never imported by runs without it."""

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.config.linear import LinearConfig
from ds_fp8.config.presets import PRESETS
from ds_fp8.research.config import ResearchLinear
from ds_fp8.research.presets import PRESETS as RESEARCH_PRESETS

SECTIONS = {
    **{name: {"preset": name} for name in [*PRESETS, *RESEARCH_PRESETS]},
    "an override": {"linear": {"overrides": {"*.down_proj": {"grad_output": {"rounding": "stochastic"}}}}},
    "Smooth-SwiGLU": {"linear": {"smooth_swiglu": True}},
    "moments": {"optimizer": {"exp_avg": "log8", "exp_avg_sq": "e3m4"}},
    "gradients": {"grad_reduce": {"format": "int8"}},
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_what_is_dumped_is_read_again_and_the_class_takes_what_a_file_takes(section):
    config = parse_fp8({"fp8": section})
    assert type(config).model_validate_json(config.model_dump_json()) == config
    assert parse_fp8({"fp8": config.model_dump()}) == config
    assert type(FP8Config(**section)) is type(config)
    assert FP8Config(**section) == config


@pytest.mark.parametrize("make", [FP8Config, FP8Config.from_preset])
def test_a_section_of_research_keeps_its_keys(make):
    config = make(linear=ResearchLinear(smooth_swiglu=True, skip=("q_proj",)), loss={"mode": "off"})
    assert config.model_dump()["linear"]["smooth_swiglu"]
    assert parse_fp8({"fp8": config.model_dump()}) == config
    assert FP8Config(linear=LinearConfig(skip=("q_proj",)), optimizer={"exp_avg": "log8"}).linear.skip == ("q_proj",)


def test_a_section_of_core_stays_core():
    assert type(parse_fp8({"fp8": {"preset": "precise"}}).linear) is LinearConfig


@pytest.mark.parametrize(
    ("linear", "key", "remedy"),
    [
        ({"inputt": {}}, "fp8.linear.inputt", "input"),
        ({"rotations": {}}, "fp8.linear.rotations", "rotation"),
        ({"rotation": {"fprop": "tokens"}}, "fp8.linear.rotation.fprop", "change the value"),
        ({"overrides": {"*": {"input": {"roundin": "x"}}}}, 'fp8.linear.overrides["*"].input.roundin', "rounding"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest_of_both(linear, key, remedy):
    with pytest.raises(UserError) as caught:
        parse_fp8({"fp8": {"linear": linear}})
    assert caught.value.key == key
    assert remedy in caught.value.remedy
