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
from tests.refusals import refused

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
    with refused(key="model.path") as caught:
        load(folder)
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
        weights.append((entry, {entry.name: weight}))
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


def store(folder: Path) -> Path:
    small_model().save_pretrained(folder, max_shard_size="300KB")
    return folder


def config_with(folder: Path, values: dict, keep: bool = False) -> None:
    """Write config.json: these values alone, or beside those that are there."""
    before = json.loads((folder / "config.json").read_text()) if keep else {}
    (folder / "config.json").write_text(json.dumps({**before, **values}))


def a_file_is_cut_short(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def a_weight_is_missing(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    save_file({name: tensors[name] for name in list(tensors)[1:]} | {"spare": torch.ones(1)}, file, {"format": "pt"})


def code_of_its_own(folder: Path) -> None:
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config_with(folder, {"model_type": "its_own", "auto_map": own})
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


DAMAGES = {  # what is done to a folder, and words of the error
    "a file is missing": (lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), "incomplete"),
    "the index is missing": (lambda folder: (folder / "model.safetensors.index.json").unlink(), "incomplete"),
    "a file is cut short": (a_file_is_cut_short, "cannot be read"),
    "a weight is missing": (a_weight_is_missing, "incomplete"),
    "another shape": (lambda folder: config_with(folder, {"intermediate_size": 512}, keep=True), "cannot be read"),
    "more layers": (
        lambda folder: config_with(folder, {"num_hidden_layers": 3, "layer_types": None}, keep=True),
        "and 8 more of Qwen3ForCausalLM are in none of its files",
    ),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "unknown class": (lambda folder: config_with(folder, {"model_type": "never_heard_of"}), "never_heard_of"),
    "code of its own": (code_of_its_own, "code from a model folder is not run"),
    "encoder-decoder": (
        lambda folder: config_with(folder, {"model_type": "bart"}),
        "its decoder alone",
    ),
    "speech": (lambda folder: config_with(folder, {"model_type": "whisper"}), "its decoder alone"),
    "no language model": (lambda folder: config_with(folder, {"model_type": "vit"}), "no causal language model"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_what_cannot_be_a_start_is_refused(case, tmp_path):
    damage, words = DAMAGES[case]
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
    with refused("can be reached"):
        load(name, "v3")


def test_a_folder_has_no_revisions(tmp_path):
    with refused(key="model.revision"):
        stored_model(str(tmp_path), None, "v2")
