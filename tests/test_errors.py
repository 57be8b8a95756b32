"""What the package says: a user's mistake as one screen of rank 0, and lines of the logger "ds_fp8"."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.panel import Panel

from ds_fp8.cluster import entry, watchdog
from ds_fp8.cluster.guardian import USER
from ds_fp8.config import log
from ds_fp8.config.errors import EXIT_USER_ERROR, UserError, as_user_error

SCRIPT = """
import time
time.sleep = lambda seconds: print("waited", seconds > 0)  # real ranks wait so that rank 0 speaks first
from ds_fp8.config.errors import UserError, main_entry
def main():
    print("started")
    {body}
main_entry(main)
"""
PROGRAM = """
import time
time.sleep = lambda seconds: print("waited", seconds > 0)
from ds_fp8.config.errors import UserError, show_without_traceback
show_without_traceback()
{body}
"""
MISTAKE = 'raise UserError("bad format", key="fp8.linear.format", file="ds.json", remedy="use e4m3")'


def run(body: str, rank: int | None, script: str = SCRIPT) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    if rank is not None:
        environment["RANK"] = str(rank)
    command = [sys.executable, "-c", script.format(body=body)]
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


@pytest.mark.parametrize(("rank", "waited"), [(0, ""), (1, "waited True")])
def test_a_program_that_does_not_catch_a_mistake_ends_with_one_screen(rank, waited):
    result = run(MISTAKE, rank, PROGRAM)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[0] == "error: bad format"
    assert "Traceback" not in result.stderr
    assert result.stdout.strip() == waited
    assert "Traceback" in run("raise RuntimeError('ours')", rank, PROGRAM).stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "open('/proc/version/x', 'w')",
            ["error: Not a directory", "  file:   /proc/version/x", "  remedy: check the path"],
        ),
        (
            "open('/dev/full', 'w', 1).write('x' * 99999)",
            ["error: No space left on device", "  remedy: make room there"],
        ),
        ("raise OSError(24, 'no')", ["error: Too many open files", "  remedy: raise the limit of open files"]),
        ("raise OSError(27, 'no', 'a')", ["error: File too large", "  file:   a", "  remedy: raise the limit of"]),
        (
            "raise PermissionError(13, 'no', 'a')",
            ["error: Permission denied", "  file:   a", "  remedy: check the path"],
        ),
    ],
)
def test_what_the_file_system_refuses_is_a_users_mistake(body, said):
    result = run(body, None)
    assert result.returncode == EXIT_USER_ERROR
    lines = result.stderr.strip().splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(words) for line, words in zip(lines, said, strict=True))


def test_and_a_rank_says_so_to_the_others(monkeypatch):
    told = []
    monkeypatch.setattr(watchdog, "fail", lambda *words: told.append(words))
    monkeypatch.setattr(entry, "main_entry", lambda main: main())
    with pytest.raises(UserError, match="Not a directory"):
        entry.rank_entry(lambda: Path("/proc/version/x").read_text())
    assert [(kind, code) for kind, _, code in told] == [(USER, EXIT_USER_ERROR)]


@pytest.mark.parametrize(
    "error", [OSError("plain"), BrokenPipeError(32, "pipe"), PermissionError(1, "kill"), KeyError(1)]
)
def test_errors_that_name_no_file_are_not(error):
    assert as_user_error(error) is None


def test_the_innermost_file_wins():
    assert UserError("bad").located("outer.json").file == "outer.json"
    assert UserError("bad", file="inner.json").located("outer.json").file == "inner.json"
    assert UserError("bad", file="inner.json").located(None).file == "inner.json"


# ---------------------------------------------------------------- lines of the logger


LOGGING = """
import logging, sys
{before}
from rich.panel import Panel
from ds_fp8.config import log
{after}
log.logger.info("a line [bold]as it is[/bold]")
log.show(Panel("the [bold]report[/bold]"))
log.logger.warning("beware")
"""


def said(before="", after="", rank=None):
    """The standard output and error of a program."""
    environment = {**os.environ, **({} if rank is None else {"RANK": str(rank)})}
    program = LOGGING.format(before=before, after=after)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return run.stdout, run.stderr


def test_without_any_configuration_everything_is_on_the_standard_output():
    out, error = said()
    assert "a line [bold]as it is[/bold]\n" in out
    assert "the report" in out
    assert "╭" in out
    assert out.endswith("beware\n")
    assert error == ""


def test_other_ranks_say_nothing():
    assert said(rank=1) == ("", "")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_level_silences(when):
    out, _ = said(**{when: 'logging.getLogger("ds_fp8").setLevel(logging.WARNING)'})
    assert out == "beware\n"


@pytest.mark.parametrize(
    "handlers",
    [
        'logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")',
        'logging.getLogger("ds_fp8").addHandler(logging.StreamHandler())',
    ],
)
def test_with_handlers_of_the_programs_own_it_writes_to_those_alone(handlers):
    out, error = said(after=handlers)
    assert out == ""
    assert "a line [bold]as it is[/bold]\n" in error
    assert "the report" in error
    assert "\x1b" not in error
    assert "beware" in error


def test_the_logger_can_be_captured(caplog):
    with caplog.at_level(logging.INFO, logger="ds_fp8"):
        log.show(Panel("the report"))
    assert "the report" in caplog.text


def test_a_reader_that_is_gone_ends_no_training():
    program = (
        "from ds_fp8.config import log\nimport sys, time\n"
        "for number in range(20):\n    log.logger.info('line'), time.sleep(0.05)\nprint('done', file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == "done\n"
    assert process.returncode == 0
