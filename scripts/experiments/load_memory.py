"""How much host memory do all ranks together take while a stage loads its model?

    torchrun --nproc_per_node 4 scripts/experiments/load_memory.py --folder /tmp/model \
        [--shape ds_configs/sweeps/shapes/qwen2.5_7b.json] [--layers N] [--drawn] [--every-rank] [--json FILE]

Answer (2026-11-22, four ranks, all 28 layers of 7B): 1.17 times the model's bytes in BF16. With one layer 1.48, and
2.90 where every rank loads the whole model.

A model of the shape, with random weights in BF16, is written to the folder shard by shard, loaded as a stage loads it,
up to the point where its optimizer would be made, and deleted. --drawn: weights drawn from the seed, and no folder.
--every-rank: the comparison, every rank loading the whole model before it is sharded.

What counts is the processes' own memory: Pss_Anon and Pss_Shmem of /proc/PID/smaps_rollup, where pages that several
processes share count once, sampled of all ranks at once and less what they held before. Pages of the model's files that
are mapped are the kernel's cache, which it can drop; they stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401  (for `common` and its neighbours)
import deepspeed
import torch
from common import banner, print_banner, print_table, write_json
from deepspeed import comm as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from zero_ranks import is_first, join_ranks, leave_ranks

from ds_fp8.config.files import read_json
from ds_fp8.train import Stage, load_stage
from ds_fp8.train.model import build_model, build_sharded_model
from ds_fp8.zero.seams import full_shape

SHARD_BYTES = 2 << 30
INTERVAL = 0.005
"""Seconds between samples."""


def host_bytes(processes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that processes hold together: (their own, mapped from files)."""
    own = mapped = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
            name, kilobytes = line.split(":")[0], int(line.split()[1])
            own += 1024 * kilobytes * (name in ("Pss_Anon", "Pss_Shmem"))
            mapped += 1024 * kilobytes * (name == "Pss_File")
    return own, mapped


def peak_of_all_ranks(work: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Do `work` on all ranks. Collective.

    Returns:
        Its result, and how far the ranks' memory together rose above what it was before: [their own, mapped files],
        in bytes.
    """
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    before, peaks, done = host_bytes(processes), [0, 0], threading.Event()

    def sample() -> None:
        while True:
            ended = done.wait(INTERVAL)
            now = host_bytes(processes)
            peaks[:] = [max(peak, n - b) for peak, n, b in zip(peaks, now, before, strict=True)]
            if ended:
                return

    thread = threading.Thread(target=sample, daemon=True)
    dist.barrier()  # all have measured what was before
    if is_first():
        thread.start()
    result = work()
    dist.barrier()
    if is_first():
        done.set()
        thread.join()
    dist.broadcast_object_list(peaks, 0)
    return result, peaks


def write_model(config: PretrainedConfig, folder: Path) -> None:
    """Write a model with random weights in BF16, one file of SHARD_BYTES in memory at a time."""
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    numbers = (0.02 * torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))).bfloat16()
    files, part = {}, {}
    for name, shape in shapes.items():
        part[name] = torch.empty(shape.shape, dtype=torch.bfloat16)
        for some in part[name].view(-1).split(len(numbers)):
            some.copy_(numbers[: len(some)])
        if sum(tensor.nbytes for tensor in part.values()) >= SHARD_BYTES or len(files) + len(part) == len(shapes):
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(part, file)
            part.clear()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def load_on_every_rank(stage: Stage, config: PretrainedConfig) -> torch.nn.Module:
    """Build the whole model on every rank, and shard it then."""
    model = build_model(stage, config)
    deepspeed.zero.Init(module=model, config_dict_or_path=stage.raw)
    return model


def measure(stage: Stage, config: PretrainedConfig, every_rank: bool) -> dict[str, float]:
    """Return figures of one load: model_bytes, own and mapped (peaks in multiples of them), seconds. Collective."""
    started = time.perf_counter()
    load = load_on_every_rank if every_rank else build_sharded_model
    model, (own, mapped) = peak_of_all_ranks(lambda: load(stage, config))
    seconds = time.perf_counter() - started
    model_bytes = 2 * sum(full_shape(parameter).numel() for parameter in model.parameters())
    return {"model_bytes": model_bytes, "own": own / model_bytes, "mapped": mapped / model_bytes, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for the model")
    parser.add_argument("--shape", type=Path, default=Path("ds_configs/sweeps/shapes/qwen2.5_7b.json"))
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the shape has")
    parser.add_argument("--drawn", action="store_true", help="no stored weights")
    parser.add_argument("--every-rank", action="store_true", help="every rank loads the whole model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    join_ranks()
    values = dict(read_json(options.shape)["model"]["config"])
    values["num_hidden_layers"] = options.layers or values["num_hidden_layers"]
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if not options.drawn and is_first():
        write_model(config, options.folder)
    dist.barrier()
    try:
        stored = ["model.config=null", f"model.path={options.folder}"]
        stage = load_stage(options.shape, [] if options.drawn else stored)
        figures = measure(stage, config, options.every_rank)
    finally:
        if not options.drawn and is_first():
            shutil.rmtree(options.folder)
    if is_first():
        facts = banner() | {"ranks": str(dist.get_world_size()), "shape": str(options.shape)}
        print_banner(facts)
        row = [
            options.shape.stem,
            values["num_hidden_layers"],
            "drawn" if options.drawn else "stored",
            "every" if options.every_rank else "first",
        ]
        cells = [f"{figures['model_bytes'] / 2**30:.2f}", f"{figures['own']:.2f}", f"{figures['mapped']:.2f}"]
        columns = ["shape", "layers", "weights", "read by rank", "GiB", "own memory", "mapped files", "seconds"]
        print_table("multiples of the model's BF16 bytes", columns, [[*row, *cells, f"{figures['seconds']:.0f}"]])
        if options.json:
            write_json(options.json, facts=facts, figures=figures)
    leave_ranks()


if __name__ == "__main__":
    main()
