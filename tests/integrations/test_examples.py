"""The files of examples/ do what they say: each runs on two CPU ranks, where what it needs is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from ds_fp8.cluster.hosts import free_port
from ds_fp8.config.fp8 import parse_fp8
from tests.engine.graphs_in_python import in_every_engine
from tests.integrations import accelerate_on_cpus
from tests.integrations.programs import history, installed, small_model, small_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WORDS = ("one", "two", "three", "four", "five", "six")
PROGRAMS = ["zero3", "axolotl", "llamafactory"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the examples, with a tiny model and data for each of them beside."""
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    small_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tiny")
    small_tokenizer().save_pretrained(tmp_path / "tiny")
    for name, times in (("text.txt", 400), ("short.txt", 100)):
        (tmp_path / name).write_text("one two three four five six 0123456789 " * times)
    turns = [{"role": "user", "content": "after one"}, {"role": "assistant", "content": "two"}]
    rows = {
        "chats": {"messages": turns},
        "preferences": {"prompt": "after one ", "chosen": "two", "rejected": "seven"},
        "prompts": {"prompt": "after one "},
    }
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in WORDS * 4))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> str:
    """Return what the command prints in the current folder, on CPUs; it must succeed."""
    ours = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", *command], env={**others, **ours}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


# Options with which a program of TRL ends soon
FEW = (
    *("--model_name_or_path", "tiny", "--output_dir", "out", "--max_steps", "3", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "2", "--report_to", "none", "--save_strategy", "no"),
    *("--dataloader_pin_memory", "false", "--disable_tqdm", "true"),
)


@contextlib.contextmanager
def started(folder: Path, program: str, *arguments: str, **variables: str):
    """Let a program find itself in the folder, with these arguments and environment variables."""
    before = Path.cwd(), sys.argv, dict(os.environ)
    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = [program, *arguments]
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
        os.environ.clear()
        os.environ.update(before[2])


def of_accelerate(program: str, folder: Path, arguments: tuple[str, ...]):
    """Run a program with what `accelerate launch --config_file zero3.yaml` tells it: losses and start reports."""
    accelerate_on_cpus.enable()  # which sets a variable that is to stay
    config = yaml.safe_load((folder / "zero3.yaml").read_text())["deepspeed_config"]
    told = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": config["deepspeed_config_file"],
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(config["zero3_init_flag"]).lower(),
    }
    with started(folder, program, *FEW, *arguments, **told), installed():
        trainer = runpy.run_path(program, run_name="__main__")["trainer"]
        reference = getattr(trainer, "ref_model", None)
        reports = [engine.fp8.report for engine in (trainer.model_wrapped, reference) if engine is not None]
        return history(trainer, "loss"), reports


def plain(folder: Path, program: str, *arguments: str):
    """(FP8 linears, what is printed, graphs) of a program that calls ds_fp8.initialize itself."""
    with started(folder, program, *arguments), in_every_engine(), contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = runpy.run_path(program, run_name="__main__")["engine"]
    graphs = engine.fp8.graphs
    return engine.fp8.report["fp8_linears"], printed.getvalue(), (graphs.off, graphs.log.count("replayed for 0"))


