"""However a rank fails, all ranks end with one exit code, the message names it, and no process is left."""

from __future__ import annotations

import json
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
from tests.cluster.conftest import of_job
from tests.zero.models import config

TIMEOUT = 4.0
ENDS = 30.0  # Seconds in which all ranks have ended after one that raised or was killed


def begin(timeout: float = 60) -> torch.distributed.Store:
    """Join the others; on a busy machine only a test that waits for a hang may have little patience."""
    store = watchdog.start(60)
    watchdog.set_timeout(timeout)
    watchdog.beat("step 7")
    return store


def wait_for_others() -> None:
    threading.Event().wait()


def all_done(rank: int, seconds: float) -> int:
    store = begin(1.6 * watchdog.MIN_SILENCE)
    multiprocessing.util.Finalize(None, time.sleep, (seconds,), exitpriority=1)  # as unloading libraries
    if rank == 0:
        store.get("read")  # its process serves the store
    else:
        store.set("read", "")
    return 0


@pytest.mark.parametrize("seconds", [0, 1.5 * watchdog.MIN_SILENCE])
def test_a_job_that_is_done_leaves_nothing_and_may_take_its_time_to_end(job, seconds):
    started = time.monotonic()
    ended = job(2, all_done, seconds)
    assert (ended.codes, ended.output, ended.left) == ([0, 0], "", [])
    assert time.monotonic() - started > seconds


# ---------------------------------------------------------------- collectives x ways to fail


# What casts, gathers, gradients, exports, sync_weights and saves wait in
COLLECTIVES = {
    "all_reduce": lambda x, world: dist.all_reduce(x),
    "all_gather": lambda x, world: dist.all_gather_into_tensor(x.new_empty(world * len(x)), x),
    "reduce_scatter": lambda x, world: dist.reduce_scatter_tensor(x, x.new_empty(world * len(x))),
    "all_to_all": lambda x, world: dist.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda x, world: dist.broadcast(x, 0),
    "objects": lambda x, world: dist.all_gather_object([None] * world, "x"),
    "barrier": lambda x, world: dist.barrier(),
}


def fail(how: str) -> None:
    if how == "exception":
        raise ValueError("a fault of the program")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def one_fails_in(rank: int, collective: str, how: str, failing: int, own_program: bool) -> None:
    """Call a collective over and over; one rank fails before it joins the third."""
    world = int(os.environ["WORLD_SIZE"])
    if own_program:
        os.environ[watchdog.VARIABLE] = str(TIMEOUT) if how == "stop" else "60"
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        watchdog.join()
    else:
        begin(TIMEOUT if how == "stop" else 60)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    x = torch.ones(12 * world)
    for turn in range(10**6):
        watchdog.beat(f"step {turn}")
        if turn == 3 and rank == failing:
            fail(how)
        COLLECTIVES[collective](x, world)


WAYS = {"exception": "ValueError: a fault of the program", "kill": "its process ", "stop": "stopped by a signal"}
SHORT = [("all_gather", "exception", False), ("all_reduce", "kill", False), ("all_reduce", "kill", True)]
SHORT += [("barrier", "stop", True)]
"""Tested always; all others with the slow tests."""


@pytest.mark.parametrize(
    ("collective", "how", "world", "failing", "own_program"),
    [
        pytest.param(
            collective,
            how,
            world,
            failing,
            own,
            marks=[] if (collective, how, own) in SHORT and world == 2 else pytest.mark.slow,
        )
        for collective in COLLECTIVES
        for how in WAYS
        for world, failing in ((2, 1), (3, 0))
        for own in (False, True)
    ],
)
def test_a_rank_that_fails_in_a_collective_ends_all(collective, how, world, failing, own_program, job):
    started = time.monotonic()
    ended = job(world, one_fails_in, collective, how, failing, own_program, own_program=own_program)
    seconds = time.monotonic() - started
    # In a program of one's own gloo's own error may end the others of a rank that was killed before their guardians do.
    others = [1] if how == "exception" else [75, 1] if own_program and how == "kill" else [75]
    for rank, code in enumerate(ended.codes):
        assert code in ([-signal.SIGKILL] if rank == failing and how != "exception" else others), ended.output
    assert f"(rank {failing}): " in ended.output
    assert WAYS[how] in ended.output
    if how == "stop":
        assert f"limit {watchdog.VARIABLE if own_program else 'train.timeout'}" in ended.output
        assert seconds > TIMEOUT
    assert seconds < ENDS + (TIMEOUT if how == "stop" else 0)
    assert not ended.left


