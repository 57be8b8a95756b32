"""README's program runs as it stands, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def block(language):
    """Return the only code block of a language."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return code


def test_the_program_trains_and_writes_a_folder_that_transformers_loads(tmp_path):
    (tmp_path / "ds_config.json").write_text(block("json"))
    (tmp_path / "train.py").write_text(block("python"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", run.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert "linears in FP8" in run.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.bfloat16)
    assert model.config.model_type == "qwen3"
