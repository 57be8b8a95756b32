"""scripts/formats.py: the table, sensitivities and a mix on a small model with weights."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.layers.convert import convert
from tests.layers.hugging_face import causal_lm

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import formats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose head has learnt one sentence, its tokenizer, and the text."""
    path = tmp_path_factory.mktemp("model")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    (path / "text.txt").write_text(" ".join(words * 8))
    model = causal_lm("llama", intermediate_size=256)
    ids = torch.arange(10).repeat(4)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(15):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def test_table_sensitivities_and_a_mix_that_trains(folder, tmp_path):
    figures, stage = tmp_path / "figures.json", tmp_path / "stage.json"
    arguments = ["--model", str(folder), "--data", str(folder / "text.txt"), "--rows", "2", "--length", "40"]
    budget = ["--budget", "0.02", "--output", str(stage), "--json", str(figures)]
    formats.main([*arguments, "--formats", "e3m0,int8", *budget])
    found = json.loads(figures.read_text())
    table, search = found["table"], found["search"]
    loss = table["bf16"]["weights"]
    assert abs(table["int8"]["weights and inputs"] - loss) < abs(table["e3m0"]["weights and inputs"] - loss)
    assert abs(table["e3m0"]["weights"] - loss) > 0
    assert search["loss"] <= 1.02 * loss
    assert 4 <= search["bits"] < 16
    assert len(search["sensitivities"]) == 14
    overrides = json.loads(stage.read_text())["fp8"]["linear"]["overrides"]
    model = causal_lm("llama", intermediate_size=256)
    conversion = convert(model, parse_fp8(json.loads(stage.read_text())))
    assert len(overrides) == 14
    in_bf16 = sum(casts == "bf16" for casts in overrides.values())
    assert len(conversion.converted) == 14 - in_bf16
    ids = torch.arange(10)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert math.isfinite(model.model.layers[0].mlp.up_proj.weight.grad.norm())


def test_upgrades_win_most_loss_for_their_bits_first():
    layers = [formats.Layer("small", 10), formats.Layer("large", 100)]
    added = {"small": {"int4": 1.0, "int8": 0.5, "bf16": 0.0}, "large": {"int4": 2.0, "int8": 0.0, "bf16": 0.0}}
    bits = {"int4": 4, "int8": 8, "bf16": 16}
    expected = [("small", "int8"), ("small", "bf16"), ("large", "int8"), ("large", "bf16")]
    assert formats.upgrades(layers, added, bits) == expected


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["--formats", "e9"], "--formats"), (["--output", "x"], "--output"), (["--data", "absent"], "--data")],
)
def test_mistakes(folder, arguments, key):
    with pytest.raises(UserError) as caught:
        formats.main(["--model", str(folder), "--data", str(folder / "text.txt"), *arguments])
    assert caught.value.key == key
