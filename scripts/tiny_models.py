"""Tiny random models of the types of transformers: which there are, small configurations, inputs, words for failures.

NAME is a model type of the causal language models, or of the image-text-to-text models; TYPE:image is the class with a
tower of a type that has a class of each kind.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

ROWS, LENGTH = 2, 48
LARGEST = 60_000_000  # Parameters above which a configuration has not become small

# Of 2026 and 2025 by the dates of transformers' files, those that are trained most first; all others follow.
FIRST = """
    qwen3_5 qwen3_5_moe qwen3_5:image qwen3_5_moe:image gemma4 gemma4_text gpt_oss glm4_moe deepseek_v3 deepseek_v32
    qwen3_vl qwen3_vl_moe olmo3 llama4:image llama4 ministral3 smollm3 lfm2 lfm2_moe qwen3_5_text qwen3_5_moe_text
    qwen3_next qwen3 qwen3_moe qwen2_5_vl gemma3 gemma3_text gemma3n_text deepseek_v4 glm4_moe_lite glm_moe_dsa glm4v
    glm4v_moe mistral3 mistral4 minimax_m2 minimax_m3_vl kimi_linear kimi_k25 nemotron_h granitemoehybrid falcon_h1
    olmo_hybrid lfm2_vl internvl blt smolvlm hy_v3 hy_v4 axk1 axk2 qwen4_exp qwen4_exp_text gemma4_unified
    gemma4_unified_text cohere2_moe exaone_moe exaone4_5 solar_open longcat_flash youtu mimo_v2_flash mellum laguna
    nanochat vaultgemma hrm_text zaya step3p7 glm_ocr glm5_next llama4_text
""".split()  # noqa: SIM905

# Set where a configuration has a field of this name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "moe_intermediate_size"), 256),
    **dict.fromkeys(("embed_dim", "expert_ffn_hidden_size", "moe_latent_size", "out_hidden_size"), 256),
    **dict.fromkeys(("text_hidden_size", "projection_dim", "proj_hidden_size", "hidden_size_global"), 256),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "vocab_size", "mlp_dim"), 512),
    **dict.fromkeys(("vocab_size_per_layer_input", "shared_expert_intermediate_size", "intermediate_size_mlp"), 512),
    **dict.fromkeys(("dense_intermediate_size", "max_position_embeddings", "max_seq_len", "encoder_ffn_dim"), 512),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_hash_byte_group_vocab"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "linear_num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "global_head_dim"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mamba_d_head", "linear_head_dim"), 64),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "index_topk"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "sliding_window", "sliding_window_size"), 32),
    "hidden_size_per_layer_input": 32,
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "pad_token_id"), 0),
    **dict.fromkeys(("num_channels", "in_channels"), 3),
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("mamba_n_heads", "index_n_heads"), 8),  # fewer heads of an indexer leave keys of equal scores
    "image_size": 56,
    "patch_size": 14,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
}
OF_TOWERS = {"hidden_size": 128, "embed_dim": 128, "intermediate_size": 256}
NOT_OF_TOWERS = {"head_dim", "vocab_size", "num_key_value_heads"}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"]}
AS_MANY_KEYS = {"num_key_value_heads": 4}

# What a type needs besides, or instead (None: its own default).
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 12, 8]}}
    },
    "cosmos3_edge_text": {"head_dim": 128},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [256, 256], "num_attention_heads": 2, "num_key_value_heads": 1},
    "mistral4": AS_MANY_KEYS | {"head_dim": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": "auto"},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 512},
    "gemma3n_text": GEMMA
    | {"activation_sparsity_pattern": [0.95, 0.0], "intermediate_size": [512, 512], "laurel_rank": 16},
    "gemma4_text": GEMMA | {"head_dim": None},
    "glm4v_moe_text": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "glm5_next_text": AS_MANY_KEYS | {"qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 64},
    "qwen2_vl_text": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2_5_vl_text": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0},  # of DBRX
    "reformer": {"is_decoder": True, "axial_pos_shape": [6, LENGTH // 6]},
    "whisper": {"d_model": 256},
    "xlnet": {"d_head": 64, "n_head": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 64},
    "zaya": {"num_experts_per_tok": 1},
    "kimi_linear": HYBRID | AS_MANY_KEYS,
    **dict.fromkeys(("minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), HYBRID),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"), AS_MANY_KEYS),
    **dict.fromkeys(("minicpm3", "axk1", "axk2", "youtu"), AS_MANY_KEYS),
    "longcat_flash": AS_MANY_KEYS | {"zero_expert_num": 2},
}


def types() -> list[str]:
    """Return the names of all types, in the order in which they are tried."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

    images = (kind + ":image" * (kind in TEXT) for kind, own in IMAGES.items() if TEXT.get(kind) != own)
    known = dict.fromkeys([*TEXT, *images])
    return list(dict.fromkeys([*(name for name in FIRST if name in known), *known]))


