"""Peaks of tensors on GPUs, torch.cuda.max_memory_allocated in GiB, as measured (docs/log/losses.md, zero3.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_fp8.config.files import read_json
from ds_fp8.memory import Workload, read_workload
from ds_fp8.report.compare import read_points

SWEEPS = Path(__file__).parents[2] / "ds_configs" / "sweeps"
# 2026-11-21, when steps were DeepSpeed's: 2 x 8192 tokens on one H200, and 1 x 8192 on each of two
LEVELS = {
    "BF16": (101.29, 130.19),
    "BF16, loss without logits": (74.82, 120.26),
    "+ linears": (52.08, 95.32),
    "+ parameter gather": (54.64, 98.21),
    "+ gradient reduction": (54.75, 98.21),
    "+ moments": (46.13, 77.20),
    "+ activations": (38.60, 69.36),
    "infir2": (47.33, 90.37),
    "infir2, layers recomputed": (35.56, 75.48),
}
_QWEN = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "model_type": "qwen2", "vocab_size": 152064, "num_hidden_layers": 28, "max_position_embeddings": 1 << 20,
}  # fmt: skip
_LARGE = {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_key_value_heads": 8}
_SMALL = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS = {
    "7b": _QWEN,
    "32b": {**_QWEN, **_LARGE, "num_hidden_layers": 64},
    "1.5b": {**_QWEN, **_SMALL, "tie_word_embeddings": True},
    "8b": {**_QWEN, **_LLAMA, "num_hidden_layers": 32, "vocab_size": 128256},
    "a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "model_type": "qwen3_moe",
        "vocab_size": 152064, "max_position_embeddings": 1 << 20, "num_hidden_layers": 48,
    },
}  # fmt: skip
EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]


def of_equal_layers(raw: dict[str, Any], **more: Any) -> Workload:
    """Read the workload of a model whose layers are all equal: one is built."""
    config = raw["model"]["config"]
    one = {**raw, "model": {**raw["model"], "config": {**config, "num_hidden_layers": 1}}}
    w = read_workload(one, **more)
    return replace(w, model=replace(w.model, layers=w.model.layers * config["num_hidden_layers"]))


class Step(NamedTuple):
    """A row of scripts/bench/step.py."""

    peak: float
    model: str
    length: int
    fp8: Any = "hybrid_fast"
    moments: str | None = None
    gpus: int = 1
    layers: int | None = None
    rows: int = 1
    shared: int = 1
    recompute: bool | str = False
    lora: int | None = None
    vocabulary: int | None = None
    gradients: str = "fp32"
    more: dict[str, Any] | None = None
    error: float = 0.038

    def workload(self) -> Workload:
        changes = {"num_hidden_layers": self.layers, "vocab_size": self.vocabulary}
        config = {**MODELS[self.model], **{key: value for key, value in changes.items() if value}}
        preset = {"linear": self.fp8, **({"optimizer": self.moments} if self.moments else {})}
        fp8 = {"preset": preset, **(self.more or {})} if isinstance(self.fp8, str) else self.fp8
        train: dict[str, Any] = {"run_dir": "run", "steps": 3}
        if self.lora:
            train["lora"] = {"r": self.lora, "targets": EXPERTS if self.model == "a3b" else "all-linear"}
        return of_equal_layers(
            {
                "train_micro_batch_size_per_gpu": self.rows,
                "gradient_accumulation_steps": 1,
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": self.gradients},
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
                "zero_optimization": {"stage": 3},
                "sequence_parallel_size": self.shared,
                "fp8": fp8,
                "model": {"config": config, "activation_checkpointing": self.recompute},
                "data": {"path": "x", "tokenizer": "bytes", "sequence_length": self.length},
                "train": train,
            },
            gpus=self.gpus,
        )


KEEP = {"activations": {"keep_attention": True}}
FP8_ATTENTION = {**KEEP, "attention": {"format": "e4m3"}}
TILED = {**FP8_ATTENTION, "activations": {"keep_attention": True, "mlp_tile_tokens": 8192}}
_SHARED = {"moments": "coat", "gpus": 2, "shared": 2}
OFF = {"enabled": False}

# 2026-11-23 to 2026-11-28
STEPS = {
    "7B": Step(59.6, "7b", 8192, moments="coat", gpus=2),
    "7B, precise": Step(59.8, "7b", 8192, "precise", moments="coat", gpus=2),
    "7B, head in FP8": Step(59.8, "7b", 8192, moments="coat", gpus=2, more={"loss": {"head": "fp8"}}),
    "7B, 32,768 tokens": Step(59.4, "7b", 32768, moments="coat", gpus=2, recompute=True, more=KEEP),
    "7B, 32,768 tokens, FP8 attention": Step(
        56.4, "7b", 32768, moments="coat", gpus=2, recompute=True, more=FP8_ATTENTION
    ),
    "7B, 14 layers": Step(56.8, "7b", 8192, moments="coat", layers=14),
    "7B, 14 layers, precise": Step(56.9, "7b", 8192, "precise", moments="coat", layers=14),
    "7B, 14 layers, infir2": Step(80.9, "7b", 8192, "infir2", layers=14),
    "1.5B, two GPUs": Step(24.5, "1.5b", 8192, moments="coat", rows=2, gpus=2),
    "1.5B, precise": Step(24.7, "1.5b", 8192, "precise", moments="coat", rows=2, gpus=2),
    "1.5B, 2,048 tokens": Step(19.2, "1.5b", 2048, moments="coat"),
    "1.5B, 2,048 tokens, two GPUs": Step(12.7, "1.5b", 2048, moments="coat", gpus=2, error=0.075),
    "1.5B, 65,536 shared": Step(18.1, "1.5b", 65536, **_SHARED, recompute=True, more=KEEP, error=0.06),
    "1.5B, 131,072 shared": Step(26.4, "1.5b", 131072, **_SHARED, recompute=True, more=KEEP, error=0.04),
    "1.5B, 131,072 shared, FP8 attention": Step(23.6, "1.5b", 131072, **_SHARED, recompute=True, more=FP8_ATTENTION),
    "1.5B, 131,072 shared, offload": Step(18.7, "1.5b", 131072, **_SHARED, recompute="offload", more=FP8_ATTENTION),
    "1.5B, 131,072 shared, tiled": Step(20.1, "1.5b", 131072, **_SHARED, recompute=True, more=TILED, error=0.06),
    "1.5B, 131,072 shared, both": Step(15.2, "1.5b", 131072, **_SHARED, recompute="offload", more=TILED, error=0.05),
    "7B, 14 layers, 131,072 shared, FP8 attention": Step(
        45.7, "7b", 131072, **_SHARED, layers=14, recompute=True, more=FP8_ATTENTION, error=0.05
    ),
    "7B, precise, FP32 moments": Step(80.8, "7b", 8192, "precise", gpus=2),
    "32B, compact": Step(116, "32b", 4096, moments="compact", gpus=2, recompute=True, gradients="bf16"),
    "8B, compact": Step(61.2, "8b", 8192, moments="compact", recompute=True, gradients="bf16"),
    "7B, adapters": Step(25.6, "7b", 4096, rows=2, lora=16),
    "7B, adapters, two GPUs": Step(22.1, "7b", 4096, rows=2, lora=16, gpus=2),
    "32B, adapters": Step(38.7, "32b", 4096, lora=16, recompute=True),
    "A3B, adapters": Step(42.1, "a3b", 4096, lora=16, recompute=True, vocabulary=151936),
    "A3B, 4 layers, two GPUs": Step(18.9, "a3b", 8192, moments="coat", layers=4, gpus=2, vocabulary=32768, error=0.045),
    "A3B, 6 layers": Step(45.2, "a3b", 8192, moments="coat", layers=6, vocabulary=32768),
    "A3B, 4 layers": Step(29.5, "a3b", 2048, moments="coat", layers=4, vocabulary=32768),
    "A3B, 6 layers, BF16": Step(78.0, "a3b", 8192, OFF, layers=6, vocabulary=32768),
    "A3B, 4 layers, BF16": Step(54.3, "a3b", 2048, OFF, layers=4, vocabulary=32768),
    "A3B, 8 layers, adapters, BF16": Step(29.3, "a3b", 4096, OFF, layers=8, vocabulary=32768, lora=16, error=0.045),
}


def levels() -> dict[str, tuple[float, Workload]]:
    """Peaks of the sweep fp8_levels with their workloads."""
    found = {}
    sizes = (("qwen2.5_1.5b", 1, 2), ("qwen2.5_7b", 2, 1))
    for column, (shape, gpus, rows) in enumerate(sizes):
        raw = read_json(SWEEPS / "shapes" / f"{shape}.json")
        points = read_points(SWEEPS / "fp8_levels.json", gpus)
        for point in points:
            applied = point.applied(raw)
            applied["train_micro_batch_size_per_gpu"] = rows
            applied["model"]["attn_implementation"] = "sdpa"
            w = of_equal_layers(applied, gpus=gpus, sequence_length=8192)
            found[f"{shape}, {point.name}"] = (LEVELS[point.name][column], replace(w, own_optimizer=False))
    return found
