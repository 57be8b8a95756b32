"""Jobs on one host and on many: stopped with their ranks, started again after a loss; hostfiles; launch options."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from deepspeed.launcher.runner import fetch_hostfile
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8 import cli
from ds_fp8.cluster import guardian, launcher, watchdog
from ds_fp8.cluster.entry import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_USER_ERROR, rank_entry
from ds_fp8.cluster.hosts import read_hostfile
from ds_fp8.commands.train import main as train
from ds_fp8.config.errors import UserError
from ds_fp8.train import processes
from tests.refusals import refused

# ---------------------------------------------------------------- ranks of this host

RANK = """
import os, pathlib, signal, sys, time
folder, deed = pathlib.Path(sys.argv[1]), sys.argv[2:]
rank = os.environ["RANK"]
(folder / ("environment" + rank)).write_text(" ".join(os.environ[name] for name in (
    "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_FP8_STARTED_BY")))
def save(*_):
    time.sleep(0.3)
    (folder / ("saved" + rank)).touch()
    sys.exit(0 if "finish" in deed else 143)
signal.signal(signal.SIGTERM, save)
(folder / ("ready" + rank)).touch()
if "die" in deed and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if deed and deed[0].isdigit():
    sys.exit(int(deed[int(rank)]))
time.sleep(60)
"""


@pytest.fixture
def ranks_here(tmp_path, monkeypatch):
    """`ranks_here(*deeds)`: run two ranks that do no more than they must, in the place of those that train."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setattr(launcher, "TRAIN", "rank")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Ignored where the tests run in the background, or under nohup.
    asking = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in asking.items()}
    yield lambda *deeds: launcher.train_here([str(tmp_path), *map(str, deeds)], 2)
    for number, handler in before.items():
        signal.signal(number, handler)


def once_ready(folder, action):
    """Act in another thread once both ranks are there."""

    def wait():
        while not all((folder / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        action()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("deeds", "code"), [((), EXIT_INTERRUPTED), (("finish",), 0)])
def test_a_signal_lets_all_ranks_save(ranks_here, tmp_path, number, deeds, code):
    before = signal.getsignal(number)
    once_ready(tmp_path, lambda: os.kill(os.getpid(), number))
    assert ranks_here(*deeds) == code
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))
    assert signal.getsignal(number) is before
    told = [(tmp_path / f"environment{rank}").read_text().split() for rank in (0, 1)]
    assert [words[:4] for words in told] == [[str(rank), "2", "2", "127.0.0.1"] for rank in (0, 1)]
    assert told[0][4:] == [told[1][4], str(os.getpid())]


@pytest.mark.parametrize(
    ("codes", "found"),
    [((0, 0), 0), ((2, 2), EXIT_USER_ERROR), ((1, 75), EXIT_FAILED), ((75, 0), EXIT_LOST), ((143, 143), 143)],
)
def test_the_code_of_a_job_is_that_of_its_ranks(ranks_here, codes, found):
    assert ranks_here(*codes) == found


def test_ranks_that_outlive_a_dead_one_are_killed(ranks_here, monkeypatch):
    """Guardians end them; this is for ranks that have none yet."""
    monkeypatch.setattr(launcher, "_OTHERS_END", 0.5)
    started = time.monotonic()
    assert ranks_here("die") == EXIT_LOST
    assert time.monotonic() - started < 30


def test_ranks_know_the_command_that_started_them(monkeypatch):
    """They watch whether it has ended."""
    parent = psutil.Process().parent()
    assert processes.command_of_rank() is None
    monkeypatch.setenv(launcher.STARTED_BY, str(parent.pid))
    assert processes.command_of_rank() == parent
    for command in (["-m", "deepspeed.launcher.runner"], ["/usr/bin/deepspeed", "--num_gpus", "1"]):
        idle = "import time; print(flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", idle, *command], stdout=subprocess.PIPE) as started:
            started.stdout.readline()  # until then it may not be the command yet
            found = processes._runs(psutil.Process(started.pid), "deepspeed", "deepspeed.launcher.runner")
            started.kill()
        assert found


