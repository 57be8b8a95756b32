"""A source as tokens on disk: read once, tokenised in parallel, memory-mapped.

folder/tokens       uint32 [tokens]: token ids; the top bit marks a token that carries no loss
folder/ends         int64 [examples]: where each example ends in tokens
folder/digest       hash of both, and their sizes and times: changed files are told by it, and made anew
folder/state.json   numbers of tokens and examples; written last: without it nothing counts
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from ds_fp8.config.files import write_atomically
from ds_fp8.config.log import logger
from ds_fp8.data.chat import IGNORED, tokenize_chats
from ds_fp8.data.config import DataConfig
from ds_fp8.data.sources import read_examples, source_identity
from ds_fp8.data.tokenizer import encode_documents

NO_LOSS = np.uint32(1 << 31)  # Marks a token that carries no loss
_HASHED_AT_ONCE = 1 << 22
_TOKENS, _ENDS, _DIGEST, _STATE = "tokens", "ends", "digest", "state.json"

BATCH_EXAMPLES = 512
BATCH_CHARACTERS = 2_000_000  # A batch ends with the example that reaches either number
# Starting processes costs seconds: a source of no more batches than this is tokenised without them
BATCHES_WITHOUT_WORKERS = 16
REPORT_SECONDS = 5.0

# uint32 tokens of several examples one after the other, with NO_LOSS marks; the length of each; how many are chats
# whose last turn's end carries no loss
Batch = tuple[np.ndarray, np.ndarray, int]
# Called now and then with the path of the source, examples and tokens so far, and whether that is all
Report = Callable[[str, int, int, bool], None]

VERSION = 2  # Part of a store's name: raised when what it holds for the same source changes
CHAT_VERSION = 4  # The same for stores of chats alone


def tokenise_source(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, report: Report | None = None
) -> TokenStore:
    """Return the token store of one source, made now unless it is there. Any number of processes may call at once.

    One of them does the work, the others wait for it. Raises UserError for a source that cannot be read.
    """
    folder = store_folder(config, tokenizer, cache_dir)
    with exclusive(folder):
        if not _is_as_written(folder):
            _fill(folder, config, tokenizer, report)
        elif not Path(config.path).expanduser().exists():
            logger.info("%s: as it was read before; another data.cache_dir reads it again from the hub", config.path)
    return TokenStore(folder)


def store_folder(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Path:
    """Return the folder of this source's token store; its name is a hash of everything that its content depends on."""
    # Only what changes the tokens: another split, length or share of the same source reads the same store.
    facts: list[Any] = [VERSION, source_identity(config.path), tokenizer_identity(tokenizer), config.format]
    if config.format == "chat":
        facts += [config.messages_key, CHAT_VERSION]
    else:
        facts += [config.text_key, config.add_bos, config.add_eos]
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
        reported = time.monotonic()
        for batch in _tokenised(_batches(read_examples(config)), tokenizer, config):
            writer.append(*batch)
            if report and time.monotonic() - reported > REPORT_SECONDS:
                report(config.path, writer.examples, writer.tokens, False)
                reported = time.monotonic()
        writer.complete()
        if report:
            report(config.path, writer.examples, writer.tokens, True)


