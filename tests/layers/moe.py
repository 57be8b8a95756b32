"""Small mixtures of experts of Hugging Face's architectures, whose experts are whole numbers of 128x128 blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_fp8.layers.experts import routing
from tests.layers.hugging_face import causal_lm

EXPERTS = 4
# What differs from the sizes of all
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 128, "sliding_window": None},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 128},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "head_dim": 16,
    },
    "llama4_text": {"num_local_experts": EXPERTS, "intermediate_size": 128},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 128},
}


def mixture(architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """A random model in training mode; the same arguments give the same numbers."""
    common = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    return causal_lm(architecture, dtype, **{**common, **SIZES[architecture], **changes})


def routed_steps(engine, batch: Callable, steps: int, replayed_in: int, routes: Callable) -> tuple[list, list]:
    """(losses, router statistics by step) of steps on `batch(step)`; that of `replayed_in` has `routes(tokens)`."""
    losses, measured = [], []
    for step in range(steps):
        ids = batch(step)
        with routing.replay(engine, routes(ids)) if step == replayed_in else nullcontext():
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        report, engine.fp8.health.last = engine.fp8.health.last, None
        measured.append(report and report.routing)
    return losses, measured
