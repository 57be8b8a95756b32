"""Whole runs on two CPU ranks, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_fp8.commands.train import main
from ds_fp8.data import build_data, build_tokenizer
from ds_fp8.data.rows import rows_of_step
from ds_fp8.train import load_stage, train
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.model import build_model, load_model_config
from ds_fp8.train.resume import inspect_run
from ds_fp8.train.stage import learning_rate_factor
from tests.corpus import CHATS
from tests.numerics import error
from tests.refusals import refused

TRAINING = ("step", "loss", "learning_rate", "gradient_norm", "skipped_steps", "validation_loss", "exact_match")


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=150)
    assert process.returncode == code, output
    return output


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not any(record["step"] >= step for record in read_metrics(run_dir / "metrics.jsonl", 10**9)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def process_of_rank(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    ranks = list(psutil.Process(launcher.pid).children(recursive=True))
    return next(child for child in ranks if f"--local_rank={rank}" in child.cmdline())


def measured(run_dir: Path) -> list[dict]:
    """What the records of a run say of the training, leaving out times, memory and traffic."""
    records = [record for record in read_metrics(run_dir / "metrics.jsonl", 10**9) if "saved" not in record]
    return [{key: value for key, value in record.items() if key in TRAINING} for record in records]


def train_on_these_ranks(file: Path, run_dir: Path, steps: int) -> None:
    train(load_stage(file, [f"train.run_dir={run_dir}", f"train.steps={steps}"]))


def handlers_around_a_run(file: Path, run_dir: Path, steps: int) -> bool:
    """Whether a program has its own handlers of signals back after a run."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    train_on_these_ranks(file, run_dir, steps)
    kept = all(signal.getsignal(number) is signal.default_int_handler for number in numbers)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    return kept


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_made_longer_has_the_rates_of_its_new_length_and_says_what_its_log_lost(
    tiny, write, ranks, tmp_path, enabled
):
    """Also the first step after the old end, whose rate the checkpoint has as of the old length."""
    tiny["fp8"]["enabled"] = enabled
    tiny["train"] |= {"eval_batches": 1, "schedule": {"type": "cosine", "warmup": 1}}
    file, run_dir = write(tiny), tmp_path / "run"
    schedule, metrics = load_stage(file).train.schedule, run_dir / "metrics.jsonl"
    assert ranks(1, handlers_around_a_run, file, run_dir, 2) == [True]
    whole = [record for record in read_metrics(metrics) if "loss" in record]
    assert whole[1]["learning_rate"] == pytest.approx(1e-3 * learning_rate_factor(1, 2, schedule))
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[2:]))  # without the first validation and the first step
    ranks(1, train_on_these_ranks, file, run_dir, 5)
    rates = {record["step"]: record["learning_rate"] for record in measured(run_dir) if "loss" in record}
    assert [rates[step] for step in (3, 4, 5)] == [1e-3 * learning_rate_factor(n, 5, schedule) for n in (2, 3, 4)]
    assert [r["records"] for r in read_metrics(metrics) if r.get("event") == "records lost"] == [2]
    # No figure is made of the rest.
    result = json.loads((run_dir / "result.json").read_text())
    assert [result[key] for key in ("first_loss", "first_validation_loss", "last_train_loss")] == [None] * 3
    assert result["final_loss"] is not None
    assert result["tokens_per_step"] == whole[0]["tokens"]


