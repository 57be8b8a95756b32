"""pytest plugin of deepspeed_tests.py: FP8 in DeepSpeed's own tests, and their outcomes as JSON lines.

DeepSpeed's tests run on ranks that a fork server makes, so the server imports this module too. Where the environment
variable DS_FP8 holds an "fp8" section, every configuration without one gets it.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
from pathlib import Path

import pytest

import ds_fp8
from ds_fp8.integrations.install import VARIABLE
from ds_fp8.zero.seams import disable_shm_build

OUTCOMES, SECONDS = "DEEPSPEED_TESTS_OUTCOMES", "DEEPSPEED_TESTS_SECONDS"
"""Environment variables: the file that outcomes are appended to, and the time limit of a test."""

multiprocessing.set_forkserver_preload([__name__])
disable_shm_build()
if VARIABLE in os.environ:
    ds_fp8.install()


def _append(**record: str) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    _append(test=nodeid, outcome="hung", message="")  # unless another outcome follows
    # A rank that failed leaves the others in a collective, and DeepSpeed's own limit waits for them again.
    faulthandler.dump_traceback_later(float(os.environ[SECONDS]), exit=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        _append(test=report.nodeid, outcome=report.outcome, message=message)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish() -> None:
    _append(test="", outcome="finished", message="")
