"""What the ranks of a run tell each other: their data before they train, and that one was asked to stop."""

import signal
import subprocess
import time

import psutil
import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.train.processes import Interrupt, Interrupted, check_same_everywhere
from tests.ranks import on_ranks


def compared(other: dict) -> str:
    """Compare facts of which the second rank has others; returns what the error says, empty without one."""
    facts = {"tokenizer": "a", "train": {"rows": 12, "tokens": 3000}}
    try:
        check_same_everywhere(
            "the data", facts | other if dist.get_rank() else facts, key="data.path", remedy="copy it"
        )
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"train": {"tokens": 3000, "rows": 12}}, ""),
        ({"train": {"rows": 11, "tokens": 3000}}, "train is {'rows': 11, 'tokens': 3000}, not {'rows': 12"),
        ({"validation": {"rows": 1}}, "validation is {'rows': 1}, not None"),
    ],
)
def test_a_rank_with_other_facts_is_named_on_all(other, words, ranks):
    for said in ranks(2, compared, other):
        assert words in said
        assert bool(said) == bool(words)
        assert ("(rank 1) the data differs from" in said) == bool(words)


@pytest.mark.parametrize("how", ["signal", "command that ended", "command that was waited for"])
@on_ranks(2)
def test_all_ranks_stop_where_one_was_asked_to(how):
    interrupt = Interrupt(torch.device("cpu"))
    try:
        interrupt.check()
        if dist.get_rank() == 1 and how == "signal":
            signal.raise_signal(signal.SIGTERM)
        elif dist.get_rank() == 1:
            command = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            interrupt._command = psutil.Process(command.pid)
            command.stdin.close()
            assert command.stdout.read() == b""  # it closes this as it ends
            while "waited" not in how and interrupt._command.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            if "waited" in how:
                command.wait()
        for _ in range(2):
            with pytest.raises(Interrupted):
                interrupt.check()
    finally:
        interrupt.end()
