"""Train with random combinations of valid settings, in FP8 and in BF16: equal losses, or a refusal in words.

    python scripts/faults/settings.py --combinations 40 --seed 1

Each combination has a ZeRO stage, offload, sizes of sub-groups and buckets, overlap, accumulation, a preset, a model
(dense, experts, LoRA), rows that ranks share, attention and head in FP8, a checkpoint on the way and more, and trains
for a few steps on two CPU ranks. A combination is refused where `ds_fp8.initialize` raises a UserError. Where DeepSpeed
itself fails at the combination in BF16, that is said, and the combination does not count. Exits with 1 where losses are
more than GAP apart, where ranks hold other weights than each other, or where FP8 fails in any other way.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["DS_ACCELERATOR"] = "cpu"

from tests.ranks import RankPools

RANKS, STEPS = 2, 4
GAP = 0.01
"""Relative difference of the last loss to that in BF16."""
CHOICES: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3, 3, 3],
    "model": ["llama", "llama", "qwen3_moe", "lora"],
    "shared_rows": [1, 1, 1, 2],
    "attention": [None, None, "e4m3"],
    "head": [None, None, "fp8"],
    "moments": [None, "coat", "compact"],
    "checkpoint": [False, False, True],
    "offload_optimizer": [None, None, {"device": "cpu"}, {"device": "cpu", "pin_memory": False}],
    "offload_param": [None, None, None, {"device": "cpu"}],
    "sub_group_size": [10**9, 5000, 1000],
    "overlap_comm": [True, False],
    "reduce_bucket_size": [5 * 10**8, 4000, 1],
    "contiguous_gradients": [True, False],
    "reduce_scatter": [True, True, False],
    "round_robin_gradients": [False, True],
    "stage3_param_persistence_threshold": [0, 100, 10**5],
    "stage3_prefetch_bucket_size": [0, 5 * 10**7],
    "zero_hpz_partition_size": [1, 1, 1, 2],
    "gradient_accumulation_steps": [1, 2, 3],
    "gradient_clipping": [0.0, 1.0, 0.01],
    "grad_accum_dtype": [None, "fp32", "bf16"],
    "preset": ["infir2", "hybrid_fast", "precise", "coat", "fp8lm_o2", "rowwise", "tensorwise"],
    "grad_reduce": [None, {"format": "bf16"}, {"format": "e5m2"}],
    "param_gather": [None, {"format": "bf16"}],
    "checkpointing": [False, True, "keep_attention"],
    "optimizer": ["AdamW", "AdamW", "Adam", "SGD"],
}
ONLY_STAGE_3 = ("offload_param", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
                "zero_hpz_partition_size", "sub_group_size")  # fmt: skip
NOT_OF_ZERO = ("gradient_accumulation_steps", "gradient_clipping", "grad_accum_dtype", "preset", "grad_reduce",
               "param_gather", "checkpointing", "optimizer", "model", "shared_rows", "attention", "head", "moments",
               "checkpoint")  # fmt: skip


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a combination: a value of every choice; below stage 3 what FP8 has there, but for some."""
    chosen = {key: rng.choice(values) for key, values in CHOICES.items()}
    if chosen["stage"] == 3 and chosen["moments"] == "compact":  # else hardly any is not refused
        chosen |= {"param_gather": None, "offload_optimizer": None, "offload_param": None, "zero_hpz_partition_size": 1}
    if chosen["stage"] != 3 and rng.random() < 0.9:
        chosen |= {"grad_reduce": {"format": "bf16"}, "param_gather": {"format": "bf16"}}
    return chosen


def configuration(chosen: dict[str, Any], fp8: bool) -> dict[str, Any]:
    zero = {key: value for key, value in chosen.items() if key not in NOT_OF_ZERO and value is not None}
    if chosen["stage"] != 3:
        zero = {key: value for key, value in zero.items() if key not in ONLY_STAGE_3}
    params = {"lr": 1e-3, "torch_adam": True} if "Adam" in chosen["optimizer"] else {"lr": 1e-2}
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
        "gradient_clipping": chosen["gradient_clipping"],
        "bf16": {"enabled": True},
        "optimizer": {"type": chosen["optimizer"], "params": params},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**6,
    }
    if chosen["grad_accum_dtype"]:
        raw["data_types"] = {"grad_accum_dtype": chosen["grad_accum_dtype"]}
    if fp8:
        asked = {key: chosen[key] for key in ("grad_reduce", "param_gather") if chosen[key]}
        preset = {"linear": chosen["preset"], "optimizer": chosen["moments"]} if chosen["moments"] else chosen["preset"]
        raw["fp8"] = {"preset": preset, **asked}
        if chosen["attention"]:
            raw["fp8"]["attention"] = {"format": chosen["attention"]}
        if chosen["checkpointing"] == "keep_attention":
            raw["fp8"]["activations"] = {"keep_attention": True}
        if chosen["head"]:
            raw["fp8"]["loss"] = {"head": chosen["head"]}
    if chosen["shared_rows"] > 1:
        raw["sequence_parallel_size"] = chosen["shared_rows"]
    return raw


