"""pytest plugin of deepspeed_tests.py: FP8 in DeepSpeed's own tests, run on ranks forked from one warm process.

Where the environment variable DS_FP8 holds an "fp8" section, every configuration without one gets it; where
DEEPSPEED_TESTS_BF16 is set, every configuration trains in BF16, with FP8 and without. Outcomes are JSON lines.

DeepSpeed starts processes for every test, and each imports the test, reads DeepSpeed's compiled optimizers and what
initialize imports late: most of the time of most tests. Here a fork server has done all of it once (this module is
imported there too), so each test still has processes of its own. And once a rank of a test has failed, the others,
which may wait for it in a collective, are not waited for until the time limit.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.zero.muon.original_muon
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig

import ds_fp8
from ds_fp8.cluster.hosts import free_port
from ds_fp8.config.files import read_config
from ds_fp8.integrations.install import VARIABLE
from ds_fp8.zero.deepspeed.patches import disable_shm_build

# Environment variables: the file that outcomes are appended to, and the time limit of a test
OUTCOMES, SECONDS = "DEEPSPEED_TESTS_OUTCOMES", "DEEPSPEED_TESTS_SECONDS"
# Environment variables: a file with the names of tests that are left out, and whether all train in BF16
WITHOUT, BF16 = "DEEPSPEED_TESTS_WITHOUT", "DEEPSPEED_TESTS_BF16"

GRACE = 10  # Seconds that the other ranks of a test have once one has failed

_limit = math.inf  # End of the running test's time, by time.monotonic


class Hung(Exception):
    """A test exceeded its time."""


def in_bf16(config: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration (a mapping, or a file) with BF16 in the place of FP16, autocast or FP32."""
    raw = dict(read_config(config)[0])
    for section in ("fp16", "amp", "torch_autocast", "bfloat16"):
        raw.pop(section, None)
    raw["bf16"] = {**raw.get("bf16", {}), "enabled": True}
    return raw


def _as_bf16(value: Any) -> Any:
    """Return an argument of a forward with its floating-point tensors in BF16."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    if isinstance(value, Mapping):
        return {key: _as_bf16(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_bf16, value))
    return value


def _cast_arguments(module: Any, args: tuple, keywords: dict) -> tuple[tuple, dict]:
    return _as_bf16(args), _as_bf16(keywords)


def train_in_bf16() -> None:
    """Make every engine and every zero.Init of this process one of BF16, and give models their input in it."""
    read, initialize = DeepSpeedConfig.__init__, deepspeed.initialize

    def init(self: DeepSpeedConfig, config: Any, *args: Any, **keywords: Any) -> None:
        read(self, in_bf16(config) if isinstance(config, str | os.PathLike | Mapping) else config, *args, **keywords)

    def bf16_initialize(
        args: Any = None, model: Any = None, *more: Any, config: Any = None, config_params: Any = None, **keywords: Any
    ) -> tuple:
        config = config if config is not None else config_params
        if config is None and getattr(args, "deepspeed_config", None) is not None:
            config, args.deepspeed_config = args.deepspeed_config, None
        result = initialize(args, model, *more, config=config and in_bf16(config), **keywords)
        result[0].register_forward_pre_hook(_cast_arguments, with_kwargs=True)
        return result

    DeepSpeedConfig.__init__ = init
    deepspeed.initialize = bf16_initialize


def prepare() -> None:
    """Do what would cost every rank of every test its time, and put FP8, or BF16, where the environment asks for it."""
    disable_shm_build()
    for builder in ("FusedAdamBuilder", "CPUAdamBuilder"):
        get_accelerator().create_op_builder(builder).load(verbose=False)
    if VARIABLE in os.environ:
        ds_fp8.install()
    if os.environ.get(BF16):
        train_in_bf16()
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage several times an engine


if OUTCOMES in os.environ:
    prepare()


def run_rank(test: Any, rank: int, world: int, port: str, init_method: str) -> str:
    """Run one rank of a DistributedTest and return the reason to skip it, empty if it ran."""
    faulthandler.enable()  # what every thread was doing when native code aborts
    message = test._dist_run(rank, world, port, init_method)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return message


def _answer(parent: Connection, function: Callable, args: tuple) -> None:
    try:
        answer = function(*args), None
    except BaseException as error:
        try:
            pickle.loads(sent := pickle.dumps(error))
        except Exception:
            sent = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        answer = None, (sent, traceback.format_exc())
    parent.send(answer)


def run_processes(method: str, function: Callable, args: list[tuple]) -> list[Any]:
    """Return the results of a function, called in a process of its own with each of the tuples of arguments.

    Raises Hung where the test has used its time, or what the first process to fail failed with.
    """
    context = multiprocessing.get_context(method)
    processes, waiting, results = [], {}, {}
    failure, until = None, _limit
    try:
        for rank, of_rank in enumerate(args):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(theirs, function, of_rank), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            waiting[ours] = rank
        while waiting:
            ready = wait(list(waiting), None if until == math.inf else max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    results[rank], error = connection.recv()
                except EOFError:
                    processes[rank].join()
                    ended = RuntimeError(f"rank {rank} ended with exit code {processes[rank].exitcode}")
                    error = pickle.dumps(ended), ""
                if error is not None and failure is None:
                    failure, until = error, min(until, time.monotonic() + GRACE)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failure is not None:
        print(failure[1])
        raise pickle.loads(failure[0])
    if waiting:
        raise Hung(f"ranks {sorted(waiting.values())} of {len(args)} had not ended")
    return [results[rank] for rank in range(len(args))]


def run_ranks(test: Any, world: int, init_method: str) -> None:
    """Run a DistributedTest in the place of its _launch_daemonic_procs: in new processes, forked from a warm one."""
    port = str(free_port())
    args = [(test, rank, world, port, init_method) for rank in range(world)]
    _skip_for(set(run_processes("forkserver", run_rank, args)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a test without ranks in a fork of pytest: some leave an environment behind that fails the next."""

    def call() -> str:
        try:
            pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        except pytest.skip.Exception as skip:  # which cannot be pickled
            return skip.msg
        return ""

    _skip_for(set(run_processes("fork", call, [()])))
    return True


def _skip_for(reasons: set[str]) -> None:
    """Skip the test if its processes did, which give the reason, or an empty one."""
    if any(reasons):
        assert len(reasons) == 1, "ranks skip a test for different reasons"
        pytest.skip(reasons.pop())


def _append(**record: str) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = set(json.loads(Path(os.environ[WITHOUT]).read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in without])
    items[:] = [item for item in items if item.nodeid not in without]


def pytest_collection_finish(session: pytest.Session) -> None:
    from unit.common import DistributedExec

    modules = {item.module.__name__ for item in session.items if hasattr(item, "module")}
    multiprocessing.set_forkserver_preload([__name__, *sorted(modules)])
    DistributedExec.reuse_dist_env = False  # what a test leaves in its ranks is no other test's
    DistributedExec._launch_daemonic_procs = run_ranks
    for item in session.items:
        if getattr(item.cls, "reuse_dist_env", False):
            item.cls.reuse_dist_env = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    global _limit
    _append(test=nodeid, outcome="hung", message="")  # unless another outcome follows
    _limit = time.monotonic() + float(os.environ[SECONDS])
    # For what pytest itself does around a test, such as its fixtures.
    faulthandler.dump_traceback_later(float(os.environ[SECONDS]) + 2 * GRACE, exit=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        hung = f"{Hung.__module__}.{Hung.__name__}: " in message
        _append(test=report.nodeid, outcome="hung" if hung else report.outcome, message=message)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish() -> None:
    _append(test="", outcome="finished", message="")
