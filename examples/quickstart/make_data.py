"""Make the data of the quickstart: word problems as documents and as chats, and a tokenizer trained on them.

    python examples/quickstart/make_data.py [FOLDER]      default runs/quickstart/data

Writes documents.jsonl, basic.jsonl and mixed.jsonl (chats) and tokenizer/. The same files on every machine; a folder
that is there is left as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NAMES = ("Tom", "Ann", "Sam", "Eva", "Ben", "Mia", "Leo", "Zoe", "Max", "Ida", "Kim", "Roy")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "cups", "keys", "nuts", "toys", "hats", "figs")
BOXES = ("bags", "boxes", "jars", "rows")
VERBS = {"+": ("gets", "buys", "finds", "wins"), "-": ("gives", "loses", "sells", "drops")}
QUESTIONS = ("How many now?", "How many then?", "What is left?", "What remains now?")
LEADS = ("So", "Well", "Now", "First", "Here", "Thus", "Then", "Yes", "Good", "Look", "Right", "See")
CONCLUSIONS = ("The", "So the", "Now the", "Here the")
SYSTEM_PROMPTS = ("You solve small problems.", "Show your steps.", "You are a kind teacher.")
# Operations, applied from left to right: of stage 1 (and of documents in words), and those that stage 2 brings.
BASIC, NEW = ("+", "-"), ("*", "++", "+-", "*+")
OLD = 0.1  # Share of stage 2's problems that are of stage 1's kind
FIRST, SECOND, FACTORS = 13, 4, 5  # Largest numbers: the first, those that are added or taken off, those multiplied
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def results(operations: str, numbers: tuple[int, ...]) -> list[int]:
    """Return the result after each operation, from left to right."""
    found, value = [], numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        value = {"+": value + number, "-": value - number, "*": value * number}[operation]
        found.append(value)
    return found


@cache
def numbers_for(operations: str) -> list[tuple[int, ...]]:
    """Return all numbers from 2 (1 would need the singular) whose results are positive."""
    first = FACTORS if operations[0] == "*" else FIRST
    others = [range(2, (FACTORS if operation == "*" else SECOND) + 1) for operation in operations]
    return [numbers for numbers in product(range(2, first + 1), *others) if min(results(operations, numbers)) > 0]


def equations(operations: str, numbers: tuple[int, ...]) -> str:
    """Return the steps, such as "3 * 4 = 12. 12 + 2 = 14."."""
    found = results(operations, numbers)
    steps = zip((numbers[0], *found), operations, numbers[1:], found, strict=False)
    return " ".join(f"{left} {operation} {right} = {result}." for left, operation, right, result in steps)


def story(rng: Random, operations: str) -> tuple[str, str, int]:
    """Return a problem without its question, its steps, and the answer."""
    first, *others = numbers = rng.choice(numbers_for(operations))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    told = f"{name} has {first} {thing}"
    if operations[0] == "*":
        told = f"{name} has {first} {rng.choice(BOXES)} of {others[0]} {thing}"
    for operation, number in zip(operations, others, strict=True):
        told += f", {rng.choice(VERBS[operation])} {number}" if operation != "*" else ""
    return f"{told}.", equations(operations, numbers), results(operations, numbers)[-1]


def documents(count: int, seed: int = 1236) -> Iterator[str]:
    """Yield pages: of sums, or of stories with theirs. No page asks or answers."""
    rng = Random(f"documents {seed}")
    for _ in range(count):
        if rng.random() < 0.5:
            sums = [(operations, rng.choice(numbers_for(operations))) for operations in rng.choices(BASIC + NEW, k=20)]
            yield " ".join(equations(*of) for of in sums)
        else:
            yield " ".join(" ".join(story(rng, rng.choice(BASIC))[:2]) for _ in range(12))


def chats(count: int, mixed: bool = False, seed: int = 1236) -> Iterator[list[dict[str, str]]]:
    """Yield chats of one to four exchanges, half of them opened by a system turn."""
    rng = Random(f"chats {mixed} {seed}")
    for _ in range(count):
        messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.5 else []
        for _ in range(rng.choice((1, 2, 4))):
            told, steps, answer = story(rng, rng.choice(NEW if mixed and rng.random() >= OLD else BASIC))
            messages.append({"role": "user", "content": f"{told} {rng.choice(QUESTIONS)}"})
            solution = f"{rng.choice(LEADS)}, {steps} {rng.choice(CONCLUSIONS)} answer is {answer}."
            messages.append({"role": "assistant", "content": solution})
        yield messages


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer of bytes, to which a number is one token: small models learn to add those sooner."""
    texts = [*documents(300, 1), *(turn["content"] for chat in chats(1000, True, 1) for turn in chat)]
    texts += ["system\nuser\nassistant\n" + "".join(f" {number}" for number in range(60))] * 300
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d+| ?[^\s\d\p{P}]+|\p{P}|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    pad, bos, eos, *markers = SPECIAL_TOKENS
    roles = {"pad_token": pad, "bos_token": bos, "eos_token": eos, "additional_special_tokens": markers}
    # No text has an unknown token; without one transformers adds Qwen's to the tokenizer of a Qwen model.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=pad, **roles)


def write(folder: Path, examples: tuple[int, int, int] = (4000, 4000, 4000), vocab_size: int = 528) -> Path:
    """Write documents, basic and mixed chats, so many of each, and the tokenizer, unless the folder is there."""
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    texts, basic, mixed = examples
    rows = {
        "documents": ({"text": text} for text in documents(texts)),
        "basic": ({"messages": chat} for chat in chats(basic)),
        "mixed": ({"messages": chat} for chat in chats(mixed, mixed=True)),
    }
    for name, of in rows.items():
        (part / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of), encoding="utf-8")
    train_tokenizer(vocab_size).save_pretrained(part / "tokenizer")
    try:
        part.rename(folder)  # complete, or not there
    except OSError:  # another process was first
        shutil.rmtree(part)
    return folder


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(f"data: {write(Path(*sys.argv[1:2] or ['runs/quickstart/data']))}")
