"""The built-in corpus: small word problems with worked steps and an answer that can be checked.

Everything follows from (split, seed, count, difficulty) alone. The identity of a problem is (kind, numbers), as in
("gain", (3, 4)); one identity in ten is held out for the split "test" and never occurs in the split "train", whatever
the seed, the difficulty or the format. Names, things and phrasings vary, which keeps the loss well above zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Literal

Split = Literal["train", "test"]
Difficulty = Literal["basic", "mixed"]
Message = dict[str, str]

NAMES = ("Tom", "Ann", "Sam", "Eva", "Ben", "Mia", "Leo", "Zoe", "Max", "Ida", "Kim", "Roy")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "cups", "keys", "nuts", "toys", "hats", "figs")
CONTAINERS = ("bags", "boxes", "jars", "rows")
SCENES = ("", "", "At home, ", "At school, ", "Today, ", "In town, ")
LEADS = (
    *("Let us", "We can", "We must", "We will", "I can", "I must", "I will", "You can"),
    *("First", "First we", "Here we", "Here I", "Now", "Now we", "Now I", "Just"),
)
METHODS = {
    "+": ("add", "count", "find the sum", "put them together", "add them", "count them all"),
    "-": ("take away", "count", "find the rest", "take them off", "find what is left", "count down"),
    "*": ("count", "find all", "count them all", "take each in turn", "go in steps", "add them"),
}
CONCLUSIONS = ("The", "So the", "Now the", "Here the")
ANSWER_PATTERN = r"\b[Tt]he answer is (-?\d+)"
"""The first group is the answer that a solution gives."""
SYSTEM_PROMPTS = ("You solve small problems.", "Show your steps.", "You are a kind teacher.")


@dataclass(frozen=True)
class Kind:
    """A family of problems: the operations applied in turn to the numbers, and ways to ask for the result."""

    name: str
    operations: str
    questions: tuple[str, ...]


BASIC_KINDS = (
    Kind(
        "gain",
        "+",
        (
            "{name} has {a} {things} and gets {b} more. How many now?",
            "{name} had {a} {things}. {other} gave {b} more. How many now?",
        ),
    ),
    Kind(
        "together",
        "+",
        (
            "{name} has {a} {things} and {other} has {b}. How many in all?",
            "There are {a} {things} here and {b} there. How many in all?",
        ),
    ),
    Kind(
        "lose",
        "-",
        (
            "{name} has {a} {things} and gives {b} to {other}. How many are left?",
            "{name} had {a} {things} and lost {b}. How many are left?",
        ),
    ),
    Kind(
        "difference",
        "-",
        (
            "{name} has {a} {things} and {other} has {b}. How many more has {name}?",
            "There are {a} {things} here and {b} there. How many more are here?",
        ),
    ),
    Kind(
        "groups",
        "*",
        (
            "{name} has {a} {containers} with {b} {things} in each. How many in all?",
            "There are {a} {containers} with {b} {things} in each. How many in all?",
        ),
    ),
)
TWO_STEP_KINDS = (
    Kind(
        "gain_then_lose",
        "+-",
        (
            "{name} has {a} {things}, gets {b} more and gives {c} to {other}. How many are left?",
            "{name} had {a} {things}, got {b} more and lost {c}. How many are left?",
        ),
    ),
    Kind(
        "three_together",
        "++",
        (
            "{name} has {a} {things}, {other} has {b} and I have {c}. How many in all?",
            "There are {a} {things} here, {b} there and {c} at home. How many in all?",
        ),
    ),
    Kind(
        "groups_then_gain",
        "*+",
        (
            "{name} has {a} {containers} with {b} {things} in each and gets {c} more. How many now?",
            "There are {a} {containers} with {b} {things} in each. {name} has {c} more. How many in all?",
        ),
    ),
)
# Later turns of a conversation that go on from the answer before; a is that answer.
FOLLOW_UP_KINDS = (
    Kind("add_to_that", "+", ("And {b} more?", "Now add {b} to that.")),
    Kind("take_from_that", "-", ("And {b} less?", "Now take {b} from that.")),
)


@dataclass(frozen=True)
class Problem:
    """A problem with its worked solution; (kind, numbers) is its identity."""

    kind: str
    numbers: tuple[int, ...]
    question: str
    steps: str
    conclusion: str
    answer: str

    @property
    def solution(self) -> str:
        """Return the reply to `question`: the worked steps, then a last sentence with the answer."""
        return f"{self.steps} {self.conclusion}"


def is_held_out(kind: str, numbers: tuple[int, ...]) -> bool:
    """Return whether the identity (kind, numbers) belongs to the split "test".

    One in ten does, the same on every machine.
    """
    # A hash, not hash() or a generator: the split must not depend on Python, seed or order.
    digest = hashlib.sha256(f"{kind} {numbers}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 10 == 0


def problems(split: Split, seed: int, count: int, difficulty: Difficulty = "basic") -> list[Problem]:
    """Return `count` problems of `split` with distinct questions (there are more than 100,000 in either split)."""
    rng = Random(f"problems {split} {seed} {difficulty}")
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        problem = _draw_problem(rng, split, difficulty)
        # Distinct by question: one identity has many phrasings.
        chosen.setdefault(problem.question, problem)
    return list(chosen.values())


def documents(split: Split, seed: int, count: int, difficulty: Difficulty = "basic") -> Iterator[str]:
    """Return `count` texts: a question with its answer, or (one in ten) a line of plain sums."""
    rng = Random(f"documents {split} {seed} {difficulty}")
    for _ in range(count):
        if rng.random() < 0.1:
            yield _plain_sums(rng)
        else:
            problem = _draw_problem(rng, split, difficulty)
            yield f"{document_prompt(problem)} {problem.solution}"


def conversations(split: Split, seed: int, count: int, difficulty: Difficulty = "basic") -> Iterator[list[Message]]:
    """Return `count` conversations of one to three exchanges, half of them opened by a system turn."""
    rng = Random(f"conversations {split} {seed} {difficulty}")
    for _ in range(count):
        messages: list[Message] = []
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        problem = None
        for _ in range(rng.choice((1, 2, 2, 3))):
            follow_up = _draw_follow_up(rng, split, int(problem.answer)) if problem and rng.random() < 0.2 else None
            problem = follow_up or _draw_problem(rng, split, difficulty)
            messages.append({"role": "user", "content": problem.question})
            messages.append({"role": "assistant", "content": problem.solution})
        yield messages


def document_prompt(problem: Problem) -> str:
    """Return the beginning of the document about `problem`, to be completed by a space and the solution."""
    return f"Question: {problem.question}\nAnswer:"


def chat_prompt(problem: Problem) -> list[Message]:
    """Return the conversation about `problem` up to the user's turn, to be completed by the assistant."""
    return [{"role": "user", "content": problem.question}]


