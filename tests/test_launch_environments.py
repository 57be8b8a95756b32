"""Real ranks in the environments of launchers: hosts, transport, levels of the reduction."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.multiprocessing as multiprocessing

from ds_fp8.cluster.hosts import free_port

OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "CUDA_VISIBLE", "NCCL_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC")
TIMEOUT = 120
SEVERAL_HOSTS = "the ranks are on several hosts, or there is one rank only"


@dataclass(frozen=True)
class Rank:
    """A rank as its launcher knows it: two GPUs a host, ranks numbered host by host."""

    rank: int
    local_rank: int
    host: int
    ranks: int
    hosts: int
    port: int

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts


def texts(**numbers: int) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items()}


def python(rank: Rank) -> dict[str, str]:
    """As a program that is started by itself needs them."""
    numbers = texts(RANK=rank.rank, LOCAL_RANK=rank.local_rank, WORLD_SIZE=rank.ranks, MASTER_PORT=rank.port)
    return {**numbers, "MASTER_ADDR": "127.0.0.1"}


def deepspeed(rank: Rank) -> dict[str, str]:
    """As deepspeed/launcher/launch.py sets them, --launcher mpich and scripts for srun."""
    return {**python(rank), "CUDA_VISIBLE_DEVICES": "0,1"}


def torchrun(rank: Rank) -> dict[str, str]:
    """As torch/distributed/elastic/agent/server/local_elastic_agent.py sets them; accelerate launch calls it."""
    agents = texts(GROUP_RANK=rank.host, LOCAL_WORLD_SIZE=rank.per_host, ROLE_WORLD_SIZE=rank.ranks)
    return python(rank) | agents | texts(TORCHELASTIC_RESTART_COUNT=0, TORCHELASTIC_MAX_RESTARTS=0)


def one_gpu(rank: Rank) -> dict[str, str]:
    """As torchrun --virtual-local-rank, srun --gpus-per-task=1 and Ray: every rank sees one GPU, which it calls 0."""
    return {**torchrun(rank), "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(rank.local_rank)}


def mpirun(rank: Rank) -> dict[str, str]:
    """As OpenMPI's mpirun, alone or by deepspeed --launcher openmpi: DeepSpeed asks MPI, as under srun alone."""
    numbers = {"RANK": rank.rank, "SIZE": rank.ranks, "LOCAL_RANK": rank.local_rank, "LOCAL_SIZE": rank.per_host}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


@dataclass(frozen=True)
class Launch:
    """A way to start a job, and what is to come of it."""

    variables: Callable[[Rank], dict[str, str]]
    hosts: int = 1
    ranks: int = 2
    transport: str = "copy engines"
    hierarchy: str = "flat"


def two_hosts(variables: Callable[[Rank], dict[str, str]]) -> Launch:
    return Launch(variables, 2, 4, SEVERAL_HOSTS, "2 nodes x 2")


LAUNCHES = {
    "deepspeed": Launch(deepspeed),
    "torchrun": Launch(torchrun),
    "one GPU a rank": Launch(one_gpu),
    "mpirun": Launch(mpirun),
    "python": Launch(python, ranks=1, transport=SEVERAL_HOSTS),
    "two hosts by torchrun": two_hosts(torchrun),
    "two hosts, one GPU a rank": two_hosts(one_gpu),
}


def mpi(rank: Rank) -> ModuleType:
    """Stand in for mpi4py: what MPI tells DeepSpeed of a job."""
    hosts = [f"host{other // rank.per_host}" for other in range(rank.ranks)]
    world = SimpleNamespace(
        Get_rank=lambda: rank.rank,
        Get_size=lambda: rank.ranks,
        bcast=lambda value, root: "127.0.0.1",
        allgather=lambda name: hosts,
    )
    module = ModuleType("mpi4py")
    module.__spec__ = SimpleNamespace()
    module.MPI = SimpleNamespace(COMM_WORLD=world, Get_processor_name=lambda: hosts[rank.rank])
    return module


