"""However a rank fails, all ranks end with one exit code, the message names it, and no process is left."""

from __future__ import annotations

import multiprocessing.util
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ds_fp8
from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.export.engines import export_engine
from ds_fp8.integrations.vllm import sync_weights
from tests.cluster.conftest import at_once, run_job
from tests.zero.models import config

TIMEOUT = 4.0
ENDS = 30.0  # Seconds in which all ranks have ended after one that raised or was killed


def begin(own_program: bool = False, timeout: float = 60) -> torch.distributed.Store | None:
    """Join the others; on a busy machine only a test that waits for a hang may have little patience."""
    if own_program:
        os.environ[watchdog.VARIABLE] = str(timeout)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        watchdog.join()
        return None
    store = watchdog.start(60)
    watchdog.set_timeout(timeout)
    watchdog.beat("step 7")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    return store


def wait_for_others() -> None:
    threading.Event().wait()


# ---------------------------------------------------------------- operations x ways to fail


def tiny_engine() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = AutoConfig.for_model("llama", vocab_size=64, **sizes)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    return ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config({}))[0]


class Server:
    """An LLM of vLLM that takes all that it is given."""

    llm_engine = SimpleNamespace(
        has_unfinished_requests=lambda: False, model_executor=SimpleNamespace(driver_worker=None)
    )

    def __getattr__(self, name: str) -> Callable:
        return lambda *_, **__: None


def validate(engine: Any, batch: dict[str, torch.Tensor]) -> None:
    engine.eval()
    with torch.no_grad():
        dist.all_reduce(engine(**batch).loss)


# Collective calls of a program, and which of their collectives a rank fails in: the first whose name matches
OPERATIONS: dict[str, tuple[str, Callable]] = {
    "initialize": ("", lambda engine, batch, folder: tiny_engine()),
    "all-gather of a forward": ("all_?gather", lambda engine, batch, folder: engine(**batch)),
    "reduce-scatter of a backward": (
        "alltoall|reduce_scatter",
        lambda engine, batch, folder: engine.backward(engine(**batch).loss),
    ),
    "norm of a step": ("all_?reduce", lambda engine, batch, folder: engine.step()),
    "evaluation": ("all_?gather", lambda engine, batch, folder: validate(engine, batch)),
    "save_checkpoint": ("", lambda engine, batch, folder: engine.save_checkpoint(folder, tag="new")),
    "load_checkpoint": ("", lambda engine, batch, folder: engine.load_checkpoint(folder, tag="old")),
    "export_engine": ("all_?gather", lambda engine, batch, folder: export_engine(engine, f"{folder}/export")),
    "sync_weights": ("all_?gather", lambda engine, batch, folder: sync_weights(engine, Server(), chunk_bytes=1)),
}
BEGIN_COLLECTIVES = [name for name in vars(dist.ProcessGroup) if re.match("_?(all|reduce|broad|barr|gath|scat)", name)]


def one_fails_within(rank: int, operation: str, how: str, failing: int, own_program: bool, folder: str) -> None:
    """Call an operation; one rank fails where it would begin a collective of it."""
    timeout = TIMEOUT if how == "stop" else 60
    begin(own_program, timeout if own_program else 60)
    where, run = OPERATIONS[operation]
    batch = {name: torch.arange(64).reshape(2, 32) for name in ("input_ids", "labels")}
    engine = None
    if operation != "initialize":
        engine = tiny_engine()
        engine.backward(engine(**batch).loss)
        if "step" not in operation:
            engine.step()
            engine.save_checkpoint(folder, tag="old")
    for name in BEGIN_COLLECTIVES if rank == failing else ():
        begin_it = getattr(dist.ProcessGroup, name)

        def fails(*arguments: Any, name: str = name, begin_it: Callable = begin_it, **options: Any) -> Any:
            if re.search(where, name):
                Path(folder, "failed").touch()
                if how == "exception":
                    raise ValueError("a fault of the program")
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            return begin_it(*arguments, **options)

        setattr(dist.ProcessGroup, name, fails)
    watchdog.set_timeout(timeout)
    watchdog.beat(operation, slow=True)
    run(engine, batch, folder)
    if rank != failing:
        wait_for_others()  # a program's next collective


WAYS = {"exception": "ValueError: a fault of the program", "kill": "its process ", "stop": "stopped by a signal"}
SHORT = {("initialize", "kill", True), ("norm of a step", "stop", True), ("sync_weights", "exception", True)}
SHORT |= {("evaluation", "kill", False), ("save_checkpoint", "stop", False)}
"""Tested always, on two ranks; all others with the slow tests."""


