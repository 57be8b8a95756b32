"""The built-in corpus: right answers, a split that does not leak, the same text everywhere."""

import hashlib
import re
from string import Formatter

import pytest

from ds_fp8.data import synthetic
from ds_fp8.data.questions import extract_answer
from ds_fp8.data.synthetic import (
    ANSWER_PATTERN,
    chat_prompt,
    conversations,
    document_prompt,
    documents,
    problems,
)

KINDS = (*synthetic.BASIC_KINDS, *synthetic.TWO_STEP_KINDS, *synthetic.FOLLOW_UP_KINDS)
DIFFICULTIES = ("basic", "mixed")


def _pattern(template: str) -> re.Pattern:
    """A regular expression that reads a question back; a field that recurs must recur with the same words."""
    pattern, seen = "", set()
    for literal, field, _, _ in Formatter().parse(template):
        pattern += re.escape(literal)
        if field:
            words = r"\d+" if field in "abc" else r"[A-Za-z]+"
            pattern += f"(?P={field})" if field in seen else f"(?P<{field}>{words})"
            seen.add(field)
    return re.compile(rf"(?:[A-Z][a-z ]*, )?{pattern}", re.IGNORECASE)


PATTERNS = [(kind.name, _pattern(template)) for kind in KINDS for template in kind.questions]


def _identity(question: str, answer_before: int | None = None) -> tuple[str, tuple[int, ...]]:
    found = {
        (name, tuple(int(match[field]) for field in "abc" if match.groupdict().get(field)))
        for name, pattern in PATTERNS
        if (match := pattern.fullmatch(question))
    }
    assert len(found) == 1, (question, found)
    ((name, numbers),) = found
    return (name, numbers) if name not in ("add_to_that", "take_from_that") else (name, (answer_before, *numbers))


def _document_identities(texts):
    return {_identity(text.split("\n")[0].removeprefix("Question: ")) for text in texts if text.startswith("Question")}


def _chat_identities(chats):
    found = set()
    for messages in chats:
        before = None
        for message in messages:
            if message["role"] == "user":
                found.add(_identity(message["content"], before))
            elif message["role"] == "assistant":
                before = int(extract_answer(ANSWER_PATTERN, message["content"]))
    return found


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_steps_and_answer_are_right(split, difficulty):
    for problem in problems(split, 3, 500, difficulty):
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", problem.steps)
        assert len(equations) == len(problem.numbers) - 1
        for left, operation, right, result in equations:
            assert eval(f"{left} {operation} {right}") == int(result)
        assert equations[-1][-1] == problem.answer
        assert [int(equations[0][0]), *(int(right) for _, _, right, _ in equations)] == list(problem.numbers)
        assert re.findall(r"\d+", problem.question) == [str(number) for number in problem.numbers]
        assert _identity(problem.question) == (problem.kind, problem.numbers)


def test_plain_sums_are_right():
    lines = [text for text in documents("train", 0, 500) if not text.startswith("Question")]
    assert 25 <= len(lines) <= 75
    for line in lines:
        for equation in line.rstrip(".").split(". "):
            left, right = equation.split(" = ")
            assert eval(left) == int(right)


@pytest.mark.parametrize("seed", [1, 1236])
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_test_identity_occurs_in_training_text(seed, difficulty):
    trained = _document_identities(documents("train", seed, 4000, difficulty))
    trained |= _chat_identities(conversations("train", seed, 2000, difficulty))
    held_out = {(problem.kind, problem.numbers) for problem in problems("test", seed, 1500, difficulty)}
    held_out |= _document_identities(documents("test", seed + 1, 1000, difficulty))
    held_out |= _chat_identities(conversations("test", seed + 1, 1000, difficulty))
    assert len(trained) > 150
    assert len(held_out) > 20
    assert not trained & held_out


def test_about_a_tenth_of_every_basic_kind_is_held_out():
    for kind in synthetic.BASIC_KINDS:
        everything = [
            (a, b)
            for a in range(2, 10)
            for b in range(2, 10)
            if 1 <= {"+": a + b, "-": a - b, "*": a * b}[kind.operations] <= 27
        ]
        held_out = [numbers for numbers in everything if synthetic.is_held_out(kind.name, numbers)]
        assert 0.02 <= len(held_out) / len(everything) <= 0.25, kind.name
    identities = [("kind", (a, b)) for a in range(100) for b in range(100)]
    assert 0.09 < sum(synthetic.is_held_out(*identity) for identity in identities) / 10_000 < 0.11


def test_text_depends_on_its_arguments_alone():
    texts = list(documents("train", 7, 50, "mixed"))
    assert texts == list(documents("train", 7, 50, "mixed"))
    assert texts != list(documents("train", 8, 50, "mixed"))
    assert list(documents("train", 7, 20, "mixed")) == texts[:20]
    # The same on every machine and in every process: strings hash differently in each, and must not matter.
    everything = repr((texts, list(conversations("train", 7, 50)), problems("test", 7, 50)))
    assert hashlib.sha256(everything.encode()).hexdigest()[:16] == "1bce7affcde9b3dd"


def test_problems_are_distinct():
    questions = [problem.question for problem in problems("test", 0, 400)]
    assert len(questions) == len(set(questions)) == 400


def test_conversations_take_turns():
    chats = list(conversations("train", 0, 300))
    for messages in chats:
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert 2 <= len(turns) <= 6
    assert {len(messages) for messages in chats} >= {2, 3, 4, 6, 7}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7.", "7"),
        (" Let us add. 3 + 4 = 7. So the answer is 7.</s>", "7"),
        ("the answer is -12 apples", "-12"),
        ("The answer is 7. The answer is 8.", "7"),
        ("3 + 4 = 7.", None),
        ("The answer is", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(ANSWER_PATTERN, text) == answer


def test_prompt_and_solution_make_the_document():
    (problem,) = problems("train", 5, 1)
    assert document_prompt(problem) == f"Question: {problem.question}\nAnswer:"
    assert chat_prompt(problem) == [{"role": "user", "content": problem.question}]
    assert extract_answer(ANSWER_PATTERN, problem.solution) == problem.answer
    shape = re.compile(r"Question: .*\?\nAnswer: .*\d\. .*answer is \d+\.")
    assert any(shape.fullmatch(text) for text in documents("train", 5, 10))
