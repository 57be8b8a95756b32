"""Command-line arguments that commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ds_fp8
from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import apply_override, check_writable, flat, read_json
from ds_fp8.config.presets import DEFAULT, FOR_TRAINED, leaves_preset_open

if TYPE_CHECKING:
    from ds_fp8.config.fp8 import FP8Config

_PACKAGE = Path(ds_fp8.__file__).parent
# The configurations that come with the package: inside it once it is built, beside it in a clone
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "ds_configs"
MAX_COUNT = 2**31 - 1


def parser_of(description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", nargs="?", metavar="FILE", help="the stage's JSON, or one of `ds-fp8 configs`")
    parser.add_argument("--deepspeed_config", metavar="FILE", help="the same")
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="override a key of the stage, such as train.steps=50")  # fmt: skip


def stage_file(arguments: argparse.Namespace) -> Path:
    given = [name for name in (arguments.stage, arguments.deepspeed_config) if name is not None]
    if len(given) != 1:
        raise UserError(
            "no stage is given" if not given else f"two stages are given, {given[0]} and {given[1]}",
            remedy="name one JSON file; `ds-fp8 configs` lists those that come with ds_fp8",
        )
    return config_file(given[0])


def read_stage(arguments: argparse.Namespace) -> dict[str, Any]:
    raw = read_json(stage_file(arguments))
    for override in arguments.set:
        apply_override(raw, override)
    return raw


def check_file(option: str, file: Path) -> None:
    """Raise UserError where a command could not write this file at its end."""
    check_writable(file.resolve().parent, option)
    if file.is_dir():
        raise UserError(f"{file} is a folder", key=option, remedy="name a file")


def tokenizer_of_folder(folder: Path) -> str:
    """Return the change of a stage that takes the tokenizer of a Hugging Face folder."""
    # A name with a slash is a folder's, whatever it ends in; as JSON it stays a string.
    return f"data.tokenizer={json.dumps(f'{folder}/')}"


def say(text: str) -> None:
    """Say what takes the time, beside a command's output."""
    print(text, file=sys.stderr, flush=True)


def load_deepspeed() -> None:
    """Import torch and DeepSpeed, whose log goes to the standard error then: without a GPU its first line is a warning.

    What a command prints may be read by a program.
    """
    say("loading torch and DeepSpeed ...")
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401


def fp8_in_words(raw: Mapping[str, Any], fp8: FP8Config) -> str:
    """Return whether FP8 is on, and its preset: the configuration's own, or the one assumed where it names none."""
    if not fp8.enabled:
        return "FP8 is off"
    if leaves_preset_open(raw.get("fp8")):
        if "train" in raw or "data" in raw:  # a stage, which knows before its weights are looked at
            begins = "its weights are loaded" if FOR_TRAINED in fp8.preset_name else "its weights are random"
            return f"FP8 is on, preset {fp8.preset_name}: the stage names none, and {begins}"
        return (
            f"FP8 is on; no preset is named, and {fp8.preset_name} assumed here: it is {FOR_TRAINED} where weights are "
            f"trained, {DEFAULT} where they are random"
        )
    return f"FP8 is on, preset {fp8.preset_name}"


def as_served(result: Mapping[str, Any]) -> str:
    """Say what a run's FP8 export loses, by its result.json: words for brackets, empty where it was not measured."""
    served, in_bf16 = result.get("final_loss_served"), result.get("final_loss_bf16")
    return f"validation loss {served:.4f}, {served / in_bf16 - 1:+.2%}" if served and in_bf16 else ""


def config_file(name: str) -> Path:
    """Return the file of this name: a path, or one that comes with the package (`infir2_7b/cpt.json`)."""
    path = Path(name)
    if os.path.isfile(path):  # False for a name that no file can have
        return path
    shipped = CONFIGS / Path(*path.parts[path.parts[:1] == ("ds_configs",) :])
    for candidate in (shipped, Path(f"{shipped}.json")):
        if not path.is_absolute() and os.path.isfile(candidate):
            return candidate
    if os.path.isdir(path):
        raise UserError("this is a folder, not a configuration file", file=name, remedy="name a JSON file in it")
    close = difflib.get_close_matches(name[:200], shipped_configs(), n=1, cutoff=0.7)
    hint = f'did you mean "{close[0]}"? ' if close else ""
    raise UserError(
        "the configuration file does not exist",
        file=clipped(name),
        remedy=f"{hint}give the path of a JSON file, or a name that `ds-fp8 configs` lists",
    )


def shipped_configs() -> list[str]:
    return sorted(file.relative_to(CONFIGS).as_posix() for file in CONFIGS.glob("*/**/*.json"))


def count(text: str, least: int = 1) -> int:
    """Return the whole number of at least `least` that `text` is; else argparse shows the error."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from {least} to {MAX_COUNT}")
    return number


def amount(text: str) -> float:
    """Return the finite number above 0 that `text` is; else argparse shows the error."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a finite number above 0")
    return number


def share(text: str) -> float:
    """Return the number between 0 and 1 that `text` is; else argparse shows the error."""
    number = amount(text)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no share below 1 (1% is 0.01)")
    return number


def add_out(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--out", "--output", type=Path, metavar="FOLDER", default=default and Path(default),
        help=f"folder (default {default})" if default else "folder",
    )  # fmt: skip


def add_grid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,...",
                        help="values to try for a key; repeatable, every combination is run")  # fmt: skip
    parser.add_argument("--sweep", metavar="FILE", help="file with a grid or with named points")


def points_of(arguments: argparse.Namespace, own: Mapping[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    """Return the changes KEY=VALUE of every point by its name; without a grid the stage itself, named "".

    Points may not change the keys in `own`, which the command sets for every run; with each is the remedy.
    """
    from ds_fp8.report.compare import GPUS, Point, read_points

    file = arguments.sweep and config_file(arguments.sweep)
    points = read_points(file, 0, arguments.grid) if arguments.grid or file else [Point("", {}, 0)]
    changed, given = ({key for point in points for key, _ in flat(point.settings)},
                      {change.partition("=")[0] for change in arguments.set})  # fmt: skip
    if any(point.gpus for point in points) or GPUS in given:
        raise UserError("all points of a comparison need the same number of ranks", key=GPUS, remedy="--gpus 4")
    if "fp8.enabled" in changed | given:
        raise UserError(
            "a comparison runs every point with FP8 and with BF16 already", key="fp8.enabled", remedy="leave it out"
        )
    if own and (refused := next((key for key in own if key in changed), None)):
        raise UserError("a comparison sets this itself, for every run", key=refused, remedy=own[refused])
    return {point.name: tuple(point.changes()) for point in points}
