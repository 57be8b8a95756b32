"""Hosts that differ are named before anything is trained. Every rank here is a host with a home folder of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from ds_fp8.cluster import watchdog
from ds_fp8.cluster.start_checks import Job, check_ranks, fingerprint
from tests.cluster.conftest import at_once, run_job

RAW = {"train_batch_size": 8, "train": {"steps": 5}}


def compare(rank: int, homes: str, change: str = "") -> int:
    """Compare ranks; `change` is what the second one has otherwise."""
    home = Path(homes) / (f"host{rank}" if change else "host0")
    os.environ.update(LOCAL_RANK="0", HOME=str(home))
    raw = {**RAW, "train": {"steps": 6}} if (change, rank) == ("configuration", 1) else RAW
    run_dir = home / "run" if change == "run" else Path(homes) / "shared" / "run"
    store = watchdog.start(60)
    print(check_ranks(store, Job(raw, Path("stage.json"), {"data.path": "~/text.jsonl"}, run_dir)), file=sys.stderr)
    if rank == 0:
        store.get("read")
    else:
        store.set("read", "")
    return 0


def make_homes(folder: Path) -> None:
    for host in ("host0", "host1"):
        (folder / host).mkdir()
        (folder / host / "text.jsonl").write_text('{"text": "The same on all."}\n' * 10_000)


@at_once
def test_hosts_that_are_alike_pass_and_nothing_is_left_behind(homes):
    make_homes(homes)
    ended = run_job(homes, 2, compare, str(homes))
    assert ended.codes == [0, 0], ended.output
    assert ended.output.count("2 ranks have the same versions, configuration, data and model files") == 2
    assert not (homes / "shared").exists()


@pytest.mark.parametrize("change", ["missing", "tail", "configuration", "run"])
@at_once
def test_the_host_that_differs_is_named_with_what_differs(homes, change):
    make_homes(homes)
    # The two folders are the same to the comparison: it names files by the path in the stage.
    file = homes / "host1/text.jsonl"
    if change == "missing":
        file.unlink()
    elif change == "tail":
        file.write_bytes(file.read_bytes()[:-4] + b'!"}\n')
    started = time.monotonic()
    ended = run_job(homes, 2, compare, str(homes), change)
    assert ended.codes == [2, 2], ended.output
    assert ended.output.count("error: ") == 1
    assert "Traceback" not in ended.output
    if change == "run":
        assert "the run folder is not shared" in ended.output
        assert "train.run_dir" in ended.output
    else:
        assert "(rank 1)" in ended.output
        row = "train.steps" if change == "configuration" else "data.path: ~/text.jsonl"
        assert row in ended.output
        assert ("missing" in ended.output) == (change == "missing")
    assert not list(homes.glob("*/run"))
    assert time.monotonic() - started < 60


def test_a_fingerprint_depends_on_size_head_and_tail(tmp_path):
    file = tmp_path / "data"
    prints = []
    for content in (b"a" * 300_000, b"a" * 299_999, b"b" + b"a" * 299_999, b"a" * 299_999 + b"b", b""):
        file.write_bytes(content)
        prints.append(fingerprint(file))
    assert len(set(prints)) == 5
    assert prints[0].startswith("300000 bytes, ")
    assert fingerprint(tmp_path / "nowhere") == "missing"
    assert "cannot be read" in fingerprint(tmp_path)
