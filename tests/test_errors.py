"""A user's mistake ends every rank with one screen from rank 0."""

import os
import subprocess
import sys

import pytest

from ds_fp8.config.errors import EXIT_USER_ERROR, UserError

SCRIPT = """
import time
time.sleep = lambda seconds: print("waited", seconds > 0)  # real ranks wait so that rank 0 speaks first
from ds_fp8.config.errors import UserError, main_entry
def main():
    print("started")
    {body}
main_entry(main)
"""
MISTAKE = 'raise UserError("bad format", key="fp8.linear.format", file="ds.json", remedy="use e4m3")'


def run(body: str, rank: int | None) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    if rank is not None:
        environment["RANK"] = str(rank)
    command = [sys.executable, "-c", SCRIPT.format(body=body)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("rank", [None, 0])
def test_rank_0_prints_one_screen(rank):
    result = run(MISTAKE, rank)
    assert result.returncode == EXIT_USER_ERROR == 2
    assert result.stderr.strip().splitlines() == [
        "error: bad format",
        "  file:   ds.json",
        "  key:    fp8.linear.format",
        "  remedy: use e4m3",
    ]
    assert result.stdout.splitlines() == ["started"]


@pytest.mark.parametrize("rank", [1, 7])
def test_other_ranks_wait_and_leave_in_silence(rank):
    result = run(MISTAKE, rank)
    assert result.returncode == EXIT_USER_ERROR
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["started", "waited True"]


def test_leaving_does_not_wait_for_other_threads():
    """Clean-up at exit may be stuck in a collective that no other rank joins."""
    body = "import threading; threading.Thread(target=threading.Event().wait).start(); " + MISTAKE
    assert run(body, 0).returncode == EXIT_USER_ERROR


@pytest.mark.parametrize(("body", "code"), [("return None", 0), ("return 0", 0), ("return 3", 3), ("sys.exit(4)", 4)])
def test_without_a_mistake_the_result_is_the_exit_code(body, code):
    assert run("import sys; " + body, 0).returncode == code


def test_a_fault_of_the_program_keeps_its_traceback():
    result = run("raise RuntimeError('ours')", 1)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ({}, ["error: bad"]),
        ({"key": "a.b"}, ["error: bad", "  key:    a.b"]),
        ({"file": "f.json", "remedy": "mend"}, ["error: bad", "  file:   f.json", "  remedy: mend"]),
    ],
)
def test_only_what_is_known_is_shown(words, lines):
    assert str(UserError("bad", **words)).splitlines() == lines


def test_the_innermost_file_wins():
    assert UserError("bad").located("outer.json").file == "outer.json"
    assert UserError("bad", file="inner.json").located("outer.json").file == "inner.json"
    assert UserError("bad", file="inner.json").located(None).file == "inner.json"
