"""All the data of one stage: from its configuration to planned rows of training, validation and test."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import check_writable, write_atomically
from ds_fp8.config.log import logger
from ds_fp8.data.chat import time_limit
from ds_fp8.data.config import DataConfig
from ds_fp8.data.rows import PackedDataset, PackingStats, Plan, plan_rows, rows_of_step
from ds_fp8.data.sources import empty
from ds_fp8.data.token_store import NO_LOSS, Report, TokenStore, digest, exclusive, store_folder, tokenise_source

SPLITS = ("train", "validation", "test")
ALONE = "one_example_a_row"  # key of `StageData.identity`, where it is so


@dataclass(frozen=True)
class Question:
    """A prompt to be continued, and what must be found in the continuation."""

    prompt: tuple[int, ...]  # Token ids
    answer: str


@dataclass(frozen=True)
class StageData:
    """The training, validation and test data of a stage."""

    train: PackedDataset
    validation: PackedDataset
    test: PackedDataset  # Without rows unless `data.test_fraction` is above 0
    weights: tuple[float, ...]  # Share of each source in training
    # Returns at most so many held-out questions with known answers, of all sources in turn; none where there are none
    questions: Callable[[int], list[Question]]
    answer_pattern: str | None  # Finds an answer in a text
    # By split with rows: their number, and the figures of PackingStats (rows.py); for training also `open_ends`, the
    # chats of all splits whose last turn's end carries no loss
    report: dict[str, Any]
    identity: list[dict[str, Any]]  # Of each source its path, examples, tokens, a digest of them, and ALONE

    def rows_of_step(self, step: int, global_batch: int, seed: int) -> list[int]:
        return rows_of_step(step, self.train.rows_by_source, global_batch, seed, self.weights)


def build_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, report: Report | None = None, alone: bool = False
) -> StageData:
    """Tokenise what `config` names unless that has been done, split it, and plan its rows. Deterministic.

    `alone`: rows hold one example each. Every process of a machine may call at once: one works, all share its files.
    Raises UserError where data are missing, malformed, or too few to hold back a validation example.
    """
    config.check_named()
    cache_dir = Path(config.cache_dir or os.environ.get("DS_FP8_CACHE") or "~/.cache/ds_fp8").expanduser()
    check_writable(cache_dir, "data.cache_dir" if config.cache_dir else "DS_FP8_CACHE")
    parts: dict[str, list[tuple[TokenStore, Plan]]] = {split: [] for split in SPLITS}
    examined: list[tuple[TokenStore, np.ndarray, DataConfig]] = []
    identity = []
    for source in config.each_source():
        store = tokenise_source(source, tokenizer, cache_dir, report)
        if Path(source.path.removesuffix(".gz")).suffix == ".txt":
            logger.info("%s: %s documents, which blank lines part", source.path, f"{len(store):,}")
        chosen = _split(source, len(store))
        facts = {"path": source.path, "examples": len(store), "tokens": store.tokens, "digest": store.digest()}
        identity.append(facts | ({ALONE: True} if alone else {}))
        folder = store_folder(source, tokenizer, cache_dir)
        for split, plan in _plans(folder, source, store, chosen, alone).items():
            parts[split].append((store, plan))
        if source.answer_pattern and source.format == "chat":
            held_out = np.concatenate([chosen["validation"], chosen["test"]])
            examined.append((store, held_out, source))
    of_rows = config.sequence_length, tokenizer.pad_token_id, alone
    rows = {split: PackedDataset(parts[split], *of_rows) for split in SPLITS}
    counts = rows["train"].rows_by_source
    empty_ones = [each.path for each, count in zip(config.each_source(), counts, strict=True) if not count]
    if empty_ones or not len(rows["validation"]):
        which = f"training examples of {empty_ones[0]}" if empty_ones else "validation examples"
        raise UserError(
            f"none of the {which} fits into {config.sequence_length} tokens and carries loss",
            key="data.sequence_length",
            remedy='raise data.sequence_length, set data.overlong to "cut", or give chats that have assistant turns',
        )
    numbers = {split: dataset.report() for split, dataset in rows.items() if len(dataset)}
    numbers["train"]["open_ends"] = sum({id(store): store.open_ends for store, _ in parts["train"]}.values())
    weights = tuple(config.weights())
    questions = partial(_questions, examined, tokenizer)
    return StageData(
        rows["train"], rows["validation"], rows["test"], weights, questions, config.answer_pattern, numbers, identity
    )


def extract_answer(pattern: str, text: str) -> str | None:
    """Return what the pattern's first group finds, None where it finds nothing."""
    try:
        with time_limit():
            found = re.search(pattern, text)
    except TimeoutError as error:
        raise UserError(
            f"the pattern {clipped(pattern)} finds {error} in an answer of {len(text):,} characters",
            key="data.answer_pattern",
            remedy='give one without repeats inside repeats, as "#### (.*)"',
        ) from None
    return found.group(1).strip() if found else None


