"""What the package says: by the logger "ds_fp8", on the first rank, until the program configures its own handlers."""

import logging
import os
import subprocess
import sys

import pytest
from rich.panel import Panel

from ds_fp8.config import log

PROGRAM = """
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
    program = PROGRAM.format(before=before, after=after)
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