def test_exit_codes_of_processes_and_of_deepspeed():
    means = {0: 0, 1: 1, 2: 2, 75: 75, 143: 143, -9: 75, 247: 75, 255: 75, 127: 1}
    assert {code: launcher.meaning(code) for code in means} == means


@pytest.mark.parametrize(
    ("codes", "restarts", "found", "attempts"),
    [([75, 75, 0], 3, 0, 3), ([75, 75], 1, 75, 2), ([143], 3, 143, 1), ([1], 3, 1, 1)],
)
def test_a_lost_job_is_started_again_and_no_other(codes, restarts, found, attempts, monkeypatch):
    started = []
    monkeypatch.setattr(launcher, "run_job", lambda jobs: started.append(jobs) or codes[len(started) - 1])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", "quickstart/cpt.json", "--gpus", "1", "--max-restarts", str(restarts)])
    assert train() == found
    assert len(started) == attempts


def test_a_rank_under_any_launcher_says_that_it_leaves(monkeypatch):
    left = []
    monkeypatch.setattr(watchdog, "leave", lambda: left.append(True))
    monkeypatch.setattr(cli, "main", lambda: 0)
    for command, leaves in (("check", []), ("train", [True])):
        monkeypatch.setattr(sys, "argv", ["ds-fp8", command])
        with pytest.raises(SystemExit) as stopped:
            cli.entry()
        assert (stopped.value.code, left) == (0, leaves)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.distributed.DistBackendError("NCCL error"), guardian.LOST),
        (BrokenPipeError(), guardian.LOST),
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), guardian.LOST),
        (RuntimeError("shapes do not match"), guardian.ERROR),
        (torch.OutOfMemoryError("NCCL"), guardian.ERROR),
    ],
)
def test_a_rank_says_what_it_failed_of(error, kind, monkeypatch):
    said = []
    monkeypatch.setattr(watchdog, "fail", lambda *of: said.append(of[0]))

    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        rank_entry(main)
    assert (said, ended.value.code) == ([kind], EXIT_FAILED)


# ---------------------------------------------------------------- launch options


@pytest.mark.parametrize(
    ("given", "rank", "option"),
    [
        (["--launcher-options", "--ssh_port 22"], None, "--launcher-options"),
        (["--gpus", "2", "--hostfile", "hosts"], None, "--gpus"),
        (["--max-restarts", "1"], "0", "--max-restarts"),
        (["--hostfile", "hosts"], "0", "--hostfile"),
        (["--max-restarts", "-1", "--gpus", "2"], None, "--max-restarts"),
    ],
)
def test_options_that_would_do_nothing_are_refused(given, rank, option, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["train", "quickstart/cpt.json", *given])
    with refused(key=option):
        train()


def test_hosts_are_asked_through_the_ssh_that_pdsh_calls(tmp_path, monkeypatch):
    """Programs in place of ssh, which knows hosts by one port and key, and of pdsh, which calls it for `true` alone."""
    known = "-i key -o BatchMode=yes -o ConnectTimeout=10 -p 2222 one true"
    programs = {
        "ssh": f'test "$*" = "{known}" || {{ echo "one: refused" >&2; false; }}',
        "pdsh": 'for last; do true; done; if [ "$last" = true ]; then ssh $PDSH_SSH_ARGS_APPEND one true; '
        f'else echo "$PDSH_SSH_ARGS_APPEND" > {tmp_path}/arguments; fi',
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-i key")
    (tmp_path / "hosts").write_text("one slots=1\n")
    options = ["--ssh_port", "2222", "--master_addr", "10.0.0.1"]
    assert launcher.launch(tmp_path / "hosts", ["--module", "none"], options) == 0
    arguments = (tmp_path / "arguments").read_text().split()
    assert [arguments[:2], arguments[-2:]] == [["-i", "key"], ["-p", "2222"]]
    with refused("no ssh to one: refused") as caught:
        launcher.launch(tmp_path / "hosts", ["--module", "none"], ["--ssh_port=22"])
    assert "-p 22 HOST true" in caught.value.remedy


def test_a_job_on_hosts_that_is_started_again_has_another_port(tmp_path, monkeypatch):
    """The last attempt's may still be in use."""
    ports = []
    monkeypatch.setattr(launcher, "_SETTLE", 0)
    monkeypatch.setattr(launcher.shutil, "which", lambda program: program)
    monkeypatch.setattr(launcher.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))

    def lost(jobs):
        command = jobs[0][0]
        ports.append(command[command.index("--master_port") + 1])
        return EXIT_LOST

    monkeypatch.setattr(launcher, "run_job", lost)
    (tmp_path / "hosts").write_text("one slots=1\n")
    assert launcher.launch(tmp_path / "hosts", ["--module", "none"], max_restarts=2) == EXIT_LOST
    assert ports == ["29500", "29501", "29502"]


