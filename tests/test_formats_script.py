"""scripts/formats.py: the table, sensitivities, mixes and their page on a small model with weights."""

import itertools
import json
import math

import format_search
import formats
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.layers.convert import convert
from ds_fp8.train.stage import load_stage
from tests.browser import visit
from tests.layers.hugging_face import causal_lm

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose head has learnt one sentence, its tokenizer, and the text."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="ten").save_pretrained(path)
    (path / "text.txt").write_text("\n\n".join([" ".join(WORDS * 4)] * 6))
    model = causal_lm("llama", intermediate_size=256)
    ids = torch.arange(10).repeat(4)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(15):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def outcome(folder, tmp_path_factory):
    """Figures, stage and page of one run of the script."""
    path = tmp_path_factory.mktemp("outcome")
    arguments = [str(folder), str(folder / "text.txt"), "--rows", "2", "--length", "41", "--out", str(path)]
    arguments += ["--grid", "format=e3m0,e2m3,int8,mxfp4", "--match", "e2m3", "--budget", "0.002"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_FP8_CACHE", str(path / "cache"))
        formats.main(arguments)
    return path


def test_table_and_sensitivities(outcome):
    found = json.loads((outcome / "formats.json").read_text())
    table = found["table"]
    assert {name: round(row["bits"], 2) for name, row in table.items()} == pytest.approx(
        {"bf16": 16, "e3m0": 4.12, "e2m3": 6.12, "int8": 8.12, "mxfp4": 4.25}
    )
    divergence = {name: row["weights and inputs"]["divergence"] for name, row in table.items()}
    assert divergence["bf16"] == 0 < divergence["int8"] < divergence["e2m3"] < divergence["e3m0"]
    assert all(row["weights"]["divergence"] > 0 for name, row in table.items() if name != "bf16")
    assert len(found["sensitivities"]) == 14
    # One layer moves the model less than all of them together.
    assert all(layer["e3m0"] < divergence["e3m0"] for layer in found["sensitivities"].values())


def test_the_mix_of_as_many_bits_is_no_worse(outcome):
    (match,) = json.loads((outcome / "formats.json").read_text())["matches"]
    figures = match["figures"]
    assert figures["mix"]["bits"] <= figures["e2m3"]["bits"]
    assert figures["mix"]["divergence"] <= figures["e2m3"]["divergence"]  # both halves of this text are the same
    gap, _ = match["mix - e2m3"]["divergence"]
    assert gap == pytest.approx(figures["mix"]["divergence"] - figures["e2m3"]["divergence"], rel=0.05, abs=1e-9)


def test_the_mix_within_a_budget_is_a_stage_that_trains(outcome, monkeypatch, tmp_path):
    found = json.loads((outcome / "formats.json").read_text())
    assert found["budget"]["figures"]["loss"] <= 1.004 * found["table"]["bf16"]["weights"]["loss"]
    assert found["budget"]["figures"]["bits"] < 16
    monkeypatch.chdir(tmp_path)  # where run_dir would be
    overrides = load_stage(outcome / "stage.json").fp8.linear.overrides
    assert len(overrides) == 14
    model = causal_lm("llama", intermediate_size=256)
    conversion = convert(model, parse_fp8(json.loads((outcome / "stage.json").read_text())))
    assert len(conversion.converted) == 14 - sum(casts == "bf16" for casts in overrides.values())
    ids = torch.arange(10)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert math.isfinite(model.model.layers[0].mlp.up_proj.weight.grad.norm())


def test_the_page_in_a_browser(outcome, tmp_path):
    seen = visit(outcome / "formats.html", tmp_path)
    assert seen.console == seen.requests == []
    assert seen.document.count("<svg") == 2
    assert 'aria-label="Divergence of every layer in every format"' in seen.document
    assert "1.mlp.down_proj" in seen.document
    assert "mix of the bits of e2m3" in seen.document


def test_a_hull_leaves_out_what_is_worse_for_its_bits():
    layer = format_search.Layer("a", (64, 64))
    added = {"bf16": 0.0, "int4": 4.0, "e2m1": 5.0, "e2m2": 3.9, "e2m3": 1.0, "int8": 0.5, "e4m3": 1.1}
    assert format_search.hull(layer, added) == ["int4", "e2m3", "int8", "bf16"]


def test_mixes_are_the_best_of_their_bits():
    layers = [
        format_search.Layer("a", (64, 64)),
        format_search.Layer("b", (128, 64)),
        format_search.Layer("c", (64, 32)),
    ]
    added = {
        "a": {"int4": 1.0, "e2m3": 0.4, "int8": 0.2},
        "b": {"int4": 2.0, "e2m3": 0.3, "int8": 0.0},
        "c": {"int4": 0.1, "e2m3": 0.05, "int8": 0.04},
    }
    cheapest, steps = format_search.upgrades(layers, added)
    mixes = [cheapest := {**cheapest, layer.name: word} for layer, word in [(layers[0], cheapest["a"]), *steps]]
    everything = [dict(zip("abc", words, strict=True)) for words in itertools.product(added["a"], repeat=3)]
    for mix in mixes:
        bits, cost = format_search.mean_bits(layers, mix), sum(added[name][word] for name, word in mix.items())
        others = [other for other in everything if format_search.mean_bits(layers, other) <= bits]
        assert cost == pytest.approx(min(sum(added[name][word] for name, word in other.items()) for other in others))
        assert format_search.mix_of_bits(layers, added, bits) == mix


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["text.txt", "--grid", "format=e9"], "--grid"),
        (["text.txt", "--grid", "format=int4:1x33"], "--grid"),
        (["text.txt", "--grid", "format=int4", "--match", "int8"], "--match"),
        (["text.txt", "--out", "text.txt"], "--out"),
        (["absent.txt"], "data.path"),
    ],
)
def test_mistakes(folder, arguments, key, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as caught:
        formats.main([str(folder), *arguments])
    assert caught.value.key == key
