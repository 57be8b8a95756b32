"""The `ds-fp8` command and its arguments: from the repository, and from a wheel in an empty folder."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import ds_fp8
from ds_fp8.cli import COMMANDS, main
from ds_fp8.commands.arguments import amount, config_file, count, shipped_configs
from ds_fp8.commands.train import _end, _served_layout
from ds_fp8.config.errors import UserError
from ds_fp8.data import load_tokenizer
from ds_fp8.train import load_stage
from tests.corpus import CHATS, DOCUMENTS, TOKENIZER

ROOT = Path(__file__).parents[1]


def test_every_command_says_how_it_is_used(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ds-fp8 {ds_fp8.__version__}\n"
    assert main([]) == 0
    listed = capsys.readouterr().out
    for command in COMMANDS:
        assert command in listed
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"ds-fp8 {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["parity", "x", "--steps", "2", "--tolerance"], ["sensitivity", "m", "x", "--budget"]]
)
def test_percent_for_a_share_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "25"])
    assert "1% is 0.01" in capsys.readouterr().err


def test_the_folder_of_a_run_is_not_its_model(tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("run.lock", "config.json", "model/config.json"):
        (tmp_path / file).write_text("{}")
    for command in (["evaluate", str(tmp_path), "quickstart/cpt.json"], ["sensitivity", str(tmp_path), "x.jsonl"]):
        with pytest.raises(UserError) as caught:
            main(command)
        assert str(tmp_path / "model") in caught.value.remedy


def test_a_shipped_stage_in_fewer_steps_is_told_how():
    with pytest.raises(UserError) as caught:
        main(["check", "infir2_7b/cpt.json", "--set", "train.steps=50"])
    assert caught.value.key == "train.schedule"
    changes = [word for word in caught.value.remedy.split() if "=" in word]
    changed = [part for change in ("train.steps=50", *changes) for part in ("--set", change)]
    assert main(["check", "infir2_7b/cpt.json", "--gpus", "8", *changed]) == 0


def test_train_says_what_loads_before_it_loads():
    """The command's modules import neither torch nor DeepSpeed: those take the time."""
    program = (
        "import sys, ds_fp8.cli\n"
        "import ds_fp8.commands.train, ds_fp8.cluster.entry\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("changes", "model", "layout"),
    [
        ([], {}, "fp8"),
        (["fp8.preset=rowwise"], {"hidden_size": 576}, "compressed-tensors"),
        (["fp8.enabled=false"], {}, None),
        (["fp8.preset=precise"], {}, "fp8"),
        (["train.lora.r=4"], {}, "fp8"),
        ([], {"hidden_size": 576}, None),
        ([], {"model_type": "munit_llama"}, None),
    ],
)
def test_the_export_that_train_proposes_holds_the_weights(changes, model, layout):
    stage = load_stage(config_file("quickstart/cpt.json"), changes, 2)
    assert _served_layout(stage, {"model_type": "llama", "hidden_size": 256, **model}) == layout


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("infir2", "export:  ds-fp8 export {0} {0}-fp8 --format fp8"),
        ("precise", "serve:   vllm serve {0}/model   (BF16: FP8 folders"),
    ],
)
def test_the_end_of_a_training_says_how_to_serve(preset, words, tmp_path):
    stage = load_stage(config_file("quickstart/cpt.json"), [f"fp8.preset={preset}", f"train.run_dir={tmp_path}"], 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama", "hidden_size": 256}')
    assert _end(stage, {"final_loss": 1.0, "steps": 3})[-1].startswith(words.format(tmp_path))


def test_an_unknown_command_names_the_nearest():
    with pytest.raises(UserError) as caught:
        main(["trian"])
    assert '"train"' in caught.value.remedy


def test_shipped_configurations_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"infir2_7b/cpt.json", "sweeps/fp8_levels.json"} <= set(shipped_configs())
    for name in ("infir2_7b/cpt.json", "infir2_7b/cpt", "ds_configs/infir2_7b/cpt.json"):
        assert json.loads(config_file(name).read_text())["model"]["path"] == "Qwen/Qwen2.5-7B"
    with pytest.raises(UserError) as caught:
        config_file("infir2_7b/ctp.json")
    assert "infir2_7b/cpt.json" in caught.value.remedy


