"""The log of a run: what survives a kill and a resume, and what is summed up of it."""

import json
import math
import random

import pytest

from ds_fp8.train.metrics import MetricsLog, read_metrics, summarise
from ds_fp8.train.spikes import LEAST_HISTORY, SpikeDetector


def opened(file, records=(), writes=True) -> MetricsLog:
    log = MetricsLog(file, list(records), writes)
    log.open()
    return log


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
    lines = [*(json.dumps(training(step, 1.0)) for step in range(1, 6)), "[]", '{"step": "x"}', "[" * 100_000, "null"]
    file.write_text("\n".join(lines) + '\n{"step": 3, "lo')
    assert [record["step"] for record in read_metrics(file, 3)] == [1, 2, 3]


def test_the_summary_is_of_the_whole_run(tmp_path):
    log = opened(tmp_path / "metrics.jsonl")
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


def test_ranks_that_write_nothing_keep_no_records_of_steps(tmp_path):
    logs = [opened(tmp_path / "metrics.jsonl", [training(1, 1.0)], writes) for writes in (True, False)]
    for log in logs:
        log.append(training(2, 1.0))
        log.append({"step": 2, "validation_loss": 2.0})
        log.append({"step": 4, "validation_loss": 1.0})
        log.go_back(3)
        assert (log.value(2, "validation_loss"), log.has(4, "validation_loss")) == (2.0, False)
        assert log.by_step("validation_loss") == {2: 2.0}
    assert [len(log.records) for log in logs] == [3, 1]


# ---------------------------------------------------------------- spikes


def noisy(count: int, level: float = 3.0, spread: float = 0.05, slope: float = 0.0) -> list[float]:
    rng = random.Random(0)
    return [level - slope * index + rng.gauss(0, spread) for index in range(count)]


@pytest.mark.parametrize("slope", [0.0, 0.01, -0.0005])
def test_noise_and_trends_are_no_spikes(slope):
    detector = SpikeDetector(100, 10.0)
    assert [detector.observe(loss) for loss in noisy(500, level=8.0, slope=slope)] == [None] * 500


# History, what comes then, and the least scores: 0 for no spike
SPIKES = {
    "far above": (noisy(60), [3.1, 5.0], [0, 2.0 / 0.05]),
    "far below": (noisy(60), [0.1], [0]),
    "one does not hide the next": (noisy(60), [9.0] * 5, [6.0 / 0.05] * 5),
    "too few losses say nothing": (noisy(LEAST_HISTORY - 1), [50.0, 50.0], [0, 10]),
    "equal losses do not make a ripple a spike": ([2.0] * 50, [2.01, 2.1], [0, 10]),
}


@pytest.mark.parametrize(("history", "losses", "least"), SPIKES.values(), ids=SPIKES)
def test_spikes_are_what_is_far_above_the_last_losses(history, losses, least):
    detector = SpikeDetector(100, 10.0, history)
    for loss, score in zip(losses, least, strict=True):
        found = detector.observe(loss)
        assert found is None if score == 0 else found >= 0.5 * score


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_left_to_the_skipped_step(loss):
    detector = SpikeDetector(100, 10.0, noisy(60))
    assert detector.observe(loss) is None
    assert loss not in detector.losses


def test_it_goes_on_from_the_losses_it_remembers():
    first = SpikeDetector(30, 10.0)
    losses = noisy(80)
    for loss in losses[:50]:
        first.observe(loss)
    second = SpikeDetector(30, 10.0, first.losses)
    assert [first.observe(loss) for loss in [*losses[50:], 4.5]] == [
        second.observe(loss) for loss in [*losses[50:], 4.5]
    ]
