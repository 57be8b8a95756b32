"""Stored models as a stage's start: FP8, many files, names on the hub; and those that cannot be one, on real files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.data import DataConfig, build_tokenizer, load_tokenizer
from ds_fp8.export.folder import write_folder
from ds_fp8.export.plan import make_plan
from ds_fp8.train.stored_model import check_trainable, load_stored_model, stored_config, stored_model
from tests.corpus import MAKE

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}


def small_model(model_type: str = "qwen3", **changes):
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **SHAPE, **changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def load(folder: Path | str, revision: str | None = None):
    """As a stage does: checks first, then weights."""
    source = stored_model(str(folder), None, revision)
    config = stored_config(source)
    check_trainable(source, config)
    return load_stored_model(source, config, {"dtype": torch.bfloat16})


def refusal(folder: Path | str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(folder)
    assert caught.value.key == "model.path"
    assert caught.value.remedy
    return caught.value


def same(model, tensors: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() >= tensors.keys() and all(torch.equal(state[name], value) for name, value in tensors.items())


def export(folder: Path, model, layout: str, granularity: str = "128x128") -> dict[str, torch.Tensor]:
    """Write an export of this package. Returns what it stands for."""
    linear = parse_fp8({"fp8": {"linear": {"weight": {"granularity": granularity}}}}).linear
    plan = make_plan(model, {"lm_head": "left out"}, linear, layout)
    state, weights, expected = model.state_dict(), [], {}
    for entry in plan.entries:
        weight = quantize(state[entry.name], "e4m3", granularity) if entry.quantized else state[entry.name]
        expected[entry.name] = weight.dequantize(torch.bfloat16) if entry.quantized else weight
        weights.append((entry.name, weight))
    assert plan.quantized
    write_folder(folder, plan, weights, model.config, shard_bytes=300_000)
    return expected


@pytest.mark.parametrize(
    ("layout", "granularity"),
    [("fp8", "128x128"), *(("compressed-tensors", granularity) for granularity in ("128x128", "row", "tensor"))],
)
def test_this_packages_own_export_is_a_start(layout, granularity, tmp_path):
    expected = export(tmp_path / "fp8", small_model(), layout, granularity)
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    model = load(tmp_path / "fp8")
    assert same(model, expected)
    assert not same(model, small_model().state_dict())
    model.save_pretrained(tmp_path / "bf16")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "bf16"), expected)


def store(folder: Path, max_shard_size: str = "300KB") -> Path:
    small_model().save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def a_file_is_missing(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def the_index_is_missing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def a_file_is_cut_short(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def a_weight_is_missing(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    save_file({name: tensors[name] for name in list(tensors)[1:]} | {"spare": torch.ones(1)}, file, {"format": "pt"})


def another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))


def more_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_class(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "never_heard_of", "vocab_size": 300}))


def code_of_its_own(folder: Path) -> None:
    values = {"model_type": "its_own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def no_language_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (a_file_is_missing, "incomplete"),
        (the_index_is_missing, "incomplete"),
        (a_file_is_cut_short, "cannot be read"),
        (a_weight_is_missing, "incomplete"),
        (another_shape, "cannot be read"),
        (more_layers, "and 8 more of Qwen3ForCausalLM are in none of its files"),
        (no_configuration, "has no config.json"),
        (unknown_class, "never_heard_of"),
        (code_of_its_own, "code from a model folder is not run"),
        (no_language_model, "no causal language model"),
    ],
)
def test_what_cannot_be_a_start_is_refused(damage, words, tmp_path):
    folder = store(tmp_path / "model")
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    assert words in str(refusal(folder))
    assert sorted(tmp_path.rglob("*")) == before


COMMITS = {"main": "1" * 40, "v2": "2" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The hub's cache of a machine without a network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def cached(cache: Path, name: str, revision: str, folder: Path) -> None:
    """Put a folder into the cache as a revision of a model, as a download leaves it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / COMMITS[revision])
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(COMMITS[revision])


@pytest.mark.parametrize("name", ["somebody/small", "small"])
def test_names_are_found_in_the_cache_of_the_hub(name, hub, tmp_path):
    models = {"main": small_model(), "v2": small_model(tie_word_embeddings=True)}
    for n, (revision, model) in enumerate(models.items()):
        model.save_pretrained(tmp_path / revision, max_shard_size="300KB")
        MAKE["train_tokenizer"](400 + n).save_pretrained(tmp_path / revision)
        cached(hub, name, revision, tmp_path / revision)
    for revision, tied, tokens in ((None, False, 400), ("v2", True, 401), (COMMITS["v2"], True, 401)):
        model = load(name, revision)
        assert model.config.tie_word_embeddings is tied
        assert same(model, models["v2" if tied else "main"].state_dict())
        assert len(load_tokenizer(name, revision)) == tokens
        config = DataConfig(path="x", tokenizer=name, tokenizer_revision=revision)
        assert len(build_tokenizer(config)) == tokens
    assert "can be reached" in str(refusal("somebody/else"))
    with pytest.raises(UserError, match="can be reached"):
        load(name, "v3")


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(UserError) as caught:
        stored_model(str(tmp_path), None, "v2")
    assert caught.value.key == "model.revision"