@pytest.mark.slow
def test_a_run_stopped_by_signals_and_resumed_equals_an_uninterrupted_one(
    tiny, write, launch, ranks, tmp_path, monkeypatch, caplog
):
    """Stopped by a rank and by the launcher; undisturbed, and resumed for the last time, on ranks without one."""
    tiny["data"] = {**CHATS, "sequence_length": 128, "answer_pattern": r"answer is (\d+)"}
    tiny["train"] |= {
        "schedule": {"type": "constant", "warmup": 0},
        "eval_every": 8,
        "exact_match_problems": 5,
        "max_new_tokens": 3,
    }
    file, run_dir = write(tiny), tmp_path / "parts"
    endless = (f"train.run_dir={run_dir}", "train.steps=10000")
    by_rank = launch(file, *endless)
    wait_for_step(run_dir, 3, by_rank)
    first, second = (process_of_rank(by_rank, rank) for rank in (0, 1))
    second.send_signal(signal.SIGUSR1)
    first.send_signal(signal.SIGHUP)
    with contextlib.suppress(psutil.NoSuchProcess):
        while second.status() != psutil.STATUS_ZOMBIE:  # impatient, until the very end of the process
            second.send_signal(signal.SIGTERM)
            time.sleep(0.01)
    output = finish(by_rank, 143)
    assert "Traceback" not in output
    assert all(words in output for words in ("the same command resumes", "loss", "tokens/s"))
    assert not (run_dir / "result.json").exists()
    stopped = [record["step"] for record in measured(run_dir)][-1]
    assert stopped >= 3

    the_command = launch(file, *endless)
    wait_for_step(run_dir, stopped + 2, the_command)
    started = psutil.Process(the_command.pid).children(recursive=True)
    the_command.terminate()
    the_command.communicate(timeout=60)
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert not (run_dir / "result.json").exists()

    steps = measured(run_dir)[-1]["step"] + 3
    for folder in (run_dir, tmp_path / "whole"):
        ranks(2, train_on_these_ranks, file, folder, steps)
    assert measured(run_dir) == measured(tmp_path / "whole")
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "whole", run_dir)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    before = (run_dir / "result.json").read_bytes()
    changes = [f"train.run_dir={run_dir}", f"train.steps={steps}"]
    monkeypatch.setattr(sys, "argv", ["train", str(file), *(word for change in changes for word in ("--set", change))])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    # It would raise the level of pytest's handlers, too.
    monkeypatch.setattr("deepspeed.utils.logging.set_log_level_from_string", lambda level: None)
    assert main() == 0
    assert "nothing to do" in caplog.text
    assert (run_dir / "result.json").read_bytes() == before


@pytest.mark.slow
def test_the_same_stage_trains_on_a_file_of_ones_own(tiny, write, launch, tmp_path):
    """Only `data.path` changes: there is nothing to answer in the file, which the run says."""
    tiny["train"] |= {"steps": 2, "exact_match_problems": 5}
    lines = [
        json.dumps({"text": f"Line {number} of a text of one's own, long enough to learn from."})
        for number in range(80)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    output = finish(launch(write(tiny), f"data.path={tmp_path / 'own.jsonl'}", ranks=0))
    assert "no exact match" in output
    lines = output.splitlines()
    assert lines[-3:] == [
        "model:   run/model",
        "report:  run/report.html",
        "export:  ds-fp8 export run run-fp8 --format fp8",
    ]
    assert "Learning rate" in (tmp_path / "run" / "report.html").read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["final_loss"] < result["first_validation_loss"]
    assert result["exact_match"] == {"before": None, "after": None, "problems": 0}
    assert result["data"]["train"]["examples"] == 76


def token_mean_loss(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    """Mean loss over every label token of `rows`, one document at a time, by the definition."""
    total = count = 0
    for row in rows:
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(row["labels"])], strict=True):
            with torch.no_grad():
                logits = model(input_ids=row["input_ids"][None, start:stop]).logits[0].float()
            labels = row["labels"][start + 1 : stop]
            total += torch.nn.functional.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum").item()
            count += (labels != -100).sum().item()
    return total / count


def test_adapters_are_trained_merged_and_loaded_by_peft(tiny, write, ranks, tmp_path):
    stage = load_stage(write(tiny))
    base = build_model(stage, load_model_config(stage, build_tokenizer(stage.data)))
    base.save_pretrained(tmp_path / "base")
    tiny["model"] = {"path": str(tmp_path / "base")}
    lora = {"r": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj", "down_proj", "embed_tokens"]}
    tiny["train"] |= {"lora": lora}
    tiny["optimizer"]["params"]["lr"] = 1e-2
    file, run_dir = write(tiny), tmp_path / "run"
    ranks(2, train_on_these_ranks, file, run_dir, 3)
    names = base.state_dict().keys()
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "model").eval()
    adapted = PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    assert adapted.peft_config["default"].r == 4
    ids = torch.arange(32)[None]
    with torch.no_grad():
        found, expected = (model(input_ids=ids).logits.float() for model in (merged, adapted))
        with adapted.disable_adapter():
            untrained = adapted(input_ids=ids).logits.float()
    assert error(found, expected) < 0.01
    assert error(untrained, expected) > 0.05
    assert merged.state_dict().keys() == names
    stored = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    adapters = [tensor for name, tensor in stored.items() if ".lora_" in name]
    assert len(adapters) == 2 * 3 * 2 + 2
    assert not merged.config.tie_word_embeddings  # any more: the head has no part of its embeddings' adapter
    result = json.loads((run_dir / "result.json").read_text())
    assert result["final_loss"] < result["first_validation_loss"]
    with refused(r"train\.lora\.r = 4, not 8"):
        inspect_run(load_stage(file, [f"train.run_dir={run_dir}", "train.lora.r=8"], world=2))

    trained = sum(tensor.numel() for tensor in adapters)
    saved = sum(part.stat().st_size for part in (run_dir / "checkpoints" / "step_3").glob("*states.pt"))
    assert saved < 20 * trained + 2**17 < sum(tensor.nbytes for tensor in base.state_dict().values())
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(Exception, match=r"they were trained beside have changed \(model\.safetensors\)"):
        ranks(2, train_on_these_ranks, file, run_dir, 4)


