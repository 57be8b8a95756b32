"""The flags of all commands: what means the same has one name, which comes first, and takes the same values."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from itertools import groupby

import pytest

from ds_fp8.cli import COMMANDS

SYNONYMS = {
    "--ranks": "--gpus",
    "--num_gpus": "--gpus",
    "--output": "--out",
    "--output_dir": "--out",
    "--override": "--set",
    "--config": "--deepspeed_config",
}
"""Other names -> the one that `--help` shows first."""
OTHER_VALUES = {"--json"}
"""Flags that take a FILE in one command (sensitivity) and nothing in others."""


class _Parsed(Exception):
    """Carries the parser of a command out of it."""


@pytest.fixture(scope="module")
def parsers():
    """The parser of every command, as it is when the command parses."""
    found = {}

    def stop(parser, *_):
        raise _Parsed(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        for command in COMMANDS:
            patch.setattr(sys, "argv", [command])
            with pytest.raises(_Parsed) as caught:
                import_module(f"ds_fp8.commands.{command}").main()
            (found[command],) = caught.value.args
    return found


def flags(parsers):
    """(name, command, action) of every long flag."""
    return sorted(
        (
            (name, command, action)
            for command, parser in parsers.items()
            for action in parser._actions
            for name in action.option_strings
            if name.startswith("--")
        ),
        key=lambda flag: flag[:2],
    )


def test_one_name_for_one_meaning(parsers):
    for name, command, action in flags(parsers):
        assert action.option_strings[0] not in SYNONYMS, f"ds-fp8 {command} {name}"
        if name in SYNONYMS:
            assert action.option_strings[0] == SYNONYMS[name], f"ds-fp8 {command} {name}"


def test_a_name_takes_the_same_values_everywhere(parsers):
    for name, group in groupby(flags(parsers), key=lambda flag: flag[0]):
        if name not in OTHER_VALUES:
            kinds = {(type(action), action.type, action.nargs): command for _, command, action in group}
            assert len(kinds) == 1, f"{name}: {kinds}"


def test_a_command_that_trains_or_measures_a_stage_takes_changes_and_gpus(parsers):
    names = {command: {name for name, of, _ in flags(parsers) if of == command} for command in parsers}
    for command in ("train", "check", "estimate", "evaluate", "parity"):
        assert {"--set", "--gpus", "--deepspeed_config"} <= names[command], command
    for command in ("evaluate", "parity", "report", "sweep"):
        assert "--out" in names[command], command
