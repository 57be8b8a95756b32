"""Where each test of a GPU runs: those with ranks of their own in a few groups, whose processes they share."""

from __future__ import annotations

import os

import pytest
import torch

from ds_fp8.layers.attention.cudnn import load_cudnn

load_cudnn()  # before anything imports Transformer Engine

GROUPS = int(os.environ.get("DS_FP8_GPU_GROUPS", "3"))
"""Processes of tests that have ranks: each keeps its pools, so that imports and CUDA contexts are paid once a group."""
WITH_RANKS = {"gpu_ranks", "own_ranks", "pool", "rank"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    on_gpus = [item for item in items if "gpu" in item.keywords]
    with_ranks = [item for item in on_gpus if WITH_RANKS.intersection(getattr(item, "fixturenames", ()))]
    for number, item in enumerate(with_ranks):
        item.add_marker(pytest.mark.xdist_group(f"ranks{number % GROUPS}"))


@pytest.fixture(autouse=True)
def _memory_for_others():
    yield
    torch.cuda.empty_cache()


def pytest_runtest_logreport(report):
    """Print each failure when it happens: a limit may end the run before its summary."""
    if report.failed:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")][-8:]
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", *lines, sep="\n    ", flush=True)
