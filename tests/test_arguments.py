"""Arguments of the commands: wrong ones are a usage message, never a traceback."""

import argparse

import pytest

from ds_fp8.cli import main
from ds_fp8.commands.arguments import amount, count


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "nan", "9" * 30, "9" * 5000, "1e3"])
def test_a_count_is_a_whole_number_from_1(text):
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)
    assert count("12") == 12


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "nan", "inf", "-inf", "1e999"])
def test_an_amount_is_finite_and_above_0(text):
    with pytest.raises(argparse.ArgumentTypeError):
        amount(text)
    assert amount("0.5") == 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimate", "--deepspeed_config", "x.json", "--memory", "nan"],
        ["sweep", "--deepspeed_config", "x.json", "--sweep", "y.json", "--timeout", "inf"],
        ["parity", "x.json", "--steps", "0"],
        ["evaluate", "model", "x.json", "--problems", "-1"],
    ],
)
def test_commands_refuse_them(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[-2] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
