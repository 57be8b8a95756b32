"""From a configuration to packed rows."""

import pytest

from ds_fp8.data import IGNORED, DataConfig, build_data, read_examples
from ds_fp8.errors import UserError
from ds_fp8.schema import parse_section


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
    assert sorted(found) == sorted(read_examples(config, tmp_path))


def test_the_same_configuration_gives_the_same_rows(tokenizer, tmp_path):
    config = DataConfig(examples=60)
    first, again = build_data(config, tokenizer, tmp_path), build_data(config, tokenizer, tmp_path)
    other = build_data(DataConfig(examples=60, seed=2), tokenizer, tmp_path)
    assert (first.train.input_ids == again.train.input_ids).all()
    assert first.problems == again.problems
    assert not (
        first.train.input_ids.shape == other.train.input_ids.shape
        and (first.train.input_ids == other.train.input_ids).all()
    )


def test_own_data_has_no_problems_and_the_built_in_corpus_has_400(tokenizer, tmp_path):
    assert len(build_data(DataConfig(examples=20), tokenizer, tmp_path).problems) == 400
    (tmp_path / "own.txt").write_text("One text.\n\nAnother text.\n\nA third, with naïve words.")
    own = build_data(DataConfig(path=str(tmp_path / "own.txt")), tokenizer, tmp_path)
    assert own.problems == []
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


@pytest.mark.parametrize(
    ("values", "key"),
    [
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
