"""Whole runs on two CPU ranks, as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_fp8.data import build_data, build_tokenizer, rows_of_step
from ds_fp8.train import load_stage
from ds_fp8.train.checkpoints import newest_step
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.model import build_model, load_model_config

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
    records = read_metrics(run_dir / "metrics.jsonl", 10**9)
    return [{key: value for key, value in record.items() if key in TRAINING} for record in records]


def test_a_run_stopped_by_signals_and_resumed_equals_an_uninterrupted_one(tiny, write, launch, tmp_path):
    tiny["train"] |= {"steps": 24, "eval_every": 8, "exact_match_problems": 5, "max_new_tokens": 3}
    file = write(tiny)
    output = finish(launch(file, "train.run_dir=whole"))
    assert "loss" in output
    assert "tokens/s" in output

    one_rank = launch(file, "train.run_dir=parts")
    wait_for_step(tmp_path / "parts", 3, one_rank)
    process_of_rank(one_rank, 1).send_signal(signal.SIGUSR1)
    assert "the same command resumes" in finish(one_rank, 143)
    assert not (tmp_path / "parts" / "result.json").exists()
    stopped = [record["step"] for record in measured(tmp_path / "parts")][-1]
    assert 3 <= stopped < 20

    the_command = launch(file, "train.run_dir=parts")
    wait_for_step(tmp_path / "parts", stopped + 2, the_command)
    started = psutil.Process(the_command.pid).children(recursive=True)
    the_command.terminate()
    the_command.communicate(timeout=60)
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert not (tmp_path / "parts" / "result.json").exists()
    finish(launch(file, "train.run_dir=parts"))

    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    before = (tmp_path / "parts" / "result.json").read_bytes()
    assert "nothing to do" in finish(launch(file, "train.run_dir=parts", ranks=0))
    assert (tmp_path / "parts" / "result.json").read_bytes() == before


def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny, write, launch, tmp_path):
    tiny["train"] |= {"steps": 30, "save_every": 4, "keep_last": 1}
    file = write(tiny)
    killed = launch(file, ranks=0)
    wait_for_step(tmp_path / "run", 6, killed)
    killed.kill()
    killed.communicate()
    before = measured(tmp_path / "run")
    step = newest_step(tmp_path / "run")
    assert 4 <= step < 30

    finish(launch(file, ranks=0))
    after = measured(tmp_path / "run")
    assert [record["step"] for record in after if "loss" in record] == list(range(1, 31))
    assert before == after[: len(before)]  # the steps after the checkpoint came out the same again
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_30"]


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
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["final_loss"] < result["first_validation_loss"]
    assert result["exact_match"] == {"before": None, "after": None, "problems": 0}
    assert result["data"]["train"]["examples"] == 76


def token_mean_loss(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    """Mean loss over every label token of `rows`, one row at a time, by the definition."""
    total = count = 0
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0].float()
        labels = row["labels"][1:]
        total += torch.nn.functional.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum").item()
        count += (labels != -100).sum().item()
    return total / count


def test_losses_are_means_over_all_label_tokens_and_the_result_is_usable(tiny, write, launch, tmp_path, cache_home):
    """Chats spread their label tokens unevenly over rows: a mean of means would be another number."""
    tiny["fp8"]["enabled"] = False
    tiny["data"] |= {"format": "chat", "sequence_length": 128, "examples": 60, "validation_fraction": 0.3}
    tiny |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    tiny["csv_monitor"] = {"enabled": True, "output_path": "csv", "job_name": "tiny"}
    tiny["train"] |= {"steps": 2, "eval_batches": 100, "exact_match_problems": 3, "max_new_tokens": 4}
    file = write(tiny)
    finish(launch(file))

    stage = load_stage(file)
    tokenizer = build_tokenizer(stage.data, cache_home)
    data = build_data(stage.data, tokenizer, cache_home)
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

    assert result["exact_match"]["problems"] == 3
    assert result["exact_match"]["before"] == 0
    assert min(result["bytes_per_step"]["all_gather_bytes"], result["bytes_per_step"]["grad_bytes"]) > 0
    assert (result["steps"], result["skipped_steps"], result["ranks"]) == (2, 0, 2)
    logged = {path.name for path in (tmp_path / "csv" / "tiny").iterdir()}
    assert {"Train_loss.csv", "Train_learning_rate.csv", "Train_validation_loss.csv"} <= logged


@pytest.mark.parametrize(
    ("ranks", "overrides", "words"),
    [
        (2, ["data.sequence_length=500"], ["max_position_embeddings 128", "data.sequence_length"]),
        (0, ["train.stepps=5"], ['Did you mean "steps"?', "train.stepps"]),
        (0, ["data.path=no/such.jsonl"], ["no/such.jsonl", "data.path"]),
        (0, ["train.exact_match_problems=100000"], ["held-out", "train.exact_match_problems"]),
    ],
)
def test_bad_input_is_one_screen_and_writes_nothing(ranks, overrides, words, tiny, write, launch, tmp_path):
    file = write(tiny)
    output = finish(launch(file, *overrides, ranks=ranks), 2)
    assert "Traceback" not in output
    assert output.count("error: ") == 1
    assert all(word in output for word in [*words, str(file), "remedy:"])
    assert [path.name for path in tmp_path.iterdir()] == ["stage.json"]
