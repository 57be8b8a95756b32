"""Memory of an export: that of a file of weights and a few tensors, not of the model."""

from __future__ import annotations

from pathlib import Path

from export_memory import Peak, write_checkpoint
from transformers import AutoConfig

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.export import checkpoints, export_checkpoint
from tests.export.servers import assert_served

MIB = 1 / 1024
"""In GiB."""


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