def enter(launch: Launch, rank: Rank) -> None:
    """Leave this process with the launcher's variables, and a host of its own by the name that NCCL would take."""
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    os.environ.update(launch.variables(rank))
    if rank.hosts > 1:
        os.environ["NCCL_HOSTID"] = f"host{rank.host}"
    if launch.variables is mpirun:
        sys.modules["mpi4py"] = mpi(rank)


def job(launch: Launch, rank: Rank, connection: Connection) -> None:
    enter(launch, rank)
    import logging

    import torch
    from deepspeed import comm as dist

    import ds_fp8
    from ds_fp8.zero import collectives
    from tests.zero.gpus import gpus
    from tests.zero.models import Net, config

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    fp8 = {"preset": "infir2", "linear": {"skip": []}, "monitor": {"every": 0}}
    engine = ds_fp8.initialize(model=Net(), config=config(fp8), distributed_port=rank.port)[0]
    report = engine.fp8.report

    # This host's GPUs, which a rank sees as CUDA_VISIBLE_DEVICES says.
    seen = [f"host{rank.host} GPU {n}" for n in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")]
    with gpus(seen, int(os.environ["LOCAL_RANK"])) as device:
        shared = collectives.share(16, device, None)
    x = torch.zeros(2, 8, dtype=torch.int64)
    loss = engine(x).float().mean()
    engine.backward(loss)
    engine.step()
    transport = shared if isinstance(shared, str) else "copy engines"
    connection.send((dist.get_rank(), report["ranks"], report["hosts"], transport, report["grad_hierarchy"]))
    dist.barrier()


def run(launch: Launch) -> list[tuple]:
    """Start the ranks, and return what each found."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    port, per_host = free_port(), launch.ranks // launch.hosts
    processes, connections = [], []
    for number in range(launch.ranks):
        rank = Rank(number, number % per_host, number // per_host, launch.ranks, launch.hosts, port)
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=job, args=(launch, rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    try:
        assert all(connection.poll(TIMEOUT) for connection in connections)
        return [connection.recv() for connection in connections]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


@pytest.mark.parametrize("name", LAUNCHES)
def test_ranks_find_hosts_transport_and_levels(name):
    launch = LAUNCHES[name]
    for rank, found in enumerate(run(launch)):
        assert found == (rank, launch.ranks, launch.hosts, launch.transport, launch.hierarchy)


WORLD = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
COMMANDS = {
    "deepspeed": (
        deepspeed,
        f"-m deepspeed.launcher.launch --world_info {WORLD} --master_port PORT --no_python --no_local_rank",
    ),
    "one GPU a rank": (
        one_gpu,
        "-m torch.distributed.run --nproc-per-node 2 --master-port PORT --virtual-local-rank --no-python",
    ),
    "accelerate": (
        torchrun,
        "-m accelerate.commands.launch --use_deepspeed --num_processes 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no --main_process_port PORT --no_python",
    ),
}


def asked(name: str, folder: Path) -> None:
    """Start ranks by a launcher that is installed; each writes its environment down.

    Below the command `deepspeed`, which would import all of DeepSpeed once more.
    """
    variables, command = COMMANDS[name]
    port, script = free_port(), folder / "rank"
    script.write_text(f'#!/bin/sh\nenv > "{folder}/$RANK.env"\n')
    script.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    words = [sys.executable, *command.replace("PORT", str(port)).split(), str(script)]
    done = subprocess.run(words, env=clean, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(2):
        lines = (folder / f"{number}.env").read_text().splitlines()
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        expected = variables(Rank(number, number, 0, 2, 1, port))
        # The GPUs that are visible, where a host has some, and the name that a launcher gives this host.
        for key in expected.keys() - {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR"}:
            assert found.get(key) == expected[key], (name, key)


@pytest.mark.parametrize(
    "names", [("deepspeed", "one GPU a rank"), pytest.param(("accelerate",), marks=pytest.mark.slow)]
)
def test_the_launchers_set_these_variables(names, tmp_path_factory):
    """Side by side: what takes their time is imports."""
    with ThreadPoolExecutor(len(names)) as pool:
        for done in [pool.submit(asked, name, tmp_path_factory.mktemp("launched")) for name in names]:
            done.result()
