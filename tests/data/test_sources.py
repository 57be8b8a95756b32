"""Reading examples: every kind of local data, and an error with a remedy for every mistake."""

import bz2
import gzip
import json
import lzma
from itertools import islice

import datasets
import fsspec.compression
import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.data import DataConfig
from ds_fp8.data.sources import ExampleStream, read_examples

TEXTS = ["The first text.", "The second text,\nof two lines.", "The third."]
CHATS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ],
]


def _write(path, column, values):
    rows = [{column: value, "number": index} for index, value in enumerate(values)]
    if path.suffix == ".txt":
        path.write_text("\n\n".join(values) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def _error(config):
    with pytest.raises(UserError) as error:
        read_examples(config)
    assert error.value.remedy
    return error.value


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".json", ".parquet"])
def test_texts_from_a_file(ending, tmp_path):
    path = _write(tmp_path / f"data{ending}", "text", TEXTS)
    assert [text.strip() for text in read_examples(DataConfig(path=path))] == TEXTS


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_chats_from_a_file_under_another_key(ending, tmp_path):
    path = _write(tmp_path / f"data{ending}", "turns", CHATS)
    config = DataConfig(path=path, format="chat", messages_key="turns")
    assert read_examples(config) == CHATS


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_calls_of_tools_have_their_own_arguments_alone(ending, tmp_path):
    """A column of a table gives every call the arguments of all."""

    def chat(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [{"role": "user", "content": "?"}, answer, {"role": "tool", "content": "1"}]

    chats = [chat({"city": "Paris"}), chat({"a": 1, "of": [{"b": 2}, {"c": 3}]})]
    path = _write(tmp_path / f"data{ending}", "messages", chats)
    assert read_examples(DataConfig(path=path, format="chat")) == chats


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_compressed_files(kind, ending, compress, tmp_path):
    (tmp_path / "plain").mkdir()
    _write(tmp_path / "plain" / f"data{kind}", "text", TEXTS)
    packed = tmp_path / f"data{kind}{ending}"
    packed.write_bytes(compress((tmp_path / "plain" / f"data{kind}").read_bytes()))
    assert [text.strip() for text in read_examples(DataConfig(path=str(packed)))] == TEXTS


@pytest.mark.parametrize("name", ["part[1].jsonl", "part*.jsonl", "part?.jsonl", "{part}.jsonl"])
def test_a_name_is_no_pattern(name, tmp_path):
    for other in ("part1.jsonl", "part2.jsonl", name):
        _write(tmp_path / other, "text", [f"in {other}"])
    assert read_examples(DataConfig(path=str(tmp_path / name))) == [f"in {name}"]
    (tmp_path / "folder[1]").mkdir()
    _write(tmp_path / "folder[1]" / name, "text", TEXTS)
    assert read_examples(DataConfig(path=str(tmp_path / "folder[1]"))) == TEXTS


def test_folders_named_like_files_and_links_to_folders_are_entered(tmp_path):
    """As Spark leaves folders with one for each table, and as a folder of links gathers corpora of several disks."""
    (tmp_path / "disk").mkdir()
    _write(tmp_path / "disk" / "c.jsonl", "text", ["c"])
    for table in ("a", "b"):
        (tmp_path / "all" / f"{table}.jsonl").mkdir(parents=True)
        _write(tmp_path / "all" / f"{table}.jsonl" / "part-0.jsonl", "text", [table])
    (tmp_path / "all" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "all" / "linked again").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "all")
    assert read_examples(DataConfig(path=str(tmp_path / "all"))) == ["a", "b", "c"]


def test_zstandard_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    (tmp_path / "data.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04\x58\x00")
    assert _error(DataConfig(path=str(tmp_path / "data.jsonl.zst"))).remedy == "pip install zstandard"


def test_files_with_other_columns_are_not_called_damaged(tmp_path):
    for name, about in (("a", {"of": 1}), ("b", "of"), ("c", [3])):
        row = {"text": name, "about": about}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / "tables").mkdir(exist_ok=True)
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / "tables" / f"{name}.parquet")
    assert "same columns" in _error(DataConfig(path=str(tmp_path / "tables"))).remedy
    for name in "abc":
        (tmp_path / "tables" / f"{name}.parquet").unlink()
    assert read_examples(DataConfig(path=str(tmp_path))) == ["a", "b", "c"]  # rows of JSON need not be alike


def test_a_damaged_compressed_file_is_named(tmp_path):
    file = tmp_path / "data.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"text": "x" * 5000}).encode())[:40])
    assert "cannot be read as json data" in str(_error(DataConfig(path=str(file))))