def test_adapters_of_no_layer_are_refused(tiny, write):
    tiny["train"]["lora"] = {"targets": ["nothing"]}
    stage = load_stage(write(tiny))
    with refused(key="train.lora.targets"):
        build_model(stage, load_model_config(stage, build_tokenizer(stage.data)))


def test_losses_are_means_over_all_label_tokens_and_the_result_is_usable(tiny, write, ranks, tmp_path):
    """Chats spread their label tokens unevenly over rows: a mean of means would be another number."""
    tiny["fp8"]["enabled"] = False
    tiny["data"] = {**CHATS, "sequence_length": 128, "validation_fraction": 0.06, "answer_pattern": r"answer is (\d+)"}
    tiny |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    tiny["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "tiny"}
    tiny["train"] |= {"steps": 2, "eval_batches": 100, "exact_match_problems": 3, "max_new_tokens": 4}
    file = write(tiny)
    ranks(2, train_on_these_ranks, file, tmp_path / "run", 2)

    stage = load_stage(file)
    tokenizer = build_tokenizer(stage.data)
    data = build_data(stage.data, tokenizer)
    result = json.loads((tmp_path / "run" / "result.json").read_text())

    untrained = build_model(stage, load_model_config(stage, tokenizer)).eval()
    first_rows = [data.train[row] for row in rows_of_step(0, len(data.train), 4, stage.train.seed)]
    assert result["first_loss"] == pytest.approx(token_mean_loss(untrained, first_rows), rel=2e-4)
    validation = [data.validation[row] for row in range(len(data.validation))]
    assert result["first_validation_loss"] == pytest.approx(token_mean_loss(untrained, validation), rel=2e-4)

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert trained.dtype == torch.bfloat16
    assert result["final_loss"] == pytest.approx(token_mean_loss(trained, validation), rel=2e-4)
    assert result["final_loss"] < result["first_validation_loss"]
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").get_vocab() == tokenizer.get_vocab()
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", tokenizer.eos_token])
    assert trained.generation_config.eos_token_id == ends
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "model").iterdir()} == {0o644}

    assert result["exact_match"]["problems"] == 3
    assert result["exact_match"]["before"] == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl", 10**9)
    [*_, last] = (record["answers"] for record in records if record.get("event") == "answers")
    asked = [tokenizer.decode(question.prompt, skip_special_tokens=True) for question in data.questions(3)[::2]]
    assert [answer["prompt"] for answer in last] == asked  # rank 0's
    assert all(answer["expected"] and not answer["right"] for answer in last)
    assert min(result["bytes_per_step"]["all_gather_bytes"], result["bytes_per_step"]["grad_bytes"]) > 0
    assert (result["steps"], result["skipped_steps"], result["ranks"]) == (2, 0, 2)
    logged = {path.name for path in (tmp_path / "csv" / "tiny").iterdir()}
    assert {"Train_loss.csv", "Train_learning_rate.csv", "Train_validation_loss.csv"} <= logged


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("train.stepps=5", 'Did you mean "steps"?'),
        ("data.path=no/such.jsonl", "no/such.jsonl"),
        ("data.sequence_length=500", "max_position_embeddings 128"),
    ],
)
def test_bad_input_names_file_and_key_before_anything_is_written(change, word, tiny, write, tmp_path, monkeypatch):
    tiny["data"] |= {**CHATS, "answer_pattern": r"answer is (\d+)"}
    file = write(tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", str(file), "--set", change])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with refused() as refusal:
        main()
    assert all(part in str(refusal.value) for part in (word, change.split("=")[0], str(file), "remedy:"))
    assert [path.name for path in tmp_path.iterdir()] == ["stage.json"]
