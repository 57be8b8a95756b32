"""A source as a token store: read once, tokenised in parallel, and continued where a killed run left off."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_fp8.data.chat import IGNORED, tokenize_chats
from ds_fp8.data.config import DataConfig
from ds_fp8.data.sources import ExampleStream, source_identity
from ds_fp8.data.token_store import TokenStore, TokenWriter, is_complete, pack_batch
from ds_fp8.data.tokenizer import encode_documents

BATCH_EXAMPLES = 512
BATCH_CHARACTERS = 2_000_000
"""A batch ends with the example that reaches either number."""
BATCHES_WITHOUT_WORKERS = 16
"""Starting processes costs seconds: a source of no more batches than this is tokenised without them."""
COMMIT_SECONDS = 5.0

Batch = tuple[np.ndarray, np.ndarray, int]
"""uint32 tokens of several examples one after the other, with NO_LOSS marks; the length of each; how many are chats
whose last turn's end carries no loss."""
Report = Callable[[str, int, int, bool], None]
"""Called now and then with the path of the source, examples and tokens so far, and whether that is all."""

VERSION = 1
"""Part of a store's name: raised when what it holds for the same source changes."""
CHAT_VERSION = 3
"""The same for stores of chats alone."""


def tokenise_source(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, report: Report | None = None
) -> TokenStore:
    """Return the token store of one source, made now unless it is there. Any number of processes may call at once.

    One of them does the work, the others wait for it. Killed, it goes on where it was when it is called again. Raises
    UserError for a source that cannot be read.
    """
    folder = store_folder(config, tokenizer, cache_dir)
    with exclusive(folder):
        if not is_complete(folder):
            _fill(folder, config, tokenizer, report)
    return TokenStore(folder)


def store_folder(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Path:
    """Return the folder of this source's token store; its name is a hash of everything that its content depends on."""
    # Only what changes the tokens: another split, length or share of the same source reads the same store.
    facts: list[Any] = [VERSION, source_identity(config.path), tokenizer_identity(tokenizer), config.format]
    if config.format == "chat":
        facts += [config.messages_key, CHAT_VERSION]
    else:
        facts += [config.text_key, config.add_bos, config.add_eos]
    if config.path == "synthetic":
        facts += [config.seed, config.examples, config.difficulty]
    return cache_dir / "tokens" / digest(facts)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a key that differs between tokenizers that may give different tokens."""
    inside = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    # Not part of a fast tokenizer's own description, and tokens depend on them all the same.
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template]
    return digest([inside, special])


def digest(facts: Any) -> str:
    """Return a short name for anything that JSON can hold."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine out of `folder`; a killed holder's claim ends with it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        # A lock of the kernel: it ends with its holder, however that ends. The file stays and means nothing.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tokenise_batch(tokenizer: PreTrainedTokenizerBase, config: DataConfig, examples: list) -> Batch:
    """Return the tokens of examples; those without any token are left out."""
    if config.format == "chat":
        chats = [chat for chat in tokenize_chats(tokenizer, examples) if chat.ids]
        tokens, lengths = pack_batch([(chat.ids, np.array(chat.labels) != IGNORED) for chat in chats])
        return tokens, lengths, sum(not chat.ends for chat in chats)
    documents = encode_documents(tokenizer, examples, config.add_bos, config.add_eos)
    return *pack_batch([(ids, None) for ids in documents if ids]), 0


def _fill(folder: Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase, report: Report | None) -> None:
    with TokenWriter(folder) as writer:
        # From the state of the last commit: what was appended behind it by a killed run has been cut off.
        stream = ExampleStream(config, writer.reader)
        committed = time.monotonic()
        for (tokens, lengths, open_ends), state in _tokenised(_batches(stream), tokenizer, config):
            writer.append(tokens, lengths)
            writer.open_ends += open_ends
            if time.monotonic() - committed > COMMIT_SECONDS:
                writer.commit(state)
                committed = time.monotonic()
                if report:
                    report(config.path, writer.examples, writer.tokens, False)
        # No state of the stream: a complete store is never continued.
        writer.commit(None, complete=True)
        if report:
            report(config.path, writer.examples, writer.tokens, True)


def _batches(stream: ExampleStream) -> Iterator[tuple[list, dict]]:
    """Yield examples in batches, each with the state of the stream behind it."""
    batch, characters = [], 0
    for example in stream:
        batch.append(example)
        characters += len(example) if isinstance(example, str) else sum(len(turn["content"] or "") for turn in example)
        if len(batch) == BATCH_EXAMPLES or characters >= BATCH_CHARACTERS:
            yield batch, stream.state()
            batch, characters = [], 0
    if batch:
        yield batch, stream.state()


def _tokenised(
    batches: Iterator[tuple[list, dict]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[tuple[Batch, dict]]:
    """Yield each batch tokenised, in order, with its state."""
    workers = config.workers or _cores()
    # One more than the limit is enough to know, and `chain` gives them back.
    first = list(islice(batches, BATCHES_WITHOUT_WORKERS + 1))
    if workers == 1 or len(first) <= BATCHES_WITHOUT_WORKERS:
        for batch, state in chain(first, batches):
            yield tokenise_batch(tokenizer, config, batch), state
        return
    # Not forked from this process, whose threads may hold locks, nor each started afresh, for dozens of workers would
    # import torch at once: forked from a process that has imported this module and done nothing else.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, processes, _start_worker, (tokenizer, config)) as pool:
        running: deque = deque()
        for batch, state in chain(first, batches):
            running.append((pool.submit(_work, batch), state))
            # Bounds what waits in memory, and keeps results in order: the stream's state must match what is written.
            if len(running) > 3 * workers:
                future, done = running.popleft()
                yield future.result(), done
        for future, done in running:
            yield future.result(), done


def _cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker: tuple[PreTrainedTokenizerBase, DataConfig]


def _start_worker(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = tokenizer, config
    # A daemon: it must not keep a worker alive that the pool has ended.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Stop with the parent: a killed one cannot stop its workers, which would wait for work for ever."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _work(examples: list) -> Batch:
    return tokenise_batch(*_worker, examples)
