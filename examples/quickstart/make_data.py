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
CONTAINERS = ("bags", "boxes", "jars", "rows")
SCENES = ("", "", "At home, ", "At school, ", "Today, ", "In town, ")
LEADS = ("Let us", "We can", "We must", "We will", "I can", "I must", "You can", "First", "First we", "Now", "Now we")
METHODS = {
    "+": ("add", "count", "find the sum", "put them together", "count them all"),
    "-": ("take away", "count", "find the rest", "take them off", "count down"),
    "*": ("count", "find all", "count them all", "take each in turn", "go in steps"),
}
CONCLUSIONS = ("The", "So the", "Now the", "Here the")
SYSTEM_PROMPTS = ("You solve small problems.", "Show your steps.", "You are a kind teacher.")
# The operations applied in turn to the numbers a, b, c, and ways to ask for the result.
BASIC = (
    ("+", "{name} has {a} {things} and gets {b} more. How many now?"),
    ("+", "{name} had {a} {things}. {other} gave {b} more. How many now?"),
    ("+", "There are {a} {things} here and {b} there. How many in all?"),
    ("-", "{name} has {a} {things} and gives {b} to {other}. How many are left?"),
    ("-", "{name} had {a} {things} and lost {b}. How many are left?"),
    ("-", "{name} has {a} {things} and {other} has {b}. How many more has {name}?"),
    ("*", "{name} has {a} {containers} with {b} {things} in each. How many in all?"),
)
TWO_STEPS = (
    ("+-", "{name} has {a} {things}, gets {b} more and gives {c} to {other}. How many are left?"),
    ("++", "{name} has {a} {things}, {other} has {b} and I have {c}. How many in all?"),
    ("*+", "{name} has {a} {containers} with {b} {things} in each and gets {c} more. How many now?"),
)
# Later turns of a chat, which go on from the answer before.
FOLLOW_UPS = (("+", "And {b} more?"), ("+", "Now add {b} to that."), ("-", "And {b} less?"), ("-", "Now take {b} off."))
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def results(operations: str, numbers: tuple[int, ...]) -> list[int]:
    """Return the result after each operation, from left to right."""
    found, value = [], numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        value = {"+": value + number, "-": value - number, "*": value * number}[operation]
        found.append(value)
    return found


@cache
def numbers_for(operations: str, largest: int) -> list[tuple[int, ...]]:
    """Return numbers from 2 to `largest` (1 would need the singular) whose results lie between 1 and 3 * `largest`."""
    choices = product(range(2, largest + 1), repeat=len(operations) + 1)
    return [choice for choice in choices if all(1 <= found <= 3 * largest for found in results(operations, choice))]


def problem(rng: Random, mixed: bool) -> tuple[str, str, int]:
    """Return a question, its worked solution, and the answer."""
    kinds, largest = BASIC, 9
    if mixed and rng.random() < 0.5:
        kinds, largest = (BASIC, 19) if rng.random() < 0.5 else (TWO_STEPS, 9)
    operations, template = rng.choice(kinds)
    question, solution, answer = tell(rng, operations, template, rng.choice(numbers_for(operations, largest)))
    scene = rng.choice(SCENES)
    return scene + (question.replace("There are", "there are", 1) if scene else question), solution, answer


def tell(rng: Random, operations: str, template: str, numbers: tuple[int, ...]) -> tuple[str, str, int]:
    """Put the numbers into words; see `problem`."""
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": rng.choice(THINGS), "containers": rng.choice(CONTAINERS)}
    question = template.format(**words, **dict(zip("abc", numbers, strict=False)))
    found = results(operations, numbers)
    steps = zip((numbers[0], *found), operations, numbers[1:], found, strict=False)
    equations = " ".join(f"{left} {operation} {right} = {result}." for left, operation, right, result in steps)
    opening = f"{rng.choice(LEADS)} {rng.choice(METHODS[operations[0]])}."
    return question, f"{opening} {equations} {rng.choice(CONCLUSIONS)} answer is {found[-1]}.", found[-1]


def documents(count: int, seed: int = 1236) -> Iterator[str]:
    """Yield texts: a question with its answer, or (one in ten) a line of plain sums."""
    rng = Random(f"documents {seed}")
    for _ in range(count):
        if rng.random() < 0.1:
            sums = [(operation, rng.choice(numbers_for(operation, 9))) for operation in rng.choices("+-*", k=3)]
            yield " ".join(f"{a} {operation} {b} = {results(operation, (a, b))[0]}." for operation, (a, b) in sums)
        else:
            question, solution, _ = problem(rng, mixed=False)
            yield f"Question: {question}\nAnswer: {solution}"


def chats(count: int, mixed: bool = False, seed: int = 1236) -> Iterator[list[dict[str, str]]]:
    """Yield chats of one to three exchanges, half of them opened by a system turn."""
    rng = Random(f"chats {mixed} {seed}")
    for _ in range(count):
        messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.5 else []
        answer = 0
        for _ in range(rng.choice((1, 2, 2, 3))):
            if answer > 9 and rng.random() < 0.2:
                question, solution, answer = tell(rng, *rng.choice(FOLLOW_UPS), (answer, rng.randint(2, 9)))
            else:
                question, solution, answer = problem(rng, mixed)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
        yield messages


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer of bytes, to which a number is one token: small models learn to add those sooner."""
    texts = [*documents(3000, 1), *(turn["content"] for chat in chats(1000, True, 1) for turn in chat)]
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


def write(folder: Path, examples: tuple[int, int, int] = (8000, 2500, 2500), vocab_size: int = 560) -> Path:
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