@pytest.mark.parametrize("path", ["synthetic", "files"])
@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_a_stream_goes_on_from_its_state(path, after, tmp_path):
    if path == "files":
        for name, numbers in (("a.jsonl.gz", range(5)), ("b.jsonl", range(5, 9))):
            text = "".join(json.dumps({"text": f"Text {n}." if n != 2 else None}) + "\n" for n in numbers)
            (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        path = str(tmp_path)
    config = DataConfig(path=path, examples=9)
    stream = ExampleStream(config)
    seen = list(islice(stream, after))
    state = json.loads(json.dumps(stream.state()))
    assert seen + list(ExampleStream(config, state)) == read_examples(config)


def test_keys_that_only_other_messages_have_are_no_keys(tmp_path):
    chats = [CHATS[0], [{"role": "user", "content": "x", "name": "Ann"}, CHATS[0][1]]]
    path = _write(tmp_path / "data.parquet", "messages", chats)
    assert read_examples(DataConfig(path=path, format="chat")) == chats


def test_folder_of_files_in_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    _write(folder / "a.jsonl", "text", TEXTS[:2])
    _write(folder / "deep" / "b.jsonl", "text", TEXTS[2:])
    (folder / "notes.md").write_text("not data")
    assert read_examples(DataConfig(path=str(folder))) == TEXTS


def test_changed_file_is_read_anew(tmp_path):
    config = DataConfig(path=_write(tmp_path / "data.jsonl", "text", TEXTS))
    assert read_examples(config) == TEXTS
    _write(tmp_path / "data.jsonl", "text", [*TEXTS, "One more."])
    assert read_examples(config) == [*TEXTS, "One more."]


def test_synthetic_examples(tmp_path):
    texts = read_examples(DataConfig(examples=7))
    chats = read_examples(DataConfig(examples=7, format="chat"))
    assert len(texts) == len(chats) == 7
    assert isinstance(texts[0], str)
    assert isinstance(chats[0], list)
    assert texts != read_examples(DataConfig(examples=7, seed=1))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing/folder/", "missing.txt"])
def test_missing_file(name, tmp_path):
    error = _error(DataConfig(path=f"{tmp_path}/{name}"))
    assert error.key == "data.path"
    assert name in str(error)


def test_relative_missing_file_is_not_taken_for_a_datasets_name(tmp_path):
    assert "does not exist" in str(_error(DataConfig(path="some/data.jsonl")))


@pytest.mark.parametrize("name", ["owner/no_such_dataset", "owner/no_such_dataset:subset"])
def test_name_that_cannot_be_reached(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = _error(DataConfig(path=name))
    assert error.key == "data.path"
    assert name in str(error)


def test_unknown_ending(tmp_path):
    (tmp_path / "data.docx").write_text("x")
    error = _error(DataConfig(path=str(tmp_path / "data.docx")))
    assert error.key == "data.path"
    assert ".parquet" in error.remedy


def test_folder_without_data_and_folder_of_several_kinds(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "holds no" in str(_error(DataConfig(path=str(folder))))
    _write(folder / "a.txt", "text", TEXTS)
    _write(folder / "b.jsonl", "text", TEXTS)
    assert "mixes .jsonl, .txt" in str(_error(DataConfig(path=str(folder))))


def test_missing_column_names_those_there_are(tmp_path):
    path = _write(tmp_path / "data.jsonl", "body", TEXTS)
    error = _error(DataConfig(path=path))
    assert error.key == "data.text_key"
    assert "body" in error.remedy
    assert "number" in error.remedy
    error = _error(DataConfig(path=path, format="chat"))
    assert error.key == "data.messages_key"
    assert "body" in error.remedy


def test_column_of_another_type(tmp_path):
    error = _error(DataConfig(path=_write(tmp_path / "data.jsonl", "text", [1, 2])))
    assert error.key == "data.text_key"


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_file(ending, content, tmp_path):
    path = tmp_path / f"data{ending}"
    path.write_bytes(content)
    assert _error(DataConfig(path=str(path))).key == "data.path"


def test_texts_that_are_all_empty(tmp_path):
    error = _error(DataConfig(path=_write(tmp_path / "data.jsonl", "text", ["", "  ", None])))
    assert error.key == "data.path"
    assert "no examples" in str(error)


def test_broken_file(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n{"text": broken\n')
    error = _error(DataConfig(path=str(tmp_path / "data.jsonl")))
    assert error.key == "data.path"
    assert "cannot be read" in str(error)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        ["Hi"],
        [{"role": "user"}],
        [{"from": "human", "value": "Hi"}],
        [{"role": "user", "content": "Hi"}],
        [{"role": "assistant", "content": None}],
        [{"role": "robot", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "Hello"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 0.5}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "tool_calls": "f"}],
    ],
)
def test_malformed_messages(messages, tmp_path):
    path = _write(tmp_path / "data.jsonl", "messages", [messages])
    error = _error(DataConfig(path=path, format="chat"))
    assert error.key == "data.path"
    assert "row 0" in str(error)
    assert "content" in error.remedy
