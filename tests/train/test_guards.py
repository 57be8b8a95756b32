"""What a run does about a loss that spikes or is not finite."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from deepspeed import comm as dist

from ds_fp8.train import load_stage, train
from ds_fp8.train.batches import BatchesAhead
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.spikes import SpikeDetector
from tests.train.damage import stopped_at

TOLERANCE = 2e-3  # Losses of BF16 models whose gradients were summed in another order
SETTINGS = {
    "steps": 4,
    "save_every": 2,
    "keep_last": 9,
    "eval_batches": 1,
    "spike": "rollback",
    "schedule": {"type": "constant", "warmup": 0},
}


def detector(spikes, seen):
    """Return a detector class for which the losses of these ordinals are spikes; `seen` receives all it observes."""

    class Injected(SpikeDetector):
        def observe(self, loss):
            seen.append(loss)
            return 99.0 if len(seen) in spikes else super().observe(loss)

    return Injected


def run(file, overrides, spikes=(), not_finite=()):
    """Train on this rank, with spikes at the losses of these ordinals and loss that is not finite at these steps."""
    seen = []

    class Broken(BatchesAhead):
        def take(self, data_step):
            batches = super().take(data_step)
            return replace(batches, items=batches.items * float("nan")) if len(seen) + 1 in not_finite else batches

    with (
        mock.patch("ds_fp8.train.spikes.SpikeDetector", detector(spikes, seen)),
        mock.patch("ds_fp8.train.steps.BatchesAhead", Broken),
    ):
        return train(load_stage(file, overrides))


def losses_of(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl", 100) if "loss" in record]


def events_of(folder):
    return [record for record in read_metrics(folder / "metrics.jsonl", 100) if "event" in record]


@pytest.fixture
def stage(tiny, write, tmp_path):
    tiny["train"] |= SETTINGS | {"run_dir": str(tmp_path / "run")}
    return str(write(tiny))


def test_a_spike_is_undone_and_its_data_left_out_and_one_that_stays_does_not_stop_the_run(stage, ranks, tmp_path):
    """Nor does a step that is not finite: it is skipped and counted."""
    result = ranks(2, run, stage, [], (1, 3, 4, 5, 6), (2,))[0]
    folder = tmp_path / "run"
    assert [result[key] for key in ("steps", "rollbacks", "skipped_steps")] == [4, 3, 1]
    # Before the first checkpoint there is nothing to go back to; after three rollbacks to the same one it goes on.
    events = [(event["event"], event["step"], event.get("from_step")) for event in events_of(folder)]
    assert events == [("spike", 1, None), *[("rollback", 2, 3)] * 3, ("spike", 3, None)]
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl", 100) if "loss" in r] == [1, 2, 3, 4]
    losses = losses_of(folder)
    assert [loss is None for loss in losses] == [False, True, False, False]
    assert result["final_loss"] < result["first_validation_loss"]
    marker = json.loads((folder / "checkpoints" / "step_4" / "manifest.json").read_text())
    assert (marker["step"], marker["data_step"]) == (4, 7)
    # A run that begins at that checkpoint finds the same state and the same data behind the gap.
    overrides = [f"train.resume={folder}/checkpoints/step_2", f"train.run_dir={tmp_path}/branch", "train.steps=2"]
    ranks(2, run, stage, overrides)
    assert losses_of(tmp_path / "branch") == losses[2:]


def test_a_run_goes_on_from_other_masters(stage, ranks, tmp_path):
    """FP32 masters and codes with corrections lie in other sub-groups."""
    common = ["train.spike=off", "fp8.monitor.every=0"]
    for master, name, more in (
        ("fp32", "first", ["train.steps=2"]),
        ("fp8_plus16", "second", [f"train.resume={tmp_path}/first", "train.steps=2"]),
        ("fp32", "third", [f"train.resume={tmp_path}/second", "train.steps=1"]),
    ):
        own = [f"fp8.optimizer.master={master}", f"train.run_dir={tmp_path}/{name}"]
        ranks(2, run, stage, [*common, *own, *more])
    found = [loss for name in ("first", "second", "third") for loss in losses_of(tmp_path / name)]
    assert len(found) == 5
    assert found[0] > found[2] > found[4]


def test_a_run_does_not_go_on_with_another_model(stage, ranks, tmp_path):
    common = ["train.spike=off", "train.steps=1", "gradient_accumulation_steps=2"]
    ranks(1, run, stage, common)
    branch = [*common, f"train.run_dir={tmp_path}/branch", f"train.resume={tmp_path}/run"]
    for change, words in {
        "num_hidden_layers=3": r"model\.layers\.2\.\S+ is not in it \(and 11 more\)",
        "num_hidden_layers=1": r"it has model\.layers\.1\.\S+ and this model has not \(and 11 more\)",
        "intermediate_size=144": r"gate_proj\.weight has the shape \(136, 60\) in it, and \(144, 60\) here",
    }.items():
        with pytest.raises(Exception, match=words):
            ranks(1, run, stage, [*branch, f"model.config.{change}"])


OFF = {"enabled": False}
COMPRESSED = {"preset": "coat", "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
COMPRESSED |= {"monitor": {"every": 0}}


@pytest.mark.parametrize(
    ("zero", "accumulator", "fp8"),
    [(0, "bf16", OFF), (1, "bf16", COMPRESSED), (2, "fp32", COMPRESSED), (3, "fp32", OFF)],
)
def test_a_run_goes_on_on_other_ranks(zero, accumulator, fp8, stage, ranks, tmp_path):
    """Three ranks share the batch otherwise than two: losses are nearly those of a run on two."""
    common = [f"fp8={json.dumps(fp8)}", "train.spike=off", f"data_types.grad_accum_dtype={accumulator}"]
    common += [f'zero_optimization={{"stage": {zero}}}', "train.steps=3", "train.save_every=1"]

    def go(world, name):
        batch = f"gradient_accumulation_steps={12 // (2 * world)}"
        ranks(world, run, stage, [*common, batch, f"train.run_dir={tmp_path}/{name}"])

    go(2, "whole")
    stopped_at(1, tmp_path / "whole", tmp_path / "parts")
    go(3, "parts")
    # Gradients that are summed in BF16 differ by more where they are summed in another order.
    close = TOLERANCE if accumulator == "fp32" else 3 * TOLERANCE
    whole, parts = losses_of(tmp_path / "whole"), losses_of(tmp_path / "parts")
    assert parts == pytest.approx(whole, rel=close)
    assert parts[1:] != whole[1:]
    left = {path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()}
    assert left == {"latest", "zero_to_fp32.py", "zero_to_torch.py", "step_1", "step_2", "step_3"}


def counted_run(file, overrides, unread_seconds):
    """Train on this rank, with a spike at step 5; returns how many all-reduces training steps needed for themselves."""
    stage = load_stage(file, overrides)
    counts, all_reduce = [], dist.all_reduce

    def counted(*args, **kwargs):
        counts.append(sys._getframe(1).f_code.co_filename)
        return all_reduce(*args, **kwargs)

    # Otherwise the speed of the machine has a say in when losses are read.
    unhurried = mock.patch("ds_fp8.train.steps.SECONDS_UNREAD", unread_seconds)
    spiked = mock.patch("ds_fp8.train.spikes.SpikeDetector", detector((5,), []))
    with unhurried, spiked, mock.patch.object(dist, "all_reduce", counted):
        train(stage)
    return sum(Path(caller).name in ("steps.py", "processes.py", "batches.py") for caller in counts)


def test_steps_that_log_nothing_read_nothing_and_train_the_same(stage, ranks, tmp_path):
    """Losses are read, and looked at for spikes, when they are logged; none is missed."""

    def go(name, log_every, unread_seconds=1e9):
        overrides = ["train.spike=warn", "train.save_every=null", "train.steps=6"]
        overrides += [f"train.run_dir={tmp_path}/{name}", f"train.log_every={log_every}"]
        reductions = ranks(2, counted_run, stage, overrides, unread_seconds)[0]
        records = read_metrics(tmp_path / name / "metrics.jsonl", 100)
        weights = (tmp_path / name / "model" / "model.safetensors").read_bytes()
        return reductions, {r["step"]: r for r in records if "loss" in r}, weights

    every_reductions, every, weights = go("every", 1)
    seldom_reductions, seldom, same = go("seldom", 3)
    assert list(seldom) == [1, 3, 6]
    for number, record in seldom.items():
        for key in ("loss", "learning_rate", "gradient_norm", "tokens", "grad_bytes"):
            assert record[key] == every[number][key], key
    for name in ("every", "seldom"):
        assert [(e["event"], e["step"]) for e in events_of(tmp_path / name)] == [("spike", 5)]
    assert weights == same
    assert every_reductions - seldom_reductions >= 3 * 3  # losses, figures and signals of three steps

    # Steps as slow as SECONDS_UNREAD: signals are looked for after each, though no more is logged.
    slow_reductions, slow, same = go("slow", 3, 0.0)
    assert list(slow) == [1, 3, 6]
    assert slow_reductions == every_reductions
    assert weights == same
