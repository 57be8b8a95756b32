"""The `ds-fp8` command: ds-fp8 COMMAND ..., each of ds_fp8/commands/."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import ds_fp8
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.schema import nearest

COMMANDS = {
    "train": "train a model on data, or one stage",
    "chat": "ask a trained model one question",
    "estimate": "estimate how much memory a stage takes in FP8 and BF16",
    "sweep": "measure memory and speed over a grid of settings",
    "parity": "compare FP8 with BF16 on your own stage, over seeds and a grid",
    "sensitivity": "measure which casts cost a model the most, and propose what to keep in BF16",
    "export": "write a Hugging Face folder in BF16 or FP8",
    "evaluate": "measure perplexity and exact match of a Hugging Face folder",
    "report": "compare finished FP8 runs with their BF16 runs",
    "check": "check a DeepSpeed JSON, a stage, or a model and data, without training",
    "configs": "list the configurations that come with ds_fp8",
}

# Commands that only print: a reader that closes its pipe (`| head`) ends them without a word
PRINTING = ("configs", "estimate", "check")
EXIT_PIPE = 141  # As a shell tells of programs that SIGPIPE ended
# Modules of the extra "recipe"
OF_THE_RECIPE = (
    *("accelerate", "datasets", "sentencepiece", "google", "wandb", "tensorboard", "psutil", "xxhash"),
    "jinja2",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names with the rest; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print("usage: ds-fp8 COMMAND ...    (help on a command: ds-fp8 COMMAND --help; version: ds-fp8 --version)\n")
        print("\n".join(f"  {name:<11} {what}" for name, what in COMMANDS.items()))
        return 0
    if given[0] == "--version":
        print(f"ds-fp8 {ds_fp8.__version__}")
        return 0
    command, *rest = given
    if command not in COMMANDS:
        raise UserError(f'unknown command "{command}"', remedy=nearest(command, COMMANDS, "there are"))
    sys.argv = [f"ds-fp8 {command}", *rest]
    try:
        return import_module(f"ds_fp8.commands.{command}").main() or 0
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in OF_THE_RECIPE:
            raise
        raise UserError(
            f"ds-fp8 {command} needs {missing}, which is not installed",
            remedy='pip install "ds-fp8[recipe]" (from the repository: pip install ".[recipe]")',
        ) from error


def entry() -> None:
    """Run `main` as a console command: a UserError is one printed screen, and a rank's end is known to the others."""
    if sys.argv[1:2] == ["train"]:
        from ds_fp8.cluster.entry import rank_entry

        rank_entry(main)
    prints = sys.argv[1:2] and sys.argv[1] in PRINTING
    try:
        main_entry(_printed if prints else main)
    except BrokenPipeError:
        if not prints:
            raise
        # Python flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_PIPE)


def _printed() -> int:
    code = main()
    sys.stdout.flush()  # here, where a closed pipe is caught
    return code


if __name__ == "__main__":
    entry()
