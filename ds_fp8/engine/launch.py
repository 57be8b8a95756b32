"""Checks of the environment that a launcher starts a rank in."""

from __future__ import annotations

import importlib.util
import os

import torch
from deepspeed.accelerator import get_accelerator

from ds_fp8.config.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
"""Variables that DeepSpeed needs; it asks MPI where any is missing."""
CLOUDS = ("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")
"""Variables of clouds whose launchers DeepSpeed knows."""


def check_launch() -> None:
    """Check that DeepSpeed can find its rank, the other ranks and its GPU.

    Raises:
        UserError: A variable is missing that nothing else tells, or LOCAL_RANK is a GPU that this process does not see.
    """
    if torch.distributed.is_initialized():
        missing = [] if {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys() else ["LOCAL_RANK"]
    elif importlib.util.find_spec("mpi4py") is not None or any(name in os.environ for name in CLOUDS):
        missing = []
    else:
        missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"the environment has no {', '.join(missing)}, which launchers set",
            remedy="start with deepspeed, torchrun or accelerate launch; under srun and mpirun install mpi4py, or set "
            "them in a script (docs/many_hosts.md); a single process needs RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
        )
    local_rank, gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if get_accelerator().device_name() == "cuda" and local_rank.isdigit() and int(local_rank) >= gpus > 0:
        raise UserError(
            f"LOCAL_RANK is {local_rank}, but this process sees {gpus} GPU{'s' * (gpus != 1)}",
            remedy="set LOCAL_RANK=0 for ranks that each see one GPU, or let every rank see all GPUs of its host",
        )
