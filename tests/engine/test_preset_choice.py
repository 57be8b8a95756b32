"""The preset that a configuration leaves open follows from the weights of the model, the same on all ranks."""

import contextlib
import json

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from transformers import AutoModelForCausalLM, OlmoConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import leaves_preset_open, with_preset
from ds_fp8.engine.model import weights_are_trained
from tests.layers.hugging_face import causal_lm
from tests.ranks import on_ranks
from tests.zero import models

OPEN = {"monitor": {"every": 0}}


def trained_model():
    """A model whose weights are not those of a beginning."""
    model = causal_lm("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def from_config(folder, config):
    return causal_lm("llama")


def from_pretrained(folder, config):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def loaded_by_hand(folder, config):
    model = causal_lm("llama")
    if dist.get_rank() == 0:  # whose weights DeepSpeed broadcasts
        model.load_state_dict(from_pretrained(folder, config).state_dict())
    return model


def named_but_random(folder, config):
    model = causal_lm("llama")
    model.config.name_or_path = folder  # as of a configuration that transformers has read
    return model


def sharded(build):
    """`build` under zero.Init, of DeepSpeed itself or of transformers."""

    def build_sharded(folder, config):
        keep = HfDeepSpeedConfig({key: value for key, value in config.items() if key != "fp8"})
        born = contextlib.nullcontext()
        if build is not from_pretrained:
            born = deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16)
        try:
            with born:
                return build(folder, config)
        finally:
            unset_hf_deepspeed_config()
            del keep

    return build_sharded


BUILDS = {
    "from_config": (from_config, "infir2"),
    "from_pretrained": (from_pretrained, "precise"),
    "loaded by hand on the first rank": (loaded_by_hand, "precise"),
    "named but random": (named_but_random, "infir2"),
    "zero.Init": (sharded(from_config), "infir2"),
    "from_pretrained under zero.Init": (sharded(from_pretrained), "precise"),
}


def chosen(folder, name, section):
    """The report and the saved preset of an engine."""
    config = models.config({**OPEN, **section})
    model = BUILDS[name][0](folder, json.loads(json.dumps(config)))
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    state = engine.fp8.state_dict()
    engine.destroy()
    return engine.fp8.report, state["preset"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    trained_model().save_pretrained(path)
    return str(path)


@on_ranks(2)
def test_it_is_precise_for_trained_weights_alone_on_all_ranks(folder):
    for name, (_, expected) in BUILDS.items():
        report, saved = chosen(folder, name, {})
        assert report["preset"] == saved == expected, name
        assert ("trained" in report["preset_reason"]) == (expected == "precise"), name
        assert report["outlier_channels"] == (128 if expected == "precise" else 0), name


@pytest.mark.parametrize(
    ("section", "preset", "has_reason", "channels"),
    [
        ({"preset": "infir2"}, "infir2", False, 0),
        ({"linear": {"input": {"scale": "pow2"}}}, "infir2", False, 0),
        ({"linear": {"outlier_channels": 64}}, "precise", True, 64),
        ({"preset": {"optimizer": "coat"}}, {"optimizer": "coat", "linear": "precise"}, True, 128),
    ],
)
@on_ranks(1)
def test_what_the_section_names_stays(folder, section, preset, has_reason, channels):
    report, saved = chosen(folder, "from_pretrained", section)
    assert saved == preset
    assert (report["preset_reason"] is not None) == has_reason
    assert report["outlier_channels"] == channels


@on_ranks(1)
def test_a_note_says_where_trained_weights_meet_infir2(folder):
    infir2 = {"preset": "infir2"}
    for name, section, noted in (
        ("from_pretrained", infir2, True),
        ("from_pretrained", {**infir2, "optimizer": "coat"}, True),
        ("from_pretrained under zero.Init", infir2, True),
        ("from_config", infir2, False),
        ("from_pretrained", {}, False),
        ("from_pretrained", {"linear": {"input": {"scale": "fp32"}}}, False),
    ):
        notes = [note for note in chosen(folder, name, section)[0]["notes"] if note.startswith("preset")]
        said = "preset infir2 on trained weights: precise ends closer to BF16 (docs/configuration.md)"
        assert notes == [said] * noted, (name, section)


@pytest.mark.parametrize(
    ("section", "is_open"),
    [
        ({}, True),
        (True, True),
        ({"linear": {"skip": ["lm_head"]}}, True),
        ({"linear": {"outlier_channels": 64}}, True),
        ({"preset": {"optimizer": "coat"}}, True),
        ({"optimizer": "coat"}, True),
        ("infir2", False),
        ({"preset": "infir2"}, False),
        ({"preset": {"linear": "rowwise"}}, False),
        ({"linear": "rowwise"}, False),
        ({"linear": {"input": {"scale": "fp32"}}}, False),
        ({"enabled": False}, False),
        (None, False),
    ],
)
def test_a_section_leaves_the_preset_open_or_not(section, is_open):
    assert leaves_preset_open(section) == is_open
    if isinstance(section, dict):
        assert FP8Config(**section).leaves_preset_open == is_open
    if is_open:
        assert not leaves_preset_open(with_preset(section, "precise"))


def test_norms_without_weights_leave_it_to_what_transformers_has_loaded(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = OlmoConfig(**sizes, vocab_size=128, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    drawn = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert weights_are_trained(drawn) == (False, "neither norms nor transformers show that weights are trained")
    drawn.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert weights_are_trained(loaded) == (True, "the weights are trained: transformers has loaded them")


@pytest.mark.parametrize(
    ("build", "section", "channels"),
    [
        (trained_model, {}, 128),
        (trained_model, {"linear": {"outlier_channels": 64}}, 64),
        (trained_model, {"preset": "infir2"}, 0),
        (lambda: causal_lm("llama"), {}, 0),
    ],
)
def test_convert_decides_as_initialize_does(build, section, channels):
    if section.keys() != {"linear"}:  # a mapping, or a preset's name
        given = section.get("preset", {**OPEN, **section})
        assert ds_fp8.convert(build(), given).recipe.outlier_channels == channels
    assert ds_fp8.convert(build(), FP8Config(**OPEN, **section)).recipe.outlier_channels == channels


@on_ranks(2)
def test_a_checkpoint_of_another_preset_is_not_continued_silently(folder, tmp_path):
    """By a random model, from the checkpoint of a trained one; it is with the preset named."""

    def engine(model, section):
        return ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=models.config(section))[0]

    engine(from_pretrained(folder, None), OPEN).save_checkpoint(tmp_path, tag="a")
    with pytest.raises(UserError) as caught:
        engine(causal_lm("llama"), OPEN).load_checkpoint(tmp_path, tag="a")
    assert caught.value.key == "fp8.preset"
    assert caught.value.remedy == '"fp8": {"preset": "precise"}'
    engine(causal_lm("llama"), {**OPEN, "preset": "precise"}).load_checkpoint(tmp_path, tag="a")
    engine(from_pretrained(folder, None), OPEN).load_checkpoint(tmp_path, tag="a")
