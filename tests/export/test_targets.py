"""Where an export may write, said before the work, and settings for generate() that transformers would not save."""

import hashlib
import json
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ds_fp8.config.errors import UserError
from ds_fp8.config.linear import LinearConfig
from ds_fp8.data import DataConfig, build_data, build_tokenizer
from ds_fp8.export import export_checkpoint
from ds_fp8.export.folder import _complete, check_target, make_savable, write_folder
from ds_fp8.export.plan import make_plan
from ds_fp8.train import load_stage
from ds_fp8.train.model import build_model, load_model_config
from tests.corpus import DOCUMENTS
from tests.train.tiny_stage import TINY


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (".", "you are in"),
        ("..", "you are in"),
        ("file", "exists"),
        ("file/out", "cannot be written"),
        ("/dev/null/out", "cannot be written"),
    ],
)
def test_targets_that_are_refused(target, problem, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/file").touch()
    with pytest.raises(UserError, match=problem) as caught:
        export_checkpoint(tmp_path / "checkpoint", target, None, None, force=True)
    assert caught.value.remedy


def exported(folder):
    """A folder as exports leave it: files, and their sums by name."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "checksums.sha256").write_text(f"{hashlib.sha256(b'{}').hexdigest()}  config.json\n")


def named_by_a_foreign_list(folder):
    (folder / "thesis.txt").write_text("mine")
    with (folder / "checksums.sha256").open("a") as file:
        file.write("0  thesis.txt\n")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "mine.txt").write_text("mine"), "holds mine.txt next to an export"),
        (lambda folder: (folder / "mine").mkdir(), "holds mine next to an export"),
        (lambda folder: (folder / "checksums.sha256").unlink(), "holds no export"),
        (named_by_a_foreign_list, "holds thesis.txt, which is not as an export wrote it"),
        (lambda folder: (folder / "config.json").write_text("mine"), "holds config.json, which is not as"),
        (lambda folder: (folder / "checksums.sha256").write_text("0123  other"), "holds no export"),
        (lambda folder: None, None),
        (lambda folder: [path.unlink() for path in folder.iterdir()], None),
    ],
)
def test_force_replaces_exports_alone(change, words, linked, tmp_path):
    exported(tmp_path / "real")
    change(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    target = tmp_path / ("link" if linked else "real")
    if words is None:
        check_target(target, force=True)
        return
    with pytest.raises(UserError, match=words) as caught:
        check_target(target, force=True)
    assert caught.value.remedy


def test_a_folder_of_the_user_by_the_name_of_an_unfinished_export_stays(tmp_path):
    (tmp_path / "served.part").mkdir()
    (tmp_path / "served.part/mine").touch()
    with _complete(tmp_path / "served") as part:
        (part / "new").touch()
    assert sorted(os.listdir(tmp_path)) == ["served", "served.part"]
    assert os.listdir(tmp_path / "served.part") == ["mine"]


def test_a_target_behind_a_link_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_target(tmp_path / "link", force=True)
    with _complete(tmp_path / "link") as part:
        (part / "new").touch()
    assert os.listdir(tmp_path / "real") == ["new"]
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


@pytest.mark.parametrize(("own", "key"), [(True, "data.cache_dir"), (False, "DS_FP8_CACHE")])
def test_a_cache_that_cannot_be_written(own, key, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_FP8_CACHE", str(tmp_path / "file/cache"))
    (tmp_path / "file").touch()
    config = DataConfig(**DOCUMENTS, cache_dir=str(tmp_path / "file/cache") if own else None)
    with pytest.raises(UserError, match="cannot be written") as caught:
        build_data(config, None)
    assert caught.value.key == key


# ---------------------------------------------------------------- settings for generate()


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
