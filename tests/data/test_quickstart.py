"""The quickstart: right answers, a tokenizer that loses nothing, the same files every time, stages that read them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fp8.commands.arguments import config_file
from ds_fp8.data import DataConfig, build_data, build_tokenizer, load_tokenizer
from tests.corpus import MAKE, TOKENIZER

STAGES = {"cpt": "documents.jsonl", "sft_stage1": "basic.jsonl", "sft_stage2": "mixed.jsonl"}


@pytest.mark.parametrize("mixed", [False, True])
def test_steps_and_answers_are_right(mixed):
    chats = list(MAKE["chats"](300, mixed))
    texts = [turn["content"] for chat in chats for turn in chat if turn["role"] == "assistant"]
    for text in texts if mixed else [*texts, *MAKE["documents"](300)]:
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", text)
        assert equations
        assert all(eval(f"{left} {operation} {right}") == int(result) for left, operation, right, result in equations)
        assert "answer is" not in text or text.endswith(f"answer is {equations[-1][-1]}.")
    for chat in chats:
        roles = [turn["role"] for turn in chat if turn["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40))
def test_every_text_is_encoded_without_loss_and_small_numbers_are_tokens(text):
    tokenizer = load_tokenizer(TOKENIZER)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for number in range(60):
        assert f"Ġ{number}" in tokenizer.tokenize(f"Tom has {number}.")


def test_stages_read_files_that_are_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_FP8_CACHE", str(tmp_path / "cache"))
    twice = [MAKE["write"](folder, (200, 60, 60)) for folder in (tmp_path / "runs/quickstart/data", tmp_path / "again")]
    first, second = ({file.name: file.read_bytes() for file in folder.rglob("*.json*")} for folder in twice)
    assert first == second
    for stage, name in STAGES.items():
        raw = json.loads(config_file(f"quickstart/{stage}.json").read_text())
        config = DataConfig(**raw["data"])
        assert config.path.endswith(name)
        data = build_data(config, tokenizer := build_tokenizer(config))
        assert len(data.train) > 4
        assert bool(data.questions(1)) == (stage != "cpt")
        assert len(tokenizer) <= 528
    assert json.loads(config_file("quickstart/cpt.json").read_text())["model"]["config"]["vocab_size"] == 528
