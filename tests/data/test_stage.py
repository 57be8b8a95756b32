"""From a configuration to packed rows."""

import json
import re

import numpy as np
import pytest

from ds_fp8.config.schema import parse_section
from ds_fp8.data import IGNORED, DataConfig, build_data, chat
from ds_fp8.data.stage import describe, extract_answer
from tests.corpus import CHATS, DOCUMENTS, MAKE
from tests.refusals import refused


def build(own, source=DOCUMENTS, **keys):
    return build_data(DataConfig(**{**source, **keys}), own)


def _ids(data):
    return [row["input_ids"].tolist() for row in data.train]


@pytest.mark.parametrize("source", [DOCUMENTS, CHATS], ids=["documents", "chats"])
def test_every_example_is_in_training_or_validation(source, tokenizer):
    data = build(tokenizer, source, validation_fraction=0.1, sequence_length=512)
    assert data.report["train"]["examples"] == 270
    assert data.report["validation"]["examples"] == 30
    for name, dataset in (("train", data.train), ("validation", data.validation)):
        assert data.report[name]["rows"] == len(dataset)
        assert data.report[name]["tokens"] == dataset.tokens <= len(dataset) * 512
        assert data.report[name]["dropped"] == 0
        for row in dataset:
            assert (row["labels"] != IGNORED).any()
    first = tokenizer.bos_token_id if source is DOCUMENTS else tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert {int(row["input_ids"][0]) for row in data.train} == {first}


def test_rows_hold_the_documents_and_splits_have_none_in_common(tokenizer):
    data = build(tokenizer, validation_fraction=0.05, test_fraction=0.05, sequence_length=1024)
    assert [data.report[split]["examples"] for split in ("train", "validation", "test")] == [270, 15, 15]
    found = []
    for dataset in (data.train, data.validation, data.test):
        for row in dataset:
            text = tokenizer.decode(row["input_ids"])
            found += [part.removeprefix("<s>").split("</s>")[0] for part in text.split("<s>") if "</s>" in part]
    assert sorted(found) == sorted(MAKE["documents"](300))


def test_the_same_configuration_gives_the_same_rows(tokenizer):
    assert _ids(build(tokenizer)) == _ids(build(tokenizer)) != _ids(build(tokenizer, seed=2))


def test_what_a_power_loss_left_of_prepared_data_is_made_again(tokenizer, cache_dir):
    """The file system may keep a file's name and lose what was written into it."""
    expected = _ids(build(tokenizer))
    files = sorted(file for file in (cache_dir / "tokens").rglob("*") if file.is_file() and file.stat().st_size)
    assert len(files) == 11  # tokens, ends, state, digest; and statistics, and pieces and rows of three splits
    for file in files:
        whole, times = file.read_bytes(), re.compile(rb"\d{19}")  # of change, noted of the other files
        for left in (0, 5, None):
            file.unlink() if left is None else file.write_bytes(whole[:left])
            assert _ids(build(tokenizer)) == expected, file
            assert times.sub(b"", file.read_bytes()) == times.sub(b"", whole)


@pytest.mark.parametrize("stats", ["{}", "[]", "3", "{'", '{"made": 1}'])
def test_a_plan_that_is_none_or_was_changed_is_made_again(stats, tokenizer, cache_dir):
    expected = _ids(build(tokenizer))
    (file,) = cache_dir.rglob("packing_stats.json")
    file.write_text(stats)
    assert _ids(build(tokenizer)) == expected
    for name in ("train.pieces", "train.rows"):
        numbers = np.load(file.with_name(f"{name}.npy"), mmap_mode="r+")
        numbers[1:] += 1_000_000  # rows of pieces and pieces of examples that there are not
        numbers.flush()
        assert _ids(build(tokenizer)) == expected