def one_crashes(rank: int, own_program: bool) -> None:
    if own_program:
        os.environ[watchdog.VARIABLE] = "60"
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        watchdog.join()
    else:
        begin()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    wait_for_others()


@pytest.mark.parametrize(
    ("own_program", "words"),
    [(False, "the same command resumes from the last checkpoint"), (True, "a rank was lost; go on from the last")],
)
def test_what_is_said_of_a_crash_holds_for_the_program(own_program, words, job):
    ended = job(2, one_crashes, own_program, own_program=own_program)
    assert words in ended.output
    assert "SIGSEGV" in ended.output or "crashed" in ended.output  # the first, unless its parent was quicker


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
    "step": ("", lambda engine, batch, folder: engine.step()),
    "evaluation": ("all_?gather", lambda engine, batch, folder: validate(engine, batch)),
    "save_checkpoint": ("", lambda engine, batch, folder: engine.save_checkpoint(folder, tag="new")),
    "load_checkpoint": ("", lambda engine, batch, folder: engine.load_checkpoint(folder, tag="old")),
    "export_engine": ("all_?gather", lambda engine, batch, folder: export_engine(engine, f"{folder}/export")),
    "sync_weights": ("all_?gather", lambda engine, batch, folder: sync_weights(engine, Server(), chunk_bytes=1)),
}
BEGIN_COLLECTIVES = [name for name in vars(dist.ProcessGroup) if re.match("_?(all|reduce|broad|barr|gath|scat)", name)]


def one_fails_within(rank: int, operation: str, how: str, failing: int, folder: str) -> None:
    """Call an operation; one rank fails where it would begin a collective of it."""
    os.environ[watchdog.VARIABLE] = str(TIMEOUT) if how == "stop" else "60"
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    where, run = OPERATIONS[operation]
    batch = {name: torch.arange(64).reshape(2, 32) for name in ("input_ids", "labels")}
    engine = None
    if operation != "initialize":
        engine = tiny_engine()
        engine.backward(engine(**batch).loss)
        if operation != "step":
            engine.step()
            engine.save_checkpoint(folder, tag="old")
    for name in BEGIN_COLLECTIVES if rank == failing else ():
        begin_it = getattr(dist.ProcessGroup, name)

        def fails(*arguments: Any, name: str = name, begin_it: Callable = begin_it, **options: Any) -> Any:
            if re.search(where, name):
                Path(folder, "failed").touch()
                fail(how)
            return begin_it(*arguments, **options)

        setattr(dist.ProcessGroup, name, fails)
    run(engine, batch, folder)
    if rank != failing:
        wait_for_others()  # a program's next collective


@pytest.mark.parametrize(
    ("operation", "how", "world", "failing"),
    [
        pytest.param(operation, how, world, failing, marks=[] if short else pytest.mark.slow)
        for operation in OPERATIONS
        for how in WAYS
        for world, failing in ((2, 1), (3, 0))
        for short in [world == 2 and (operation, how) in (("initialize", "kill"), ("sync_weights", "exception"))]
    ],
)
def test_a_rank_that_fails_within_an_operation_ends_all(operation, how, world, failing, job, tmp_path):
    ended = job(world, one_fails_within, operation, how, failing, str(tmp_path), own_program=True)
    failed = tmp_path / "failed"
    assert failed.exists(), ended.output
    seconds = time.time() - failed.stat().st_mtime
    said = next((line for line in ended.output.splitlines() if f"(rank {failing}): " in line), "")
    print(f"RANKS | {operation} | {how} | {world} | {seconds:.0f} s | {ended.codes} | {said}")
    for rank, code in enumerate(ended.codes):
        others = [1] if how == "exception" else [75, 1] if how == "kill" else [75]
        assert code in ([-signal.SIGKILL] if rank == failing and how != "exception" else others), ended.output
    assert WAYS[how] in ended.output
    assert how == "exception" or WAYS[how] in said, ended.output
    assert how != "stop" or f"limit {watchdog.VARIABLE}" in ended.output
    assert seconds < ENDS + (TIMEOUT if how == "stop" else 0)
    assert not ended.left


def stopped_and_continued(rank: int, seconds: float) -> int:
    """A rank is stopped for less than the limit, or all of them for longer (Ctrl-Z): the job goes on."""
    begin(TIMEOUT)
    everybody = seconds > TIMEOUT
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    stops = rank == 1 or everybody
    if stops and os.fork() == 0:
        stopped = psutil.Process(os.getppid())
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        time.sleep(seconds)
        stopped.resume()
        os._exit(0)
    dist.barrier()  # all at one moment, also on a busy machine
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    watchdog.beat("step 8")
    time.sleep(1)
    return 0