def auto_class(name: str) -> Any:
    """Return the class of transformers that builds a type from its configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return AutoModelForCausalLM if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def reader(name: str, folder: Path) -> Any:
    """Return the class that reads a folder: the model's own where AutoModel does not know the type of a text model."""
    import transformers

    config, auto = transformers.AutoConfig.from_pretrained(folder), auto_class(name)
    return auto if type(config) in auto._model_mapping else getattr(transformers, config.architectures[0])


def tiny_config(name: str) -> Any:
    """Return a configuration of a type with small sides, of towers and text model too."""
    from transformers import CONFIG_MAPPING

    kind = name.partition(":")[0]
    known = CONFIG_MAPPING[kind]()
    parts = getattr(type(known), "sub_configs", None) or {}
    has_text_model = any("text" in name for name in parts)
    wanted = {} if has_text_model else _sizes(known, kind)
    for name, part_class in parts.items():
        part = getattr(known, name, None)
        if part is None and hasattr(part_class, "model_type"):
            part = part_class()
        if part is not None and not getattr(part, "sub_configs", None):
            sizes = _sizes(part, part.model_type or name)
            if "text" not in name and (has_text_model or "vision" in name or "audio" in name):
                sizes = {key: OF_TOWERS.get(key, own) for key, own in sizes.items() if key not in NOT_OF_TOWERS}
            wanted[name] = {**sizes, "model_type": part.model_type}
    if has_text_model:
        marks = [key for key in vars(known) if re.search(r"_token_(id|index)$", key) and key not in SIZES]
        wanted |= {key: 500 + place for place, key in enumerate(marks)}
        wanted |= {k: SIZES[k] for k in ("hidden_size", "pad_token_id", "vocab_size") if k in vars(known)}
    return CONFIG_MAPPING[kind](**wanted)


def _sizes(known: Any, kind: str) -> dict[str, Any]:
    names = vars(known).keys() | getattr(known, "attribute_map", {}).keys()
    wanted = {key: value for key, value in SIZES.items() if key in names}
    # Noise that is larger than what a few steps change
    wanted |= {key: 0.0 for key, value in vars(known).items() if "drop" in key and isinstance(value, float)}
    return {key: value for key, value in (wanted | CHANGES.get(kind, {})).items() if value is not None}


def tokens(seed: int) -> Any:
    import torch

    return torch.randint(3, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def words(error: BaseException) -> str:
    """Return an error's type and message, and the last line of the code of models or of this package."""
    ours = r"(transformers|ds_fp8|deepspeed|peft)/.*"
    frames = [(re.search(ours, frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    found, frame = next((pair for pair in reversed(frames) if pair[0]), frames[-1] if frames else (None, None))
    where = f" ({found[0] if found else Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return f"{type(error).__name__}: {' '.join(str(getattr(error, 'problem', error)).split())[:200]}{where}"