def _questions(
    examined: list[tuple[TokenStore, np.ndarray, DataConfig]], tokenizer: PreTrainedTokenizerBase, most: int
) -> list[Question]:
    sources = [_questions_of(*source, tokenizer) for source in examined]
    in_turn = (question for turn in zip_longest(*sources) for question in turn if question is not None)
    return list(islice(in_turn, most))


def _questions_of(
    store: TokenStore, held_out: np.ndarray, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Question]:
    """Yield the last assistant turns of held-out chats that hold an answer. All before such a turn is its prompt."""
    for example in held_out.tolist():
        tokens = store[example]
        spoken = np.flatnonzero(tokens < NO_LOSS)
        if not len(spoken):
            continue
        # Runs of tokens with loss are the assistant's turns; the last run is the last turn.
        breaks = np.flatnonzero(np.diff(spoken) > 1)
        start, stop = int(spoken[breaks[-1] + 1] if len(breaks) else spoken[0]), int(spoken[-1]) + 1
        text = tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=True)
        answer = extract_answer(config.answer_pattern, text)
        # Without a prompt there is nothing to continue; one longer than a row was never seen in training.
        if answer is not None and 0 < start < config.sequence_length:
            yield Question(tuple((tokens[:start] & ~NO_LOSS).tolist()), answer)


def _split(source: DataConfig, examples: int) -> dict[str, np.ndarray]:
    if examples == 0:
        raise empty(source.path)
    if examples == 1:
        raise UserError(
            f"{source.path} holds one example, and one more is needed for validation",
            key="data.path",
            remedy="give at least two examples; in a .txt file a blank line parts two documents",
        )
    # A permutation of all examples by the seed alone: every rank, and a run resumed later, finds the same split.
    order = np.random.default_rng(source.seed).permutation(examples)
    # At least one example is left for training and one for validation, whatever the fractions say.
    validation = min(max(1, round(examples * source.validation_fraction)), examples - 1)
    test = min(round(examples * source.test_fraction), examples - 1 - validation)
    parts = order[validation + test :], order[:validation], order[validation : validation + test]
    return dict(zip(SPLITS, parts, strict=True))


def _plans(
    folder: Path, source: DataConfig, store: TokenStore, chosen: dict[str, np.ndarray], alone: bool
) -> dict[str, Plan]:
    together = source.tokens_per_gpu is None and not alone
    # Everything that a plan depends on beside the tokens, which the parent folder is named after: a change makes
    # another plan beside the old one.
    facts = [source.sequence_length, source.overlong_policy, together, source.seed]
    facts += [source.validation_fraction, source.test_fraction]
    plans = folder / f"plan-{digest(facts)}"
    # One process plans, the others of this machine wait and map its files.
    with exclusive(plans):
        try:
            return _kept(plans, store)
        except (OSError, ValueError, LookupError, TypeError, EOFError):  # none yet, damaged, or changed since
            plans.mkdir(exist_ok=True)
            how = {"together": together, "all_carry_loss": source.format == "documents"}
            made = {
                split: plan_rows(store, examples, source.sequence_length, source.overlong_policy, **how)
                for split, examples in chosen.items()
            }
            for split, plan in made.items():
                for name, numbers in (("pieces", plan.pieces), ("rows", plan.row_ends)):
                    with (plans / f"{split}.{name}.npy").open("wb") as file:
                        np.save(file, numbers)
                        file.flush()
                        os.fsync(file.fileno())
            # Written last and renamed: its presence says that the arrays before it are complete.
            stats = {split: asdict(plan.stats) for split, plan in made.items()}
            stats["made"] = store.plan_state(plans.glob("*.npy"))
            write_atomically(plans / "packing_stats.json", json.dumps(stats))
            return _kept(plans, store)


def _kept(plans: Path, store: TokenStore) -> dict[str, Plan]:
    """Return the plans in a folder; raise where they are missing, not whole, or not as they were made of `store`."""
    stats = json.loads((plans / "packing_stats.json").read_text())
    if stats["made"] != store.plan_state(plans.glob("*.npy")):
        raise ValueError("other files than were written")
    return {
        split: Plan(
            # Memory-mapped: the ranks of a host share the pages, and a plan of billions of tokens fits.
            np.load(plans / f"{split}.pieces.npy", mmap_mode="r"),
            np.load(plans / f"{split}.rows.npy", mmap_mode="r"),
            PackingStats(**stats[split]),
        )
        for split in SPLITS
    }


def describe(report: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Say what the data of a stage is, a line per split, and what was left out of it."""
    for split, numbers in report.items():
        line = f"{split}: {numbers['examples']:,} examples, {numbers['tokens']:,} tokens in {numbers['rows']:,} rows"
        if numbers["overlong"]:
            longest = f"(the longest {numbers['longest']:,} tokens)"
            line += f"; {numbers['overlong']:,} examples are longer than a row {longest}"
        if numbers["dropped"] or numbers["tokens_left_out"]:
            line += f"; {numbers['dropped']:,} examples and {numbers['tokens_left_out']:,} tokens are left out"
        if numbers.get("open_ends"):
            line += f"; {numbers['open_ends']:,} of all chats end in a turn whose end the template leaves without loss"
        progress(line)
