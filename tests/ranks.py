"""Real ranks for tests, over gloo on CPUs or NCCL on GPUs: a pool of processes that run a function together.

Starting a process and importing DeepSpeed takes seconds, so the processes of a pool are reused by all tests of a run. A
test function is any module-level function; it is called on every rank after deepspeed.init_distributed. `on_ranks`
makes a test of one that asserts on its rank, so that nothing need be sent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore

TIMEOUT = 180  # Seconds after which a call counts as hung
# Bytes and threads of a rank on a CPU at which its pool makes way for a new one, in 0.3 s: DeepSpeed's engines leave
# memory, and gloo's process groups threads, which wake a hundred times a second
LARGEST, MOST_THREADS = 5 * 2**28, 48
LARGEST_ON_GPU = 2**31  # Bytes that a rank may still hold on its GPU after a test; others run beside it


def _worker(
    rank: int, world: int, port: int, accelerator: str, connection: Any, crash_file: str, one_gpu: bool
) -> None:
    # Open until the process ends: what every thread was doing when native code aborts.
    faulthandler.enable(open(crash_file, "w"), all_threads=True)  # noqa: SIM115
    local_rank = 0 if one_gpu else rank
    if one_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the pool's, not rank 0's
        TORCHELASTIC_RESTART_COUNT="0",
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
    from ds_fp8.zero.deepspeed.patches import disable_shm_build

    disable_shm_build()
    if accelerator == "cuda":
        from ds_fp8.layers.attention.cudnn import load_cudnn

        load_cudnn()  # before PEFT imports Transformer Engine, which finds the system's
        torch.cuda.set_device(local_rank)
    deepspeed.init_distributed(dist_backend="nccl" if accelerator == "cuda" else "gloo", verbose=False)
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        # DeepSpeed keeps engines, and collects garbage several times an engine: not through those of all tests before.
        gc.collect()
        if accelerator == "cuda" and torch.cuda.memory_allocated() > 2**28:  # of an engine that was still held
            gc.unfreeze()
            gc.collect()
        gc.freeze()
        left = 0
        if accelerator == "cuda":
            torch.cuda.empty_cache()  # other processes of tests share the GPU
            left = torch.cuda.memory_reserved()
        try:
            sent = pickle.dumps((*answer, left))
        except Exception:  # what cannot be sent
            sent = pickle.dumps((False, traceback.format_exc(), left))
        connection.send_bytes(sent)
        del answer


class RankDied(Exception):
    """A rank's process ended without an answer."""


