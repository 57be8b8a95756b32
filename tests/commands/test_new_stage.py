"""`ds-fp8 train MODEL DATA`: what it decides, says, refuses, and leaves behind."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from types import SimpleNamespace

import psutil
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ds_fp8.cli import main
from ds_fp8.commands.new_stage import look_for_network, read_data
from ds_fp8.config.errors import UserError
from ds_fp8.data import build_tokenizer, load_tokenizer
from ds_fp8.data.chat import CHATML_TEMPLATE
from ds_fp8.train import load_stage
from ds_fp8.train.resume import inspect_run
from tests.corpus import CHATS, DOCUMENTS, TOKENIZER

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 384}
ALPACA = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(2, 40)]
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of tiny models: `chat`, `plain` without a chat template, `silent` without a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_tokenizer(TOKENIZER)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name in ("chat", "plain", "silent"):
        model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "plain")
    tokenizer.chat_template = CHATML_TEMPLATE
    tokenizer.save_pretrained(folder / "chat")
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_FP8_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def _write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def _loads(folder):
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    assert AutoTokenizer.from_pretrained(folder).chat_template
    return model


def test_a_model_and_chats_alone_are_trained_on_two_ranks(models, forked_ranks, capfd, tmp_path):
    data = _write("sums.jsonl", ALPACA)
    assert main(["train", f"{models}/chat", data, "--gpus", "2", "--set", "train.steps=2"]) == 0
    said = capfd.readouterr().out
    run = tmp_path / "runs/chat-sums"
    words = [
        "sums.jsonl: chats (Alpaca)",
        "«0 1",
        "fits: ",
        "all weights of",
        "preset precise",
        "2 steps of",
        "step 2/2",
    ]
    words += ["final validation loss", "ds-fp8 chat runs/chat-sums/model", "vllm serve runs/chat-sums/model"]
    for word in words:
        assert word in said, word
    stage = json.loads((run / "stage.json").read_text())
    assert json.loads((run / "config.json").read_text()) == stage
    assert inspect_run(load_stage(run / "stage.json", world=2)).result  # the same run, which is done
    trained, name = _loads(run / "model"), "model.layers.0.mlp.up_proj.weight"
    before = AutoModelForCausalLM.from_pretrained(f"{models}/chat")
    assert not torch.equal(trained.get_parameter(name), before.get_parameter(name))


def test_adapters_are_trained_resumed_by_the_same_command_and_asked(models, forked_ranks, capfd, tmp_path):
    command = ["train", f"{models}/chat", CHATS["path"], "--gpus", "1", "--lora", "4", "--out", "run"]
    assert main([*command, "--set", "train.steps=1"]) == 0
    assert "adapters of rank 4" in capfd.readouterr().out
    assert main([*command, "--set", "train.steps=2"]) == 0
    assert "goes on behind step 1 of 2" in capfd.readouterr().out
    merged = _loads("run/model")
    base = AutoModelForCausalLM.from_pretrained(f"{models}/chat")
    adapted = PeftModel.from_pretrained(base, tmp_path / "run/adapter").merge_and_unload()
    assert all(map(torch.equal, merged.state_dict().values(), adapted.state_dict().values()))
    assert main(["chat", "run", "2 + 2?", "--max-new-tokens", "4"]) == 0
    assert capfd.readouterr().out.strip()


def test_what_is_asked_for_is_in_the_stage_that_is_written(models):
    options = ["--lora", "8", "--seq", "256", "--epochs", "2", "--lr", "1e-3", "--out", "elsewhere"]
    options += ["--set", "train.schedule.warmup=0.1", "--gpus", "2", "--write", "stage.json"]
    assert main(["train", f"{models}/plain", DOCUMENTS["path"], *options]) == 0
    stage = load_stage("stage.json", world=2)
    assert (stage.train.lora.r, stage.train.lora.alpha, stage.train.epochs, stage.data.sequence_length) == (
        8,
        16,
        2,
        256,
    )
    assert stage.configuration.optimizer_params["lr"] == 1e-3
    assert (stage.train.run_dir, stage.train.schedule.warmup) == ("elsewhere", 0.1)
    assert stage.data.format == "documents"
    assert stage.global_batch % (2 * stage.micro_batch) == 0


def test_a_model_that_cannot_compute_packed_attention_gets_eager(models, capsys):
    shutil.copytree(models / "chat", "capped")
    AutoConfig.for_model("gemma2", vocab_size=1024, **SIZES).save_pretrained("capped")
    assert main(["train", "capped", _write("sums.jsonl", ALPACA), "--write", "stage.json"]) == 0
    assert load_stage("stage.json").model.attn_implementation == "eager"
    assert 'attention "eager": a gemma2 cannot compute "packed"' in capsys.readouterr().out


def test_a_model_that_does_not_separate_documents_gets_one_example_a_row(models, capsys):
    shutil.copytree(models / "chat", "hybrid")
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    AutoConfig.for_model("lfm2", **{"vocab_size": 1024, **SIZES, **layers}).save_pretrained("hybrid")
    assert main(["train", "hybrid", CHATS["path"], "--write", "stage.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "one example a row: Lfm2ForCausalLM does not separate documents of a row" in said
    examples, rows = re.search(r"train: (\S+) examples, \S+ tokens in (\S+) rows", said).groups()
    assert examples == rows
    # The example that is shown ends with its last turn, not with the padding of its row.
    assert int(re.search("an example, ([0-9]+) tokens", said)[1]) < load_stage("stage.json").data.sequence_length


@pytest.mark.parametrize("no_colour", [False, True])
def test_the_example_shows_what_carries_loss(models, no_colour, monkeypatch):
    assert main(["train", f"{models}/chat", CHATS["path"], "--gpus", "1", "--write", "stage.json"]) == 0
    monkeypatch.setenv("NO_COLOR", "1") if no_colour else monkeypatch.delenv("NO_COLOR", raising=False)
    stage, shown = load_stage("stage.json", world=1), io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=200)
    read_data(stage, build_tokenizer(stage.data), console)
    example = shown.getvalue().partition("an example")[2]
    learnt = "«" if no_colour else "\x1b[32m"
    assert f"assistant\n{learnt}" in example.replace("\x1b[0m", "").replace("\x1b[2m", "")
    assert f"{learnt}<|im_start|>" not in example
    assert ("\x1b[32m" in example) is not no_colour


def test_check_reads_the_data_of_a_stage_where_it_is_asked(models, capsys):
    stage = {"fp8": {}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_batch_size": 2}
    stage |= {"optimizer": {"type": "AdamW"}, "train": {"run_dir": "run", "steps": 2}}
    stage |= {
        "model": {"path": f"{models}/chat"},
        "data": {**CHATS, "tokenizer": f"{models}/chat", "sequence_length": 256},
    }
    with open("stage.json", "w") as file:
        json.dump(stage, file)
    assert main(["check", "stage.json", "--data"]) == 0
    assert "an example, " in capsys.readouterr().out
    missing = ["check", "stage.json", "--set", "data.path=gone.jsonl"]
    assert main(missing) == 0
    with pytest.raises(UserError, match=r"gone.jsonl does not exist"):
        main([*missing, "--data"])


@pytest.mark.parametrize(
    ("model", "data", "options", "words"),
    [
        ("owner/no-such-model", [MESSAGES] * 9, [], "neither a folder with a Hugging Face model nor a model name"),
        ("{}/gone/here/model", [MESSAGES] * 9, [], "does not exist"),
        ("{}/silent", [MESSAGES] * 9, [], "no tokenizer could be loaded"),
        ("{}/plain", [MESSAGES] * 9, [], "has no chat template"),
        ("{}/chat", None, [], "does not exist"),
        ("{}/chat", [], [], "holds no examples"),
        ("{}/chat", [*ALPACA, MESSAGES], [], "row 39 of own.jsonl is not Alpaca"),
        ("{}/chat", [*ALPACA, {**ALPACA[0], "output": ""}], [], "row 39 of own.jsonl has no word of the assistant"),
        ("{}/chat", ALPACA, ["--seq", "48"], "of 38 chats are longer than a row of 48 tokens"),
        ("{}/chat", ALPACA, ["--seq", "1024"], "longer than the model allows"),
        ("{}/chat", ALPACA, ["memory"], "chat does not fit: "),
        ("{}/chat", ALPACA, ["disk"], "its disk has 0.00 free"),
        ("{}/chat", ALPACA, ["--out", "other"], "other holds a run with "),
        ("{}/chat", ALPACA, ["--hostfile", "hosts"], "the stage of many hosts is written first"),
        ("{}/chat", "nothing", [], "is a model, and no data is given"),
        ("quickstart/cpt.json", ALPACA, [], "a stage names its model and its data itself"),
        ("quickstart/cpt.json", "nothing", ["--lora", "8"], "--lora goes with MODEL DATA"),
    ],
)
def test_wrong_calls_end_before_anything_is_written(model, data, options, words, models, tmp_path, monkeypatch):
    if model.startswith("owner"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if options == ["memory"]:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**30))
    if options == ["disk"]:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    if "other" in options:
        (tmp_path / "other").mkdir()
        (tmp_path / "other/config.json").write_text('{"train": {"run_dir": "other"}}')
    if isinstance(data, list):
        _write("own.jsonl", data)
    rest = [] if data == "nothing" else ["own.jsonl"]
    options = [] if options in (["memory"], ["disk"]) else options
    with pytest.raises(UserError) as caught:
        main(["train", model.format(models), *rest, "--gpus", "1", *options])
    assert words in str(caught.value)
    assert caught.value.key
    assert caught.value.remedy
    assert not (tmp_path / "runs").exists()


def test_a_hub_that_does_not_answer_is_not_asked_again(monkeypatch, capsys, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    look_for_network(str(tmp_path))
    assert capsys.readouterr().err == ""
    look_for_network(str(tmp_path), "owner/data")
    assert "does not answer: owner/data must be on this machine" in capsys.readouterr().err
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
