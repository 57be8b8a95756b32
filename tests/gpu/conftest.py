"""Where each test of a GPU runs: those with ranks of their own in a few groups, whose processes they share."""

from __future__ import annotations

import os

import pytest
import torch

from ds_fp8.layers.attention.cudnn import load_cudnn

load_cudnn()  # before anything imports Transformer Engine

# Processes of tests that share pools of ranks: imports and CUDA contexts are paid once a group
GROUPS = int(os.environ.get("DS_FP8_GPU_GROUPS", "3"))
OF_THEIR_OWN = {"own_ranks", "pool", "rank"}


@pytest.hookimpl(tryfirst=True)  # before marks are selected by, and xdist reads the groups
def pytest_collection_modifyitems(items):
    shared = 0
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "gpu" not in item.keywords:
            continue
        if fixtures & OF_THEIR_OWN or item.get_closest_marker("ranks"):
            group = "ranks of their own"  # one after another: each starts several processes
        elif "gpu_ranks" in fixtures:
            group, shared = f"ranks{shared % GROUPS}", shared + 1
        else:
            continue
        item.add_marker(pytest.mark.ranks)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _memory_for_others():
    yield
    torch.cuda.empty_cache()


def pytest_runtest_logreport(report):
    """Print each failure when it happens: a limit may end the run before its summary."""
    if report.failed:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")][-8:]
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", *lines, sep="\n    ", flush=True)
