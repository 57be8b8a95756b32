"""The tensors that vLLM and SGLang look for in a decoder's folder, from its config.json alone.

Written down from their loaders, which docs/export.md names, and not from ds_fp8.export: an export is compared with it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open

# Layers of the servers -> the layers of a folder that they stack: all in FP8, or none
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # Name -> type as safetensors writes it, and shape


def assert_served(folder: Path) -> None:
    """Fail where a folder's tensors are not, by name, type and shape, those that servers read from it."""
    config = json.loads((folder / "config.json").read_text())
    assert stored(folder) == expected(config)
    section = config.get("quantization_config", {})
    if section.get("scale_fmt") == "ue8m0":
        for scales in _numbers(folder, "weight_scale_inv"):
            assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))


def stored(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  no mapping
                view = tensors.get_slice(name)
                assert name not in found
                found[name] = (view.get_dtype(), tuple(view.get_shape()))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    return found


def expected(config: dict) -> Tensors:
    """Return what servers read into a Llama, Mistral, Qwen2 or Qwen3 of this configuration."""
    hidden, intermediate, vocabulary = (config[f"{n}_size"] for n in ("hidden", "intermediate", "vocab"))
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = (config[f"num_{n}_heads"] * head for n in ("attention", "key_value"))
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    vectors = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if config["model_type"] == "qwen2":
        vectors |= {f"self_attn.{n}_proj.bias": size for n, size in (("q", query), ("k", key), ("v", key))}
    if config["model_type"] == "qwen3":
        vectors |= {"self_attn.q_norm.weight": head, "self_attn.k_norm.weight": head}
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (vocabulary, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = ("BF16", (vocabulary, hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: ("BF16", (size,)) for name, size in vectors.items()}
        for name, shape in linears.items():
            tensors |= _linear(prefix + name, shape, config.get("quantization_config"))
    return tensors


def _linear(name: str, shape: tuple[int, int], section: dict | None) -> Tensors:
    if section is None or _skipped(name, section):
        return {f"{name}.weight": ("BF16", shape)}
    blocks = tuple(math.ceil(side / 128) for side in shape)
    if section["quant_method"] == "fp8":
        assert section["weight_block_size"] == [128, 128]
        assert section["activation_scheme"] == "dynamic"  # with blocks no other is taken
        scale, scales = "weight_scale_inv", blocks
        assert all(side % 128 == 0 for side in shape)  # or else stacked layers and tensor parallelism refuse
    else:
        scale, scales = "weight_scale", _compressed_scales(section, shape, blocks)
    return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.{scale}": ("F32", scales)}


def _compressed_scales(section: dict, shape: tuple[int, int], blocks: tuple[int, int]) -> tuple[int, ...]:
    assert section["quant_method"] == "compressed-tensors"
    assert section["format"] == "float-quantized"
    (group,) = section["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    assert group["targets"] == ["Linear"]
    for part in (weights, inputs):
        assert (part["type"], part["num_bits"], part["symmetric"]) == ("float", 8, True)
    assert inputs["dynamic"]
    assert not weights["dynamic"]
    if weights["strategy"] == "block":
        assert weights["block_structure"] == [128, 128]
        assert (inputs["strategy"], inputs["group_size"]) == ("group", 128)
    else:
        assert inputs["strategy"] == "token"
    return {"block": blocks, "channel": (shape[0], 1), "tensor": ()}[weights["strategy"]]


def _skipped(name: str, section: dict) -> bool:
    """Judge as `is_layer_skipped` and `should_ignore_layer` do: names in full, stacked layers alike."""
    ignored = section["ignored_layers" if section["quant_method"] == "fp8" else "ignore"]
    assert ignored == section.get("modules_to_not_convert", ignored)  # to transformers, and to later versions of vLLM
    parent, _, own = name.rpartition(".")
    together = next((parts for parts in STACKED.values() if own in parts), (own,))
    verdicts = {f"{parent}.{part}" in ignored for part in together}
    assert len(verdicts) == 1, f"some but not all layers stacked with {name} are in FP8"
    return verdicts.pop()


def _numbers(folder: Path, suffix: str) -> list[torch.Tensor]:
    found = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found += [tensors.get_tensor(name) for name in tensors.keys() if name.endswith(suffix)]  # noqa: SIM118
    assert found
    return found
