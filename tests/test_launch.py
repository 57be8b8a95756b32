"""The deepspeed command that scripts start training with."""

import subprocess
import sys

import psutil
import pytest

from ds_fp8.cluster import local_launch as launch
from ds_fp8.cluster.local_launch import deepspeed_command
from ds_fp8.config.errors import UserError
from ds_fp8.train import processes


@pytest.fixture
def on_gpus(monkeypatch):
    class Accelerator:
        def device_name(self):
            return "cuda"

    monkeypatch.setattr(launch, "get_accelerator", Accelerator)


@pytest.mark.usefixtures("on_gpus")
def test_it_takes_the_first_of_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    assert deepspeed_command(2)[-2:] == ["--include", "localhost:3,1"]


def test_without_that_variable_it_asks_for_a_number(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert deepspeed_command(2)[-2:] == ["--num_gpus", "2"]


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    ("visible", "problem"), [("3", "lists 1"), ("GPU-8a1c,GPU-93b0", "numbers"), ("-1,-1", "numbers")]
)
def test_too_few_gpus_or_other_names_are_an_error(monkeypatch, visible, problem):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=problem):
        deepspeed_command(2)


def test_on_cpus_that_variable_says_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert deepspeed_command(2)[-2:] == ["--num_gpus", "2"]


def test_ranks_know_the_command_that_started_them():
    """They watch whether it has ended."""
    for command in (deepspeed_command(1), ["/usr/bin/deepspeed", "--num_gpus", "1"]):
        idle = "import time; print(flush=True); time.sleep(60)"
        arguments = [sys.executable, "-c", idle, *command[1:], *command[:1]]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as started:
            started.stdout.readline()  # until then it may not be the command yet
            found = processes._runs(psutil.Process(started.pid), "deepspeed", "deepspeed.launcher.runner")
            started.kill()
        assert found


def test_ports_differ():
    ports = {command[command.index("--master_port") + 1] for command in (deepspeed_command(1) for _ in range(8))}
    assert len(ports) > 1