class RankPool:
    """`world` processes joined by gloo (accelerator "cpu") or NCCL ("cuda").

    one_gpu: whether each sees its own GPU only, as under srun --gpus-per-task=1.
    """

    def __init__(self, world: int, accelerator: str = "cpu", one_gpu: bool = False):
        self.world = world
        # Ranks on CPUs are forked from one process that has imported everything; CUDA does not survive a fork.
        context = multiprocessing.get_context("forkserver" if accelerator == "cpu" else "spawn")
        if accelerator == "cpu":
            context.set_forkserver_preload(["tests.preload"])
        # Of this process, which holds its port until the ranks have met: a free port may be another's a moment later.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._accelerator, self._left = accelerator, 0
        self._connections, self._processes = [], []
        self._crashes = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (rank, world, self._store.port, accelerator, theirs, self._crash_file(rank), one_gpu)
            process = context.Process(target=_worker, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.broken = False

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """Return the results of `function(*args)`, run on every rank at once, by rank.

        Raises:
            AssertionError: with the traceback of a rank.
            RankDied: a rank's process was killed, or crashed in native code.
        """
        try:
            return self._run(function, args)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            for process in self._processes:
                process.join(1)
            codes = [process.exitcode for process in self._processes]
            stacks = [Path(self._crash_file(rank)).read_text() for rank in range(self.world)]
            self.close()
            where = getattr(function, "__qualname__", repr(function))
            raise RankDied("\n".join([f"exit codes by rank {codes} in {where}", *stacks])) from None
        except BaseException:
            self.close()  # an answer that is still to come would be taken for that of the next function
            raise

    def _crash_file(self, rank: int) -> str:
        return f"{self._crashes.name}/{rank}.txt"

    def _run(self, function: Callable, args: tuple) -> list[Any]:
        sent = pickle.dumps((function, args))  # all bytes: send() opens a file a tensor, and 1024 are many users' limit
        for connection in self._connections:
            connection.send_bytes(sent)
        waiting, answers = dict(zip(self._connections, range(self.world), strict=True)), {}
        while waiting:
            # Once one rank has failed the others may wait for it in a collective for ever.
            failed = [value for good, value in answers.values() if not good]
            ready = wait(list(waiting), 2 if failed else TIMEOUT)
            if not ready:
                self.close()
                silent = f"ranks {sorted(waiting.values())} of {self.world} did not answer"
                raise AssertionError("\n".join(failed) or silent)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    good, value, left = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    if not failed:
                        raise
                    continue  # it was ended because of another's failure
                self._left = max(self._left, left)
                answers[rank] = good, value if good else f"rank {rank}: {value}"
        failures = [value for good, value in answers.values() if not good]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.world)]

    @property
    def worn(self) -> bool:
        """Whether one of its processes has grown so much that new ones are faster."""
        if self._accelerator == "cuda":
            return self._left > LARGEST_ON_GPU
        found = [psutil.Process(process.pid) for process in self._processes]
        return any(one.memory_info().rss > LARGEST or one.num_threads() > MOST_THREADS for one in found)

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()
        self._crashes.cleanup()


class RankPools:
    """Pools by size, made when first asked for and again after a failure broke one."""

    def __init__(self, accelerator: str = "cpu") -> None:
        self._accelerator = accelerator
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world: int, function: Callable, *args: Any) -> list[Any]:
        try:
            return self._pool(world).run(function, *args)
        except RankDied as death:
            # A pool lives through hundreds of tests, and what crashes a rank may lie in any before: once more, alone.
            warnings.warn(f"a rank died, its test runs again in new processes: {death}", stacklevel=2)
            return self._pool(world).run(function, *args)

    def _pool(self, world: int) -> RankPool:
        pool = self._pools.get(world)
        if pool is not None and not pool.broken and pool.worn:
            pool.close()
        if pool is None or pool.broken:
            pool = self._pools[world] = RankPool(world, self._accelerator)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class _Body:
    """The body of a test of `on_ranks`: a rank finds the test by its name."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self.__qualname__ = module, name

    def __call__(self, arguments: dict[str, Any]) -> None:
        try:
            getattr(importlib.import_module(self._module), self.__qualname__).body(**arguments)
        except AssertionError as error:  # pytest explains those of its own process alone
            frames = [
                frame for frame, _ in traceback.walk_tb(error.__traceback__) if "/tests/" in frame.f_code.co_filename
            ]
            values = "\n".join(f"  {name} = {value!r:.300}" for name, value in frames[-1].f_locals.items())
            raise AssertionError(f"{error}\n{values}") from error


def on_ranks(*worlds: int, fixture: str = "ranks") -> Callable[[Callable], Callable]:
    """Let a test run on all of so many ranks of the pools of a fixture, which get its parameters and fixtures.

    Without a number of ranks `world` is a parameter of the test.
    """

    def decorate(body: Callable) -> Callable:
        names, function = list(inspect.signature(body).parameters), _Body(body.__module__, body.__qualname__)

        def test(**given: Any) -> None:
            given[fixture](
                given["world"] if "world" in given else worlds[0], function, {name: given[name] for name in names}
            )

        needed = dict.fromkeys([fixture, *(["world"] if len(worlds) != 1 else []), *names])
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in needed])
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        test.body = body
        return pytest.mark.parametrize("world", worlds)(test) if len(worlds) > 1 else test

    return decorate


@contextlib.contextmanager
def case(name: object) -> Iterator[None]:
    """Name one case of several in an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {name}")
        raise
