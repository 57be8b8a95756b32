"""Joules of a run and of a kernel, by a counter in place of NVML's: no GPU is needed."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import common
import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.monitor.energy import energy_counter
from ds_fp8.train import load_stage, steps, train
from ds_fp8.train.metrics import read_metrics

JOULES = 250.0  # from one reading of the counter to the next
GPU = torch.device("cuda", 0)
PYNVML = f"""
drawn = 0
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
def nvmlInit(): pass
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != "GPU-of-this-test":
        raise NVMLError(uuid)
    return uuid
def nvmlDeviceGetTotalEnergyConsumption(handle):
    global drawn
    drawn += int(1000 * {JOULES})
    return drawn
"""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """A folder with the module `pynvml`, on the path; a GPU that it knows."""
    (tmp_path / "nvml").mkdir()
    (tmp_path / "nvml" / "pynvml.py").write_text(PYNVML)
    with monkeypatch.context() as patch:
        count_as_a_gpu(patch, tmp_path / "nvml")
        yield tmp_path / "nvml"
    sys.modules.pop("pynvml", None)


def count_as_a_gpu(patch: pytest.MonkeyPatch, folder: Path, uuid: str = "of-this-test") -> None:
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, "pynvml", raising=False)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))


def test_joules_are_those_of_the_gpu_with_the_uuid_of_the_device(nvml):
    count = energy_counter(GPU)
    assert count() - count() == -JOULES


def test_nothing_is_counted_on_a_cpu_of_another_gpu_without_a_counter_and_without_the_package(nvml, monkeypatch):
    assert energy_counter(torch.device("cpu")) is None
    pynvml = importlib.import_module("pynvml")
    with monkeypatch.context() as patch:
        count_as_a_gpu(patch, nvml, uuid="of-a-slice")
        assert energy_counter(GPU) is None

    def not_supported(handle):
        raise pynvml.NVMLError_NotSupported

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", pynvml)
        patch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", not_supported)
        assert energy_counter(GPU) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_counter(GPU) is None


def test_a_kernel_in_a_steady_state_has_the_joules_of_its_share_of_the_time(monkeypatch):
    drawn = [0.0]

    def kernel() -> None:
        time.sleep(0.005)
        drawn[0] += 2.0

    monkeypatch.setattr(common, "energy_counter", lambda device: lambda: drawn[0])
    found = common.sustained(kernel, seconds=0.5)
    assert found.milliseconds >= 5
    assert found.joules == pytest.approx(2.0, rel=0.2)
    assert found.watts == pytest.approx(found.joules / found.milliseconds * 1e3)
    monkeypatch.setattr(common, "energy_counter", lambda device: lambda: 1.0)
    assert common.sustained(kernel, seconds=0.02).joules is None  # of a counter that stands still


def run_where_ranks_are_counted(file: Path, runs: Path, nvml: Path) -> None:
    for counted in (2, 1):
        with pytest.MonkeyPatch.context() as patch:
            count_as_a_gpu(patch, nvml)
            here = dist.get_rank() < counted
            patch.setattr(steps, "energy_counter", lambda device, here=here: energy_counter(GPU) if here else None)
            train(load_stage(file, [f"train.run_dir={runs / str(counted)}", "train.steps=3"]))


def test_a_run_logs_the_energy_of_a_token_over_all_ranks_where_all_are_counted(tiny, write, ranks, tmp_path, nvml):
    tiny["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "tiny"}
    ranks(2, run_where_ranks_are_counted, write(tiny), tmp_path, nvml)
    records = [record for record in read_metrics(tmp_path / "2" / "metrics.jsonl") if "loss" in record]
    assert len(records) == 3
    for record in records:
        assert record["millijoules_per_token"] * record["tokens"] == pytest.approx(2e3 * JOULES)
    result = json.loads((tmp_path / "2" / "result.json").read_text())
    mean = (records[1]["millijoules_per_token"] + records[2]["millijoules_per_token"]) / 2
    assert result["millijoules_per_token"] == pytest.approx(mean)  # without the first step
    assert (tmp_path / "csv" / "tiny" / "Train_millijoules_per_token.csv").is_file()
    assert not any("millijoules_per_token" in record for record in read_metrics(tmp_path / "1" / "metrics.jsonl"))
    assert json.loads((tmp_path / "1" / "result.json").read_text())["millijoules_per_token"] is None