def _batches(examples: Iterator[Any]) -> Iterator[list]:
    batch, characters = [], 0
    for example in examples:
        batch.append(example)
        texts = [example] if isinstance(example, str) else [str(turn["content"]) for turn in example.messages]
        characters += sum(map(len, texts))
        if len(batch) == BATCH_EXAMPLES or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenised(batches: Iterator[list], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Iterator[Batch]:
    workers = config.workers or len(os.sched_getaffinity(0))
    # One more than the limit is enough to know, and `chain` gives them back.
    first = list(islice(batches, BATCHES_WITHOUT_WORKERS + 1))
    if workers == 1 or len(first) <= BATCHES_WITHOUT_WORKERS:
        for batch in chain(first, batches):
            yield tokenise_batch(tokenizer, config, batch)
        return
    # Not datasets.map(num_proc): it takes a table on disk, where rows of one schema have all keys that any of them has.
    # A fork of this process might inherit locks that its threads hold; the fork server has none.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, processes, _start_worker, (tokenizer, config)) as pool:
        running: deque = deque()
        for batch in chain(first, batches):
            running.append(pool.submit(_work, batch))
            if len(running) > 3 * workers:  # bounds what waits in memory, and keeps results in order
                yield running.popleft().result()
        for future in running:
            yield future.result()


_worker: tuple[PreTrainedTokenizerBase, DataConfig]


def _start_worker(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = tokenizer, config

    def end_with_parent() -> None:
        # A killed parent cannot stop its workers, which would wait for work for ever.
        wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(examples: list) -> Batch:
    return tokenise_batch(*_worker, examples)


class TokenWriter:
    """Writes a store anew. A context manager; `complete` makes what was appended count."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _STATE).unlink(missing_ok=True)
        self._folder = folder
        self._files = [(folder / name).open("wb") for name in (_TOKENS, _ENDS)]
        self.tokens = self.examples = self._open_ends = 0

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.close()

    def append(self, tokens: np.ndarray, lengths: np.ndarray, open_ends: int = 0) -> None:
        """Append examples: their uint32 tokens one after the other, how many tokens each has, and chats' open ends."""
        to_tokens, to_ends = self._files
        to_tokens.write(np.ascontiguousarray(tokens, dtype=np.uint32))
        to_ends.write(self.tokens + np.cumsum(lengths, dtype=np.int64))
        self.tokens += len(tokens)
        self.examples += len(lengths)
        self._open_ends += open_ends

    def complete(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())  # before the state that counts these bytes
        _note_digest(self._folder, _hashed(self._folder))
        state = {"tokens": self.tokens, "examples": self.examples, "open_ends": self._open_ends}
        write_atomically(self._folder / _STATE, json.dumps(state))


class TokenStore:
    """A complete store, to be read. Sequence of examples, each uint32 [length] with NO_LOSS marks."""

    def __init__(self, folder: Path):
        state = read_state(folder)
        self.tokens: int = state["tokens"]  # Tokens in all examples
        self.open_ends: int = state["open_ends"]  # Chats whose last turn's end carries no loss
        # Mapped: pages are read when a row asks for them, and all ranks of a host share them.
        self._tokens, self._ends = _map(folder / _TOKENS, np.uint32), _map(folder / _ENDS, np.int64)
        self._folder = folder

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, example: int) -> np.ndarray:
        return self._tokens[self._begin(example) : self._ends[example]]

    def read(self, example: int, start: int, length: int) -> np.ndarray:
        begin = self._begin(example) + start
        return self._tokens[begin : begin + length]

    def lengths(self) -> np.ndarray:
        return np.diff(self._ends, prepend=0)

    def digest(self) -> str:
        return (self._folder / _DIGEST).read_text()[:32]

    def plan_state(self, files: Iterable[Path]) -> list[Any]:
        """Return what files made of this store are known by, until it or they are changed."""
        return [self.digest(), _stamps(*sorted(files))]

    def _begin(self, example: int) -> int:
        return int(self._ends[example - 1]) if example else 0


def pack_batch(examples: Sequence[tuple[Sequence[int], Sequence[bool] | None]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, lengths) as `TokenWriter.append` takes them.

    Examples are given as ids and, for each token, whether it carries loss.
    """
    lengths = np.array([len(ids) for ids, _ in examples], dtype=np.int64)
    tokens = np.empty(int(lengths.sum()), dtype=np.uint32)
    stop = 0
    for ids, carries_loss in examples:
        start, stop = stop, stop + len(ids)
        tokens[start:stop] = ids
        if carries_loss is not None:
            tokens[start:stop][~np.asarray(carries_loss, dtype=bool)] |= NO_LOSS
    return tokens, lengths


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a store; None where it is not complete, or files lack part of what it counts."""
    try:
        state = json.loads((folder / _STATE).read_text())
        sizes = {_TOKENS: 4 * state["tokens"], _ENDS: 8 * state["examples"]}
        is_whole = type(state["open_ends"]) is int
        return state if is_whole and all((folder / name).stat().st_size == sizes[name] for name in sizes) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _stamps(*files: Path) -> list[list[int]]:
    return [[stat.st_size, stat.st_mtime_ns] for stat in map(os.stat, files)]


def _is_as_written(folder: Path) -> bool:
    """Return whether a store is complete and what was written: by sizes and times, or else by its digest."""
    if read_state(folder) is None:
        return False
    file = folder / _DIGEST
    digest, _, noted = file.read_text(errors="replace").partition(" ") if file.exists() else ("", "", "")
    if noted != json.dumps(_stamps(folder / _TOKENS, folder / _ENDS)):
        # Copied, or written by an older version, or changed: all of it is read to know.
        now = _hashed(folder)
        if len(digest) == 32 and digest != now:
            logger.warning("the tokens in %s have been changed, and are made anew", folder)
            return False
        _note_digest(folder, now)
    return True


def _hashed(folder: Path) -> str:
    hashed = xxhash.xxh3_128()
    for numbers in (_map(folder / _TOKENS, np.uint32), _map(folder / _ENDS, np.int64)):
        for start in range(0, len(numbers), _HASHED_AT_ONCE):
            hashed.update(numbers[start : start + _HASHED_AT_ONCE])
    return hashed.hexdigest()


def _note_digest(folder: Path, digest: str) -> None:
    write_atomically(folder / _DIGEST, f"{digest} {json.dumps(_stamps(folder / _TOKENS, folder / _ENDS))}")


def _map(file: Path, dtype: type) -> np.ndarray:
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)
