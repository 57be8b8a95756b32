"""A rank that trains with graphs of "auto", as lists of operations, beside Python: losses, hosts and what was done."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

from ds_fp8.zero.deepspeed.methods import disable_shm_build
from tests.engine.graphs_in_python import Graphs, engine_of

STEPS = 6


def losses(graphs: bool) -> tuple[list[float], list[str], str]:
    """Losses of some steps, what the graphs did, and the hosts of the report."""
    torch.manual_seed(0)
    engine, _ = engine_of(fp8={"graph": "auto"})
    log: list[str] = []
    if graphs:
        engine.fp8.graphs = Graphs(engine, auto=True)
        log = engine.fp8.graphs.log
    found = []
    for step in range(STEPS):
        tokens = (torch.arange(64) * 7 + 10 * step + int(os.environ["RANK"]))[None] % 128
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    hosts, done = engine.fp8.report["ranks_of_hosts"], list(log)
    engine.destroy()
    return found, done, hosts


if __name__ == "__main__":
    disable_shm_build()
    deepspeed.init_distributed("gloo")
    result = {"eager": losses(False), "graphs": losses(True)}
    Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
