"""A tiny stage, and a way to run it as a user would."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fp8.cluster.hosts import free_port
from tests.train.tiny_stage import TINY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny() -> dict:
    return copy.deepcopy(TINY)


@pytest.fixture
def write(tmp_path):
    """Write a configuration, given as a mapping or as text, to a file in a folder of the test's own."""

    def to_file(raw: dict | str, name: str = "stage.json") -> Path:
        file = tmp_path / name
        file.write_text(raw if isinstance(raw, str) else json.dumps(raw, indent=2))
        return file

    return to_file


@pytest.fixture
def launch(tmp_path):
    """Start `deepspeed scripts/train.py` on CPU ranks in the test's folder, or without the launcher for 0 ranks."""
    started: list[subprocess.Popen] = []

    def start(file: Path, *overrides: str, ranks: int = 2) -> subprocess.Popen:
        script = [str(ROOT / "scripts" / "train.py"), "--deepspeed_config", str(file)]
        script += [part for override in overrides for part in ("--set", override)]
        command = [sys.executable]
        if ranks:
            command += [str(Path(sys.executable).with_name("deepspeed"))]
            command += ["--num_gpus", str(ranks), "--master_port", str(free_port())]
        ours = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [*command, *script],
            cwd=tmp_path,
            env={**os.environ, **ours, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
