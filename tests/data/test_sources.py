"""Reading examples: every kind of local data, and an error with a remedy for every mistake."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import datasets
import fsspec.compression
import pytest

from ds_fp8.data import DataConfig, build_data
from ds_fp8.data import sources as module
from ds_fp8.data.sources import read_examples, recognise
from tests.refusals import refused

TEXTS = ["The first text.", "The second text,\nof two lines.", "The third."]
CHATS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ],
]
TABLES = [".jsonl", ".json", ".parquet"]


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


def read(path, tokenizer=None, **keys):
    """Return the examples, or with a tokenizer the data of a stage."""
    config = DataConfig(path=str(path), tokenizer="given", **keys)
    if tokenizer:
        return build_data(config, tokenizer)
    return [example if isinstance(example, str) else example.messages for example in read_examples(config)]


def _error(path, tokenizer=None, **keys):
    with refused() as error:
        read(path, tokenizer, **keys)
    return error.value


@pytest.mark.parametrize("ending", [".txt", *TABLES])
def test_texts_from_a_file_that_may_change(ending, tmp_path):
    for texts in (TEXTS, [*TEXTS, "One more."]):
        path = _write(tmp_path / f"data{ending}", "text", texts)
        assert [text.strip() for text in read(path)] == texts


def test_a_cache_that_cannot_be_written_is_no_damaged_file(tmp_path, monkeypatch):
    """As the home of a service: datasets makes its folder there although nothing is cached."""
    path = _write(tmp_path / "data.txt", "text", TEXTS)

    def makedirs(folder, *_, **__):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "makedirs", makedirs)
    error = _error(path)
    assert "Permission denied" in error.problem
    assert "HF_HOME" in error.remedy


@pytest.mark.parametrize("ending", TABLES)
def test_chats_from_a_file_under_another_key(ending, tmp_path):
    path = _write(tmp_path / f"data{ending}", "turns", CHATS)
    assert read(path, format="chat", messages_key="turns") == CHATS


def call(arguments):
    tool = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [tool]}
    return [{"role": "user", "content": "?"}, answer, {"role": "tool", "content": "1"}]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "chats",
    [
        [call({"city": "Paris"}), call({"a": 1, "of": [{"b": 2}, {"c": 3}]})],
        [CHATS[0], [{"role": "user", "content": "x", "name": "Ann"}, CHATS[0][1]]],
    ],
)
def test_keys_that_only_other_messages_and_calls_have_are_no_keys(chats, ending, tmp_path):
    """A column of a table gives every message the keys, and every call the arguments, of all."""
    assert read(_write(tmp_path / f"data{ending}", "messages", chats), format="chat") == chats


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_compressed_files(kind, ending, compress, tmp_path):
    (tmp_path / "plain").mkdir()
    _write(tmp_path / "plain" / f"data{kind}", "text", TEXTS)
    packed = tmp_path / f"data{kind}{ending}"
    packed.write_bytes(compress((tmp_path / "plain" / f"data{kind}").read_bytes()))
    assert [text.strip() for text in read(packed)] == TEXTS


@pytest.mark.parametrize("name", ["part[1].jsonl", "part*.jsonl", "part?.jsonl", "{part}.jsonl"])
def test_a_name_is_no_pattern(name, tmp_path):
    for other in ("part1.jsonl", "part2.jsonl", name):
        _write(tmp_path / other, "text", [f"in {other}"])
    assert read(tmp_path / name) == [f"in {name}"]
    (tmp_path / "folder[1]").mkdir()
    _write(tmp_path / "folder[1]" / name, "text", TEXTS)
    assert read(tmp_path / "folder[1]") == TEXTS


def test_folders_named_like_files_and_links_to_folders_are_entered(tmp_path):
    """As Spark leaves folders with one for each table, and as a folder of links gathers corpora of several disks."""
    (tmp_path / "disk").mkdir()
    _write(tmp_path / "disk" / "c.jsonl", "text", ["c"])
    for table in ("a", "b"):
        (tmp_path / "all" / f"{table}.jsonl").mkdir(parents=True)
        _write(tmp_path / "all" / f"{table}.jsonl" / "part-0.jsonl", "text", [table])
    (tmp_path / "all" / "notes.md").write_text("not data")
    (tmp_path / "all" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "all" / "linked again").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "all")
    assert read(tmp_path / "all") == ["a", "b", "c"]


def test_files_with_other_columns_are_not_called_damaged(tmp_path):
    (tmp_path / "tables").mkdir()
    for name, about in (("a", {"of": 1}), ("b", "of"), ("c", [3])):
        row = {"text": name, "about": about}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / "tables" / f"{name}.parquet")
    assert "same columns" in _error(tmp_path / "tables").remedy
    for name in "abc":
        (tmp_path / "tables" / f"{name}.parquet").unlink()
    assert read(tmp_path) == ["a", "b", "c"]  # rows of JSON need not be alike


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}/missing.jsonl", "does not exist"),
        ("{}/missing/folder/", "does not exist"),
        ("some/data.jsonl", "does not exist"),
        ("owner/no_such_dataset", "neither a local file"),
        ("owner/no_such_dataset:subset", "neither a local file"),
    ],
)
def test_what_is_not_there(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = _error(name.format(tmp_path))
    assert error.key == "data.path"
    assert words in str(error)
    assert name.format(tmp_path) in str(error)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"data.docx": b"x"}, "no known file type"),
        ({"data.jsonl": b'\n{"text": "fine"}\n{"text": broken\n'}, "line 3 of data.jsonl"),
        ({"data.jsonl": b'{"text": "fine"}\n\n7\n'}, "line 3 of data.jsonl is of type int"),
        ({"data.jsonl.gz": gzip.compress(b'{"text": "' + bytes(range(65, 91)) * 99 + b'"}')[:40]}, "as json data"),
        ({"data.jsonl": b'{"text": ""}\n{"text": null}'}, "no examples"),
        *(({f"data{ending}": content}, "") for ending in (".txt", *TABLES) for content in (b"", b"\n\n")),
        ({}, "holds no"),
        ({"a.txt": b"x", "b.jsonl": b"{}"}, "mixes .jsonl, .txt"),
    ],
)
def test_what_is_no_data(files, words, tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    error = _error(folder / next(iter(files)) if len(files) == 1 else folder, tokenizer)
    assert error.key == "data.path"
    assert words in str(error)


def test_zstandard_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    (tmp_path / "data.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04\x58\x00")
    assert _error(tmp_path / "data.jsonl.zst").remedy == "pip install zstandard"


def test_a_missing_column_names_those_there_are(tmp_path):
    path = _write(tmp_path / "data.jsonl", "body", [1, 2])
    for format, key in (("documents", "data.text_key"), ("chat", "data.messages_key")):
        error = _error(path, format=format)
        assert error.key == key
        assert "body, number" in error.remedy
    assert _error(path, text_key="body").key == "data.text_key"  # no text
    Path(path).write_text('{"text": "a"}\n{"txt": "b"}\n')
    error = _error(path)
    assert "row 2 of" in str(error)
    assert "set data.text_key" not in error.remedy  # to a column that other rows do not have


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
        *([CHATS[0][0], {**CHATS[0][1], "tool_calls": [{"function": each}]}] for each in ("f", 1, True, [1])),
    ],
)
def test_malformed_messages(messages, tmp_path):
    error = _error(_write(tmp_path / "data.jsonl", "messages", [messages]), format="chat")
    assert error.key == "data.path"
    assert "row 1 of" in str(error)
    assert "content" in error.remedy


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("tools", value) for value in ("[", "{}", 3, [1], ["weather"], [{"function": 1}], "[" * 100_000)),
        *(("chat_template_kwargs", value) for value in ("no", [], {"messages": []}, {"add_generation_prompt": True})),
        *(("documents", value) for value in ("text", {"text": "x"})),
        *((column, "x") for column in ("functions", "tool_defs", "system", "images", "enable_thinking")),
        *(("messages", [CHATS[0][0], {**CHATS[0][1], key: False}]) for key in ("train", "loss", "function_call")),
    ],
)
def test_a_field_beside_messages_is_read_or_refused(column, value, tmp_path):
    rows = [{"messages": CHATS[0], "id": 3, "source": "web", "parallel_tool_calls": True, "images": []}]
    rows += [{**rows[0], column: value}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = _error(tmp_path / "own.jsonl", format="chat")
    assert error.key == "data.path"
    assert f"row 2 of {tmp_path}" in str(error)
    assert f'"{column}"' in str(error)


CALL = {"name": "add", "arguments": {"a": 1}}
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Hi", "completion": "Ho"}, HI),
        ({"prompt": HI + HI[:1], "completion": HI[1:]}, [HI[0], {**HI[1], "weight": 0}, *HI]),
        ({"conversations": HI}, HI),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "Ho", "weight": 0},
                ],
                "system": "Be kind.",
            },
            [
                {"role": "system", "content": "Be kind."},
                HI[0],
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "content": "2"},
                {**HI[1], "weight": 0},
            ],
        ),
        ({"instruction": "Hi", "input": "", "output": "Ho", "source": "web"}, HI),
        (
            {"instruction": "Add", "input": "1 1", "output": "2", "system": "Be kind.", "history": [["Hi", "Ho"]]},
            [
                {"role": "system", "content": "Be kind."},
                HI[0],
                {**HI[1], "weight": 0},
                {"role": "user", "content": "Add\n1 1"},
                {"role": "assistant", "content": "2"},
            ],
        ),
    ],
)
def test_other_forms_of_chats_are_read_as_messages(row, messages, tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    (tmp_path / "own.jsonl").write_text(json.dumps({**row, "tools": tools}))
    config = DataConfig(path=str(tmp_path / "own.jsonl"), tokenizer="given", format="chat")
    (chat,) = read_examples(config)
    assert chat.messages == messages
    assert chat.arguments == {"tools": tools}
    assert recognise(str(tmp_path / "own.jsonl"), "messages")[0] == {"format": "chat"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": HI}, {"conversations": HI}], 'row 2 of {} has no column "messages"'),
        ([{"conversations": HI}, {"messages": HI}], "row 2 of {} is not ShareGPT, as row 1 is"),
        ([{"conversations": HI}, {"text": "Hi"}], "row 2 of {} is not ShareGPT, as row 1 is"),
        ([{"conversations": [{"from": "human"}]}], "row 1 of {} is not ShareGPT, as its columns say"),
        ([{"instruction": 3, "input": "4", "output": "Ho"}], "row 1 of {} is not Alpaca, as its columns say"),
        ([{"instruction": "Hi", "output": ""}], '"messages" of row 1 of {} has no word of the assistant'),
        ([{"prompt": "Hi", "completion": None}], "row 1 of {} is not prompt and completion, as its columns say"),
        ([{"chosen": HI, "rejected": HI}], '{} has no column "messages"'),
    ],
)
def test_rows_of_mixed_or_of_broken_forms_are_refused(rows, words, tmp_path):
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert words.format(tmp_path / "own.jsonl") in str(_error(tmp_path / "own.jsonl", format="chat"))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"text": "a", "title": "b"}, {"format": "documents"}),
        ({"body": "a", "id": 3}, {"format": "documents", "text_key": "body"}),
        ({"chosen": HI, "rejected": HI}, "pairs of preference"),
        ({"title": "a", "body": "b"}, "title, body"),
    ],
)
def test_text_is_recognised_by_its_column(row, found, tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    if isinstance(found, dict):
        assert recognise(str(tmp_path / "own.jsonl"), "messages")[0] == found
    else:
        with refused(found):
            recognise(str(tmp_path / "own.jsonl"), "messages")


def test_a_row_that_no_tokenizer_takes_is_named(tmp_path, monkeypatch):
    (tmp_path / "own.jsonl").write_text('{"text": "fine"}\n{"text": "x \\ud800 y"}\n')
    assert "row 2 of" in str(error := _error(tmp_path / "own.jsonl"))
    assert "surrogate" in str(error)
    monkeypatch.setattr(module, "MAX_CHARACTERS", 100)
    content = json.dumps({"text": "fine"}) + "\n" + json.dumps({"text": "x" * 1000})
    (tmp_path / "own.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    assert "line 2 of own.jsonl.gz has more than 100 characters" in str(_error(tmp_path / "own.jsonl.gz"))
    (tmp_path / "own.json").write_text(json.dumps([{"text": "fine"}] * 50))  # one line
    assert read(tmp_path / "own.json") == ["fine"] * 50
    (tmp_path / "own.jsonl").write_text('{"text": "fine"}\n' + '{"a":' * 50_000)
    monkeypatch.undo()
    assert "line 2 of own.jsonl is nested too deep" in str(_error(tmp_path / "own.jsonl"))
