"""Shapes of the models that the shipped configurations name, so that estimates need neither network nor weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_fp8.config.files import read_json
from ds_fp8.config.fp8 import section_of

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-8B-Base": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B-Base": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-1.7B-Base": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-4B-Base": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "mistralai/Mistral-7B-v0.3": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "google/gemma-3-1b-pt": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}
"""Hugging Face name -> the configuration published under it, as far as memory depends on it."""


def with_known_model(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return a stage whose model can be estimated where it lies neither here nor in reach.

    A model of SHAPES is described in the place of its name. A stage that begins with the weights of a run that has not
    been made yet gets the model of that run's own stage, where its JSON lies beside this one.

    Args:
        raw: The stage.
        file: Its JSON.
    """
    raw = dict(raw)
    model, train = section_of(raw, "model"), section_of(raw, "train")
    before = train.get("init_from")
    if before is not None and not Path(before).expanduser().exists():
        earlier = _stage_that_writes(before, file)
        if earlier is not None:
            found = section_of(with_known_model(read_json(earlier), earlier), "model")
            model = {**model, **{key: found.get(key) for key in ("path", "config")}}
            raw["train"] = {**train, "init_from": None}
    if model.get("path") in SHAPES:
        model = {**model, "path": None, "config": SHAPES[model["path"]]}
    if model:
        raw["model"] = dict(model)
    return raw


def _stage_that_writes(run_dir: str, file: Path) -> Path | None:
    for sibling in sorted(file.parent.glob("*.json")):
        if sibling != file and section_of(read_json(sibling), "train").get("run_dir") == run_dir:
            return sibling
    return None
