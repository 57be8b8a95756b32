"""Token stores: what is written is read, killed work is continued, and processes do not get into each other's way."""

import json
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.config.errors import UserError
from ds_fp8.data import DataConfig
from ds_fp8.data import token_store as module
from ds_fp8.data.token_store import (
    NO_LOSS,
    TokenStore,
    TokenWriter,
    pack_batch,
    read_state,
    store_folder,
    tokenise_batch,
    tokenise_source,
)
from tests.corpus import CHATS, DOCUMENTS


def content(store: TokenStore) -> list[list[int]]:
    return [store[index].tolist() for index in range(len(store))]


@settings(max_examples=12, deadline=None)
@given(batches=st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1), min_size=1))
def test_what_is_written_is_read(batches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with TokenWriter(folder) as writer:
        for batch in batches:
            writer.append(*pack_batch([(ids, None) for ids in batch]))
        writer.complete()
    store, examples = TokenStore(folder), [ids for batch in batches for ids in batch]
    assert content(store) == examples
    assert store.lengths().tolist() == list(map(len, examples))
    assert store.tokens == sum(map(len, examples))
    for index, ids in enumerate(examples):
        assert store.read(index, 1, len(ids) - 1).tolist() == ids[1:]


def test_a_writer_that_did_not_come_to_its_end_counts_for_nothing(tmp_path):
    for complete in (True, False, True):
        with TokenWriter(tmp_path) as writer:
            for number in range(4):
                writer.append(*pack_batch([([number] * 5, None)]))
            if complete:
                writer.complete()
        assert (read_state(tmp_path) is not None) == complete
    assert content(TokenStore(tmp_path)) == [[number] * 5 for number in range(4)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_is_the_documents_in_order(workers, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCHES_WITHOUT_WORKERS", 2)
    texts = [f"Document {n} has {n % 7} lines of {n * n} words. " * (n % 3 + 1) for n in range(1600)]
    given = [*texts[:10], "", None, "  ", *texts[10:]]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    store = tokenise_source(DataConfig(path=str(tmp_path / "corpus.jsonl"), workers=workers), tokenizer, tmp_path)
    assert len(store) == len(texts)
    for index in (0, 10, 511, 512, len(texts) - 1):
        ids = tokenizer(texts[index], add_special_tokens=False)["input_ids"]
        assert store[index].tolist() == [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]


def test_tokens_without_loss_are_marked():
    tokens, lengths = pack_batch([([5, 6, 7], [False, True, False]), ([8], None)])
    assert tokens.tolist() == [5 | int(NO_LOSS), 6, 7 | int(NO_LOSS), 8]
    assert lengths.tolist() == [3, 1]


def test_processes_that_come_together_share_one_store(tokenizer, tmp_path, monkeypatch):
    filled = []
    fill = module._fill
    monkeypatch.setattr(module, "_fill", lambda *arguments: (filled.append(1), time.sleep(0.2), fill(*arguments)))
    stores = []
    config = DataConfig(**DOCUMENTS)
    threads = [
        threading.Thread(target=lambda: stores.append(tokenise_source(config, tokenizer, tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    assert all(content(store) == content(stores[0]) for store in stores)


@pytest.mark.parametrize("change", [CHATS, {"text_key": "content"}, {"add_eos": False}, {"add_bos": False}])
def test_what_tokens_depend_on_names_another_store(change, tokenizer, tmp_path):
    def folder(**keys):
        return store_folder(DataConfig(**{**DOCUMENTS, **keys}), tokenizer, tmp_path)

    assert folder(**change) != folder() == folder(sequence_length=64, workers=3, validation_fraction=0.2, seed=2)


def test_a_changed_file_is_tokenised_anew(tokenizer, tmp_path):
    file = tmp_path / "own.txt"
    config = DataConfig(path=str(file))
    file.write_text("One text.\n\nAnother.")
    assert len(tokenise_source(config, tokenizer, tmp_path)) == 2
    file.write_text("One text.\n\nAnother.\n\nA third.")
    assert len(tokenise_source(config, tokenizer, tmp_path)) == 3


def test_documents_may_do_without_their_ends(tokenizer):
    tokens, lengths, _ = tokenise_batch(tokenizer, DataConfig(add_bos=False, add_eos=False), ["A text.", "B."])
    ids = tokenizer(["A text.", "B."], add_special_tokens=False)["input_ids"]
    assert tokens.tolist() == [*ids[0], *ids[1]]
    assert lengths.tolist() == [len(part) for part in ids]


def test_a_mistake_in_the_data_leaves_the_store_incomplete(tokenizer, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"text": "fine"}\n{"text": 3}\n')
    config = DataConfig(path=str(file))
    with pytest.raises(UserError):
        tokenise_source(config, tokenizer, tmp_path)
    assert read_state(store_folder(config, tokenizer, tmp_path)) is None


@pytest.mark.parametrize("damage", ["every third id", "marks of loss", "an end"])
@pytest.mark.parametrize("written_by", ["this version", "one without times"])
def test_a_store_that_was_changed_on_disk_is_made_anew(damage, written_by, tokenizer, tmp_path, caplog):
    config = DataConfig(**CHATS)
    store = tokenise_source(config, tokenizer, tmp_path)
    expected, digest, folder = content(store), store.digest(), store_folder(config, tokenizer, tmp_path)
    if written_by == "one without times":
        (folder / "digest").write_text(digest)
        assert tokenise_source(config, tokenizer, tmp_path).digest() == digest
        (folder / "digest").write_text(digest)
    kind, name = (np.int64, "ends") if damage == "an end" else (np.uint32, "tokens")
    numbers = np.memmap(folder / name, dtype=kind, mode="r+")
    numbers[3 :: 3 if damage == "every third id" else 1] ^= NO_LOSS if damage == "marks of loss" else 1
    numbers.flush()
    del numbers
    with caplog.at_level("WARNING", logger="ds_fp8"):
        store = tokenise_source(config, tokenizer, tmp_path)
    assert (content(store), store.digest()) == (expected, digest)
    assert "have been changed" in caplog.text


def test_a_copied_store_is_read_and_not_made_anew(tokenizer, tmp_path, monkeypatch):
    config = DataConfig(**CHATS)
    digest = tokenise_source(config, tokenizer, tmp_path / "one").digest()
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)  # with other times
    monkeypatch.setattr(module, "_fill", None)
    assert tokenise_source(config, tokenizer, tmp_path / "two").digest() == digest
    monkeypatch.setattr(module, "_hashed", None)  # once is enough
    assert tokenise_source(config, tokenizer, tmp_path / "two").digest() == digest


def test_a_state_that_is_none_counts_for_nothing(tokenizer, tmp_path):
    config = DataConfig(**CHATS)
    folder = store_folder(config, tokenizer, tmp_path)
    expected = content(tokenise_source(config, tokenizer, tmp_path))
    whole = json.loads((folder / "state.json").read_text())
    assert "open_ends" in whole
    changed = [json.dumps({**whole, **change}) for change in ({"open_ends": None}, {"tokens": [1]})]
    for text in ("{}", "[]", "3", '{"tokens": 1, "examples": 1}', "[" * 100_000, "\xff", *changed):
        (folder / "state.json").write_text(text, encoding="latin-1")
        (folder / "digest").write_bytes(b"\xff\xfe")
        assert content(tokenise_source(config, tokenizer, tmp_path)) == expected


def test_a_data_set_of_the_hub_that_is_not_read_again_is_said(tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "read_examples", lambda config: iter(["One text.", "Another."]))
    for again in (False, True):
        with caplog.at_level("INFO", logger="ds_fp8"):
            tokenise_source(DataConfig(path="owner/name"), tokenizer, tmp_path)
        assert ("owner/name: as it was read before" in caplog.text) is again
