"""Token stores: what is written is read, killed work is continued, and processes do not get into each other's way."""

import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.config.errors import UserError
from ds_fp8.data import DataConfig, build_tokenizer
from ds_fp8.data import token_store as module
from ds_fp8.data.token_store import (
    NO_LOSS,
    TokenStore,
    TokenWriter,
    is_complete,
    pack_batch,
    read_state,
    store_folder,
    tokenise_batch,
    tokenise_source,
)
from tests.corpus import CHATS, DOCUMENTS, TOKENIZER

COUNT = 60_000
"""Enough to be killed while they are tokenised."""


def content(store: TokenStore) -> list[list[int]]:
    return [store[index].tolist() for index in range(len(store))]


@settings(max_examples=30, deadline=None)
@given(batches=st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1), min_size=1))
def test_what_is_written_is_read(batches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with TokenWriter(folder, shard_tokens=10) as writer:
        for batch in batches:
            writer.append(*pack_batch([(ids, None) for ids in batch]))
        writer.commit(None, complete=True)
    store, examples = TokenStore(folder), [ids for batch in batches for ids in batch]
    assert content(store) == examples
    assert store.lengths().tolist() == list(map(len, examples))
    assert store.tokens == sum(map(len, examples))
    for index, ids in enumerate(examples):
        assert store.read(index, 1, len(ids) - 1).tolist() == ids[1:]
    with pytest.raises(IndexError):
        store[len(examples)]


def test_tokens_without_loss_are_marked():
    tokens, lengths = pack_batch([([5, 6, 7], [False, True, False]), ([8], None)])
    assert tokens.tolist() == [5 | int(NO_LOSS), 6, 7 | int(NO_LOSS), 8]
    assert lengths.tolist() == [3, 1]


def test_what_was_not_committed_does_not_count(tmp_path):
    with TokenWriter(tmp_path, shard_tokens=4) as writer:
        writer.append(*pack_batch([([1, 2, 3, 4], None)]))
        writer.append(*pack_batch([([5, 6], None)]))
        writer.commit({"row": 2})
        writer.append(*pack_batch([([7, 8, 9], None)]))
    assert not is_complete(tmp_path)
    with TokenWriter(tmp_path, shard_tokens=4) as writer:
        assert writer.reader == {"row": 2}
        assert (writer.examples, writer.tokens) == (2, 6)
        writer.append(*pack_batch([([10, 11], None)]))
        writer.append(*pack_batch([([12], None)]))
        writer.commit(None, complete=True)
    assert content(TokenStore(tmp_path)) == [[1, 2, 3, 4], [5, 6], [10, 11], [12]]


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_shards_that_a_killed_run_began_after_its_last_commit_do_not_count(committed, tmp_path):
    with TokenWriter(tmp_path, shard_tokens=4) as writer:
        for number in range(4):  # one shard each
            if number == committed:
                writer.commit({"row": number})
            writer.append(*pack_batch([([number] * 5, None)]))
    with TokenWriter(tmp_path, shard_tokens=4) as writer:
        assert writer.examples == committed
        for number in range(committed, 6):
            writer.append(*pack_batch([([10 + number] * 4, None)]))
        writer.commit(None, complete=True)
    assert content(TokenStore(tmp_path)) == [[n] * 5 for n in range(committed)] + [
        [10 + n] * 4 for n in range(committed, 6)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A file of many short documents, and one text of each kind that is left out."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    texts = [f"Document {n} has {n % 7} lines of {n * n} words. " * (n % 3 + 1) for n in range(COUNT)]
    texts[10:10] = ["", None, "  "]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def whole(corpus, tokenizer, tmp_path_factory):
    """The corpus tokenised by this process alone, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return tokenise_source(DataConfig(path=str(corpus), workers=1), tokenizer, folder)


def test_a_store_is_the_documents_in_order(whole, corpus, tokenizer):
    assert len(whole) == COUNT
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    texts = [text for text in texts if text and text.strip()]
    for index in (0, 10, 511, 512, COUNT - 1):
        ids = tokenizer(texts[index], add_special_tokens=False)["input_ids"]
        assert whole[index].tolist() == [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]


SCRIPT = """
import os, signal, sys
from pathlib import Path

if __name__ == "__main__":  # workers import this file, too
    from ds_fp8.data import DataConfig, build_tokenizer, token_store

    token_store.COMMIT_SECONDS = 0
    corpus, tokenizer, cache, documents = sys.argv[1:]

    def killed(path, examples, tokens, done):
        if examples >= int(documents):
            os.kill(os.getpid(), signal.SIGKILL)

    config = DataConfig(path=corpus, tokenizer=tokenizer, workers=2)
    token_store.tokenise_source(config, build_tokenizer(config), Path(cache), killed)
"""


def test_killed_and_started_again_nothing_is_lost_or_repeated(corpus, whole, tmp_path):
    tokenizer = build_tokenizer(DataConfig(path="x", tokenizer=TOKENIZER))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = tmp_path / "cache"
    command = [sys.executable, str(script), str(corpus), TOKENIZER, str(cache), str(COUNT // 10)]
    folder = store_folder(DataConfig(path=str(corpus)), tokenizer, cache)
    # Its workers keep the pipe open: it closes when the last of them has ended.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not is_complete(folder)
    before = read_state(folder)["shards"][0][1]
    assert 0 < before < COUNT
    again = tokenise_source(DataConfig(path=str(corpus), workers=1), tokenizer, cache)
    assert len(again) == COUNT
    np.testing.assert_array_equal(again.lengths(), whole.lengths())
    assert all((again[index] == whole[index]).all() for index in range(COUNT))


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


@pytest.mark.parametrize(
    "change",
    [
        CHATS,
        {"text_key": "content"},
        {"add_eos": False},
        {"add_bos": False},
    ],
)
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
    assert not is_complete(store_folder(config, tokenizer, tmp_path))
