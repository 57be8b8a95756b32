"""The environments that launchers start ranks in: two GPUs a host, ranks numbered host by host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Variables = dict[str, str]


@dataclass(frozen=True)
class Rank:
    """A rank as its launcher knows it."""

    rank: int
    local_rank: int
    host: int
    ranks: int
    hosts: int
    port: int

    @property
    def per_host(self) -> int:
        """Return the ranks of a host."""
        return self.ranks // self.hosts


def _meeting(rank: Rank) -> Variables:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank.port)}


def _of_torch(rank: Rank) -> Variables:
    """What torch.distributed reads."""
    numbers = {"RANK": rank.rank, "LOCAL_RANK": rank.local_rank, "WORLD_SIZE": rank.ranks}
    return {**_meeting(rank), **{name: str(number) for name, number in numbers.items()}}


def deepspeed(rank: Rank) -> Variables:
    """As deepspeed/launcher/launch.py sets them."""
    return {
        **_of_torch(rank),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CROSS_RANK": str(rank.host),
        "CROSS_SIZE": str(rank.hosts),
        "LOCAL_SIZE": str(rank.per_host),
    }


def torchrun(rank: Rank) -> Variables:
    """As torch/distributed/elastic/agent/server/local_elastic_agent.py sets them."""
    return {
        **_of_torch(rank),
        "GROUP_RANK": str(rank.host),
        "ROLE_RANK": str(rank.rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(rank.per_host),
        "GROUP_WORLD_SIZE": str(rank.hosts),
        "ROLE_WORLD_SIZE": str(rank.ranks),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def torchrun_virtual_local_rank(rank: Rank) -> Variables:
    """As torchrun with --virtual-local-rank: every rank sees one GPU, which it calls 0."""
    return {**torchrun(rank), "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(rank.local_rank)}


def accelerate(rank: Rank) -> Variables:
    """As accelerate launch --use_deepspeed: torchrun's, and the settings of its plugin."""
    return {**torchrun(rank), "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}


def _slurm(rank: Rank) -> Variables:
    """As srun sets them."""
    return {
        "SLURM_PROCID": str(rank.rank),
        "SLURM_LOCALID": str(rank.local_rank),
        "SLURM_NODEID": str(rank.host),
        "SLURM_NTASKS": str(rank.ranks),
        "SLURM_NNODES": str(rank.hosts),
        "SLURM_TASKS_PER_NODE": f"{rank.per_host}(x{rank.hosts})",
    }


def srun(rank: Rank) -> Variables:
    """As srun, with all GPUs of the host, and a script that hands its numbers on as docs/many_hosts.md says."""
    return {**_slurm(rank), **_of_torch(rank), "CUDA_VISIBLE_DEVICES": "0,1"}


def srun_one_gpu(rank: Rank) -> Variables:
    """As srun --gpus-per-task=1, with such a script."""
    return {**srun(rank), "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(rank.local_rank)}


def deepspeed_slurm(rank: Rank) -> Variables:
    """As deepspeed --launcher slurm: srun's alone, and DeepSpeed asks MPI."""
    return {**_slurm(rank), "CUDA_VISIBLE_DEVICES": "0,1"}


def mpirun(rank: Rank) -> Variables:
    """As OpenMPI's mpirun, alone or by deepspeed --launcher openmpi: DeepSpeed asks MPI."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank.rank),
        "OMPI_COMM_WORLD_SIZE": str(rank.ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(rank.per_host),
        "OMPI_COMM_WORLD_NODE_RANK": str(rank.local_rank),
        "OMPI_UNIVERSE_SIZE": str(rank.ranks),
        "PMIX_RANK": str(rank.rank),
    }


def deepspeed_mpich(rank: Rank) -> Variables:
    """As deepspeed --launcher mpich sets them, with launcher_helper.py."""
    return {
        **_of_torch(rank),
        "PMI_RANK": str(rank.rank),
        "MPI_LOCALRANKID": str(rank.local_rank),
        "LOCAL_SIZE": str(rank.per_host),
    }


def ray(rank: Rank) -> Variables:
    """As actors of one GPU each have them under Ray (OpenRLHF, verl)."""
    return {
        **_of_torch(rank),
        "LOCAL_RANK": "0",
        "RAY_LOCAL_WORLD_SIZE": str(rank.per_host),
        "CUDA_VISIBLE_DEVICES": str(rank.local_rank),
    }


def python(rank: Rank) -> Variables:
    """As a program that is started by itself needs them."""
    return {**_meeting(rank), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@dataclass(frozen=True)
class Launch:
    """A way to start a job, and what is to come of it."""

    variables: Callable[[Rank], Variables]
    hosts: int = 1
    ranks: int = 2
    asks_mpi: bool = False
    transport: str = "copy engines"
    hierarchy: str = "flat"


_TWO = {
    "hosts": 2,
    "ranks": 4,
    "transport": "the ranks are on several hosts, or there is one rank only",
    "hierarchy": "2 nodes x 2",
}

LAUNCHES = {
    "`deepspeed`": Launch(deepspeed),
    "`torchrun`": Launch(torchrun),
    "`torchrun --virtual-local-rank`": Launch(torchrun_virtual_local_rank),
    "`accelerate launch`": Launch(accelerate),
    "`srun`, all GPUs a task": Launch(srun),
    "`srun --gpus-per-task=1`": Launch(srun_one_gpu),
    "`mpirun` (OpenMPI), `deepspeed --launcher openmpi`": Launch(mpirun, asks_mpi=True),
    "`deepspeed --launcher slurm`": Launch(deepspeed_slurm, asks_mpi=True),
    "`deepspeed --launcher mpich`": Launch(deepspeed_mpich),
    "Ray (OpenRLHF, verl)": Launch(ray),
    "`python`": Launch(python, ranks=1, transport="the ranks are on several hosts, or there is one rank only"),
    "two hosts: `deepspeed --hostfile`": Launch(deepspeed, **_TWO),
    "two hosts: `torchrun --nnodes 2`": Launch(torchrun, **_TWO),
    "two hosts: `srun`": Launch(srun, **_TWO),
    "two hosts: `srun --gpus-per-task=1`": Launch(srun_one_gpu, **_TWO),
    "two hosts: `mpirun`": Launch(mpirun, asks_mpi=True, **_TWO),
    "two hosts: Ray": Launch(ray, **_TWO),
}
"""By their names in the table of docs/many_hosts.md."""
