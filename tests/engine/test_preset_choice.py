"""The preset that a configuration leaves open follows from the weights of the model, the same on all ranks."""

import json
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from transformers import AutoModelForCausalLM, OlmoConfig
from transformers.integrations import HfDeepSpeedConfig

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import leaves_preset_open, with_preset
from ds_fp8.engine.model import weights_are_trained
from tests.layers.hugging_face import causal_lm
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
        try:
            if build is from_pretrained:
                return build(folder, config)
            with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
                return build(folder, config)
        finally:
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

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
    config = models.config(section)
    model = BUILDS[name][0](folder, json.loads(json.dumps(config)))
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    report, state = engine.fp8.report, engine.fp8.state_dict()
    engine.destroy()
    return report["preset"], report["preset_reason"], state["preset"], report["outlier_channels"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    trained_model().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", BUILDS)
def test_it_is_precise_for_trained_weights_alone_on_all_ranks(ranks, folder, name):
    expected = BUILDS[name][1]
    for preset, reason, saved, channels in ranks(2, chosen, folder, name, OPEN):
        assert preset == saved == expected
        assert ("trained" in reason) == (expected == "precise")
        assert channels == (128 if expected == "precise" else 0)


def test_what_the_section_names_stays(ranks, folder):
    def preset_of(section):
        return ranks(1, chosen, folder, "from_pretrained", {**OPEN, **section})[0]

    assert preset_of({"preset": "infir2"})[:2] == ("infir2", None)
    assert preset_of({"linear": {"input": {"scale": "pow2"}}})[1:] == (None, "infir2", 0)
    assert preset_of({"linear": {"outlier_channels": 64}})[2:] == ("precise", 64)
    partial = preset_of({"preset": {"optimizer": "coat"}})
    assert partial[2] == {"optimizer": "coat", "linear": "precise"}
    assert partial[1] is not None


def notes_on_preset(folder, build, section):
    config = models.config(section)
    model = BUILDS[build][0](folder, config)
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.destroy()
    return [note for note in engine.fp8.report["notes"] if note.startswith("preset")]


def test_a_note_says_where_trained_weights_meet_infir2(ranks, folder):
    def notes_of(build, section):
        return ranks(1, notes_on_preset, folder, build, {**OPEN, **section})[0]

    said = ["preset infir2 on trained weights: precise ends closer to BF16 (docs/configuration.md)"]
    assert notes_of("from_pretrained", {"preset": "infir2"}) == said
    assert notes_of("from_pretrained", {"preset": "infir2", "optimizer": "coat"}) == said
    assert notes_of("from_pretrained under zero.Init", {"preset": "infir2"}) == said
    assert not notes_of("from_config", {"preset": "infir2"})
    assert not notes_of("from_pretrained", {})
    assert not notes_of("from_pretrained", {"linear": {"input": {"scale": "fp32"}}})


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


def resumed(folder, checkpoints):
    """What a random model does with the checkpoint of a trained one: as it is, and with the preset named."""

    def engine(model, section):
        return ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=models.config(section))[0]

    first = engine(from_pretrained(folder, None), OPEN)
    first.save_checkpoint(checkpoints, tag="a")
    with pytest.raises(UserError) as caught:
        engine(causal_lm("llama"), OPEN).load_checkpoint(checkpoints, tag="a")
    engine(causal_lm("llama"), {**OPEN, "preset": "precise"}).load_checkpoint(checkpoints, tag="a")
    engine(from_pretrained(folder, None), OPEN).load_checkpoint(checkpoints, tag="a")
    return caught.value.key, caught.value.remedy


def test_a_checkpoint_of_another_preset_is_not_continued_silently(ranks, folder, tmp_path):
    for key, remedy in ranks(2, resumed, folder, str(Path(tmp_path))):
        assert key == "fp8.preset"
        assert remedy == '"fp8": {"preset": "precise"}'