def build(kind: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 2}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    config = AutoConfig.for_model("llama" if kind == "lora" else kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if kind == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def rows_of(step: int, micro: int, shared: int) -> dict[str, Any]:
    """Return this rank's batch of a micro-step: rows of its own, or its half of rows of all."""
    import deepspeed
    import torch

    rank = deepspeed.comm.get_rank()
    draw = torch.Generator().manual_seed(100 * step + micro + (0 if shared > 1 else 10**4 * (1 + rank)))
    rows = torch.randint(0, 128, (2, 32), generator=draw) // 8 * 8
    if shared == 1:
        return {"input_ids": rows, "labels": rows}
    length = rows.shape[1] // shared
    mine = slice(rank * length, (rank + 1) * length)
    positions = torch.arange(rows.shape[1])[None].expand_as(rows)
    targets = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=-100)
    batch = {"input_ids": rows, "labels": targets, "shift_labels": targets, "position_ids": positions}
    return {name: x[:, mine].contiguous() for name, x in batch.items()}


def train(raw: dict[str, Any], chosen: dict[str, Any], folder: str) -> tuple[str, Any]:
    """Train on this rank. Returns ("trained", the last loss), ("refused", why), or ("failed", the error)."""
    import deepspeed
    import torch

    import ds_fp8

    logging.getLogger("ds_fp8").setLevel(logging.ERROR)
    engine = None

    def start() -> Any:
        model = build(chosen["model"])
        if chosen["checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return ds_fp8.initialize(model=model, model_parameters=trained, config=raw)[0]

    try:
        engine = start()
        for step in range(STEPS):
            loss = torch.zeros(())
            for micro in range(raw["gradient_accumulation_steps"]):
                batch = rows_of(step, micro, chosen["shared_rows"])
                part = engine(**batch, use_cache=False).loss
                engine.backward(part)
                engine.step()
                loss += part.detach().float() / raw["gradient_accumulation_steps"]
            if chosen["checkpoint"] and step == 1:
                engine.save_checkpoint(folder)
                engine.destroy()
                engine = start()
                if engine.load_checkpoint(folder)[0] is None:
                    raise RuntimeError("nothing was loaded")
        deepspeed.comm.all_reduce(loss)
        with contextlib.suppress(ValueError):  # no parameters that lie whole on a rank
            whole = torch.cat([p.detach().double().flatten() for p in engine.module.parameters() if p.numel() > 0])
            largest = torch.stack([whole.sum(), -whole.sum()])
            deepspeed.comm.all_reduce(largest, op=deepspeed.comm.ReduceOp.MAX)
            if chosen["stage"] < 3 and largest.sum() != 0:
                return "failed", f"ranks hold other weights: sums differ by {largest.sum():.3g}"
        return "trained", loss.item() / deepspeed.comm.get_world_size()
    except ds_fp8.UserError as error:
        return "refused", f"{error.problem} [{error.key}]"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        if engine is not None:
            engine.destroy()
        del engine
        gc.collect()


def attempt(pools: RankPools, raw: dict[str, Any], chosen: dict[str, Any]) -> tuple[str, Any]:
    """Train on all ranks and return the first one's outcome, or what became of the ranks."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = pools(RANKS, train, raw, chosen, folder)
    except AssertionError as error:
        return "failed", str(error)[-500:]
    return next((outcome for outcome in outcomes if outcome[0] == "failed"), outcomes[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--combinations", type=int, default=40, help="that train in FP8 and BF16 (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, pools, counts, largest = random.Random(arguments.seed), RankPools(), Counter(), 0.0
    number = 0
    while counts["equal"] + counts["DIFFERS"] + counts["FAILS"] < arguments.combinations:
        number += 1
        chosen = drawn(rng)
        kind, loss = attempt(pools, configuration(chosen, fp8=True), chosen)
        twin, expected = ("", None) if kind == "refused" else attempt(
            pools, configuration(chosen, fp8=False), chosen
        )  # fmt: skip
        outcome = kind
        if twin not in ("", "trained"):
            outcome = "deepspeed fails"
        elif kind == "trained":
            gap = abs(loss / expected - 1)
            largest = max(largest, gap)
            outcome = "equal" if gap <= GAP else "DIFFERS"
        elif kind == "failed":
            outcome = "FAILS"
        counts[outcome] += 1
        detail = f"{loss:.4f} and {expected:.4f}" if kind == twin == "trained" else f"{loss}; {twin} {expected}"
        print(f"{number}: {outcome}: {detail}: {json.dumps(chosen)}", flush=True)
    pools.close()
    print(f"{dict(counts)}, largest gap {largest:.3%}")
    return int(bool({"DIFFERS", "FAILS"} & set(counts)))


if __name__ == "__main__":
    sys.exit(main())