@pytest.mark.parametrize(
    ("source", "keys", "key", "remedy"),
    [
        ({}, {"tokenizer": "t"}, "data.path", "a file"),
        ({}, {"path": "p"}, "data.tokenizer", "folder"),
        (CHATS, {"sequence_length": 12}, "data.sequence_length", "cut"),
        (DOCUMENTS, {"path": "own.txt"}, "data.path", "blank line"),
    ],
)
def test_mistakes_name_their_key(source, keys, key, remedy, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("Only one text.\nOf two lines.")
    with refused(key=key) as error:
        build(tokenizer, source, **keys)
    assert remedy in error.value.remedy


def test_a_mixture_has_the_rows_of_all_its_sources(tokenizer, tmp_path):
    for name, size in (("a", 12), ("b", 5)):
        lines = [json.dumps({"body" if name == "b" else "text": f"Text {i} of {name}."}) for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = (
        {"path": str(tmp_path / "a.jsonl"), "weight": 3},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1, "text_key": "body"},
    )
    more = {"sources": sources, "sequence_length": 32, "validation_fraction": 0.2}
    data = build(tokenizer, {"tokenizer": DOCUMENTS["tokenizer"]}, **more)
    assert data.weights == (3, 1)
    assert len(data.train.rows_by_source) == 2
    text = " ".join(tokenizer.decode(row["input_ids"]) for row in [*data.train, *data.validation])
    assert all(f"Text {i} of {name}." in text for name, size in (("a", 12), ("b", 5)) for i in range(size))
    of_b = sum(row >= data.train.rows_by_source[0] for row in data.rows_of_step(0, 4096, 1))
    assert of_b == 1024


def test_with_a_budget_of_tokens_every_chat_has_a_row_of_its_own(tokenizer):
    data = build(tokenizer, CHATS, sequence_length=512, tokens_per_gpu=512)
    assert len(data.train) == data.report["train"]["examples"] == 285
    assert sum(map(data.train.row_tokens, range(285))) == data.train.tokens


@pytest.mark.parametrize("choice", ["cut", "drop", "split", None])
def test_what_happens_to_long_chats_is_chosen_and_said(choice, tokenizer):
    report = build(tokenizer, CHATS, sequence_length=80, overlong=choice, validation_fraction=0.3).report
    train = report["train"]
    assert 0 < train["overlong"] < train["examples"]
    assert train["longest"] > 80
    assert (0 < train["dropped"] < train["examples"]) == (choice in ("drop", None))
    said = []
    describe(report, said.append)
    assert f"{train['overlong']} examples are longer than a row (the longest {train['longest']} tokens)" in said[0]
    whole = build(tokenizer, CHATS, sequence_length=1000, validation_fraction=0.3).report["train"]
    names = ("tokens", "tokens_left_out")
    assert sum(train[name] for name in names) == sum(whole[name] for name in names)


def test_questions_come_from_the_last_turns_of_held_out_chats(tokenizer, tmp_path):
    chats = [
        [
            {"role": "user", "content": f"What is {n} and {n}?" + " Think." * 400 * (n % 4 == 3)},  # longer than a row
            {"role": "assistant", "content": "Wait. #### 0"},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": f"It is #### {2 * n}" if n % 2 else "I do not know."},
        ]
        for n in range(40)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    own = {"path": str(tmp_path / "own.jsonl"), "validation_fraction": 0.4, "answer_pattern": r"#### (\d+)"}
    data = build(tokenizer, CHATS, **own)
    questions = data.questions(16)
    assert 0 < len(questions) < 16
    for question in questions:
        prompt = tokenizer.decode(question.prompt)
        n = int(question.answer) // 2
        assert n % 4 == 1
        assert prompt == tokenizer.apply_chat_template(chats[n][:3], tokenize=False, add_generation_prompt=True)


def test_questions_come_from_all_sources_in_turn_and_as_many_as_are_asked_for(tokenizer, tmp_path):
    sources = []
    for name, chats in (("one", 40), ("two", 1000)):
        lines = [
            [{"role": "user", "content": f"{name} {n}?"}, {"role": "assistant", "content": f"#### {n}"}]
            for n in range(chats)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in lines))
        sources.append({"path": str(tmp_path / f"{name}.jsonl")})
    own = {"sources": sources, "validation_fraction": 0.5, "answer_pattern": r"#### (\d+)"}
    data = build(tokenizer, {key: value for key, value in CHATS.items() if key != "path"}, **own)
    questions = data.questions(10_000)
    assert len(questions) == 20 + 500
    assert data.questions(60) == questions[:60]
    of_one = ["one" in tokenizer.decode(question.prompt) for question in questions]
    assert of_one == [True, False] * 20 + [False] * 480


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is -12 apples.", "-12"),
        ("The answer is 7. The answer is 8.", "7"),
        ("3 + 4 = 7.", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(r"\b[Tt]he answer is (-?\d+)", text) == answer


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"sources": [{"path": "y", "weight": 0}]}, "data.sources.0.weight"),
        ({"overlong": "keep"}, "data.overlong"),
        ({"answer_pattern": "("}, "data.answer_pattern"),
        ({"answer_pattern": "no group"}, "data.answer_pattern"),
        ({"pth": "x"}, "data.pth"),
        ({"format": "chats"}, "data.format"),
        ({"sequence_length": 7}, "data.sequence_length"),
        ({"validation_fraction": 0}, "data.validation_fraction"),
        ({"validation_fraction": 1.0}, "data.validation_fraction"),
    ],
)
def test_values_out_of_range(values, key):
    with refused(key=key):
        parse_section(DataConfig, values, key="data")


def test_a_pattern_without_end_is_ended(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    with refused(r"no end after 0\.2 s", "data.answer_pattern"):
        extract_answer(r"(([a-z0-9 ]+)+)+#$", "the answer is four and four more words of it")
