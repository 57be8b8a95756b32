"""Real text from what is installed: each file once, and a tokenizer that gives it back."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import corpus
import pytest
from transformers import AutoTokenizer


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of packages: a source in two places, one that is too small, one that is no text."""
    texts = {"a/code.py": "x = 1\n" * 200, "b/code.py": "x = 1\n" * 200, "a/tiny.py": "x", "a/data.bin": "y" * 900}
    texts["a/guide.md"] = "The answer is 42. " * 60
    for name, text in texts.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    return texts


def test_every_text_is_written_once(installed, tmp_path):
    corpus.main(["--output", str(tmp_path / "c.jsonl")])
    found = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert sorted(found) == sorted([installed["a/code.py"], installed["a/guide.md"]])


def test_the_tokenizer_gives_text_back_digit_by_digit(installed, tmp_path):
    folder = tmp_path / "tokenizer"
    corpus.main(["--output", str(tmp_path / "c.jsonl"), "--tokenizer", str(folder), "--vocabulary", "300"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def naïve(x):\n\treturn 1234  # €"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234")["input_ids"]) == 4
    assert len(tokenizer("<|im_start|>")["input_ids"]) == 1
    assert tokenizer.eos_token == corpus.END
