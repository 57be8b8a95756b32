"""Real ranks for tests, over gloo on CPUs or NCCL on GPUs: a pool of processes that run a function together.

Starting a process and importing DeepSpeed takes seconds, so the processes of a pool are reused by all tests of a run. A
test function is any module-level function; it is called on every rank after deepspeed.init_distributed.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as multiprocessing

TIMEOUT = 180
"""Seconds after which a call counts as hung."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(rank: int, world: int, port: int, accelerator: str, connection: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR=accelerator,
        LOG_LEVEL="ERROR",
        DEEPSPEED_LOG_LEVEL="error",
    )
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from ds_fp8.zero.seams import spare_shared_memory_op

    spare_shared_memory_op()
    if accelerator == "cuda":
        torch.cuda.set_device(rank)
    deepspeed.init_distributed(dist_backend="nccl" if accelerator == "cuda" else "gloo", verbose=False)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class RankPool:
    """`world` processes joined by gloo (accelerator "cpu") or NCCL ("cuda")."""

    def __init__(self, world: int, accelerator: str = "cpu"):
        self.world = world
        # Ranks on CPUs are forked from one process that has imported everything; CUDA does not survive a fork.
        context = multiprocessing.get_context("forkserver" if accelerator == "cpu" else "spawn")
        if accelerator == "cpu":
            context.set_forkserver_preload(["tests.preload"])
        port = _free_port()
        self._connections, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, world, port, accelerator, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.broken = False

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """`function(*args)` on every rank at once; results by rank. Raises AssertionError with a rank's traceback."""
        for connection in self._connections:
            connection.send((function, args))
        results, failures = [], []
        for rank, connection in enumerate(self._connections):
            # Once one rank has failed the others may wait for it in a collective for ever.
            if not connection.poll(TIMEOUT if not failures else 2):
                self.close()
                raise AssertionError("\n".join(failures) or f"rank {rank} of {self.world} did not answer")
            good, value = connection.recv()
            if good:
                results.append(value)
            else:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()


class RankPools:
    """Pools by size, made when first asked for and again after a failure broke one."""

    def __init__(self, accelerator: str = "cpu") -> None:
        self._accelerator = accelerator
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world: int, function: Callable, *args: Any) -> list[Any]:
        pool = self._pools.get(world)
        if pool is None or pool.broken:
            pool = self._pools[world] = RankPool(world, self._accelerator)
        return pool.run(function, *args)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
