"""Settings for generate() that transformers reads and would not save."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ds_fp8.config.linear import LinearConfig
from ds_fp8.data import build_tokenizer
from ds_fp8.export.folder import make_savable, write_folder
from ds_fp8.export.plan import make_plan
from ds_fp8.train import load_stage
from ds_fp8.train.model import build_model, load_model_config
from tests.train.tiny_stage import TINY

VICUNA = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096}


def settings(**values) -> GenerationConfig:
    config = GenerationConfig()
    vars(config).update(values)
    return config


@pytest.mark.parametrize(
    ("values", "reset"),
    [
        (VICUNA, ["temperature", "top_p"]),
        ({"do_sample": False, "top_k": 3, "typical_p": 0.5, "min_p": 0.1}, ["top_k", "typical_p", "min_p"]),
        (
            {"num_return_sequences": 3, "length_penalty": 2.0, "pad_token_id": -1},
            ["num_return_sequences", "length_penalty", "pad_token_id"],
        ),
        ({"do_sample": True, "temperature": 0.9, "top_k": 3}, []),
        ({"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}, []),
        ({"eos_token_id": [1, 2], "repetition_penalty": 1.1}, []),
    ],
)
def test_what_does_nothing_is_reset_and_named(values, reset, tmp_path):
    config = settings(**values)
    if reset:
        with pytest.raises(ValueError, match="Fix these issues"):
            config.save_pretrained(tmp_path)
    words = make_savable(config)
    assert (words is not None) == bool(reset)
    assert all(f"{name} {values[name]}" in words for name in reset)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: stored.get(name) for name in values} == values | dict.fromkeys(reset)
    assert make_savable(config) is None


@pytest.fixture
def model(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model("llama", num_key_value_heads=1, vocab_size=560, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_a_base_model_is_savable_once_it_is_loaded(model, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "ds_fp8")
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text(json.dumps(VICUNA))
    file = tmp_path / "stage.json"
    file.write_text(json.dumps(TINY | {"model": {"path": str(tmp_path / "base")}}))
    stage = load_stage(file)
    loaded = build_model(stage, load_model_config(stage, build_tokenizer(stage.data)))
    assert "temperature 0.9, top_p 0.6 had no effect" in caplog.text
    loaded.save_pretrained(tmp_path / "model")
    assert "temperature" not in json.loads((tmp_path / "model/generation_config.json").read_text())


def test_an_export_leaves_it_out_and_the_models_own_as_it_is(model, tmp_path):
    plan = make_plan(model, dict.fromkeys(dict(model.named_modules()), "BF16"), LinearConfig(), "bf16")
    state = model.state_dict()
    model.config.architectures = [type(model).__name__]
    mine = settings(**VICUNA)
    weights = ((entry, {entry.name: state[entry.name]}) for entry in plan.entries)
    with pytest.warns(UserWarning, match="temperature"):
        write_folder(tmp_path / "out", plan, weights, model.config, generation=mine)
    assert mine.temperature == 0.9
    assert "top_p" not in json.loads((tmp_path / "out/generation_config.json").read_text())
