"""Folders and commands that fuzz.py draws and judges: damaged runs, their reports, models, and command lines."""

from __future__ import annotations

import contextlib
import copy
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

FOLDER_KINDS = ("runs", "reports", "models", "commands")
RUN_FILES = ("checkpoints/step_6/manifest.json", "checkpoints/step_4/manifest.json", "result.json",
             "metrics.jsonl", "config.json", "checkpoints/latest")  # fmt: skip
REPORT_FILES = ("result.json", "metrics.jsonl", "config.json")
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "pytorch_model.bin")  # fmt: skip
OPTIONS = {
    "train": ("--gpus", "--set", "--hostfile", "--max-restarts", "--min-hosts", "--launcher-options", "--local_rank"),
    "estimate": ("--gpus", "--memory", "--set", "--json"),
    "sweep": (
        "--sweep",
        "--grid",
        "--set",
        "--gpus",
        "--steps",
        "--timeout",
        "--only",
        "--memory",
        "--rerun",
    ),
    "parity": ("--steps", "--seeds", "--rates", "--gpus", "--out", "--tolerance", "--set", "--grid", "--sweep"),
    "export": ("--format", "--model", "--deepspeed_config", "--force"),
    "evaluate": ("--batches", "--gpus", "--problems", "--limit", "--out", "--json", "--set"),
    "report": ("--title", "--out"),
    "check": ("--gpus", "--set"),
    "configs": (),
}
"""Options of each command; what a command starts is not started."""
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
    values = [json.loads(line) for line in (content.splitlines() if file.suffix == ".jsonl" else [content])] \
        if file.suffix in (".json", ".jsonl") else []  # fmt: skip

    @st.composite
    def with_other_values(draw: st.DrawFn) -> bytes:
        place = draw(st.integers(0, len(values) - 1))
        value = draw(changed(values[place], []))
        if file.name == "manifest.json" and isinstance(value, dict):
            from ds_fp8.train.checkpoints import checksum

            value.pop("checksum", None)
            value["checksum"] = checksum(value)
        lines = [*values[:place], value, *values[place + 1 :]]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    broken = st.deferred(lambda: damaged(content))  # whose name does not hold the content
    wrong = with_other_values() if values else broken
    return st.one_of(wrong, wrong, wrong, wrong, broken, odd)


def changes(whole: Path, names: tuple[str, ...], most: int, changed: Any, damaged: Any) -> st.SearchStrategy:
    """Return what changes of up to `most` files of a folder are drawn from, as (name, change)."""
    one = st.one_of([st.tuples(st.just(name), file_changes(whole / name, changed, damaged)) for name in names])
    return st.lists(one, min_size=1, max_size=most, unique_by=lambda change: change[0])


def command_lines(text: st.SearchStrategy, paths: list[str]) -> st.SearchStrategy:
    """Return what argument lists are drawn from."""
    numbers = st.sampled_from(["0", "1", "2", "-1", "1e3", "999999999999", "2147483647", "nan", "inf", "0.5", "0x1"])
    value = numbers | st.sampled_from(paths) | text | st.sampled_from(["train.steps=3", "a=", "fp8.enabled=false"])

    stage, run, reported, model = paths[:4]
    usual = {command: [stage] for command in OPTIONS} | {"report": [reported], "export": [run, "out"], "configs": []}
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
    """Change a file of a folder that was just copied."""
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


def _make_reported(whole: Path) -> None:
    from tests.report.runs import finished_run

    finished_run(whole, 0.5, 10, 0.5)