@pytest.mark.parametrize("seconds", [TIMEOUT / 2, 1.6 * TIMEOUT])
def test_a_rank_that_is_continued_and_a_job_that_is_paused_go_on(seconds, job):
    ended = job(2, stopped_and_continued, seconds)
    assert (ended.codes, ended.output) == ([0, 0], "")


def compiles(rank: int, own_program: bool) -> int:
    """Longer than the timeout without a collective, and with the interpreter held: a first step, or a save."""
    if own_program:
        os.environ[watchdog.VARIABLE] = str(TIMEOUT)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        watchdog.join()
    else:
        begin(TIMEOUT)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        watchdog.beat("step 1", slow=True)
    if rank == 0:
        sys.setswitchinterval(3 * TIMEOUT)  # no other thread of this rank runs
        until = time.monotonic() + 1.6 * TIMEOUT
        while time.monotonic() < until:
            pass
    dist.barrier()
    return 0


@pytest.mark.parametrize("own_program", [False, True])
def test_a_rank_that_compiles_is_not_taken_for_one_that_hangs(own_program, job):
    ended = job(2, compiles, own_program, own_program=own_program)
    assert (ended.codes, ended.output) == ([0, 0], "")


# ---------------------------------------------------------------- jobs in which nothing moves


def one_is_busy(rank: int) -> None:
    begin(TIMEOUT)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    watchdog.beat("step 7")
    if rank == 0:
        reading_a_file_for_ever()
    dist.barrier()


def reading_a_file_for_ever() -> None:
    time.sleep(600)


def test_the_rank_that_the_others_wait_for_is_named(job):
    ended = job(3, one_is_busy)
    assert ended.codes == [75, 75, 75]
    assert "in step 7: limit train.timeout" in ended.output
    assert "(rank 0): in no collective: the others wait for it" in ended.output
    assert "in reading_a_file_for_ever" in ended.output
    assert all(f"(rank {rank}): waits in " in ended.output for rank in (1, 2))
    assert not ended.left


def one_works_while_others_wait(rank: int) -> int:
    begin(1.5 * TIMEOUT)
    if rank == 0:
        for _ in range(10):
            time.sleep(TIMEOUT / 6)
            watchdog.beat("tokenising")
        return 0
    time.sleep(5 / 3 * TIMEOUT)
    return 0


def test_progress_of_one_rank_is_enough(job):
    assert job(2, one_works_while_others_wait).codes == [0, 0]


def never_comes(rank: int) -> None:
    if rank == 0:
        watchdog.start(TIMEOUT)
    time.sleep(2 * TIMEOUT)


def test_a_rank_that_never_arrives_is_named(job):
    ended = job(2, never_comes)
    assert ended.codes == [75, 0]
    assert "(rank 1): did not arrive within 4 s" in ended.output


# ---------------------------------------------------------------- mistakes, guardians, launchers


def mistaken(rank: int, ranks: tuple[int, ...], words: str = "no file") -> None:
    begin()
    if rank in ranks:
        raise UserError(words, key="data.path", remedy="give one")
    wait_for_others()


@pytest.mark.parametrize(("ranks", "where"), [((0, 1), 0), ((1,), 1)])
def test_a_mistake_is_printed_once_and_with_its_place_where_not_all_found_it(job, ranks, where):
    ended = job(2, mistaken, ranks, "\x1b[2J\x07 no file")
    assert ended.codes == [2, 2]
    assert ended.output.count("error: \\x1b[2J\\x07 no file") == 1  # what would steer a terminal is spelt out
    assert ended.output.count("(rank 1)") == where
    assert not ended.left


def guardian_dies(rank: int, how: str) -> None:
    """Killed, or not heard of, as of a host whose link went down: the connections stay open."""
    begin(2 * watchdog.MIN_SILENCE)
    watchdog.beat("step 8", slow=True)
    time.sleep(1)
    if rank == 1:
        guardian = psutil.Process().children()[0]
        guardian.suspend() if how == "suspend" else guardian.kill()
        threading.Timer(20, guardian.resume).start()
    wait_for_others()


@pytest.mark.parametrize("how", ["kill", pytest.param("suspend", marks=pytest.mark.slow)])
def test_a_rank_without_guardian_ends(job, how):
    ended = job(2, guardian_dies, how)
    assert ended.codes == [75, 75]
    assert how == "kill" or "(rank 1): no message for" in ended.output
    assert not ended.left


