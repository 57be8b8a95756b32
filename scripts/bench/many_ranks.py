"""Measure what grows with the ranks on the host, without a cluster: rank 0 of W ranks whose collectives do nothing.

    python scripts/bench/many_ranks.py                  ranks 8, 64 and 256
    python scripts/bench/many_ranks.py --ranks 8 1024

For every number of ranks, in a process of its own: seconds of ds_fp8.initialize beside DeepSpeed's part of it, of the
first micro-step and optimizer step, and of compiling the kernel that sums gradients over ranks, for a Hopper GPU, which
needs none. Eight ranks a host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

RANKS_PER_HOST = 8
LAYERS, HIDDEN = 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    keys = (
        "initialize",
        "of it DeepSpeed",
        "first micro-step",
        "first step",
        "compile sum of flat rows",
        "of two levels",
    )
    print("| ranks |", " | ".join(f"{key}, s" for key in keys), "|")
    print("|---" * (len(keys) + 1), "|", sep="")
    for ranks in options.ranks:
        found = in_process(ranks)
        print(f"| {ranks} |", " | ".join(f"{found[key]:.2f}" for key in keys), "|", flush=True)


def in_process(ranks: int) -> dict[str, float]:
    """Return the seconds of `measured`, in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "DS_ACCELERATOR": "cpu"}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, __file__, "--one", str(ranks)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def seconds(function: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[float, Any]:
    before = time.perf_counter()
    result = function(*args, **keywords)
    return time.perf_counter() - before, result


def measured(ranks: int) -> dict[str, float]:
    """Return the seconds of each part on rank 0 of so many."""
    import torch
    import transformers

    join(ranks)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        vocab_size=256,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    engine, total, inside = initialized(model, ranks)
    tokens = torch.randint(0, 256, (1, 128))

    def micro_step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)

    forward_and_backward, _ = seconds(micro_step)
    step, _ = seconds(engine.step)
    compiled(1)  # Triton's own start
    return {
        "initialize": total,
        "of it DeepSpeed": inside,
        "first micro-step": forward_and_backward,
        "first step": step,
        "compile sum of flat rows": seconds(compiled, ranks)[0],
        "of two levels": seconds(compiled, max(1, ranks // RANKS_PER_HOST))[0],
    }


def join(ranks: int) -> None:
    """Make this process rank 0 of `ranks`, with torch's fake process group."""
    import deepspeed
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ds_fp8.zero.seams import disable_shm_build

    disable_shm_build()
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    deepspeed.init_distributed("fake", verbose=False)

    def all_gather_object(objects: list, mine: Any, group: object = None) -> None:
        objects[:] = [mine] * len(objects)

    deepspeed.comm.all_gather_object = all_gather_object


def initialized(model: Any, ranks: int) -> tuple[Any, float, float]:
    """Return the engine, the seconds of ds_fp8.initialize, and those of deepspeed.initialize within it."""
    import importlib

    from ds_fp8.zero.hosts import Hosts

    ours = importlib.import_module("ds_fp8.engine.initialize")
    ours.find_hosts = lambda: Hosts(tuple(rank // RANKS_PER_HOST for rank in range(ranks)))
    stock, inside = ours._deepspeed_initialize, []

    def timed(*args: Any) -> Any:
        spent, result = seconds(stock, *args)
        inside.append(spent)
        return result

    ours._deepspeed_initialize = timed
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        "fp8": {"preset": "infir2"},
    }
    total, result = seconds(ours.initialize, model=model, model_parameters=list(model.parameters()), config=config)
    return result[0], total, inside[0]


def compiled(rows: int) -> Any:
    """Return the sum over so many rows, compiled by Triton for a Hopper GPU."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ds_fp8.config.formats import BLOCK
    from ds_fp8.zero import gradient_sum_triton as kernel
    from ds_fp8.zero.message import SPAN

    arguments = {
        **{"message": "*u8", "owner": "*i32", "table": "*i64", "gradient": "*fp32", "squares": "*fp64"},
        **{"codes_in_row": "i32", "row_bytes": "i32", "divisor": "i32"},
    }
    constants = {
        **{"ROWS": rows, "LOOPED": kernel.looped_rows(rows), "UNROLL": kernel.UNROLL, "GROUPS": SPAN // BLOCK},
        **{"EXACT": True, "ACCUMULATE": False, "ALIGNED": True, "DTYPE": tl.float8e4nv},
    }
    names = kernel._add_rows.arg_names
    source = ASTSource(
        kernel._add_rows,
        {name: arguments.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in arguments if name != "divisor"},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS})


if __name__ == "__main__":
    main()
