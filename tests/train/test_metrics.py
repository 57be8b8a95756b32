"""The log of a run: what survives a kill and a resume, and what is summed up of it."""

import json

import pytest

from ds_fp8.train.metrics import MetricsLog, read_metrics, summarise


def training(step: int, loss: float) -> dict:
    return {
        "step": step,
        "loss": loss,
        "all_gather_bytes": 100 * step,
        "grad_bytes": 10,
        "tokens_per_second": float(step),
        "step_seconds": 1.0 / step,
        "memory_bytes": 1000 - step,
        "skipped_steps": step // 2,
    }


def test_reading_stops_at_the_resumed_step_and_skips_a_line_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps(training(step, 1.0)) for step in range(1, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 3, "lo')
    assert [record["step"] for record in read_metrics(file, 3)] == [1, 2, 3]


def test_no_file_is_no_records(tmp_path):
    assert read_metrics(tmp_path / "none", 10) == []


def test_a_resumed_log_holds_each_step_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first = MetricsLog(file, [], writes=True)
    for step in (1, 2, 3, 4):
        first.append(training(step, 1.0))
    again = MetricsLog(file, read_metrics(file, 2), writes=True)
    again.append(training(3, 0.5))
    assert [(record["step"], record["loss"]) for record in read_metrics(file, 9)] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_other_ranks_write_nothing(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", [], writes=False)
    log.append(training(1, 1.0))
    assert log.value(1, "loss") == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_null_in_the_file(value, tmp_path):
    file = tmp_path / "metrics.jsonl"
    MetricsLog(file, [], writes=True).append({"step": 1, "loss": value})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None}


def test_the_summary_is_of_the_whole_run(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", [], writes=True)
    log.append({"step": 0, "validation_loss": 6.0})
    log.append({"step": 0, "exact_match": 0.0, "problems": 5})
    for step in range(1, 21):
        log.append(training(step, 21.0 - step))
    log.append({"step": 20, "validation_loss": 2.0})
    log.append({"step": 20, "exact_match": 0.4, "problems": 5})
    result = summarise(log, 20)
    assert result["first_loss"] == 20.0
    assert result["last_train_loss"] == pytest.approx(5.5)
    assert (result["first_validation_loss"], result["final_loss"]) == (6.0, 2.0)
    assert result["exact_match"] == {"before": 0.0, "after": 0.4, "problems": 5}
    assert result["bytes_per_step"] == {"all_gather_bytes": 1050, "grad_bytes": 10, "exchange_bytes": None}
    assert result["tokens_per_second"] == 10.5
    assert result["peak_memory_bytes"] == 999
    assert result["skipped_steps"] == 10
