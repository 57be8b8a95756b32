"""The deepspeed command that scripts start training with."""

import pytest

from ds_fp8.errors import UserError
from ds_fp8.launch import deepspeed_command


def test_it_takes_the_first_of_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    assert deepspeed_command(2)[-2:] == ["--include", "localhost:3,1"]


def test_without_that_variable_it_asks_for_a_number(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert deepspeed_command(2)[-2:] == ["--num_gpus", "2"]


def test_too_few_visible_gpus_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match="names 1"):
        deepspeed_command(2)


def test_ports_differ():
    ports = {command[command.index("--master_port") + 1] for command in (deepspeed_command(1) for _ in range(8))}
    assert len(ports) > 1
