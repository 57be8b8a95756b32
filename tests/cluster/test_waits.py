"""Ranks wait for one that saves, loads or evaluates longer than the timeout of their process group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fp8.cluster import watchdog
from ds_fp8.export.on_all_ranks import on_all_ranks
from tests.cluster.conftest import at_once, run_job
from tests.cluster.test_watchdog import ENDS, begin, tiny_engine
from tests.ranks import case

TIMEOUT, LATE = 5.0, 6.5  # seconds of the process group, and by which one rank is later than the others
LIMIT, SLOW = 2.0, 2  # seconds without progress, and the multiple of them in a slow phase


def late(function: Callable) -> Callable:
    """Delay a function's first call, as a file system does."""
    left = [LATE]

    def delayed(*arguments: Any, **options: Any) -> Any:
        time.sleep(left.pop() if left else 0)
        return function(*arguments, **options)

    return delayed


def gathers(engine: Any, rank: int, folder: str) -> None:
    """As Trainer with `save_only_model`: the first rank writes the whole model, and there is no barrier."""
    state = engine._zero3_consolidated_16bit_state_dict()
    if rank == 0:
        late(torch.save)(state, f"{folder}/model")


def evaluates(engine: Any, rank: int, folder: str) -> None:
    engine.eval()
    with torch.no_grad():
        engine(**BATCH)
    time.sleep(LATE * rank)  # on texts that are longer, without a collective
    engine.train()


# Jobs, and what takes long in each: on which rank a function of torch is late, and what is called
JOBS: list[dict[str, tuple[int, str, Callable]]] = [
    {
        "save, first rank": (0, "save", lambda engine, rank, folder: engine.save_checkpoint(folder)),
        "load": (1, "load", lambda engine, rank, folder: engine.load_checkpoint(folder, tag="old")),
        "Trainer's model": (0, "", gathers),
        "barrier": (0, "", lambda engine, rank, folder: (rank or time.sleep(LATE), dist.barrier())),
    },
    {
        "save, last rank": (1, "save", lambda engine, rank, folder: engine.save_checkpoint(folder)),
        "model": (0, "save", lambda engine, rank, folder: engine.save_16bit_model(folder)),
        "evaluation": (1, "", evaluates),
        "export": (0, "", lambda engine, rank, folder: on_all_ranks(lambda: rank or time.sleep(LATE))),
    },
]
BATCH = {name: torch.arange(64).reshape(2, 32) for name in ("input_ids", "labels")}


def one_is_late(rank: int, job: int, folder: str) -> None:
    begin(own_program=True)
    engine = tiny_engine()
    engine.zero_gather_16bit_weights_on_model_save = lambda: True
    engine.backward(engine(**BATCH).loss)
    engine.step()
    engine.save_checkpoint(folder, tag="old")
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
    for name, (slow, function, run) in JOBS[job].items():
        stock = getattr(torch, function, None)
        if rank == slow and function:
            setattr(torch, function, late(stock))
        started = time.monotonic()
        with case(name):
            run(engine, rank, folder)
            engine.backward(engine(**BATCH).loss)
            engine.step()
        assert time.monotonic() - started > LATE, name
        if function:
            setattr(torch, function, stock)


@pytest.mark.parametrize("job", range(len(JOBS)))
@at_once
def test_a_rank_that_is_late_by_more_than_the_timeout_ends_no_other(folder, job):
    ended = run_job(folder, 2, one_is_late, job, str(folder), own_program=True)
    assert ended.codes == [0, 0], ended.output
    assert "timed out" not in ended.output  # torch's warnings, one a second


def writes(rank: int, folder: str) -> int:
    """Take twice the limit of a slow phase, in which one rank writes more and more."""
    begin(timeout=LIMIT)
    watchdog.SLOW = SLOW
    watchdog.beat("saving a checkpoint", slow=True)
    until = time.monotonic() + 2 * SLOW * LIMIT
    with open(f"{folder}/{rank}", "wb") as file:
        while rank == 0 and time.monotonic() < until:
            file.write(bytes(2**21))
            time.sleep(0.2)
    dist.barrier()
    return 0


@at_once
def test_a_rank_that_writes_is_not_taken_for_one_that_hangs(folder):
    ended = run_job(folder, 2, writes, str(folder))
    assert (ended.codes, ended.output) == ([0, 0], "")


def dies(rank: int, own_program: bool, failing: int, folder: str) -> None:
    begin(own_program)
    dist.barrier()
    if rank == failing:
        time.sleep(2)
        open(f"{folder}/died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    watchdog.wait_for_all()
    raise AssertionError("one is lost")


@pytest.mark.parametrize(("own_program", "failing"), [(True, 1), (False, 0)])
@at_once
def test_a_rank_that_dies_while_others_wait_for_it_ends_them(folder, own_program, failing):
    ended = run_job(folder, 2, dies, own_program, failing, str(folder), own_program=own_program)
    assert time.time() - (folder / "died").stat().st_mtime < ENDS  # the start takes as long where others compute
    assert ended.codes[failing] == -signal.SIGKILL
    assert ended.codes[1 - failing] == 75, ended.output
    assert f"(rank {failing}): its process " in ended.output