def test_restarts_need_hosts_where_a_script_has_no_other(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    parser = argparse.ArgumentParser()
    launcher.add_launch_options(parser)
    launcher.check_launch_options(parser.parse_args([]))
    with refused("--max-restarts"):
        launcher.check_launch_options(parser.parse_args(["--max-restarts", "1"]))


# ---------------------------------------------------------------- hostfiles


def test_hosts_come_in_the_order_of_their_lines(tmp_path):
    text = "# the cluster\nnode1 slots=8\n\n  node2\tslots=4   # four of them broke\nadmin@10.0.0.3 slots=8\r\n"
    (tmp_path / "hosts").write_text(text)
    assert list(read_hostfile(tmp_path / "hosts").items()) == [("node1", 8), ("node2", 4), ("admin@10.0.0.3", 8)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# node1 slots=8\n", "lists no hosts"),
        ("node1 slots=8\nnode2\n", "line 2: 'node2' is not NAME slots=N"),
        ("node1 8", "line 1: 'node1 8' is not"),
        ("node1 slots=8 max_slots=8", "is not NAME"),
        ("node1 slots=0", "is not NAME"),
        ("node1 slots=1" + "0" * 5000, "is not NAME"),
        ("node1 slots=٣", "is not NAME"),
        ("node1 slots=8\nnode1 slots=4", "line 2: 'node1 slots=4' is a second line of this host"),
        ("node[1-4] slots=8", "is not NAME"),
        ("node1,node2 slots=8", "is not NAME"),
        ("-oProxyCommand=x slots=8", "is not NAME"),
        ("$(reboot) slots=8", "is not NAME"),
        ("slots=8", "is not NAME"),
        ("ho\x00st slots=8", "is not NAME"),
    ],
)
def test_a_mistake_is_named_with_its_line(text, problem, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with refused(problem) as error:
        read_hostfile(file)
    assert error.value.file == file
    assert error.value.remedy


def test_what_is_no_readable_text_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00n")
    for name in ("missing", "binary", ".", "nul\0"):
        with pytest.raises(UserError):
            read_hostfile(tmp_path / name)


LINES = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"\A[a-z0-9.@:-]{1,12}[ \t]{1,2}slots=[0-9]{1,4}[ \t]*\Z"),
    st.sampled_from(["node1 slots=8", "node2 slots=8", "node1", "slots=8", "# x", "", "n  slots = 8", "n slots=8x"]),
)
HOSTFILES = st.one_of(st.binary(max_size=200), st.lists(LINES, max_size=6).map(lambda lines: "\n".join(lines).encode()))


@settings(max_examples=100, deadline=1000, derandomize=True)
@given(data=HOSTFILES)
def test_any_hostfile_is_read_as_deepspeed_does_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "hostfile"
    file.write_bytes(data)
    try:
        hosts = read_hostfile(file)
    except UserError:
        return
    assert dict(fetch_hostfile(str(file))) == hosts
