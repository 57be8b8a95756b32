"""Models and commands that fuzz.py draws and judges: damaged folders of models, and command lines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FOLDER_KINDS = ("models", "commands")
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "pytorch_model.bin")  # fmt: skip
# Options of each command; what a command starts is not started
OPTIONS = {
    "train": ("--gpus", "--set", "--hostfile", "--max-restarts", "--launcher-options", "--local_rank"),
    "estimate": ("--gpus", "--memory", "--set", "--json"),
    "sweep": ("--sweep", "--grid", "--set", "--gpus", "--steps", "--timeout", "--memory"),
    "parity": ("--steps", "--seeds", "--gpus", "--out", "--tolerance", "--set", "--grid", "--sweep"),
    "export": ("--format", "--model", "--deepspeed_config", "--force"),
    "evaluate": ("--batches", "--gpus", "--problems", "--out", "--json", "--set"),
    "report": ("--title", "--out"),
    "check": ("--gpus", "--set"),
    "configs": (),
}
FLAGS = ("--json", "--force")


class Started(BaseException):
    """Raised in the place of work that a command would begin: its arguments are accepted."""


def _started(*_: Any, **__: Any) -> None:
    raise Started


# ---------------------------------------------------------------- what is drawn


def file_changes(file: Path, changed: Any, damaged: Any) -> st.SearchStrategy:
    """Return what the new content of a file is drawn from: bytes, or the word for what takes its place."""
    content = file.read_bytes()
    odd = st.sampled_from(["gone", "folder", "pipe", "loop", "device"])
    values = [json.loads(content)] if file.suffix == ".json" else []
    broken = st.deferred(lambda: damaged(content))  # whose name does not hold the content
    wrong = changed(values[0], []).map(lambda value: json.dumps(value).encode()) if values else broken
    return st.one_of(wrong, wrong, wrong, wrong, broken, odd)


def changes(whole: Path, changed: Any, damaged: Any) -> st.SearchStrategy:
    """Return what the change of a file of a model's folder is drawn from, as (name, change)."""
    return st.one_of([st.tuples(st.just(name), file_changes(whole / name, changed, damaged)) for name in MODEL_FILES])


def command_lines(text: st.SearchStrategy, paths: list[str]) -> st.SearchStrategy:
    numbers = st.sampled_from(["0", "1", "2", "-1", "1e3", "999999999999", "2147483647", "nan", "inf", "0.5", "0x1"])
    value = numbers | st.sampled_from(paths) | text | st.sampled_from(["train.steps=3", "a=", "fp8.enabled=false"])

    stage, run, model = paths[:3]
    usual = {command: [stage] for command in OPTIONS} | {"report": [run], "export": [run, "out"], "configs": []}
    usual |= {"evaluate": [model, stage], "sweep": [stage, "--sweep", "sweeps/fp8_levels.json"]}
    usual |= {"parity": [stage, "--steps", "2"]}

    @st.composite
    def line(draw: st.DrawFn) -> list[str]:
        command = draw(st.sampled_from(sorted(OPTIONS)))
        words = [draw(st.sampled_from(paths) | text) for _ in range(draw(st.integers(0, 3)))]
        if draw(st.booleans()):
            words = [*usual[command]]
        for option in draw(st.lists(st.sampled_from(OPTIONS[command] or ("--odd",)), max_size=4)):
            words += [option] if option in FLAGS else [option, draw(value)]
        return [command, *words, *(["--plan"] if command == "sweep" else [])]

    return line()


# ---------------------------------------------------------------- what is done with it


def apply_change(folder: Path, name: str, change: bytes | str) -> None:
    file = folder / name
    file.unlink()
    if isinstance(change, bytes):
        file.write_bytes(change)
    elif change == "folder":
        file.mkdir()
    elif change == "pipe":
        os.mkfifo(file)
    elif change != "gone":
        file.symlink_to(file.name if change == "loop" else "/dev/zero")


class FolderJudges:
    """Judges of damaged folders and of command lines, beside those of fuzz.py."""

    folder: Path

    def whole(self) -> Path:
        """Return the model's folder that cases are copied from, made when it is first asked for."""
        folder = self.folder / "whole"
        if not folder.exists():
            self._make_model(folder)
        return folder

    def _make_model(self, whole: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from ds_fp8.data import load_tokenizer
        from tests.corpus import TOKENIZER

        tokenizer = load_tokenizer(TOKENIZER)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        (whole / "model.safetensors").unlink()
        torch.save(model.state_dict(), whole / "pytorch_model.bin")

    def models(self, case: tuple[str, bytes | str]) -> None:
        """Load a model in whose folder a file was changed: to evaluate it, and to train from it."""
        from ds_fp8.commands.evaluate import _load
        from ds_fp8.data import load_tokenizer
        from ds_fp8.train.stored_model import check_trainable, load_stored_model, stored_config, stored_model

        folder = self.folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.whole(), folder)
        apply_change(folder, *case)
        load_tokenizer(str(folder))
        source = stored_model(None, str(folder))
        config = stored_config(source)
        check_trainable(source, config)
        load_stored_model(source, config, {})
        _load(folder, "sdpa")

    def command_paths(self) -> list[str]:
        """Return names of files and folders that commands may be given, good and bad ones."""
        from tests.report.runs import finished_run
        from tests.train.tiny_stage import TINY

        stage, run = self.folder / "tiny.json", self.folder / "reported"
        if not run.exists():
            stage.write_text(json.dumps({**TINY, "train": {**TINY["train"], "run_dir": str(self.folder / "run")}}))
            finished_run(run, 0.5, 10, 0.5)
        own = [stage, run, self.whole(), self.folder / "absent", self.folder, Path("/dev/null"), Path("/")]
        names = ["quickstart/cpt.json", "infir2_7b/cpt", "sweeps/fp8_levels.json"]
        return [*map(str, own), *names]

    def commands(self, case: list[str]) -> None:
        """Give a command its arguments; where it would begin to work it is accepted."""
        from ds_fp8 import cli

        with contextlib.ExitStack() as work:
            for name in (
                "ds_fp8.commands.train.train_here",
                "ds_fp8.commands.train.launch",
                "ds_fp8.commands.train._train",
                "ds_fp8.commands.parity.train_once",
                "ds_fp8.train.processes.init_distributed",
                "ds_fp8.export.export_checkpoint",
                "ds_fp8.report.page.write_report",
                "ds_fp8.report.compare.write_parity",
            ):
                work.enter_context(mock.patch(name, _started))
            work.enter_context(contextlib.redirect_stdout(io.StringIO()))
            work.enter_context(contextlib.redirect_stderr(io.StringIO()))
            work.enter_context(mock.patch.object(sys, "argv", ["ds-fp8"]))
            work.enter_context(mock.patch.dict(os.environ))
            try:
                cli.main(case)
            except Started:
                return
            except SystemExit as end:
                if end.code not in (0, 2):
                    raise AssertionError(f"exit code {end.code}") from None
                if end.code:
                    from ds_fp8.config.errors import UserError

                    raise UserError("argparse refused it", remedy="as it says") from None


def folder_strategies(judges: FolderJudges, kind: str, changed: Any, damaged: Any, text: Any) -> st.SearchStrategy:
    if kind == "commands":
        return command_lines(text, judges.command_paths())
    return changes(judges.whole(), changed, damaged)
