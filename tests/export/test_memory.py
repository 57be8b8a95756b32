"""Memory of an export: that of a file of weights and a few tensors, not of the model."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.export import checkpoints, export_checkpoint
from tests.export.servers import assert_served

SUB_GROUP = 1_000_000_000  # Elements of a part of the optimizer's state, DeepSpeed's default
SAMPLE_SECONDS = 0.02


def write_checkpoint(folder: Path, config: PretrainedConfig, ranks: int) -> int:
    """Write the files of a ZeRO-3 checkpoint, full of zeros and sparse; return how many parameters the model has."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    groups = list(_sub_groups([math.ceil(shape.numel() / ranks) for shape in shapes.values()], SUB_GROUP // ranks))
    for rank in range(ranks):
        states = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [shapes],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "ds_version": "0.19.8",
        }
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            moments = {i: {key: torch.empty(n) for key in ("exp_avg", "exp_avg_sq")} for i, n in enumerate(groups)}
            optimizer = {
                "zero_stage": 3,
                "partition_count": ranks,
                "optimizer_state_dict": {"state": moments, "param_groups": []},
                "fp32_flat_groups": [torch.empty(n) for n in groups],
            }
            states = {"optimizer_state_dict": optimizer}
            torch.save(states, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return sum(shape.numel() for shape in shapes.values())


def _sub_groups(sizes: list[int], limit: int) -> Iterator[int]:
    """Yield the sizes of the flat tensors: whole weights, until a tensor has `limit` elements or more."""
    total = 0
    for size in sizes:
        total += size
        if total >= limit:
            yield total
            total = 0
    if total:
        yield total


def growth_during(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process exceeds, at most, that of before."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def sample() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    work()
    done.set()
    thread.join()
    return peak - before


def exported(folder: Path, layers: int) -> tuple[int, int]:
    """Return (growth of the peak of resident memory, bytes of the FP32 masters) of an export."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4096, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **shape, **heads, tie_word_embeddings=False)
    checkpoint, out = folder / f"{layers}/checkpoints/step_1", folder / f"{layers}/exported"
    parameters, fp8 = write_checkpoint(checkpoint, config, ranks=2), parse_fp8({"fp8": {}})
    growth = growth_during(lambda: export_checkpoint(checkpoint, out, config, fp8, shard_bytes=8 << 20))
    assert_served(out)
    return growth, 4 * parameters


def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAPPED_BYTES", 8 << 20)
    exported(tmp_path, 1)  # what the first export of a process imports and caches
    growth, masters = exported(tmp_path, 32)
    assert masters > 400 << 20
    # Two files of weights, the largest tensor (8 MiB in FP32) several times, and what malloc keeps.
    assert growth < 120 << 20
