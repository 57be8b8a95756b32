"""From a configuration to packed rows."""

import json

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import parse_section
from ds_fp8.data import IGNORED, DataConfig, build_data
from ds_fp8.data.sources import read_examples
from ds_fp8.data.stage import describe


@pytest.mark.parametrize("format", ["documents", "chat"])
def test_every_example_is_in_training_or_validation(format, tokenizer, tmp_path):
    config = DataConfig(format=format, examples=101, validation_fraction=0.1, sequence_length=256)
    data = build_data(config, tokenizer, tmp_path)
    assert data.report["train"]["examples"] == 91
    assert data.report["validation"]["examples"] == 10
    for name, dataset in (("train", data.train), ("validation", data.validation)):
        assert data.report[name]["rows"] == len(dataset)
        assert data.report[name]["tokens"] == dataset.tokens <= len(dataset) * 256
        assert data.report[name]["dropped"] == 0
        for row in dataset:
            assert (row["labels"] != IGNORED).any()
    first = tokenizer.bos_token_id if format == "documents" else tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert {int(row["input_ids"][0]) for row in data.train} == {first}


def test_rows_hold_the_documents(tokenizer, tmp_path):
    config = DataConfig(examples=40, sequence_length=128)
    data = build_data(config, tokenizer, tmp_path)
    found = []
    for dataset in (data.train, data.validation):
        for row in dataset:
            text = tokenizer.decode(row["input_ids"])
            found += [part.removeprefix("<s>").split("</s>")[0] for part in text.split("<s>") if "</s>" in part]
    assert sorted(found) == sorted(read_examples(config))


def _ids(data):
    return [row["input_ids"].tolist() for row in data.train]


def test_the_same_configuration_gives_the_same_rows(tokenizer, tmp_path):
    config = DataConfig(examples=60)
    first, again = build_data(config, tokenizer, tmp_path), build_data(config, tokenizer, tmp_path)
    other = build_data(DataConfig(examples=60, seed=2), tokenizer, tmp_path)
    assert _ids(first) == _ids(again)
    assert first.questions == again.questions
    assert _ids(first) != _ids(other)


@pytest.mark.parametrize("left", [0, 5])
def test_what_a_power_loss_left_of_prepared_data_is_made_again(left, tokenizer, tmp_path):
    """The file system may keep a file's name and lose what was written into it."""
    config = DataConfig(examples=60)
    expected = _ids(build_data(config, tokenizer, tmp_path))
    files = sorted(file for file in (tmp_path / "tokens").rglob("*") if file.is_file() and file.stat().st_size)
    assert len(files) == 11  # tokens, ends, state, digest; and statistics, and pieces and rows of three splits
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:left])
        assert _ids(build_data(config, tokenizer, tmp_path)) == expected, file
        assert file.read_bytes() == whole
        file.unlink()
        assert _ids(build_data(config, tokenizer, tmp_path)) == expected, file


def test_own_data_has_no_questions_and_the_built_in_corpus_has_400(tokenizer, tmp_path):
    assert len(build_data(DataConfig(examples=20), tokenizer, tmp_path).questions) == 400
    (tmp_path / "own.txt").write_text("One text.\n\nAnother text.\n\nA third, with naïve words.")
    own = build_data(DataConfig(path=str(tmp_path / "own.txt")), tokenizer, tmp_path)
    assert own.questions == []
    assert own.report["train"]["examples"] == 2


def test_conversations_longer_than_a_row_are_counted(tokenizer, tmp_path):
    config = DataConfig(format="chat", examples=100, sequence_length=80, validation_fraction=0.3)
    report = build_data(config, tokenizer, tmp_path).report
    assert 0 < report["train"]["dropped"] < report["train"]["examples"]
    with pytest.raises(UserError) as error:
        build_data(DataConfig(format="chat", examples=50, sequence_length=12), tokenizer, tmp_path)
    assert error.value.key == "data.sequence_length"


def test_a_single_document_leaves_nothing_to_validate_on(tokenizer, tmp_path):
    (tmp_path / "own.txt").write_text("Only one text.\nOf two lines.")
    with pytest.raises(UserError) as error:
        build_data(DataConfig(path=str(tmp_path / "own.txt")), tokenizer, tmp_path)
    assert error.value.key == "data.path"
    assert "blank line" in error.value.remedy


