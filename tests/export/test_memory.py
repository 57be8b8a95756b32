"""Memory of an export: that of a file of weights and a few tensors, not of the model."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.export import checkpoints, export_checkpoint
from tests.export.servers import assert_served

MIB = 1 / 1024
"""In GiB."""


SUB_GROUP = 1_000_000_000
"""Elements of a part of the optimizer's state, DeepSpeed's default."""
GIB = 1 << 30
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


def _memory() -> dict[str, float]:
    """Return the memory of this process, in GiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[key].split()[0]) for name, key in (("anonymous", "RssAnon"), ("resident", "VmRSS"))}
    return {name: value * 1024 / GIB for name, value in kib.items()}


class Peak:
    """Samples the memory of this process, in GiB. A context manager.

    Attributes:
        peak: The most there was, "anonymous" and "resident".
        growth: By how much that exceeds what there was at the beginning.
    """

    def __enter__(self) -> Peak:
        self._before = self.peak = _memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> dict[str, float]:
        return {name: value - self._before[name] for name, value in self.peak.items()}

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.peak = {name: max(self.peak[name], value) for name, value in _memory().items()}


def exported(folder: Path, layers: int) -> tuple[float, float]:
    """Return (growth of the peak of resident memory, bytes of the FP32 masters), in GiB, of an export."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4096, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **shape, **heads, tie_word_embeddings=False)
    checkpoint = folder / f"{layers}" / "checkpoints" / "step_1"
    parameters = write_checkpoint(checkpoint, config, ranks=2)
    out = folder / f"{layers}" / "exported"
    with Peak() as peak:
        export_checkpoint(checkpoint, out, config, parse_fp8({"fp8": {}}), shard_bytes=8 << 20)
    assert_served(out)
    return peak.growth["resident"], parameters * 4 / 2**30


def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAPPED_BYTES", 8 << 20)
    exported(tmp_path, 1)  # what the first export of a process imports and caches
    growth, masters = exported(tmp_path, 32)
    assert masters > 400 * MIB
    # Two files of weights, the largest tensor (8 MiB in FP32) several times, and what malloc keeps.
    assert growth < 120 * MIB