def test_names_that_are_no_configuration(tmp_path):
    for name, problem in (("nonsense", "does not exist"), (str(tmp_path), "a folder")):
        with pytest.raises(UserError, match=problem) as caught:
            main(["check", name])
        assert "JSON file" in caught.value.remedy
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["evaluate", "nowhere"], "not a Hugging Face folder"),
        (["evaluate", "run", "quickstart/cpt.json"], "no tokenizer"),
        (["evaluate", "model"], "no stage is given"),
        (["report", "nowhere"], "no folder"),
        (["report", "model"], "not a finished run"),
        (["export", "nowhere", "out"], "no folder"),
        (["evaluate", "model", "list.json", "--out", "list.json/figures"], "cannot be written"),
        (["evaluate", "model", "list.json", "--out", "run"], "is a folder"),
        (["report", "run", "--out", "list.json/page"], "cannot be written"),
        (["parity", "list.json", "--steps", "1", "--out", "/dev/null/x"], "cannot be written"),
        (["train", "broken.json"], "not valid JSON"),
        (["check", "list.json"], "a JSON object"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(arguments, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "run"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "broken.json").write_text('{"a": 1,')
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match=problem) as caught:
        main(arguments)
    assert caught.value.remedy
    assert "\n" not in caught.value.problem


def test_a_file_of_ones_own_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/cpt.json").write_text("{}")
    assert config_file("quickstart/cpt.json").read_text() == "{}"