def block_of_readme(language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return code


README = ("readme.py",)
PLAIN = ("train.py", "tiny", "text.txt", "out")


@pytest.mark.parametrize(
    ("words", "model"), [(README, "served"), pytest.param(PLAIN, "out/model", marks=pytest.mark.slow)], ids=str
)
def test_plain_programs_train_and_leave_a_model(words, model, folder, ranks):
    if words == README:
        fewer = block_of_readme("python").replace("range(1, 31)", "range(1, 13)").replace("step % 10", "step % 4")
        (folder / "readme.py").write_text(fewer)
        (folder / "ds_config.json").write_text(block_of_readme("json"))
    linears, printed, (off, replays) = ranks(2, plain, folder, *words)[0]
    assert linears == 14
    assert off is None
    assert replays > 4 or words != README
    losses = [float(value) for value in re.findall(r"^step \d+(?: of \d)?: loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) > 2
    assert losses == sorted(losses, reverse=True) if words == README else losses[-1] < losses[0]
    assert "linears in FP8" in printed
    assert AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.bfloat16).config.model_type == "qwen3"
    assert words == README or (folder / model / "tokenizer.json").is_file()


def of_trainer(folder: Path):
    """Losses and start report of the program with Hugging Face's Trainer."""
    accelerate_on_cpus.enable()
    with started(folder, "trainer.py", "tiny", "short.txt", "out", "--use_cpu"), installed():
        trainer = runpy.run_path("trainer.py", run_name="__main__")["trainer"]
        return history(trainer, "loss"), trainer.model_wrapped.fp8.report


def test_the_program_with_trainer_trains_and_leaves_a_model(folder, ranks):
    losses, report = ranks(2, of_trainer, folder)[0]
    assert report["fp8_linears"] == 14
    assert losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "qwen3"


@pytest.mark.slow
def test_accelerate_starts_fine_tuning_through_ds_fp8(folder):
    pytest.importorskip("trl")
    launch = ("--config_file", "zero3.yaml", "--num_processes", "2", "--main_process_port", str(free_port()))
    more = (
        "--dataset_name",
        "chats",
        "--packing",
        "--packing_strategy",
        "wrapped",
        "--max_length",
        "64",
        "--learning_rate",
        "1e-2",
    )
    printed = run("accelerate.commands.launch", *launch, "-m", "tests.integrations.launched", "sft.py", *FEW, *more)
    assert "linears in FP8  14" in printed
    losses = [float(value) for value in re.findall(r"'loss': '([\d.]+)'", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.1
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("program", "engines", "arguments"),
    [
        ("dpo.py", 2, ("--dataset_name", "preferences", "--learning_rate", "1e-3")),
        ("grpo.py", 1, ("--dataset_name", "prompts", "--num_generations", "2", "--max_completion_length", "8")),
    ],
)
def test_other_programs_of_trl_train(program, engines, arguments, ranks, folder):
    pytest.importorskip("trl")
    losses, reports = ranks(2, of_accelerate, program, folder, arguments)[0]
    assert [report["fp8_linears"] for report in reports] == [14] * engines
    assert len(losses) == 3
    if program == "dpo.py":
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)
        assert losses[-1] < 0.6
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "qwen3"


def test_other_programs_leave_precision_to_a_section_of_deepspeeds_configuration():
    """Axolotl and LLaMA-Factory name their own FP8 `fp8`."""
    recipes = {name: yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) for name in PROGRAMS}
    assert "mixed_precision" not in recipes["zero3"]
    files = {"ds_config.json", recipes["zero3"]["deepspeed_config"]["deepspeed_config_file"]}
    for name in PROGRAMS[1:]:
        assert (recipes[name]["fp8"], recipes[name]["bf16"]) == (False, True)
        files.add(recipes[name]["deepspeed"])
    for raw in (json.loads((EXAMPLES / file).read_text()) for file in files):
        assert raw["zero_optimization"]["stage"] == 3
        assert parse_fp8(raw).enabled


@pytest.mark.skipif(not importlib.util.find_spec("axolotl"), reason="needs Axolotl")
def test_axolotl_takes_the_recipe():
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig

    recipe = yaml.safe_load((EXAMPLES / "axolotl.yaml").read_text())
    taken = AxolotlInputConfig(**DictDefault(recipe))
    assert (taken.deepspeed, taken.fp8) == ("zero3.json", False)


@pytest.mark.skipif(not importlib.util.find_spec("llamafactory"), reason="needs LLaMA-Factory")
def test_llamafactory_takes_the_recipe(folder):
    recipe = ("model_name_or_path=tiny", "max_steps=2", "report_to=none")
    printed = run("torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
                  "-m", "tests.integrations.launched",
                  "-m", "llamafactory.launcher", "llamafactory.yaml", *recipe)  # fmt: skip
    assert "linears in FP8  14" in printed