@pytest.mark.parametrize(
    ("operation", "how", "world", "failing", "own_program"),
    [
        pytest.param(*case, marks=[] if (case[0], case[1], case[4]) in SHORT and case[2] == 2 else pytest.mark.slow)
        for case in (
            (operation, how, world, failing, own)
            for operation in OPERATIONS
            for how in WAYS
            for world, failing in ((2, 1), (3, 0))
            for own in (True, False)
        )
    ],
)
@at_once
def test_a_rank_that_fails_within_an_operation_ends_all(folder, operation, how, world, failing, own_program):
    arguments = operation, how, failing, own_program, str(folder)
    ended = run_job(folder, world, one_fails_within, *arguments, own_program=own_program)
    failed = folder / "failed"
    assert failed.exists(), ended.output
    seconds = time.time() - failed.stat().st_mtime
    said = next((line for line in ended.output.splitlines() if f"(rank {failing}): " in line), "")
    print(f"RANKS | {operation} | {how} | {world} | {seconds:.0f} s | {ended.codes} | {said.strip()}")
    # In a program of one's own gloo's own error may end the others of a rank that was killed before their guardians do.
    others = [1] if how == "exception" else [75, 1] if own_program and how == "kill" else [75]
    for rank, code in enumerate(ended.codes):
        assert code in ([-signal.SIGKILL] if rank == failing and how != "exception" else others), ended.output
    assert WAYS[how] in said, ended.output
    if how == "stop":
        assert f"limit {watchdog.VARIABLE if own_program else 'train.timeout'}" in said
        assert seconds > TIMEOUT
    assert seconds < ENDS + (TIMEOUT if how == "stop" else 0)
    assert not ended.left


# ---------------------------------------------------------------- ranks that end, hang, or take their time


def all_done(rank: int, seconds: float) -> int:
    store = begin()
    assert store.check(["ds_fp8/met"])
    assert not store.check(["ds_fp8/guardian"])  # nobody reads the token any more
    if rank == 0:  # and no guardian listens
        time.sleep(2)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(tuple(watchdog._watchdog._judge[:2]))
    multiprocessing.util.Finalize(None, time.sleep, (seconds,), exitpriority=1)  # as unloading libraries
    dist.barrier()
    return 0


@at_once
def test_a_job_that_is_done_leaves_nothing_and_may_take_its_time_to_end(folder):
    started = time.monotonic()
    ended = run_job(folder, 2, all_done, 8)
    assert (ended.codes, ended.output, ended.left) == ([0, 0], "", [])
    assert time.monotonic() - started > 8


def compiles(rank: int, own_program: bool) -> int:
    """Longer than the timeout without a collective, and with the interpreter held: a first step, or a save."""
    begin(own_program, TIMEOUT)
    watchdog.beat("step 1", slow=True)
    if rank == 0:
        sys.setswitchinterval(3 * TIMEOUT)  # no other thread of this rank runs
        until = time.monotonic() + 1.6 * TIMEOUT
        while time.monotonic() < until:
            pass
    dist.barrier()
    return 0


@pytest.mark.parametrize("own_program", [False, True])
@at_once
def test_a_rank_that_compiles_is_not_taken_for_one_that_hangs(folder, own_program):
    ended = run_job(folder, 2, compiles, own_program, own_program=own_program)
    assert (ended.codes, ended.output) == ([0, 0], "")


def one_is_busy(rank: int) -> None:
    begin(timeout=TIMEOUT)
    if rank == 0:
        reading_a_file_for_ever()
    if rank == 1:
        dist.barrier()
    watchdog.wait_for_all()


def reading_a_file_for_ever() -> None:
    time.sleep(600)


@at_once
def test_the_rank_that_the_others_wait_for_is_named(folder):
    ended = run_job(folder, 3, one_is_busy)
    assert ended.codes == [75, 75, 75]
    assert "in step 7: limit train.timeout" in ended.output
    assert "(rank 0): in no collective: the others wait for it" in ended.output
    assert "in reading_a_file_for_ever" in ended.output
    assert all(f"(rank {rank}): waits in " in ended.output for rank in (1, 2))
    assert not ended.left


def guardian_is_killed(rank: int) -> None:
    begin()
    if rank == 1:
        guardian = psutil.Process().children()[0]
        while not guardian.net_connections("tcp"):  # it has not connected yet
            time.sleep(0.05)
        guardian.suspend()
        watchdog.beat("step 8")  # a message that it does not read
        guardian.kill()
    wait_for_others()


@at_once
def test_a_rank_whose_guardian_is_killed_ends_with_all(folder):
    ended = run_job(folder, 2, guardian_is_killed)
    assert (ended.codes, ended.left) == ([75, 75], [])


def mistaken(rank: int) -> None:
    begin()
    raise UserError("no file", key="data.path", remedy="give one")


@at_once
def test_a_mistake_that_all_ranks_find_is_printed_once(folder):
    ended = run_job(folder, 2, mistaken)
    assert ended.codes == [2, 2]
    assert ended.output.count("error: no file") == 1
    assert "(rank" not in ended.output
    assert not ended.left


def ends_after_its_work(rank: int) -> int:
    multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGTERM), exitpriority=1)
    return 143


def is_interrupted_early(rank: int) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell inherit SIG_IGN
    signal.raise_signal(signal.SIGINT)
    return 0


@at_once
def test_a_signal_after_the_work_does_not_change_the_exit_code(folder):
    assert run_job(folder, 1, ends_after_its_work).codes == [143]


@at_once
def test_an_interrupt_before_training_is_no_traceback(folder):
    ended = run_job(folder, 1, is_interrupted_early)
    assert ended.codes == [130]
    assert ended.output.strip() == "interrupted"
