"""Nothing grows faster than the ranks: 256 of them, of which rank 0 is real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "bench"


def run(program: str, tmp_path: Path) -> object:
    """Return what a program prints, run where Triton compiles."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", f"import json, many_ranks; {program}"]
    done = subprocess.run(words, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernel_that_sums_over_ranks_does_not_grow_with_them(tmp_path):
    pytest.importorskip("triton")
    sizes = "[len(many_ranks.compiled(rows).asm['ptx']) for rows in (16, 64, 256)]"
    sixteen, sixty_four, most = run(f"print(json.dumps({sizes}))", tmp_path)
    assert max(sixty_four, most) < 1.1 * sixteen


@pytest.mark.slow
def test_rank_0_of_256_starts_and_trains(tmp_path):
    pytest.importorskip("triton")
    found = run("many_ranks.LAYERS = 2; print(json.dumps(many_ranks.measured(256)))", tmp_path)
    # This package's part of the start beside DeepSpeed's, by far.
    assert found["initialize"] - found["of it DeepSpeed"] < found["of it DeepSpeed"]