def test_the_three_splits_have_no_example_in_common(tokenizer, tmp_path):
    config = DataConfig(examples=100, validation_fraction=0.05, test_fraction=0.05, sequence_length=64)
    data = build_data(config, tokenizer, tmp_path)
    assert [data.report[split]["examples"] for split in ("train", "validation", "test")] == [90, 5, 5]
    texts = [{tokenizer.decode(row["input_ids"]) for row in rows} for rows in (data.train, data.validation, data.test)]
    assert not texts[0] & texts[1]
    assert not texts[1] & texts[2]


def test_a_mixture_has_the_rows_of_all_its_sources(tokenizer, tmp_path):
    for name, size in (("a", 12), ("b", 5)):
        lines = [json.dumps({"body" if name == "b" else "text": f"Text {i} of {name}."}) for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = (
        {"path": str(tmp_path / "a.jsonl"), "weight": 3},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1, "text_key": "body"},
    )
    config = DataConfig(sources=sources, sequence_length=32, validation_fraction=0.2)
    data = build_data(config, tokenizer, tmp_path)
    assert data.weights == (3, 1)
    assert len(data.train.rows_by_source) == 2
    text = " ".join(tokenizer.decode(row["input_ids"]) for row in [*data.train, *data.validation])
    assert all(f"Text {i} of {name}." in text for name, size in (("a", 12), ("b", 5)) for i in range(size))
    of_b = sum(row >= data.train.rows_by_source[0] for row in data.rows_of_step(0, 4096, 1))
    assert of_b == 1024


def test_with_a_budget_of_tokens_every_chat_has_a_row_of_its_own(tokenizer, tmp_path):
    config = DataConfig(format="chat", examples=50, sequence_length=256, tokens_per_gpu=512)
    data = build_data(config, tokenizer, tmp_path)
    assert len(data.train) == data.report["train"]["examples"] == 48
    assert sum(map(data.train.row_tokens, range(48))) == data.train.tokens


@pytest.mark.parametrize("choice", ["cut", "drop", "split"])
def test_what_happens_to_long_chats_is_chosen_and_said(choice, tokenizer, tmp_path):
    config = DataConfig(format="chat", examples=100, sequence_length=80, overlong=choice, validation_fraction=0.3)
    report = build_data(config, tokenizer, tmp_path).report
    train = report["train"]
    assert train["overlong"] > 0
    assert train["longest"] > 80
    assert (train["dropped"] > 0) == (choice == "drop")
    said = []
    describe(report, said.append)
    assert f"{train['overlong']} examples are longer than a row (the longest {train['longest']} tokens)" in said[0]
    assert train["tokens"] + train["tokens_left_out"] == sum(
        build_data(
            DataConfig(format="chat", examples=100, sequence_length=1000, validation_fraction=0.3), tokenizer, tmp_path
        ).report["train"][name]
        for name in ("tokens", "tokens_left_out")
    )


def test_questions_come_from_the_last_turns_of_held_out_chats(tokenizer, tmp_path):
    chats = [
        [
            {"role": "user", "content": f"What is {n} and {n}?"},
            {"role": "assistant", "content": "Wait. #### 0"},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": f"It is #### {2 * n}" if n % 2 else "I do not know."},
        ]
        for n in range(40)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    config = DataConfig(
        path=str(tmp_path / "own.jsonl"), format="chat", validation_fraction=0.4, answer_pattern=r"#### (\d+)"
    )
    data = build_data(config, tokenizer, tmp_path)
    assert 0 < len(data.questions) < 16
    for question in data.questions:
        prompt = tokenizer.decode(question.prompt)
        n = int(question.answer) // 2
        assert n % 2
        assert prompt == tokenizer.apply_chat_template(chats[n][:3], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"sources": []}, "data.sources"),
        ({"path": "x", "sources": [{"path": "y"}]}, "data.sources"),
        ({"sources": [{"path": "y", "weight": 0}]}, "data.sources.0.weight"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "data.validation_fraction"),
        ({"overlong": "keep"}, "data.overlong"),
        ({"answer_pattern": "("}, "data.answer_pattern"),
        ({"answer_pattern": "no group"}, "data.answer_pattern"),
        ({"pth": "x"}, "data.pth"),
        ({"format": "chats"}, "data.format"),
        ({"sequence_length": 7}, "data.sequence_length"),
        ({"vocab_size": 300}, "data.vocab_size"),
        ({"validation_fraction": 0}, "data.validation_fraction"),
        ({"validation_fraction": 1.0}, "data.validation_fraction"),
        ({"examples": 1}, "data.examples"),
        ({"difficulty": "hard"}, "data.difficulty"),
    ],
)
def test_values_out_of_range(values, key):
    with pytest.raises(UserError) as error:
        parse_section(DataConfig, values, key="data")
    assert error.value.key == key