def _apply(operation: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def _results(operations: str, numbers: tuple[int, ...]) -> list[int]:
    """Return the result after each operation, from left to right."""
    results, value = [], numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        value = _apply(operation, value, number)
        results.append(value)
    return results


@cache
def _number_choices(operations: str, largest: int) -> tuple[tuple[int, ...], ...]:
    """Return numbers from 2 to `largest` (1 would need the singular) whose results lie between 1 and 3 * `largest`."""
    choices = product(range(2, largest + 1), repeat=len(operations) + 1)
    return tuple(
        numbers for numbers in choices if all(1 <= result <= 3 * largest for result in _results(operations, numbers))
    )


@cache
def _identities(kind: Kind, split: Split, largest: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers that problems of `kind` have in `split`."""
    choices = _number_choices(kind.operations, largest)
    return tuple(numbers for numbers in choices if is_held_out(kind.name, numbers) == (split == "test"))


def _draw_problem(rng: Random, split: Split, difficulty: Difficulty) -> Problem:
    kinds, largest = BASIC_KINDS, 9
    if difficulty == "mixed" and rng.random() < 0.3:
        kinds, largest = (BASIC_KINDS, 19) if rng.random() < 0.5 else (TWO_STEP_KINDS, 9)
    kind = rng.choice(kinds)
    return _tell(rng, kind, rng.choice(_identities(kind, split, largest)))


def _draw_follow_up(rng: Random, split: Split, answer: int) -> Problem | None:
    """Return a problem that goes on from `answer`, None when no identity of `split` does."""
    kind = rng.choice(FOLLOW_UP_KINDS)
    identities = [
        (answer, number)
        for number in range(2, 10)
        if _results(kind.operations, (answer, number))[0] >= 1
        and is_held_out(kind.name, (answer, number)) == (split == "test")
    ]
    return _tell(rng, kind, rng.choice(identities)) if identities else None


def _tell(rng: Random, kind: Kind, numbers: tuple[int, ...]) -> Problem:
    """Put the numbers into words."""
    name, other = rng.sample(NAMES, 2)
    question = rng.choice(kind.questions).format(
        name=name,
        other=other,
        things=rng.choice(THINGS),
        containers=rng.choice(CONTAINERS),
        **dict(zip("abc", numbers, strict=False)),
    )
    if kind not in FOLLOW_UP_KINDS:
        scene = rng.choice(SCENES)
        question = scene + (question.replace("There are", "there are", 1) if scene else question)
    opening = f"{rng.choice(LEADS)} {rng.choice(METHODS[kind.operations[0]])}."
    results = _results(kind.operations, numbers)
    lefts = (numbers[0], *results)
    equations = [
        f"{left} {operation} {right} = {result}."
        for left, operation, right, result in zip(lefts, kind.operations, numbers[1:], results, strict=False)
    ]
    answer = str(results[-1])
    conclusion = f"{rng.choice(CONCLUSIONS)} answer is {answer}."
    return Problem(kind.name, numbers, question, " ".join([opening, *equations]), conclusion, answer)


def _plain_sums(rng: Random) -> str:
    """Return three equations without words."""
    sums = []
    for _ in range(3):
        operation = rng.choice("+-*")
        left, right = rng.choice(_number_choices(operation, 9))
        sums.append(f"{left} {operation} {right} = {_apply(operation, left, right)}.")
    return " ".join(sums)
