"""Tokenised examples on disk, memory-mapped: as many as fit on the disk, read without loading them.

folder/00000.tokens   uint32 [tokens]: token ids; the top bit marks a token that carries no loss
folder/00000.ends     int64 [examples]: where each example ends in 00000.tokens
folder/00001.tokens   ... a shard begins once the one before has reached SHARD_TOKENS
folder/state.json     how much of these files counts, written after them: what a kill left behind it is cut off
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

NO_LOSS = np.uint32(1 << 31)
"""Marks a token that carries no loss."""
SHARD_TOKENS = 1 << 28
"""Tokens after which a new shard begins: 1 GiB."""

_HASHED_AT_ONCE = 1 << 22
_TOKENS, _ENDS, _STATE = "tokens", "ends", "state.json"


class TokenWriter:
    """Appends examples to a store. A context manager; `commit` makes what was appended count."""

    def __init__(self, folder: Path, shard_tokens: int = SHARD_TOKENS):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shard_tokens = folder, shard_tokens
        state = read_state(folder) or {"shards": [[0, 0]], "reader": None, "complete": False}
        self.reader: Any = state["reader"]
        """The writer's state, as last committed."""
        self.open_ends: int = state.get("open_ends", 0)
        """Chats whose last turn's end carries no loss."""
        self._shards: list[list[int]] = state["shards"]
        for shard, (tokens, examples) in enumerate(self._shards):
            for name, size in ((_TOKENS, tokens * 4), (_ENDS, examples * 8)):
                file = _file(folder, shard, name)
                file.touch()
                # Bytes behind the last commit are of batches that will be tokenised once more.
                os.truncate(file, size)
        self._open()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.close()
        self._ends.close()

    @property
    def tokens(self) -> int:
        """Return the tokens appended so far."""
        return sum(tokens for tokens, _ in self._shards)

    @property
    def examples(self) -> int:
        """Return the examples appended so far."""
        return sum(examples for _, examples in self._shards)

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append examples: their uint32 tokens one after the other, and how many tokens each has."""
        shard = self._shards[-1]
        if shard[0] >= self._shard_tokens:
            self.__exit__()
            self._shards.append([0, 0])
            self._open()
            shard = self._shards[-1]
        self._tokens.write(np.ascontiguousarray(tokens, dtype=np.uint32))
        # Ends count from the shard's beginning, so that a shard can be read alone.
        self._ends.write(shard[0] + np.cumsum(lengths, dtype=np.int64))
        shard[0] += len(tokens)
        shard[1] += len(lengths)

    def commit(self, reader: Any, complete: bool = False) -> None:
        """Make all that was appended count, together with `reader`, which JSON must be able to hold."""
        for file in (self._tokens, self._ends):
            file.flush()
            # Before the state that counts these bytes: after a power loss it may be too old, never too new.
            os.fsync(file.fileno())
        self.reader = reader
        state = {"shards": self._shards, "reader": reader, "complete": complete, "open_ends": self.open_ends}
        text = json.dumps(state)
        part = self._folder / f"{_STATE}.part"
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power loss may leave the name, and nothing behind it
        os.replace(part, self._folder / _STATE)

    def _open(self) -> None:
        last = len(self._shards) - 1
        # Files of a shard that begins may hold what a killed run wrote behind its last commit.
        mode = "ab" if self._shards[last][1] else "wb"
        self._tokens = _file(self._folder, last, _TOKENS).open(mode)
        self._ends = _file(self._folder, last, _ENDS).open(mode)


class TokenStore:
    """A complete store, to be read. Sequence of examples, each uint32 [length] with NO_LOSS marks."""

    def __init__(self, folder: Path):
        state = read_state(folder)
        shards = [counts for counts in state["shards"] if counts[1]]
        self.open_ends: int = state.get("open_ends", 0)
        """Chats whose last turn's end carries no loss."""
        # Mapped: pages are read when a row asks for them, and all ranks of a host share them.
        self._tokens = [_map(_file(folder, index, _TOKENS), np.uint32) for index in range(len(shards))]
        self._ends = [_map(_file(folder, index, _ENDS), np.int64) for index in range(len(shards))]
        self._first = np.cumsum([0, *(examples for _, examples in shards)])
        self.tokens = sum(tokens for tokens, _ in shards)
        """Tokens in all examples."""
        self._folder = folder

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, example: int) -> np.ndarray:
        shard, local = self._place(example)
        ends = self._ends[shard]
        return self._tokens[shard][ends[local - 1] if local else 0 : ends[local]]

    def read(self, example: int, start: int, length: int) -> np.ndarray:
        """Return `length` tokens of an example from its token `start` on."""
        shard, local = self._place(example)
        begin = start + (int(self._ends[shard][local - 1]) if local else 0)
        return self._tokens[shard][begin : begin + length]

    def lengths(self) -> np.ndarray:
        """Return int64 [examples]: how many tokens each example has."""
        parts = [np.diff(ends, prepend=0) for ends in self._ends]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def digest(self) -> str:
        """Return a hash of all tokens, marks and lengths: computed once, then kept beside them."""
        file = self._folder / "digest"
        # A power loss may leave the name, and nothing or part of the text behind it.
        if not file.exists() or len(file.read_text()) != 32:
            digest = xxhash.xxh3_128()
            for numbers in (*self._tokens, *self._ends):
                for start in range(0, len(numbers), _HASHED_AT_ONCE):
                    digest.update(numbers[start : start + _HASHED_AT_ONCE])
            part = file.with_name(f"digest.{os.getpid()}.part")
            part.write_text(digest.hexdigest())
            os.replace(part, file)
        return file.read_text()

    def _place(self, example: int) -> tuple[int, int]:
        if not 0 <= example < len(self):
            raise IndexError(f"example {example} of {len(self)}")
        shard = int(np.searchsorted(self._first, example, side="right")) - 1
        return shard, int(example - self._first[shard])


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
    """Return the state of the last commit; None before the first, and where files lack part of what it counts."""
    try:
        state = json.loads((folder / _STATE).read_text())
        for shard, (tokens, examples) in enumerate(state["shards"]):
            for name, size in ((_TOKENS, tokens * 4), (_ENDS, examples * 8)):
                if _file(folder, shard, name).stat().st_size < size:
                    return None
    except (FileNotFoundError, ValueError):
        return None
    return state


def is_complete(folder: Path) -> bool:
    """Return whether all of the source is in the store."""
    state = read_state(folder)
    return state is not None and state["complete"]


def _file(folder: Path, shard: int, name: str) -> Path:
    return folder / f"{shard:05d}.{name}"


def _map(file: Path, dtype: type) -> np.ndarray:
    return np.memmap(file, dtype=dtype, mode="r")