def test_a_shipped_stage_is_estimated_offline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", "qwen3_8b/cpt", "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_adapters_on_experts_are_estimated_in_bf16_too(tmp_path, capsys):
    """Adapters on all linears of a mixture, experts among them."""
    stage = json.loads(config_file("quickstart/sft_stage1.json").read_text())
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 256, "hidden_size": 256}
    sizes = {"moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    stage["model"] = {"config": {"model_type": "qwen3_moe", **shape, **sizes}}
    stage["train"] = {**stage["train"], "init_from": None, "lora": {"r": 16, "targets": "all-linear"}}
    (tmp_path / "stage.json").write_text(json.dumps(stage))
    assert main(["estimate", str(tmp_path / "stage.json"), "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["as configured", "BF16, fused loss", "BF16, its own loss"]
    assert all(column["device_bytes"] > 0 for column in found.values())


@pytest.mark.parametrize(
    ("change", "key"),
    [([], None), (["--set", "fp8.fuze=off"], "fp8.fuze"), (["--set", 'optimizer={"type": "Lamb"}'], "optimizer.type")],
)
def test_check_names_the_first_mistake(change, key, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    arguments = ["check", "quickstart/cpt.json", "--gpus", "2", *change]
    if key is None:
        assert main(arguments) == 0
        assert "8 rows a step on 2 ranks" in capsys.readouterr().out
    else:
        with pytest.raises(UserError) as caught:
            main(arguments)
        assert caught.value.key == key


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Run `ds-fp8` from the built wheel alone, in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    site, empty = folder / "site", folder / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()

    def run(*commands: list[str]) -> subprocess.CompletedProcess:
        """What the commands print, one after the other in one process, which imports everything once."""
        ours = {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": "", "DS_FP8_CACHE": str(folder / "cache")}
        environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"} | ours
        program = f"from ds_fp8.cli import main\nassert not any(main(command) for command in {commands!r})"
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    run.site, run.empty = site, empty
    return run


def test_the_wheel_brings_its_configurations_and_the_command(installed):
    names = {path.relative_to(installed.site / "ds_fp8/configs").as_posix() for path in installed.site.rglob("*.json")}
    assert names == set(shipped_configs())
    (entry,) = installed.site.glob("*.dist-info/entry_points.txt")
    assert "ds-fp8 = ds_fp8.cli:entry" in entry.read_text()


def test_a_wheel_in_an_empty_folder_estimates_trains_exports_reports_and_evaluates(installed):
    small = [
        "model.config.num_hidden_layers=1",
        "train.steps=1",
        "train.exact_match_problems=0",
        "train.eval_batches=1",
    ]
    small += [f"data.path={DOCUMENTS['path']}", f"data.tokenizer={TOKENIZER}", "data.sequence_length=128"]
    small += ["train.run_dir=run"]
    changes = [part for change in small for part in ("--set", change)]
    stage = ["quickstart/cpt.json", *changes]
    _write_base_model(installed.empty / "base")
    (installed.empty / "template").write_text("{% for message in messages %}{{ message['content'] }}</s>{% endfor %}")
    base = ["evaluate", "base", *stage, "--problems", "0", "--set", "train.eval_batches=2"]
    base += ["--set", "data.validation_fraction=0.5", "--out"]
    chat = ["--set", "data.format=chat", "--set", f"data.path={CHATS['path']}"]
    chat += ["--set", r"data.answer_pattern=answer is (\d+)", "--set", "model.attn_implementation=sdpa"]
    three = ["--set", "train_batch_size=4", "--set", "gradient_accumulation_steps=1"]
    done = installed(
        ["estimate", "infir2_7b/cpt.json", "--gpus", "8", "--json"],
        ["train", *stage, "--gpus", "1"],
        ["export", "run", "served"],
        ["report", "run"],
        ["evaluate", "served", *stage, "--batches", "1", "--out", "figures/served.json"],
        ["evaluate", "served", *stage, *chat, "--batches", "1", "--problems", "2", "--out", "figures/answers.json"],
        [*base, "figures/documents.json", "--gpus", "2"],
        [*base, "figures/chats.json", *chat, *three, "--set", "train_micro_batch_size_per_gpu=1"],
        [*base, "figures/other.json", *chat, "--set", "data.chat_template=template"],
    )
    # Without a GPU and DS_ACCELERATOR DeepSpeed warns as it is imported, by default on the standard output.
    assert "Setting accelerator to CPU" in done.stderr
    estimate, end = json.JSONDecoder().raw_decode(done.stdout)  # JSON alone, from the first character on
    assert "as configured" in estimate
    printed = done.stdout[end:]
    assert "ran: no step skipped" in printed
    assert " in 1 steps of FP8" in printed
    assert "</html>" in (installed.empty / "run/report.html").read_text()
    assert "7 layers in FP8" in printed
    assert (installed.empty / "served/tokenizer.json").is_file()
    loss = json.loads((installed.empty / "run/result.json").read_text())["final_loss"]
    figures = json.loads((installed.empty / "figures/served.json").read_text())
    assert figures["loss"] == pytest.approx(loss, rel=0.02)
    assert json.loads((installed.empty / "figures/answers.json").read_text())["problems"] == 2
    names = ("documents", "chats", "other")
    documents, chats, other = (json.loads((installed.empty / f"figures/{name}.json").read_text()) for name in names)
    batch = json.loads(config_file("quickstart/cpt.json").read_text())["train_micro_batch_size_per_gpu"]
    assert [each["rows"] for each in (documents, chats, other)] == [2 * 2 * batch, 2 * 4, 2 * batch]
    # Of a model that knows nothing, but for other labels.
    assert all(each["loss"] == pytest.approx(math.log(560), rel=0.1) for each in (documents, chats, other))
    assert len({each["loss"] for each in (documents, chats, other)}) == 3


def _write_base_model(folder: Path) -> None:
    """Write a model whose tokenizer has neither a pad token nor a chat template, as those of Llama 3 and Mistral."""
    tokenizer = load_tokenizer(TOKENIZER)
    tokenizer.pad_token = None
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", num_key_value_heads=2, vocab_size=560, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_command_without_the_recipes_packages_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "ds_fp8.memory.sweep", raising=False)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(UserError, match="ds-fp8 sweep needs psutil, which is not installed") as caught:
        main(["sweep", "quickstart/cpt.json", "--plan"])
    assert "[recipe]" in caught.value.remedy


def test_a_reader_that_closes_its_pipe_sees_no_traceback():
    program = f"{shlex.quote(sys.executable)} -c 'from ds_fp8.cli import entry; entry()' configs"
    done = subprocess.run(f"{program} | head -1", shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- arguments of the commands


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