def output_is_closed(rank: int) -> int:
    """The launcher, which reads the output, is gone: that is SIGTERM."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    begin()
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    os.close(reader)
    return 0 if asked.wait(20) else 9


def test_ranks_without_a_launcher_are_asked_to_stop(job):
    assert job(2, output_is_closed).codes == [0, 0]


def all_are_asked_to_end(rank: int) -> None:
    os.environ[watchdog.VARIABLE] = "60"
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    watchdog.join()
    dist.barrier()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for_others()


def test_a_program_of_ones_own_that_is_asked_to_end_gives_no_alarm(job):
    ended = job(2, all_are_asked_to_end, own_program=True)
    assert (ended.codes, ended.output, ended.left) == ([-signal.SIGTERM] * 2, "", [])


def strangers_speak(rank: int) -> int:
    """Rank 0's guardian is spoken to by others than guardians; the job goes on."""
    store = begin()
    if rank == 0:
        guardian = psutil.Process().children()[0]
        (listener,) = [c for c in guardian.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert listener.laddr.ip == "127.0.0.1", listener
        greeting = {"rank": 1, "host": "h", "token": "guessed"}
        for lines in (
            [{"rank": 1, "host": "h"}, {"finding": ["error", "not so"]}],
            [greeting, {"finding": ["error", "not so"]}],
            [{**greeting, "rank": "x"}],
            [{"finding": ["error", "not so"]}],
            ["[" * 100_000],
        ):
            with socket.create_connection(("127.0.0.1", listener.laddr.port)) as stranger:
                stranger.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())
                stranger.settimeout(20)
                assert stranger.recv(10) == b""  # hung up on
        store.set("spoken", "")
    store.get("spoken")
    store.add("heard", 1)
    if rank == 0:
        while store.add("heard", 0) < 2:
            time.sleep(0.05)
    return 0


def test_only_the_jobs_guardians_are_heard(job):
    ended = job(2, strangers_speak)
    assert (ended.codes, ended.output, ended.left) == ([0, 0], "", [])


def strangers_are_many(rank: int, descriptors: int) -> int:
    """Rank 0's guardian has `descriptors`, and 200 others connect and say nothing; the job goes on."""
    store = begin()
    if rank == 0:
        guardian = psutil.Process().children()[0]
        guardian.rlimit(psutil.RLIMIT_NOFILE, (descriptors, descriptors))
        (listener,) = [c for c in guardian.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        strangers = [socket.create_connection(("127.0.0.1", listener.laddr.port)) for _ in range(200)]
        time.sleep(2)
        assert guardian.num_fds() < 100
        for stranger in (strangers[0], strangers[-1]):
            stranger.settimeout(20)
            assert stranger.recv(10) == b""  # hung up on
        store.set("went on", "")
    store.get("went on")
    store.add("heard", 1)
    if rank == 0:
        while store.add("heard", 0) < 2:
            time.sleep(0.05)
    return 0


@pytest.mark.parametrize("descriptors", [40, 1000])
def test_connections_that_say_nothing_are_closed(job, descriptors):
    ended = job(2, strangers_are_many, descriptors)
    assert (ended.codes, ended.output, ended.left) == ([0, 0], "", [])


def ends_after_its_work(rank: int) -> int:
    multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGTERM), exitpriority=1)
    return 143


def is_interrupted_early(rank: int) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell inherit SIG_IGN
    signal.raise_signal(signal.SIGINT)
    return 0


def test_a_signal_after_the_work_does_not_change_the_exit_code(job):
    assert job(1, ends_after_its_work).codes == [143]


def test_an_interrupt_before_training_is_no_traceback(job):
    ended = job(1, is_interrupted_early)
    assert ended.codes == [130]
    assert ended.output.strip() == "interrupted"


def rests(rank: int) -> int:
    """All guardians take less than 0.1 s of CPU while the job works for 3 s, that of a rank which has ended too."""
    store = begin()
    if rank == 0:
        store.get("found")
        return 0
    job = of_job(int(os.environ["MASTER_PORT"]))
    guardians = [process for process in job if any("guardian.py" in part for part in process.cmdline())]
    assert len(guardians) == 2
    store.set("found", "")
    time.sleep(2)  # they have started, and the first rank has ended
    before = [sum(guardian.cpu_times()[:2]) for guardian in guardians]
    time.sleep(3)
    assert all(sum(g.cpu_times()[:2]) - was < 0.1 for g, was in zip(guardians, before, strict=True))
    return 0


def test_guardians_sleep_while_nothing_happens(job):
    assert job(2, rests).codes == [0, 0]
