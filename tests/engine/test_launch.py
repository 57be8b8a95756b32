"""What a launcher did not set is said at the start."""

import importlib.util
import os

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.engine import launch
from ds_fp8.engine.launch import check_launch


class Accelerator:
    def __init__(self, name):
        self._name = name

    def device_name(self):
        return self._name


@pytest.fixture
def started(monkeypatch):
    """A process that was started with these variables, and sees so many GPUs."""

    def start(gpus=0, joined=False, **variables):
        for name in (*launch.VARIABLES, "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(launch, "get_accelerator", lambda: Accelerator("cuda" if gpus else "cpu"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)

    return start


ALL = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="DeepSpeed asks MPI")
def test_variables_that_nobody_set_are_named(started):
    started()
    with pytest.raises(UserError) as error:
        check_launch()
    assert all(name in error.value.problem for name in ALL)
    assert all(f"{name}={value}" in error.value.remedy for name, value in ALL.items())
    started(**{name: value for name, value in ALL.items() if name != "MASTER_PORT"})
    with pytest.raises(UserError, match="has no MASTER_PORT, which"):
        check_launch()


def test_nothing_is_missing(started):
    started(**ALL)
    check_launch()
    started(joined=True, LOCAL_RANK="0")
    check_launch()
    started(joined=True, OMPI_COMM_WORLD_LOCAL_RANK="0")
    check_launch()


def test_ranks_that_have_met_still_need_their_gpu(started):
    started(joined=True)
    with pytest.raises(UserError, match="has no LOCAL_RANK, which"):
        check_launch()


def test_a_rank_that_sees_one_gpu_calls_it_0(started):
    started(gpus=1, **{**ALL, "LOCAL_RANK": "1"})
    with pytest.raises(UserError, match=r"LOCAL_RANK is 1, but this process sees 1 GPU\n") as error:
        check_launch()
    assert "LOCAL_RANK=0" in error.value.remedy
    started(gpus=2, **{**ALL, "LOCAL_RANK": "1"})
    check_launch()
    assert os.environ["LOCAL_RANK"] == "1"
