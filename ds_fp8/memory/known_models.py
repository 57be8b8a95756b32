"""Shapes of the models that the shipped configurations name, so that estimates need neither network nor weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import read_json
from ds_fp8.config.fp8 import section_of

_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_VALUES = {
    "Qwen/Qwen2.5-1.5B":         ("qwen2",       1536,  8960, 28, 12, 2, 151936, 131072,  True),
    "Qwen/Qwen2.5-7B":           ("qwen2",       3584, 18944, 28, 28, 4, 152064, 131072, False),
    "meta-llama/Llama-3.1-8B":   ("llama",       4096, 14336, 32, 32, 8, 128256, 131072, False),
    "Qwen/Qwen3-8B-Base":        ("qwen3",       4096, 12288, 36, 32, 8, 151936,  32768, False),
    "Qwen/Qwen3-0.6B-Base":      ("qwen3",       1024,  3072, 28, 16, 8, 151936,  32768,  True),
    "Qwen/Qwen3-1.7B-Base":      ("qwen3",       2048,  6144, 28, 16, 8, 151936,  32768,  True),
    "Qwen/Qwen3-4B-Base":        ("qwen3",       2560,  9728, 36, 32, 8, 151936,  32768,  True),
    "meta-llama/Llama-3.2-1B":   ("llama",       2048,  8192, 16, 32, 8, 128256, 131072,  True),
    "meta-llama/Llama-3.2-3B":   ("llama",       3072,  8192, 28, 24, 8, 128256, 131072,  True),
    "mistralai/Mistral-7B-v0.3": ("mistral",     4096, 14336, 32, 32, 8,  32768,  32768, False),
    "google/gemma-3-1b-pt":      ("gemma3_text", 1152,  6912, 26,  4, 1, 262144,  32768,  True),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_KEYS, values, strict=True)) for name, values in _VALUES.items()}
"""Hugging Face name -> the configuration published under it, as far as memory depends on it."""
for _name in _VALUES:
    if "Qwen3" in _name:
        SHAPES[_name]["head_dim"] = 128
SHAPES["mistralai/Mistral-7B-v0.3"]["sliding_window"] = None
SHAPES["google/gemma-3-1b-pt"] |= {"head_dim": 256, "sliding_window": 512}


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
        try:
            train = {} if sibling == file else section_of(read_json(sibling), "train")
        except UserError:  # data or notes, say: a folder may hold other JSON than stages
            continue
        if train.get("run_dir") == run_dir:
            return sibling
    return None