class FolderJudges:
    """Judges of damaged folders and of command lines, beside those of fuzz.py."""

    folder: Path

    def whole(self, kind: str) -> Path:
        """Return the folder that a kind's cases are copied from, made when it is first asked for."""
        folder = self.folder / f"{kind}-whole"
        if not folder.exists():
            {"runs": self._make_run, "reports": _make_reported, "models": self._make_model}[kind](folder)
        return folder

    def _copy(self, kind: str, name: str, case: list) -> Path:
        copied = self.folder / name
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(self.whole(kind), copied)
        for change in case:
            apply_change(copied, *change)
        return copied

    def _stage(self) -> Any:
        from ds_fp8.train import load_stage
        from tests.train.tiny_stage import TINY

        raw = copy.deepcopy(TINY)
        raw["train"]["run_dir"] = str(self.folder / "run")
        file = self.folder / "tiny.json"
        if not file.exists():
            file.write_text(json.dumps(raw))
        return load_stage(file, world=1)

    def _make_run(self, whole: Path) -> None:
        from tests.train.damage import save_two
        from tests.train.tiny_stage import RESULT

        save_two(self._stage(), 1).rename(whole)
        (whole / "result.json").write_text(json.dumps(RESULT))

    def runs(self, case: list) -> None:
        """Resume a run in whose folder files were changed, as far as it goes without training."""
        import torch.distributed

        from ds_fp8.data.order import rows_of_step
        from ds_fp8.monitor.records import layers_in_bf16
        from ds_fp8.train import processes, resume
        from ds_fp8.train.metrics import MetricsLog, read_metrics, summarise

        if not torch.distributed.is_initialized():
            processes.set_single_process_env()
            processes.init_distributed()
        run_dir = self._copy("runs", "run", case)
        state = resume.settle(self._stage(), lambda line: None)
        records = read_metrics(run_dir / "metrics.jsonl", state.step)
        layers_in_bf16(records)
        summarise(MetricsLog(run_dir / "metrics.jsonl", records, writes=True), state.step)
        rows_of_step(state.data_step, 100, 8, 1)

    def reports(self, case: list) -> None:
        """Report on a run in whose folder files were changed."""
        from ds_fp8.cli import main

        run_dir = self._copy("reports", "reported", case)
        with contextlib.redirect_stdout(io.StringIO()):
            main(["report", str(run_dir)])

    def _make_model(self, whole: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from ds_fp8.data import DataConfig, build_tokenizer

        tokenizer = build_tokenizer(DataConfig(), self.folder)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        (whole / "model.safetensors").unlink()
        torch.save(model.state_dict(), whole / "pytorch_model.bin")

    def models(self, case: list) -> None:
        """Load a model in whose folder files were changed: to evaluate it, and to train from it."""
        from ds_fp8.commands.evaluate import _load
        from ds_fp8.data import load_tokenizer
        from ds_fp8.train.stored_model import check_trainable, load_stored_model, stored_config, stored_model

        folder = self._copy("models", "model", case)
        load_tokenizer(str(folder))
        source = stored_model(None, str(folder))
        config = stored_config(source)
        check_trainable(source, config)
        load_stored_model(source, config, {})
        _load(folder, "sdpa")

    def command_paths(self) -> list[str]:
        """Return names of files and folders that commands may be given, good and bad ones."""
        folders = [self.whole(kind) for kind in ("runs", "reports", "models")]
        own = [self._stage().file, *folders, self.folder / "absent", self.folder, Path("/dev/null"), Path("/")]
        names = ["quickstart/cpt.json", "infir2_7b/cpt", "sweeps/fp8_levels.json"]
        return [*map(str, own), *names]

    def commands(self, case: list[str]) -> None:
        """Give a command its arguments; where it would begin to work it is accepted."""
        from ds_fp8 import cli

        with contextlib.ExitStack() as work:
            for name in (
                "ds_fp8.commands.train.train_here",
                "ds_fp8.commands.train.launch_as",
                "ds_fp8.commands.train._train",
                "ds_fp8.commands.parity.train_once",
                "ds_fp8.train.processes.init_distributed",
                "ds_fp8.export.export_checkpoint",
                "ds_fp8.report.page.write_report",
                "ds_fp8.report.parity.write_parity",
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
    """Return what a kind of case is drawn from."""
    if kind == "commands":
        return command_lines(text, judges.command_paths())
    names = {"runs": RUN_FILES, "reports": REPORT_FILES, "models": MODEL_FILES}[kind]
    # A run goes on while one of its checkpoints is whole.
    return changes(judges.whole(kind), names, 4 if kind == "runs" else 1, changed, damaged)
