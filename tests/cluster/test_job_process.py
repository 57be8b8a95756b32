"""The process of a job on one host: stopped with its ranks, started again after a loss, options that do nothing."""

import argparse
import ctypes
import os
import signal
import sys
import threading
import time

import psutil
import pytest

from ds_fp8 import cli
from ds_fp8.cluster import local_launch, watchdog
from ds_fp8.cluster.exit_codes import EXIT_INTERRUPTED, EXIT_LOST
from ds_fp8.cluster.job_process import meaning, run_job, with_restarts
from ds_fp8.cluster.launch_options import add_launch_options, check_launch_options
from ds_fp8.cluster.launcher import Launch, attempt_options, launch
from ds_fp8.commands.train import main as train
from ds_fp8.config.errors import UserError

PARENT = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-S", *sys.argv[2:]]).returncode)
"""
RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(0.3)
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "pid").write_text(str(os.getpid()))
(folder / "ready").touch()
time.sleep(60)
"""


@pytest.fixture
def a_tree(tmp_path, monkeypatch):
    """Let `train_here` start a `deepspeed`, a launcher below it and a rank, none of which does more than it must."""
    for name, text in {"parent": PARENT, "rank": RANK}.items():
        (tmp_path / f"{name}.py").write_text(text)
    parent, launcher = str(tmp_path / "parent.py"), local_launch._LAUNCH
    command = [sys.executable, "-S", parent, "deepspeed", parent, launcher, str(tmp_path / "rank.py"), str(tmp_path)]
    monkeypatch.setattr(local_launch, "deepspeed_command", lambda ranks: command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    yield tmp_path
    signal.signal(signal.SIGINT, before)
    ctypes.CDLL(None).prctl(local_launch._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def once(condition, action):
    """Act in another thread when the condition holds."""

    def wait():
        while not condition():
            time.sleep(0.02)
        action()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_ranks_save(a_tree, number):
    before = signal.getsignal(number)
    once((a_tree / "ready").exists, lambda: os.kill(os.getpid(), number))
    assert local_launch.train_here([], ranks=2) == EXIT_INTERRUPTED
    assert (a_tree / "saved").exists()
    assert signal.getsignal(number) is before


def test_ranks_that_lost_deepspeed_are_waited_for(a_tree):
    """As where a signal reaches all processes of a group at once, and `deepspeed` leaves before its ranks."""

    def stop():
        rank = psutil.Process(int((a_tree / "pid").read_text()))
        rank.parent().parent().kill()
        time.sleep(0.1)
        rank.terminate()

    once((a_tree / "ready").exists, stop)
    assert local_launch.train_here([], ranks=2) == EXIT_LOST
    assert (a_tree / "saved").exists()


def test_a_job_that_is_done_is_done_whatever_came_at_its_end():
    stopped = []
    program = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print(flush=True); import time; time.sleep(.3)"
    )
    others = set(psutil.Process().children())  # the ranks of other tests
    once(lambda: set(psutil.Process().children()) - others, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_job([sys.executable, "-S", "-c", program], stop=stopped.append) == 0
    assert len(stopped) == 1


@pytest.mark.parametrize(
    ("code", "means"), [(0, 0), (1, 1), (2, 2), (75, 75), (143, 143), (-9, 75), (247, 75), (255, 75), (127, 1)]
)
def test_exit_codes_of_deepspeed(code, means):
    assert meaning(code) == means


def test_a_lost_job_is_started_again_and_no_other():
    attempts = []

    def start(codes):
        attempts.clear()
        return lambda attempt: attempts.append(attempt) or codes[attempt]

    assert with_restarts(start([75, 75, 0]), 3) == 0
    assert attempts == [0, 1, 2]
    assert with_restarts(start([75, 75]), 1) == 75
    assert with_restarts(start([143]), 3) == 143
    assert with_restarts(start([1]), 3) == 1
    with pytest.raises(UserError, match="must be at least 0, got -1"):
        with_restarts(start([0]), -1)


def test_a_restart_of_local_ranks(monkeypatch):
    codes = iter([75, 0])
    monkeypatch.setattr(local_launch, "run_job", lambda command, **_: next(codes))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", "quickstart/cpt.json", "--gpus", "1", "--max-restarts", "1"])
    assert train() == 0
    assert next(codes, None) is None


@pytest.mark.parametrize(
    ("given", "rank", "refused"),
    [
        (["--min-hosts", "1"], None, "--min-hosts"),
        (["--launcher-options", "--ssh_port 22"], None, "--launcher-options"),
        (["--gpus", "2", "--hostfile", "hosts"], None, "--gpus"),
        (["--max-restarts", "1"], "0", "--max-restarts"),
        (["--hostfile", "hosts"], "0", "--hostfile"),
        (["--max-restarts", "-1", "--gpus", "2"], None, "--max-restarts"),
    ],
)
def test_options_that_would_do_nothing_are_refused(given, rank, refused, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["train", "quickstart/cpt.json", *given])
    with pytest.raises(UserError) as caught:
        train()
    assert caught.value.key == refused
    assert caught.value.remedy


def test_restarts_need_hosts_where_a_script_has_no_other(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    parser = argparse.ArgumentParser()
    add_launch_options(parser)
    with pytest.raises(UserError, match="--max-restarts"):
        check_launch_options(parser.parse_args(["--max-restarts", "1"]))
    check_launch_options(parser.parse_args([]))


@pytest.mark.parametrize(
    "options", ["--master_addr a --master_port 29777 --x y", "--master_addr=a --master_port=29777 --x y"]
)
def test_launcher_options_in_both_spellings(options):
    given = options.split()
    assert attempt_options(given, 1, first_is_there=True) == given
    lost = attempt_options(given, 1, first_is_there=False)
    assert lost == given[-len(lost) :]
    assert "master_addr" not in " ".join(lost)
    assert "29777" in " ".join(lost)


def test_an_attempt_has_a_port_of_its_own():
    assert attempt_options(["--ssh_port", "22"], 2, True) == ["--ssh_port", "22", "--master_port", "29502"]


@pytest.mark.parametrize("fewest", [0, -1, 3])
def test_hosts_that_are_to_be_left_are_some_of_those_there(fewest, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda program: program)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    with pytest.raises(UserError) as caught:
        launch(tmp_path / "hosts", Launch(["x"], min_hosts=fewest))
    assert caught.value.key == "--min-hosts"


def test_a_rank_under_any_launcher_says_that_it_leaves(monkeypatch):
    left = []
    monkeypatch.setattr(watchdog, "leave", lambda: left.append(True))
    monkeypatch.setattr(cli, "main", lambda: 0)
    for command, leaves in (("check", []), ("train", [True])):
        monkeypatch.setattr(sys, "argv", ["ds-fp8", command])
        with pytest.raises(SystemExit) as stopped:
            cli.entry()
        assert (stopped.value.code, left) == (0, leaves)
