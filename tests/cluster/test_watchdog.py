"""However a rank fails, all ranks end with one exit code, the message names it, and no process is left."""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import signal
import socket
import threading
import time

import psutil
import pytest
import torch.distributed

from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError

TIMEOUT = 3.0


def begin(timeout: float = 60) -> torch.distributed.Store:
    """Join the others; on a busy machine only a test that waits for a hang may have little patience."""
    store = watchdog.start(60)
    watchdog.set_timeout(timeout)
    watchdog.beat("step 7")
    return store


def wait_for_others() -> None:
    threading.Event().wait()


def all_done(rank: int) -> int:
    store = begin()
    if rank == 0:
        store.get("read")  # its process serves the store
    else:
        store.set("read", "")
    return 0


def test_a_job_that_is_done_leaves_nothing(job):
    ended = job(2, all_done)
    assert (ended.codes, ended.output, ended.left) == ([0, 0], "", [])


def one_is_killed(rank: int) -> None:
    begin()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_others()


def test_a_killed_rank_ends_the_job(job):
    ended = job(3, one_is_killed)
    assert ended.codes == [75, -signal.SIGKILL, 75]
    assert "(rank 1): its process ended without a message" in ended.output
    assert "stack of ranks 0, 2" in ended.output
    assert "in wait_for_others" in ended.output
    assert not ended.left


def first_is_killed(rank: int) -> None:
    begin()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_others()


def test_rank_0_is_no_exception(job):
    ended = job(2, first_is_killed)
    assert ended.codes == [-signal.SIGKILL, 75]
    assert "(rank 0): its process ended" in ended.output
    assert not ended.left


def one_is_stopped(rank: int) -> None:
    begin(TIMEOUT)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_others()


def test_a_stopped_rank_is_killed(job):
    started = time.monotonic()
    ended = job(2, one_is_stopped)
    assert time.monotonic() - started > TIMEOUT
    assert ended.codes == [75, -signal.SIGKILL]
    assert "no progress" in ended.output
    assert "(rank 1): stopped, or stuck" in ended.output
    assert not ended.left


def one_is_busy(rank: int) -> None:
    begin(TIMEOUT)
    if rank == 0:
        reading_a_file_for_ever()
    wait_for_others()


def reading_a_file_for_ever() -> None:
    time.sleep(600)


def test_the_rank_that_the_others_wait_for_is_named(job):
    ended = job(3, one_is_busy)
    assert ended.codes == [75, 75, 75]
    assert "in step 7: limit train.timeout" in ended.output
    assert "(rank 0): the others wait for it" in ended.output
    assert "in reading_a_file_for_ever" in ended.output
    assert not ended.left


def one_works_while_others_wait(rank: int) -> int:
    begin(2 * TIMEOUT)
    if rank == 0:
        for _ in range(14):
            time.sleep(TIMEOUT / 6)
            watchdog.beat("tokenising")
        return 0
    time.sleep(7 / 3 * TIMEOUT)
    return 0


def test_progress_of_one_rank_is_enough(job):
    assert job(2, one_works_while_others_wait).codes == [0, 0]


def one_raises(rank: int) -> None:
    begin()
    if rank == 1:
        raise ValueError("a fault of the program")
    wait_for_others()


def test_an_exception_ends_all_ranks_with_its_code(job):
    ended = job(2, one_raises)
    assert ended.codes == [1, 1]
    assert ended.output.count("Traceback") == 1
    assert "(rank 1): ValueError: a fault of the program" in ended.output
    assert not ended.left


def mistaken(rank: int, ranks: tuple[int, ...]) -> None:
    begin()
    if rank in ranks:
        raise UserError("no file", key="data.path", remedy="give one")
    wait_for_others()


@pytest.mark.parametrize(("ranks", "where"), [((0, 1), 0), ((1,), 1)])
def test_a_mistake_is_printed_once_and_with_its_place_where_not_all_found_it(job, ranks, where):
    ended = job(2, mistaken, ranks)
    assert ended.codes == [2, 2]
    assert ended.output.count("error: no file") == 1
    assert ended.output.count("(rank 1)") == where
    assert not ended.left


def guardian_dies(rank: int) -> None:
    begin(4 * TIMEOUT)
    if rank == 1:
        psutil.Process().children()[0].kill()
    wait_for_others()


def test_a_rank_without_guardian_ends(job):
    ended = job(2, guardian_dies)
    assert ended.codes == [75, 75]
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


def never_comes(rank: int) -> None:
    if rank == 0:
        watchdog.start(3 * TIMEOUT)
    time.sleep(4 * TIMEOUT)


def test_a_rank_that_never_arrives_is_named(job):
    ended = job(2, never_comes)
    assert ended.codes == [75, 0]
    assert "(rank 1): did not arrive within 9 s" in ended.output


def guardian_is_stopped(rank: int) -> None:
    """As of a host whose link went down: the connections stay open, and nothing comes through them."""
    watchdog.start(60)
    watchdog.set_timeout(2 * watchdog.MIN_SILENCE)
    watchdog.beat("step 8", slow=True)
    if rank == 1:
        time.sleep(2)
        guardian = psutil.Process().children()[0]
        guardian.suspend()
        threading.Timer(20, guardian.resume).start()
    wait_for_others()


@pytest.mark.slow
def test_a_guardian_that_is_not_heard_of_is_lost_before_the_timeout(job):
    ended = job(2, guardian_is_stopped)
    assert ended.codes == [75, 75]
    assert "(rank 1): no message for" in ended.output
    assert not ended.left


def takes_long_to_end(rank: int) -> int:
    store = begin()
    atexit.register(time.sleep, 2 * watchdog.MIN_SILENCE)  # as unloading libraries on a busy host
    if rank == 0:
        store.get("read")
    else:
        store.set("read", "")
    return 0


def test_a_rank_that_is_done_may_take_its_time_to_end(job):
    ended = job(2, takes_long_to_end)
    assert (ended.codes, ended.output, ended.left) == ([0, 0], "", [])


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


def fails_in_colour(rank: int) -> None:
    begin()
    if rank == 1:
        raise UserError("\x1b[2J\x07 gone", remedy="none")
    wait_for_others()


def test_what_would_steer_a_terminal_is_spelt_out(job):
    ended = job(2, fails_in_colour)
    assert "\\x1b[2J\\x07 gone" in ended.output
    assert "\x1b" not in ended.output


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
