"""Common parts of the benchmarks of ZeRO-3: ranks, the link between them, timing in step with each other, a model."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import SIZES, device
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.zero.deepspeed.patches import disable_shm_build

LINK_SWITCHES = "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"
WARMUP = 3


def join_ranks() -> None:
    """Join the ranks that torchrun or deepspeed started; alone where neither did."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    if device().type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    import deepspeed

    disable_shm_build()
    deepspeed.init_distributed(dist_backend="nccl" if device().type == "cuda" else "gloo", verbose=False)


def leave_ranks() -> None:
    dist.barrier()
    dist.destroy_process_group()


def is_first() -> bool:
    return dist.get_rank() == 0


def link() -> str:
    switches = [f"{name}={os.environ[name]}" for name in LINK_SWITCHES if name in os.environ]
    return " ".join(switches) or ("as NCCL chooses" if device().type == "cuda" else "gloo on one host")


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


class Intervals:
    """Seconds from one mark to the next as the device meets them: the host waits for nothing in between."""

    def __init__(self):
        self._marks: list[Any] = []

    def mark(self) -> None:
        if device().type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        synchronize()
        if device().type != "cuda":
            return [end - begin for begin, end in itertools.pairwise(self._marks)]
        return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(self._marks)]


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Return the median milliseconds of `function()`, begun by all ranks together; the slowest rank's. Collective."""
    durations = []
    for _ in range(WARMUP + repeats):
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        durations.append(time.perf_counter() - begin)
    return slowest(statistics.median(durations[WARMUP:])) * 1e3


def slowest(value: float) -> float:
    agreed = torch.tensor([value], dtype=torch.float64, device=device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.item()


def zero3_config(micro_batch: int = 1, accumulation: int = 1, fp8: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a DeepSpeed configuration of ZeRO-3 in BF16 with FP32 gradients and overlap; fp8 section as given."""
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    }
    return config | {"fp8": fp8 if fp8 is not None else {"enabled": False}}


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
    "tiny-mixture": {
        "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
"""Mixtures of experts: Qwen3-30B-A3B, and one for any machine."""


def sharded_model(config: Any, ds_config: dict[str, Any], adapt: Callable[[Any], Any], in_fp8: bool) -> Any:
    """Return a causal language model of random weights, made and sharded one by one. Collective.

    `adapt` freezes what is not trained. In FP8 the frozen weights wait on the host.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from ds_fp8.train.model import shard_one_by_one

    with init_empty_weights():
        model = adapt(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))

    def memory(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        values = torch.empty(empty.shape, dtype=empty.dtype, device=device())
        if empty.dim() == 1:
            return values.fill_(float("norm" in name))
        return values.zero_() if "lora_B" in name else values.normal_(0, 0.02)

    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device()))
    shard_one_by_one(model, ds_config, in_fp8, memory)
    return model


def causal_lm_config(size: str, layers: int, vocabulary: int, positions: int) -> Any:
    """Return the configuration of a Qwen2-like or Qwen3-MoE-like model of one of SIZES or MIXTURES."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    common = {
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "use_cache": False,
    }
    if size in MIXTURES:
        return Qwen3MoeConfig(**common, **MIXTURES[size], norm_topk_prob=True)
    if size not in SIZES:
        raise UserError(f'unknown size "{size}"', key="--size", remedy=f"one of {', '.join([*SIZES, *MIXTURES])}")
    shape = SIZES[size]
    return Qwen2Config(
        **common,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
